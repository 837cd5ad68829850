package table

import (
	"math"
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// pin is what one lease holds of one extent. The pins of an extent are a doubly linked list.
type pin struct{ extent, from, n, previous, next uint32 }

// deadRows are rows that no cell names any more but a pin covers. Those of an extent are a linked list.
type deadRows struct{ from, n, next uint32 }

// lease is one Read.
type lease struct {
	s       *Table
	columns []store.Leased
	pins    []uint32
	load    *loading  // nil: nothing of it lies on disk
	streams []*stream // by column, for Piece; nil before
	done    bool      // guarded by Table.mu
}

// Read implements store.Store. Columns that hold different kinds or dtypes among the samples give SchemaMismatch.
func (s *Table) Read(name string, fields []string, samples []schema.Sample) (store.Lease, error) {
	l, err := s.Pin(name, fields, samples)
	if err != nil {
		return nil, err
	}
	if err := l.(*lease).Load(); err != nil {
		l.Release()
		return nil, err
	}
	return l, nil
}

// Pin implements store.Pinner.
func (s *Table) Pin(name string, fields []string, samples []schema.Sample) (store.Lease, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, tqerr.New(tqerr.InvalidState, "unit: the store is closed")
	}
	runs, ends, err := s.findFieldsLocked(name, fields, samples)
	if err != nil {
		return nil, err
	}
	l := &lease{s: s, columns: make([]store.Leased, len(fields)), pins: make([]uint32, len(runs))}
	out := make([]store.Run, len(runs))
	from := 0
	for i, end := range ends {
		column, err := s.columnOfLocked(fields[i], len(samples), runs[from:end])
		if err != nil {
			return nil, err
		}
		l.columns[i] = store.Leased{Column: column, Runs: out[from:end:end]}
		from = end
	}
	s.mu.clock++
	field, row := 0, 0
	for i, run := range runs {
		for i == ends[field] {
			field, row = field+1, 0
		}
		l.pinRunLocked(i, run, &out[i], field, row)
		row += int(run.n)
	}
	if l.load != nil {
		l.load.name(name, fields, samples)
	}
	s.mu.leases++
	return l, nil
}

// findFieldsLocked finds the runs in which the cells of samples lie, field by field, and where the runs of each field end. They are
// valid until mu is released.
func (s *Table) findFieldsLocked(name string, fields []string, samples []schema.Sample) (runs []rowRun, ends []int, err error) {
	runs, ends = s.mu.scratch[:0], make([]int, len(fields))
	p := s.mu.partitions[name]
	for i, field := range fields {
		var c *column
		if p != nil {
			c = p.columns[field]
		}
		var missing int
		if runs, missing = findLocked(c, samples, runs); missing >= 0 {
			return nil, nil, missingLocked(c, field, samples[missing])
		}
		ends[i] = len(runs)
	}
	if s.mu.scratch = runs[:0]; cap(runs) > maxScratch {
		s.mu.scratch = nil
	}
	return runs, ends, nil
}

// pinRunLocked pins run i of a lease, which begins at a row of a field.
func (l *lease) pinRunLocked(i int, run rowRun, out *store.Run, field, row int) {
	s := l.s
	e := s.mu.extents.At(run.extent)
	*out = store.Run{Rows: int(run.n), Block: s.blockLocked(run), OnDisk: e.tier == onDisk}
	l.pins[i] = s.pinLocked(run)
	if e.reads < math.MaxUint8 && e.touched != s.mu.clock { // several runs of one extent are one touch
		e.reads++
	}
	switch e.touched = s.mu.clock; {
	case out.Block.Size == 0:
		out.Block = store.Block{} // in no segment that anybody would have to map, or load
	case e.tier == onDisk:
		s.loadLaterLocked(l, out, run, field, row)
	}
}

// maxScratch bounds the run records that are kept between reads.
const maxScratch = 1 << 16

func missingLocked(c *column, field string, sample schema.Sample) *store.MissingError {
	e := &store.MissingError{Field: field, Sample: sample}
	if c != nil {
		if pg := c.pages[sample.Index>>pageShift]; pg != nil {
			e.Stale = pg.cells[sample.Index&pageMask].extent != 0
		}
	}
	return e
}

// columnOfLocked describes the rows of runs as one column. Runs of one Uniform layout need no look at their rows.
func (s *Table) columnOfLocked(field string, rows int, runs []rowRun) (schema.Column, error) {
	if len(runs) == 0 {
		return schema.Column{Field: field}, nil
	}
	lid := s.mu.extents.At(runs[0].extent).layout
	first := &s.mu.layouts.At(lid).column
	same := first.Form == schema.Uniform
	for _, run := range runs[1:] {
		other := s.mu.extents.At(run.extent).layout
		if other == lid {
			continue
		}
		same = false
		if c := &s.mu.layouts.At(other).column; c.Kind != first.Kind || c.DType != first.DType {
			return schema.Column{}, tqerr.New(tqerr.SchemaMismatch, "field %q: %s %s and %s %s among the samples",
				field, first.Kind, first.DType, c.Kind, c.DType)
		}
	}
	if same {
		out := *first
		out.Field, out.Rows = field, rows
		return out, nil
	}
	if run := runs[0]; len(runs) == 1 && first.Rows > 1 {
		out := first.Slice(int(run.from), int(run.from+run.n))
		out.Field = field
		out.Normalize()
		return out, nil
	}
	b := schema.NewBuilder(field)
	b.Grow(rows)
	for _, run := range runs {
		e := s.mu.extents.At(run.extent)
		c := &s.mu.layouts.At(e.layout).column
		switch {
		case c.Form == schema.Objects && c.Sizes == nil:
			one := *c
			one.Sizes = []int64{e.size}
			b.Append(one)
		default:
			b.AppendRows(c, int(run.from), int(run.from+run.n))
		}
	}
	out := b.Column()
	out.Normalize()
	return out, nil
}

func (s *Table) pinLocked(r rowRun) uint32 {
	e := s.mu.extents.At(r.extent)
	id := s.mu.pins.New()
	*s.mu.pins.At(id) = pin{extent: r.extent, from: r.from, n: r.n, next: e.pins}
	if e.pins != 0 {
		s.mu.pins.At(e.pins).previous = id
	}
	e.pins = id
	return id
}

func (s *Table) unpinLocked(id uint32) (extent uint32) {
	p := s.mu.pins.At(id)
	extent = p.extent
	if p.previous != 0 {
		s.mu.pins.At(p.previous).next = p.next
	} else {
		s.mu.extents.At(extent).pins = p.next
	}
	if p.next != 0 {
		s.mu.pins.At(p.next).previous = p.previous
	}
	s.mu.pins.Free(id)
	return extent
}

// coverLocked splits a run into parts that pins cover and parts that none does.
func (s *Table) coverLocked(e *extent, r rowRun, part func(part rowRun, covered bool)) {
	for at, end := r.from, r.from+r.n; at < end; {
		coveredTo, freeTo := at, end
		for id := e.pins; id != 0; {
			p := s.mu.pins.At(id)
			if p.from > at {
				freeTo = min(freeTo, p.from)
			} else {
				coveredTo = max(coveredTo, p.from+p.n)
			}
			id = p.next
		}
		to := freeTo
		if coveredTo > at {
			to = min(coveredTo, end)
		}
		part(rowRun{r.extent, at, to - at}, coveredTo > at)
		at = to
	}
}

// Columns implements store.Lease.
func (l *lease) Columns() []store.Leased { return l.columns }

// Release implements store.Lease.
func (l *lease) Release() {
	s := l.s
	s.mu.Lock()
	if l.done {
		s.mu.Unlock()
		return
	}
	l.done = true
	s.mu.leases--
	var settle []uint32
	for _, id := range l.pins {
		extent := s.unpinLocked(id)
		if s.mu.extents.At(extent).dead != 0 {
			settle = append(settle, extent)
		}
	}
	l.pins = nil
	slices.Sort(settle)
	freed := l.load.endLocked(s)
	for _, extent := range slices.Compact(settle) {
		freed += s.settleLocked(extent)
	}
	s.unlockAndTell(freed)
}

// settleLocked frees the zombies of an extent that no pin covers any more.
func (s *Table) settleLocked(id uint32) (freed int64) {
	e := s.mu.extents.At(id)
	was := e.dead
	e.dead = 0
	for was != 0 {
		d := *s.mu.dead.At(was)
		s.mu.dead.Free(was)
		was = d.next
		s.coverLocked(e, rowRun{id, d.from, d.n}, func(part rowRun, covered bool) {
			if !covered {
				e.zombies -= part.n
				freed += s.releaseLocked(part)
				return
			}
			kept := s.mu.dead.New()
			*s.mu.dead.At(kept) = deadRows{from: part.from, n: part.n, next: e.dead}
			e.dead = kept
		})
	}
	if e.live == 0 && e.zombies == 0 {
		s.dropExtentLocked(id)
	}
	return freed
}
