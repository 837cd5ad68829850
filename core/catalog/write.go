package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Write is a batch of rows to write: columns, tags, or both, or neither to make samples that have nothing yet.
type Write struct {
	Partition string
	// Exactly one of these names the rows.
	Keys    []string        // samples by key; those that do not exist are created, but for an update
	Samples []schema.Sample // samples that exist
	Insert  int             // this many new samples without a key

	Columns []schema.Column // valid ones; of an update: to Check the new values, to Apply what is stored
	Tags    [][]byte        // nil, or per row a msgpack map that is merged onto the stored one, or nothing
	Update  bool            // rows and fields must exist already
	Last    bool            // the partition's production is complete with this write
	// Unwatched leaves Applied.Events out, which nobody asks for.
	Unwatched bool

	found *found // what Check has found; keys and tags are not changed after it
}

// found is where the keys of a write led, which holds until a key of the partition is bound or unbound.
type found struct {
	p        *partition // nil: did not exist
	bindings uint64
	rows     []int64
	hashes   []uint64 // of the keys
}

// Applied is what a write did. Its rows are those of the write.
type Applied struct {
	Samples []schema.Sample
	Fields  []string // sorted, those that all rows have
	Tags    [][]byte // as stored
	Events  []Event
}

// Event is one change of a sample that has a key.
type Event struct {
	Kind   string // EventPut, EventUpdate, EventClear or EventLost
	Key    string
	Fields []string // that were written, cleared or lost; nil for a whole sample that was cleared
	Tags   []byte   // as stored, nil for a clear and a loss
}

// The kinds of events.
const (
	EventPut    = "put"
	EventUpdate = "update"
	EventClear  = "clear"
	EventLost   = "lost" // cells were lost with the unit that held them
)

// newRow stands for the index of a row that does not exist yet.
const newRow = -1

// plan is a write that was found valid.
type plan struct {
	p      *partition // nil: does not exist yet
	rows   []int64    // index of each row, or newRow
	hashes []uint64   // of the keys
	places bitset.Mask
}

// Check validates a write without changing anything but the write, and says where each row lives: the unit of an existing sample, NoUnit
// for a new one. Read-only.
//
// Errors: InvalidArgument for a batch that contradicts itself, SampleGone for a sample that was cleared, NotFound for a key
// to update, SchemaMismatch for a column that other samples hold with another type.
func (c *Catalog) Check(w *Write) ([]uint32, error) {
	pl, err := c.plan(w)
	if err != nil {
		return nil, err
	}
	if !w.Update {
		if err := pl.admit(w); err != nil {
			return nil, err
		}
	}
	units := make([]uint32, len(pl.rows))
	for i, index := range pl.rows {
		units[i] = c.unitID(pl.p, index)
	}
	w.found = &found{p: pl.p}
	if w.Keys != nil {
		w.found.rows, w.found.hashes = pl.rows, pl.hashes
	}
	if pl.p != nil {
		w.found.bindings = pl.p.bindings
	}
	return units, nil
}

// unitID returns the unit of a row, NoUnit for one that has never been written.
func (c *Catalog) unitID(p *partition, index int64) uint32 {
	if index == newRow || !p.active.Has(index) {
		return NoUnit
	}
	return c.home(index).id
}

// plan finds the rows of a write and validates everything that does not depend on the types of columns.
func (c *Catalog) plan(w *Write) (*plan, error) {
	n, err := w.size()
	if err != nil {
		return nil, err
	}
	if err := w.checkColumns(n); err != nil {
		return nil, err
	}
	if w.found == nil {
		if err := checkTags(w.Tags, n); err != nil {
			return nil, err
		}
	}
	pl := &plan{p: c.partitions[w.Partition]}
	switch {
	case w.Keys != nil:
		err = c.findKeys(pl, w)
	case w.Samples != nil:
		err = c.findSamples(pl, w)
	default:
		pl.rows = slices.Repeat([]int64{newRow}, n)
	}
	if err != nil {
		return nil, err
	}
	pl.places = existing(pl.rows)
	if w.Update {
		return pl, c.updatable(pl, w)
	}
	return pl, nil
}

// existing is the mask of the rows that are not new.
func existing(rows []int64) bitset.Mask {
	if !slices.Contains(rows, newRow) {
		return bitset.NewMask(rows)
	}
	return bitset.NewMask(slices.DeleteFunc(slices.Clone(rows), func(i int64) bool { return i == newRow }))
}

// size returns the number of rows.
func (w *Write) size() (int, error) {
	given := 0
	for _, is := range [...]bool{w.Keys != nil, w.Samples != nil, w.Insert != 0} {
		if is {
			given++
		}
	}
	if given != 1 {
		return 0, tqerr.New(tqerr.InvalidArgument, "rows are named in %d ways, want one of keys, samples and a number", given)
	}
	n := max(len(w.Keys), len(w.Samples), w.Insert)
	if n < 1 {
		return 0, tqerr.New(tqerr.InvalidArgument, "%d rows, want at least 1", min(w.Insert, 0))
	}
	if w.Update && w.Insert != 0 {
		return 0, tqerr.New(tqerr.InvalidArgument, "an update needs rows that exist")
	}
	return n, nil
}

func (w *Write) checkColumns(rows int) error {
	for i := range w.Columns {
		col := &w.Columns[i]
		if col.Rows != rows {
			return tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want %d", col.Field, col.Rows, rows)
		}
		for k := range i {
			if w.Columns[k].Field == col.Field {
				return tqerr.New(tqerr.InvalidArgument, "field %q is given twice", col.Field)
			}
		}
	}
	return nil
}

func (c *Catalog) findKeys(pl *plan, w *Write) error {
	if w.found == nil {
		pl.hashes = hashesOf(w.Keys)
		if twice := repeated(w.Keys, pl.hashes); twice != nil {
			return tqerr.New(tqerr.InvalidArgument, "partition %q: Got duplicated keys: %s", w.Partition, quoted(twice, fewNames))
		}
	} else {
		f := w.found
		pl.hashes = f.hashes
		if f.p == pl.p && (f.p == nil || f.bindings == f.p.bindings) {
			pl.rows = slices.Clone(f.rows)
			return nil
		}
	}
	pl.rows = make([]int64, len(w.Keys))
	var missing []string
	for i, key := range w.Keys {
		index, ok := int64(newRow), false
		if pl.p != nil {
			index, ok = pl.p.byKey.find(&c.keys, key, pl.hashes[i])
		}
		if !ok {
			index = newRow
			if w.Update {
				missing = append(missing, key)
			}
		}
		pl.rows[i] = index
	}
	if missing != nil {
		return keysNotFound(w.Partition, pl.p, missing, fewNames)
	}
	return nil
}

func (c *Catalog) findSamples(pl *plan, w *Write) error {
	pl.rows = make([]int64, len(w.Samples))
	for i, s := range w.Samples {
		if !c.owns(pl.p, s) {
			return c.gone(w.Partition, pl.p, s)
		}
		pl.rows[i] = s.Index
	}
	sorted := slices.Sorted(slices.Values(pl.rows))
	for i := 1; i < len(sorted); i++ {
		if sorted[i] == sorted[i-1] {
			return tqerr.New(tqerr.InvalidArgument, "partition %q: sample %d is given twice", w.Partition, sorted[i])
		}
	}
	return nil
}

// updatable checks that every row has the fields to update.
func (c *Catalog) updatable(pl *plan, w *Write) error {
	var lacking, fields []string
	for i := range w.Columns {
		name := w.Columns[i].Field
		fields = append(fields, name)
		if f := pl.p.fields[name]; f == nil || !f.has.HasAll(pl.places) {
			lacking = append(lacking, name)
		}
	}
	if lacking == nil {
		return nil
	}
	if err := c.lostIn(pl.p, pl.rows, fields); err != nil {
		return err
	}
	slices.Sort(lacking)
	return tqerr.New(tqerr.InvalidArgument, "partition %q: fields not produced by every sample: %s", w.Partition, quoted(lacking, allNames))
}

// admit checks the types of the columns.
func (pl *plan) admit(w *Write) error {
	if pl.p == nil {
		return nil
	}
	for i := range w.Columns {
		if f := pl.p.fields[w.Columns[i].Field]; f != nil {
			if err := f.admits(w.Partition, &w.Columns[i], pl.places); err != nil {
				return err
			}
		}
	}
	return nil
}

// keysNotFound names keys that a partition lacks, or the partition when it does not exist.
func keysNotFound(partition string, p *partition, keys []string, limit int) error {
	if p == nil {
		return tqerr.New(tqerr.NotFound, "keys or partition were not found! There is no partition %q to have keys %s", partition, quoted(keys, limit))
	}
	return tqerr.New(tqerr.NotFound, "partition %q: keys were not found: %s", partition, quoted(keys, limit))
}
