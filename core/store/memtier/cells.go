package memtier

import (
	"fmt"

	"transferqueue/core/schema"
)

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
	pages map[int64]*page
	live  int64
}

func (s *Store) columnLocked(name, field string) *column {
	p := s.mu.partitions[name]
	if p == nil {
		p = &partition{columns: map[string]*column{}}
		s.mu.partitions[name] = p
	}
	c := p.columns[field]
	if c == nil {
		c = &column{pages: map[int64]*page{}}
		p.columns[field] = c
	}
	return c
}

// pageLocked returns the page with a key, a new one when there is none.
func (s *Store) pageLocked(c *column, key int64) *page {
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

// Commit implements store.Staged. A row whose cell belongs to a newer generation is freed instead of bound: its sample is
// gone already.
func (tx *staged) Commit(samples []schema.Sample) {
	s := tx.s
	s.mu.Lock()
	if tx.done {
		s.mu.Unlock()
		return
	}
	if len(tx.extents) > 0 && len(samples) != tx.rows {
		s.mu.Unlock()
		panic(fmt.Sprintf("memtier: commit of %d samples for %d rows", len(samples), tx.rows))
	}
	tx.done = true
	s.mu.staged--
	freed := int64(0)
	for i, id := range tx.extents {
		if id != 0 {
			s.mu.extents.At(id).staged = false
			freed += s.bindLocked(s.columnLocked(tx.partition, tx.fields[i]), id, samples)
		}
	}
	s.unlockAndTell(freed)
}

// bindLocked points the cells of samples to the rows of an extent.
func (s *Store) bindLocked(c *column, extent uint32, samples []schema.Sample) int64 {
	var f freer
	added := 0
	for i := 0; i < len(samples); {
		key := samples[i].Index >> pageShift
		pg := s.pageLocked(c, key)
		before := pg.live
		for ; i < len(samples) && samples[i].Index>>pageShift == key; i++ {
			to := &pg.cells[samples[i].Index&pageMask]
			now := cell{extent, uint32(i), samples[i].Generation}
			if to.extent == 0 {
				pg.live++
			} else if to.generation > now.generation {
				f.add(s, now)
				continue
			} else {
				f.add(s, *to)
			}
			*to = now
		}
		added += pg.live - before
	}
	f.flush(s)
	c.live += int64(added)
	s.mu.cells += int64(added)
	return f.freed
}

// Delete implements store.Store.
func (s *Store) Delete(name string, fields []string, samples []schema.Sample) int64 {
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

func (s *Store) deleteLocked(p *partition, field string, samples []schema.Sample) int64 {
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
func (s *Store) Has(name string, fields []string, samples []schema.Sample) bool {
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
