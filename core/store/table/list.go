package table

import (
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// Cells are some cells of one field.
type Cells struct {
	Partition, Field string
	Samples          []schema.Sample
}

// Listed are live cells that are consecutive rows of one extent.
type Listed struct {
	Cells
	Segment uint32 // where they lie
	Bytes   int64
	Shared  bool   // they are one row, which all of them hold
	Touched uint32 // the larger, the later they were written or read
}

// List returns the live cells in memory that nobody leases, or those on disk in one segment.
func (s *Table) List(disk bool, segment uint32) (out []Listed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	shared := map[uint32]int{} // where in out
	s.eachRunLocked(func(c *column, run rowRun, samples []schema.Sample) {
		e := s.mu.extents.At(run.extent)
		if at, known := shared[run.extent]; known {
			out[at].Samples = append(out[at].Samples, samples...)
			return
		}
		if disk && (e.tier != onDisk || e.segment != segment) || !disk && (e.tier != inMemory || e.pins != 0) {
			return
		}
		if e.holders > 0 {
			shared[run.extent] = len(out)
		}
		out = append(out, Listed{
			Cells: Cells{c.partition, c.field, append([]schema.Sample(nil), samples...)}, Segment: e.segment,
			Bytes: s.blockLocked(run).Size, Touched: e.touched, Shared: e.holders > 0,
		})
	})
	return out
}

// eachRunLocked yields all live cells, as many at a time as are consecutive rows of one extent. The samples are valid until
// the function returns.
func (s *Table) eachRunLocked(yield func(c *column, run rowRun, samples []schema.Sample)) {
	var samples []schema.Sample
	for _, p := range s.mu.partitions {
		for _, c := range p.columns {
			for key, pg := range c.pages {
				var run rowRun
				for i, at := range pg.cells {
					if at.extent != run.extent || at.row != run.from+run.n {
						if run.n > 0 {
							yield(c, run, samples)
						}
						run, samples = rowRun{at.extent, at.row, 0}, samples[:0]
					}
					if at.extent != 0 {
						run.n++
						samples = append(samples, schema.Sample{Index: key<<pageShift | int64(i), Generation: at.generation})
					}
				}
				if run.n > 0 {
					yield(c, run, samples)
				}
			}
		}
	}
}

// inventoryRows bounds the rows of a Stock.
const inventoryRows = 1 << 16

// Inventory lists all live cells.
func (s *Table) Inventory() (out []schema.Stock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var of *column
	var builder *schema.Builder
	var found []schema.Sample
	end := func() {
		if len(found) > 0 {
			out = append(out, schema.Stock{Partition: of.partition, Column: builder.Column(), Samples: found})
		}
	}
	s.eachRunLocked(func(c *column, run rowRun, samples []schema.Sample) {
		if c != of || len(found)+len(samples) > inventoryRows {
			end()
			of, builder, found = c, schema.NewBuilder(c.field), nil
		}
		builder.Append(s.columnOfRunLocked(run))
		found = append(found, samples...)
	})
	end()
	return out
}

// EachOnDisk yields all live cells of the disk tier, after a call of begin, all under the lock of the table: what the index of
// the disk must say now.
func (s *Table) EachOnDisk(begin func(), yield func(partition string, column *schema.Column, samples []schema.Sample, b store.Block, sums []uint32)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin()
	s.eachRunLocked(func(c *column, run rowRun, samples []schema.Sample) {
		if s.mu.extents.At(run.extent).tier != onDisk {
			return
		}
		column := s.columnOfRunLocked(run)
		column.Field = c.field
		yield(c.partition, &column, samples, s.blockLocked(run), s.sumsLocked(run))
	})
}

// Restore makes rows that lie on disk the cells of samples, as a Bind of an earlier process has said. More samples than one
// row share it. The disk is not told.
func (s *Table) Restore(partition string, column *schema.Column, samples []schema.Sample, b store.Block, sums []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.newExtentLocked(column, b, onDisk)
	s.setSumsLocked(id, sums)
	s.mu.used[onDisk] += b.Size
	step := uint32(1)
	if column.Rows < len(samples) {
		step = 0
		s.shareLocked(id, samples)
	} else {
		s.liveLocked(id)
	}
	c := s.columnLocked(partition, column.Field)
	for i, sample := range samples {
		pg := s.pageLocked(c, sample.Index>>pageShift)
		pg.cells[sample.Index&pageMask] = cell{id, uint32(i) * step, sample.Generation}
		pg.live++
	}
	c.live += int64(len(samples))
	s.mu.cells += int64(len(samples))
}
