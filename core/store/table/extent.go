package table

import (
	"encoding/binary"

	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// extent is one column of one staged write.
type extent struct {
	offset, size int64
	segment      uint32
	rows         uint32
	live         uint32 // rows that are staged or that a cell names
	zombies      uint32 // rows in the dead list
	layout       uint32
	pins         uint32 // first of the pins on it
	dead         uint32 // first of its zombie ranges
	sum          uint32 // of the only row, on disk
	serial       uint32 // tells it from others that have had its number
	touched      uint32 // Table.clock when it was written or read last
	holders      uint32 // cells that name its only row, which they share; 0: each row has a cell of its own
	reads        uint8  // since it was written, no further than 255
	tier         tier
	staged       bool
}

// rowRun is a number of consecutive rows of one extent.
type rowRun struct{ extent, from, n uint32 }

// layout says how the rows of an extent look. Extents whose layouts need nothing per row share one.
type layout struct {
	key     string // by which it is shared; empty when it is not
	refs    uint32
	column  schema.Column // without Field and, when shared, for any number of rows
	offsets []int64       // of rows in the block; nil when all rows have row bytes
	row     int64
}

// layoutLocked finds or makes the layout of a column. One row is always shared: as a Uniform shape, or as an object of
// a codec whose size is the extent's.
func (s *Table) layoutLocked(c *schema.Column) uint32 {
	column := *c
	column.Share = nil
	if c.Rows == 1 {
		column.Normalize()
	}
	var buffer [128]byte
	key := buffer[:0]
	switch {
	case column.Form == schema.Uniform:
		key = append(key, byte(column.Kind), byte(column.DType), column.Ragged)
		for _, d := range column.Shape {
			key = binary.AppendVarint(key, d)
		}
	case column.Form == schema.Objects && c.Rows == 1:
		key = append(key, byte(column.Kind), byte(column.DType), column.Ragged, byte(column.Codecs[0]))
	}
	if len(key) > 0 {
		if id := s.mu.interned[string(key)]; id != 0 {
			s.mu.layouts.At(id).refs++
			return id
		}
	}
	id := s.mu.layouts.New()
	column.Field = ""
	l := s.mu.layouts.At(id)
	*l = layout{key: string(key), refs: 1, column: column}
	switch {
	case len(key) == 0:
		l.offsets = column.Offsets()
	case column.Form == schema.Uniform:
		l.row = column.RowBytes()
	default:
		l.column.Sizes = nil
	}
	if l.key != "" {
		s.mu.interned[l.key] = id
	}
	return id
}

func (s *Table) newExtentLocked(c *schema.Column, b store.Block, t tier) uint32 {
	lid := s.layoutLocked(c)
	id := s.mu.extents.New()
	s.mu.serial++
	*s.mu.extents.At(id) = extent{
		offset: b.Offset, size: b.Size, segment: b.Segment, rows: uint32(c.Rows), live: uint32(c.Rows), layout: lid,
		serial: s.mu.serial, touched: s.mu.clock, tier: t, staged: true,
	}
	return id
}

func (s *Table) dropExtentLocked(id uint32) {
	lid := s.mu.extents.At(id).layout
	l := s.mu.layouts.At(lid)
	if l.refs--; l.refs == 0 {
		if l.key != "" {
			delete(s.mu.interned, l.key)
		}
		s.mu.layouts.Free(lid)
	}
	delete(s.mu.sums, id)
	delete(s.mu.holders, id)
	s.mu.extents.Free(id)
}

// liveLocked makes the rows of an extent count as those of cells.
func (s *Table) liveLocked(id uint32) {
	e := s.mu.extents.At(id)
	e.staged = false
	if e.holders > 0 {
		s.countLocked(e.tier, int64(e.holders), int64(e.holders)*e.size)
		return
	}
	s.countLocked(e.tier, int64(e.rows), e.size)
}

// countLocked counts cells that begin or, when negative, end.
func (s *Table) countLocked(t tier, cells, bytes int64) {
	s.mu.values[t] += cells
	s.mu.logical[t] += bytes
}

// blockLocked is where the rows of a run lie.
func (s *Table) blockLocked(r rowRun) store.Block {
	e := s.mu.extents.At(r.extent)
	b := store.Block{Segment: e.segment, Offset: e.offset, Size: e.size}
	if r.n == e.rows {
		return b
	}
	if l := s.mu.layouts.At(e.layout); l.offsets == nil {
		b.Offset, b.Size = e.offset+int64(r.from)*l.row, int64(r.n)*l.row
	} else {
		from := l.offsets[r.from]
		b.Offset, b.Size = e.offset+from, l.offsets[r.from+r.n]-from
	}
	return b
}

// freeRowsLocked ends live rows, or takes one holder from a row that is shared. What leases cover becomes a zombie, the rest is
// free at once; it returns those bytes.
func (s *Table) freeRowsLocked(r rowRun) (freed int64) {
	e := s.mu.extents.At(r.extent)
	if !e.staged {
		s.countLocked(e.tier, -int64(r.n), -s.blockLocked(r).Size)
	}
	if e.holders > 1 {
		e.holders--
		return 0
	}
	e.live -= r.n
	if e.pins == 0 {
		freed = s.releaseLocked(r)
	} else {
		s.coverLocked(e, r, func(part rowRun, covered bool) {
			if !covered {
				freed += s.releaseLocked(part)
				return
			}
			e.zombies += part.n
			id := s.mu.dead.New()
			*s.mu.dead.At(id) = deadRows{from: part.from, n: part.n, next: e.dead}
			e.dead = id
		})
	}
	if e.live == 0 && e.zombies == 0 {
		s.dropExtentLocked(r.extent)
	}
	return freed
}

// releaseLocked returns the bytes of rows.
func (s *Table) releaseLocked(r rowRun) int64 {
	b, t := s.blockLocked(r), s.mu.extents.At(r.extent).tier
	if t == onDisk {
		s.opts.Disk.Free(b)
	} else {
		s.freeBlockLocked(b)
	}
	s.mu.used[t] -= b.Size
	return b.Size
}

// freer collects the rows of cells that end, so that neighbours are freed as one run.
type freer struct {
	run   rowRun
	freed int64
}

func (f *freer) add(s *Table, c cell) {
	if c.extent == f.run.extent && c.row == f.run.from+f.run.n {
		f.run.n++
		return
	}
	f.flush(s)
	f.run = rowRun{c.extent, c.row, 1}
}

func (f *freer) flush(s *Table) {
	if f.run.n > 0 {
		f.freed += s.freeRowsLocked(f.run)
	}
	f.run = rowRun{}
}

// columnOfRunLocked describes the rows of a run, without a field.
func (s *Table) columnOfRunLocked(r rowRun) schema.Column {
	e := s.mu.extents.At(r.extent)
	c := s.mu.layouts.At(e.layout).column
	switch {
	case c.Form == schema.Uniform:
		c.Rows = int(r.n)
		return c
	case c.Form == schema.Objects && c.Sizes == nil:
		c.Sizes = []int64{e.size}
		return c
	default:
		return rowsOfColumn(&c, int(r.from), int(r.from+r.n))
	}
}
