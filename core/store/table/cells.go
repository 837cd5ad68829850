package table

import "transferqueue/core/schema"

const (
	pageShift = 8
	pageCells = 1 << pageShift
	pageMask  = pageCells - 1
	keepPages = 64
)

// cell says where the value of one sample is; extent 0 means that there is none.
type cell struct{ extent, row, generation uint32 }

// page holds the cells of pageCells neighbouring indexes.
type page struct {
	cells [pageCells]cell
	live  int
}

// partition is the columns that hold a cell. An empty column or partition is not kept.
type partition struct{ columns map[string]*column }

// column is the cells of one field, in pages so that the indexes of a partition may lie far apart.
type column struct {
	partition, field string
	pages            map[int64]*page
	live             int64
}

func (s *Table) columnLocked(name, field string) *column {
	p := s.mu.partitions[name]
	if p == nil {
		p = &partition{columns: map[string]*column{}}
		s.mu.partitions[name] = p
	}
	c := p.columns[field]
	if c == nil {
		c = &column{partition: name, field: field, pages: map[int64]*page{}}
		p.columns[field] = c
	}
	return c
}

// pageLocked returns the page with a key, a new one when there is none.
func (s *Table) pageLocked(c *column, key int64) *page {
	pg := c.pages[key]
	if pg != nil {
		return pg
	}
	if n := len(s.mu.pages); n > 0 {
		pg, s.mu.pages = s.mu.pages[n-1], s.mu.pages[:n-1]
	} else {
		pg = new(page)
	}
	c.pages[key] = pg
	return pg
}

// bindLocked points the cells of samples to the rows of an extent, from a row on. One sample at a time shares a row.
func (s *Table) bindLocked(c *column, extent uint32, row int, samples []schema.Sample) int64 {
	var f freer
	added, bound := 0, 0
	newTier := s.mu.extents.At(extent).tier
	for i := 0; i < len(samples); {
		key := samples[i].Index >> pageShift
		pg := s.pageLocked(c, key)
		before := pg.live
		for ; i < len(samples) && samples[i].Index>>pageShift == key; i++ {
			to := &pg.cells[samples[i].Index&pageMask]
			now := cell{extent, uint32(row + i), samples[i].Generation}
			switch {
			case to.extent == 0:
				pg.live++
			case to.generation > now.generation:
				s.noteBoundLocked(c, extent, row, samples, bound, i)
				bound = i + 1
				f.add(s, now)
				continue
			default:
				if newTier != onDisk && s.mu.extents.At(to.extent).tier == onDisk {
					s.mu.drops.add(s.opts.Disk, c, schema.Sample{Index: samples[i].Index, Generation: to.generation})
				}
				f.add(s, *to)
			}
			*to = now
		}
		added += pg.live - before
	}
	s.noteBoundLocked(c, extent, row, samples, bound, len(samples))
	f.flush(s)
	c.live += int64(added)
	s.mu.cells += int64(added)
	return f.freed
}

// noteBoundLocked tells the disk that the rows of a disk extent are cells now: those of samples [from, to).
func (s *Table) noteBoundLocked(c *column, extent uint32, row int, samples []schema.Sample, from, to int) {
	if from == to || s.mu.extents.At(extent).tier != onDisk {
		return
	}
	run := rowRun{extent, uint32(row + from), uint32(to - from)}
	column := s.columnOfRunLocked(run)
	column.Field = c.field
	s.mu.drops.flush(s.opts.Disk)
	s.opts.Disk.Bind(c.partition, &column, samples[from:to], s.blockLocked(run), s.sumsLocked(run))
}

// dropper collects the cells of one column that leave the disk.
type dropper struct {
	column  *column
	samples []schema.Sample
}

func (d *dropper) add(to Disk, c *column, sample schema.Sample) {
	if d.column != c {
		d.flush(to)
		d.column = c
	}
	d.samples = append(d.samples, sample)
}

func (d *dropper) flush(to Disk) {
	if len(d.samples) > 0 {
		to.Drop(d.column.partition, d.column.field, d.samples)
	}
	d.column, d.samples = nil, d.samples[:0]
}

// Delete implements store.Store.
func (s *Table) Delete(name string, fields []string, samples []schema.Sample) int64 {
	s.mu.Lock()
	freed := int64(0)
	if p := s.mu.partitions[name]; p != nil {
		if fields == nil {
			for field := range p.columns {
				freed += s.deleteLocked(p, field, samples)
			}
		}
		for _, field := range fields {
			freed += s.deleteLocked(p, field, samples)
		}
		if len(p.columns) == 0 {
			delete(s.mu.partitions, name)
		}
	}
	s.unlockAndTell(freed)
	return freed
}

func (s *Table) deleteLocked(p *partition, field string, samples []schema.Sample) int64 {
	c := p.columns[field]
	if c == nil {
		return 0
	}
	var f freer
	removed := 0
	for i := 0; i < len(samples); {
		key := samples[i].Index >> pageShift
		pg := c.pages[key]
		if pg == nil {
			for i++; i < len(samples) && samples[i].Index>>pageShift == key; i++ {
			}
			continue
		}
		before := pg.live
		for ; i < len(samples) && samples[i].Index>>pageShift == key; i++ {
			at := &pg.cells[samples[i].Index&pageMask]
			if at.extent != 0 && at.generation == samples[i].Generation {
				if s.mu.extents.At(at.extent).tier == onDisk {
					s.mu.drops.add(s.opts.Disk, c, samples[i])
				}
				f.add(s, *at)
				*at = cell{}
				pg.live--
			}
		}
		removed += before - pg.live
		if pg.live == 0 {
			delete(c.pages, key)
			if len(s.mu.pages) < keepPages {
				s.mu.pages = append(s.mu.pages, pg)
			}
		}
	}
	f.flush(s)
	c.live -= int64(removed)
	s.mu.cells -= int64(removed)
	if c.live == 0 {
		delete(p.columns, field)
	}
	return f.freed
}

// Has implements store.Store.
func (s *Table) Has(name string, fields []string, samples []schema.Sample) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.mu.partitions[name]
	for _, field := range fields {
		var c *column
		if p != nil {
			c = p.columns[field]
		}
		if runs, missing := findLocked(c, samples, s.mu.scratch[:0]); missing >= 0 {
			return false
		} else {
			s.mu.scratch = runs[:0]
		}
	}
	return true
}

// findLocked appends the runs in which the cells of samples lie. missing is the position of the first sample whose cell is
// not there, or -1.
func findLocked(c *column, samples []schema.Sample, runs []rowRun) (_ []rowRun, missing int) {
	var run rowRun
	if c == nil {
		c = &column{}
	}
	for i := 0; i < len(samples); {
		key := samples[i].Index >> pageShift
		pg := c.pages[key]
		if pg == nil {
			return runs, i
		}
		for ; i < len(samples) && samples[i].Index>>pageShift == key; i++ {
			at := &pg.cells[samples[i].Index&pageMask]
			if at.extent == run.extent && at.row == run.from+run.n && at.generation == samples[i].Generation && run.n > 0 {
				run.n++
				continue
			}
			if at.extent == 0 || at.generation != samples[i].Generation {
				return runs, i
			}
			if run.n > 0 {
				runs = append(runs, run)
			}
			run = rowRun{at.extent, at.row, 1}
		}
	}
	if run.n > 0 {
		runs = append(runs, run)
	}
	return runs, -1
}
