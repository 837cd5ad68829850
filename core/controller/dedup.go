package controller

import (
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// same says of the columns of a write which rows are stored once: row i of column k has the bytes of row same[k][i], the first
// that has them. nil: each row is stored.
type same [][]int64

// sharing reads and checks what a write says about its rows. A client that calls different rows the same stores wrong values,
// its own; rows of another size would be read beyond their end.
func sharing(r *wire.PutRequest, columns []schema.Column) (same, error) {
	for i := range columns {
		if columns[i].Share != nil {
			return nil, tqerr.New(tqerr.InvalidArgument, "field %q: rows are shared in the description of a column", columns[i].Field)
		}
	}
	if len(r.Shared) == 0 {
		return nil, nil
	}
	if r.Update || len(r.Callable) > 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "rows are shared in a write whose values are computed")
	}
	out := make(same, len(columns))
	for _, sh := range r.Shared {
		if sh.Column < 0 || sh.Column >= len(columns) || out[sh.Column] != nil {
			return nil, tqerr.New(tqerr.InvalidArgument, "rows of column %d of %d are shared, or are twice", sh.Column, len(columns))
		}
		c := &columns[sh.Column]
		if len(sh.Rows) != c.Rows {
			return nil, tqerr.New(tqerr.InvalidArgument, "field %q: %d shared rows, want %d", c.Field, len(sh.Rows), c.Rows)
		}
		alike := c.Alike()
		for i, first := range sh.Rows {
			if first < 0 || first > int64(i) || sh.Rows[first] != first || !alike(i, int(first)) {
				return nil, tqerr.New(tqerr.InvalidArgument, "field %q: row %d cannot be row %d", c.Field, i, first)
			}
		}
		out[sh.Column] = sh.Rows
	}
	return out, nil
}

// keepOnce narrows the columns of a share to the rows that are stored.
func (sh *share) keepOnce(columns []schema.Column, first same) {
	if first == nil {
		return
	}
	sh.once = make([][]int64, len(columns))
	for k := range columns {
		pairs, share := schema.StoredOnce(first[k], sh.runs)
		if share == nil {
			continue
		}
		sh.once[k] = pairs
		sh.cols[k] = selectRuns(columns[k:k+1], pairs)[0]
		sh.cols[k].Share = share
	}
}

// runsOf is the rows of a column that lie in the share's block: pairs [from, to) of rows of the write.
func (sh *share) runsOf(column int) []int64 {
	if sh.once == nil || sh.once[column] == nil {
		return sh.runs
	}
	return sh.once[column]
}

// sharedOf tells a client which rows of a part are to be written.
func (sh *share) sharedOf(part int) (out []wire.PartRows) {
	for k, pairs := range sh.once {
		if pairs != nil {
			out = append(out, wire.PartRows{Part: part, Column: k, Rows: pairs})
		}
	}
	return out
}

// rowIn is where row i of a share lies in the block of a column.
func rowIn(c *schema.Column, i int) int {
	if c.Share == nil {
		return i
	}
	return int(c.Share[i])
}

// rowSizes returns a function that sums the bytes of a row over all columns.
func rowSizes(columns []schema.Column) func(int) int64 {
	uniform := int64(0)
	var ragged [][]int64
	for i := range columns {
		if columns[i].Form == schema.Uniform {
			uniform += columns[i].RowBytes()
		} else {
			ragged = append(ragged, columns[i].Offsets())
		}
	}
	return func(row int) int64 {
		n := uniform
		for _, offsets := range ragged {
			if row+1 < len(offsets) {
				n += offsets[row+1] - offsets[row]
			}
		}
		return n
	}
}

// storedSizes is rowSizes for a write some of whose rows are stored once: with the first that has the bytes.
func (t *txn) storedSizes() func(int) int64 {
	if t.same == nil {
		return rowSizes(t.write.Columns)
	}
	var sizes []func(int) int64
	for k := range t.write.Columns {
		sizes = append(sizes, rowSizes(t.write.Columns[k:k+1]))
	}
	return func(row int) (n int64) {
		for k, size := range sizes {
			if first := t.same[k]; first == nil || first[row] == int64(row) {
				n += size(row)
			}
		}
		return n
	}
}

// firstShared says of the rows of a leased column which is the first that lies at the same place: several samples share it. nil: no
// two do.
func firstShared(runs []store.Run) (first []int64) {
	type place struct {
		block  store.Block
		onDisk bool
	}
	known := map[place]int64{}
	row, shared := int64(0), false
	for _, run := range runs {
		at, is := row, false
		if run.Rows == 1 && run.Block.Size > 0 {
			if at, is = known[place{run.Block, run.OnDisk}]; !is {
				at = row
				known[place{run.Block, run.OnDisk}] = row
			}
		}
		shared = shared || is
		for range run.Rows {
			first = append(first, at)
			at, row = at+1, row+1
		}
	}
	if !shared {
		return nil
	}
	return first
}

// eachItsOwn describes columns some of whose rows several samples share as if each sample had its own, and says which are the
// same.
func eachItsOwn(columns []schema.Column) ([]schema.Column, same) {
	var first same
	out := slices.Clone(columns)
	for k := range columns {
		c := &columns[k]
		if c.Share == nil {
			continue
		}
		if first == nil {
			first = make(same, len(columns))
		}
		b := schema.NewBuilder(c.Field)
		sample := make([]int64, 0, c.Rows) // of each row, the first
		for i, row := range c.Share {
			if int(row) == len(sample) {
				sample = append(sample, int64(i))
			}
			first[k] = append(first[k], sample[row])
			b.AppendRows(c, int(row), int(row)+1)
		}
		out[k] = b.Column()
	}
	return out, first
}

// dedupOf checks the fields of a parsed put whose equal results are stored once.
func dedupOf(r *wire.PutRequest) error {
	if len(r.Dedup) > 0 && (r.Update || len(r.Callable) == 0) {
		return tqerr.New(tqerr.InvalidArgument, "fields to be stored once are given without a parser")
	}
	for _, field := range r.Dedup {
		if !slices.ContainsFunc(r.Columns, func(c wire.Column) bool { return c.Field == field }) {
			return tqerr.New(tqerr.InvalidArgument, "dedup: field %q is not among those that are put", field)
		}
	}
	return nil
}
