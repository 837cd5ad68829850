package table

import "fmt"

// Check verifies that cells, extents, pins and bytes agree with one another. It is for tests.
func (s *Table) Check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows, err := s.checkCellsLocked()
	if err != nil {
		return err
	}
	var used [3]int64
	var values, logical [3]int64
	pins, dead := 0, 0
	s.mu.extents.Each(func(id uint32, e *extent) {
		if e.rows == 0 || err != nil {
			return
		}
		for at := e.pins; at != 0; at = s.mu.pins.At(at).next {
			pins++
		}
		for at := e.dead; at != 0; at = s.mu.dead.At(at).next {
			dead++
		}
		var bytes int64
		bytes, err = s.checkExtentLocked(id, e, rows[id])
		used[e.tier] += bytes
		for row, n := range rows[id] {
			values[e.tier] += int64(n)
			logical[e.tier] += int64(n) * s.blockLocked(rowRun{id, row, 1}).Size
		}
	})
	switch {
	case err != nil:
		return err
	case (s.opts.Disk == nil || s.mu.staged == 0) && used != s.mu.used:
		return fmt.Errorf("table: extents hold %d bytes, %d are accounted", used, s.mu.used)
	case values != s.mu.values || logical != s.mu.logical:
		return fmt.Errorf("table: %d cells of %d bytes, counted %d of %d", values, logical, s.mu.values, s.mu.logical)
	case pins != s.mu.pins.Len() || dead != s.mu.dead.Len():
		return fmt.Errorf("table: %d pins and %d zombie ranges are linked, want %d and %d", pins, dead, s.mu.pins.Len(), s.mu.dead.Len())
	case s.opts.MemoryLimit > 0 && s.mu.used[inMemory]+s.mu.staging > s.opts.MemoryLimit:
		return fmt.Errorf("table: %d bytes of memory used and %d staged of %d", s.mu.used[inMemory], s.mu.staging, s.opts.MemoryLimit)
	case s.opts.DiskLimit > 0 && s.mu.used[onDisk] > s.opts.DiskLimit:
		return fmt.Errorf("table: %d bytes of disk used of %d", s.mu.used[onDisk], s.opts.DiskLimit)
	case s.mu.leases == 0 && s.mu.staged == 0 && s.mu.staging+s.mu.outside != 0:
		return fmt.Errorf("table: %d bytes staged and %d in scratch space for nothing", s.mu.staging, s.mu.outside)
	case s.mu.extents.Len() == 0 && s.mu.layouts.Len() != 0:
		return fmt.Errorf("table: %d layouts without an extent", s.mu.layouts.Len())
	}
	return nil
}

// checkCellsLocked returns, for every extent, how many cells name each of its rows.
func (s *Table) checkCellsLocked() (map[uint32]map[uint32]int, error) {
	rows := map[uint32]map[uint32]int{}
	total := int64(0)
	for name, p := range s.mu.partitions {
		if len(p.columns) == 0 {
			return nil, fmt.Errorf("table: partition %q is empty", name)
		}
		for field, c := range p.columns {
			live := int64(0)
			for key, pg := range c.pages {
				n := 0
				for _, at := range pg.cells {
					if at.extent == 0 {
						continue
					}
					n++
					if rows[at.extent] == nil {
						rows[at.extent] = map[uint32]int{}
					}
					rows[at.extent][at.row]++
				}
				if n == 0 || n != pg.live {
					return nil, fmt.Errorf("table: field %q: page %d has %d cells, counted %d", field, key, n, pg.live)
				}
				live += int64(n)
			}
			if live == 0 || live != c.live {
				return nil, fmt.Errorf("table: field %q has %d cells, counted %d", field, live, c.live)
			}
			total += live
		}
	}
	if total != s.mu.cells {
		return nil, fmt.Errorf("table: %d cells, counted %d", total, s.mu.cells)
	}
	return rows, nil
}

// checkExtentLocked verifies one extent and returns its bytes.
func (s *Table) checkExtentLocked(id uint32, e *extent, cells map[uint32]int) (bytes int64, err error) {
	if e.staged {
		if e.live != e.rows || len(cells) > 0 {
			return 0, fmt.Errorf("table: staged extent %d has %d cells", id, len(cells))
		}
		return e.size, nil
	}
	if int(e.live) != len(cells) || e.live+e.zombies == 0 {
		return 0, fmt.Errorf("table: extent %d has %d live and %d zombie rows, %d cells", id, e.live, e.zombies, len(cells))
	}
	for row, n := range cells {
		if n != max(1, int(e.holders)) || row >= e.rows {
			return 0, fmt.Errorf("table: row %d of extent %d is named by %d cells", row, id, n)
		}
		bytes += s.blockLocked(rowRun{id, row, 1}).Size
	}
	zombies := uint32(0)
	for at := e.dead; at != 0; {
		d := s.mu.dead.At(at)
		at = d.next
		zombies += d.n
		bytes += s.blockLocked(rowRun{id, d.from, d.n}).Size
		for row := d.from; row < d.from+d.n; row++ {
			if cells[row] != 0 {
				return 0, fmt.Errorf("table: row %d of extent %d is live and a zombie", row, id)
			}
		}
		s.coverLocked(e, rowRun{id, d.from, d.n}, func(part rowRun, covered bool) {
			if !covered {
				err = fmt.Errorf("table: zombie rows %d+%d of extent %d are not leased", part.from, part.n, id)
			}
		})
	}
	if zombies != e.zombies {
		return 0, fmt.Errorf("table: extent %d has %d zombie rows, counted %d", id, zombies, e.zombies)
	}
	return bytes, err
}
