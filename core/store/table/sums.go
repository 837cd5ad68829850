package table

import (
	"context"

	"transferqueue/core/internal/crc32c"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// sumStep is how many bytes are summed before they are written, or after they were read: few enough to stay in a cache, and as
// many as the page cache may keep in one piece.
const sumStep = 1 << 20

// stepEnd is where the step ends that begins at a place of a block. Steps end at multiples of sumStep in the file, because the
// page cache takes a write that is not aligned apart.
func stepEnd(b store.Block, from int64) int64 {
	at := b.Offset + from
	return min(b.Size, from+sumStep-at%sumStep)
}

// setSumsLocked keeps the checksums of a disk extent: one in its record, several beside it.
func (s *Table) setSumsLocked(id uint32, sums []uint32) {
	if len(sums) == 1 {
		s.mu.extents.At(id).sum = sums[0]
		return
	}
	s.mu.sums[id] = sums
}

// sumsLocked are the checksums of a run. The caller must not modify them.
func (s *Table) sumsLocked(r rowRun) []uint32 {
	if e := s.mu.extents.At(r.extent); e.rows == 1 {
		return []uint32{e.sum}
	}
	return s.mu.sums[r.extent][r.from : r.from+r.n]
}

// summer makes one CRC32C per row of a column whose bytes come in pieces.
type summer struct {
	ends []int64 // of the rows in the column; nil when all have width bytes
	wide int64
	rows int
	sums []uint32
	at   int64
	row  int
}

func newSummer(c *schema.Column) *summer {
	o := &summer{rows: c.Rows, sums: make([]uint32, c.Rows)}
	if c.Form == schema.Uniform {
		o.wide = c.RowBytes()
	} else {
		o.ends = c.Offsets()[1:]
	}
	return o
}

func (o *summer) end() int64 {
	if o.ends == nil {
		return int64(o.row+1) * o.wide
	}
	return o.ends[o.row]
}

// add takes the next bytes of the column.
func (o *summer) add(data []byte) {
	for len(data) > 0 {
		for o.at == o.end() {
			o.row++
		}
		n := min(int64(len(data)), o.end()-o.at)
		o.sums[o.row] = crc32c.Update(o.sums[o.row], data[:n])
		o.at, data = o.at+n, data[n:]
	}
}

// checksums returns one CRC32C per row of a column.
func checksums(c *schema.Column, data []byte) []uint32 {
	if c.Rows == 1 {
		return []uint32{crc32c.Checksum(data)}
	}
	o := newSummer(c)
	o.add(data)
	return o.sums
}

// writeSummed writes the rows of a column and returns their checksums. It looks at ctx between two steps.
func (s *Table) writeSummed(ctx context.Context, b store.Block, c *schema.Column, data []byte) ([]uint32, error) {
	o := newSummer(c)
	for from, end := int64(0), int64(0); from < b.Size; from = end {
		if ctx.Err() != nil {
			return nil, tqerr.New(tqerr.CodeOf(ctx.Err()), "the write to disk was stopped")
		}
		end = stepEnd(b, from)
		part := data[from:end]
		o.add(part)
		err := s.opts.Disk.Write(store.Block{Segment: b.Segment, Offset: b.Offset + from, Size: int64(len(part))}, part)
		if err != nil {
			return nil, err
		}
	}
	return o.sums, nil
}

// readSummed reads the rows of a column and returns the first that has not its checksum, -1 when all have.
func (s *Table) readSummed(b store.Block, c *schema.Column, to []byte, want []uint32) (bad int, err error) {
	o := newSummer(c)
	for from, end := int64(0), int64(0); from < b.Size; from = end {
		end = stepEnd(b, from)
		part := to[from:end]
		err := s.opts.Disk.Read(store.Block{Segment: b.Segment, Offset: b.Offset + from, Size: int64(len(part))}, part)
		if err != nil {
			return -1, err
		}
		o.add(part)
	}
	for i := range o.sums {
		if o.sums[i] != want[i] {
			return i, nil
		}
	}
	return -1, nil
}
