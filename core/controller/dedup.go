package controller

import (
	"slices"

	"transferqueue/core/schema"
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

// stored finds the rows of a column that a unit stores for runs of rows: pairs too, and for each row of the runs which of the
// stored ones it is. nil: each is stored.
func stored(first []int64, runs []int64) (pairs []int64, share []uint32) {
	if first == nil {
		return nil, nil
	}
	rows := uint32(0)
	place := map[int64]uint32{}
	for r := 0; r < len(runs); r += 2 {
		for i := runs[r]; i < runs[r+1]; i++ {
			at, known := place[first[i]]
			if !known {
				at = rows
				place[first[i]] = at
				rows++
				if n := len(pairs); n > 0 && pairs[n-1] == i {
					pairs[n-1]++
				} else {
					pairs = append(pairs, i, i+1)
				}
			}
			share = append(share, at)
		}
	}
	if int(rows) == len(share) {
		return nil, nil
	}
	return pairs, share
}

// keepOnce narrows the columns of a share to the rows that are stored.
func (sh *share) keepOnce(columns []schema.Column, first same) {
	if first == nil {
		return
	}
	sh.once = make([][]int64, len(columns))
	for k := range columns {
		pairs, share := stored(first[k], sh.runs)
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
