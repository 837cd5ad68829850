package table

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// Where says to which place Move copies.
type Where uint8

// The places.
const (
	ToDisk   Where = iota + 1 // rows that lie in memory
	ToMemory                  // rows that lie on disk
	Compact                   // rows that lie on disk, to another place there
)

// gatherStep is how many bytes of small runs become one write, which ends at a multiple of it in the file, as steps of large ones do.
const gatherStep = 256 << 10

// smallRun is up to which size runs are written together.
const smallRun = 64 << 10

// moving is a run on its way. Nothing keeps its rows meanwhile, so that clearing them frees them at once: what was copied
// counts only if the cells still name the same extent afterwards, which its serial number tells.
type moving struct {
	column  *column
	run     rowRun
	serial  uint32
	samples []schema.Sample // of the rows, or all that have held a shared one
	shared  bool
	rows    schema.Column
	from    store.Block
	to      store.Block
	sums    []uint32
	skip    bool // it could not be read: its rows are gone, or are damaged, which a reader will be told
}

// Move copies cells to another place and lets them be read from there. Cells that are not where they would be moved from, or
// are not there at all any more, are skipped, and so are those that are overwritten or cleared meanwhile. It returns the
// bytes moved. Cells stay readable all the time. On an error nothing has moved. With ToMemory, keep bounds the memory in use
// afterwards; ResourceExhausted says that there is no room.
func (s *Table) Move(cells []Cells, where Where, keep int64) (moved int64, err error) {
	list, need := s.beginMove(cells, where)
	if len(list) == 0 {
		return 0, nil
	}
	if err := s.reserveMove(need, where, keep); err != nil {
		return 0, err
	}
	if where == ToMemory {
		err = s.copyToMemory(list)
	} else {
		err = s.moveToDisk(list, need)
	}
	s.mu.Lock()
	if where != Compact {
		s.mu.moving[tierTo(where)] -= need
	}
	if err == nil {
		moved = s.endMoveLocked(list, where)
	}
	s.unlockAndTell(moved)
	return moved, err
}

func tierTo(where Where) tier {
	if where == ToMemory {
		return inMemory
	}
	return onDisk
}

// beginMove finds what is to be moved.
func (s *Table) beginMove(cells []Cells, where Where) (list []moving, need int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, 0
	}
	list = make([]moving, 0, len(cells))
	seen := map[uint32]bool{} // extents of shared rows
	var runs []rowRun
	for _, c := range cells {
		p := s.mu.partitions[c.Partition]
		if p == nil || p.columns[c.Field] == nil {
			continue
		}
		column := p.columns[c.Field]
		for from := 0; from < len(c.Samples); {
			var missing int
			runs, missing = findLocked(column, c.Samples[from:], runs[:0])
			at := from
			for _, run := range runs {
				samples := c.Samples[at : at+int(run.n)]
				at += int(run.n)
				e := s.mu.extents.At(run.extent)
				if (e.tier == onDisk) == (where == ToDisk) || seen[run.extent] {
					continue
				}
				m := moving{
					column: column, run: run, serial: e.serial, samples: samples, rows: s.columnOfRunLocked(run), from: s.blockLocked(run),
				}
				if e.holders > 0 {
					seen[run.extent] = true
					m.shared, m.samples = true, s.mu.holders[run.extent]
				}
				if where != ToDisk {
					m.sums = s.sumsLocked(run)
				}
				need += m.from.Size
				list = append(list, m)
			}
			if from = len(c.Samples); missing >= 0 {
				from = at + 1
			}
		}
	}
	return list, need
}

// reserveMove takes room for the copies. Compact takes none: its copies replace what counts already.
func (s *Table) reserveMove(need int64, where Where, keep int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch where {
	case ToMemory:
		if used := s.memoryInUseLocked(); need > keep-used {
			return tqerr.New(tqerr.ResourceExhausted, "unit memory: %d bytes needed, %d of %d used", need, used, keep)
		}
	case ToDisk:
		if err := s.diskRoomLocked(need); err != nil {
			return err
		}
	default:
		return nil
	}
	s.mu.moving[tierTo(where)] += need
	return nil
}

// copyToMemory reads runs into memory.
func (s *Table) copyToMemory(list []moving) error {
	for i := range list {
		b, err := s.allocLocked(list[i].from.Size)
		if err != nil {
			for _, done := range list[:i] {
				s.freeBlockLocked(done.to)
			}
			return err
		}
		list[i].to = b
		list[i].skip = !s.readRun(&list[i], s.Bytes(b))
	}
	return nil
}

// readRun reads a run from disk and reports whether it has its checksums.
func (s *Table) readRun(m *moving, to []byte) bool {
	bad, err := s.readSummed(m.from, &m.rows, to, m.sums)
	return err == nil && bad < 0
}

// moveToDisk writes runs one behind the other.
func (s *Table) moveToDisk(list []moving, need int64) error {
	whole, err := s.opts.Disk.Alloc(need)
	if err != nil {
		return err
	}
	rows := 0
	for i := range list {
		rows += list[i].rows.Rows
	}
	if err = s.copyToDisk(list, whole); err == nil {
		err = s.opts.Disk.Secure([]store.Block{whole}, rows)
	}
	if err != nil {
		s.opts.Disk.Free(whole)
	}
	return err
}

// copyToDisk writes the runs into a block, large ones each by itself and small ones together.
func (s *Table) copyToDisk(list []moving, whole store.Block) error {
	g := gather{disk: s.opts.Disk, at: whole}
	for i := range list {
		m := &list[i]
		m.to = store.Block{Segment: whole.Segment, Offset: g.end(), Size: m.from.Size}
		if m.from.Size <= smallRun {
			if g.buffer == nil {
				g.buffer = make([]byte, 0, min(gatherStep+smallRun, whole.Size))
			}
			g.buffer = s.appendToMove(g.buffer, m)
			if err := g.flush(false); err != nil {
				return err
			}
			continue
		}
		if err := g.flush(true); err != nil {
			return err
		}
		if err := s.copyLarge(m); err != nil {
			return err
		}
		g.at.Offset += m.to.Size
	}
	return g.flush(true)
}

// gather collects small runs that become one write.
type gather struct {
	disk   Disk
	at     store.Block // begins where the buffer does
	buffer []byte
}

func (g *gather) end() int64 { return g.at.Offset + int64(len(g.buffer)) }

// flush writes the steps that are complete, or all there is.
func (g *gather) flush(all bool) error {
	for from := g.at.Offset; ; from = g.at.Offset {
		n := gatherStep - from%gatherStep
		if n > int64(len(g.buffer)) {
			if n = int64(len(g.buffer)); !all || n == 0 {
				return nil
			}
		}
		if err := g.disk.Write(store.Block{Segment: g.at.Segment, Offset: from, Size: n}, g.buffer[:n]); err != nil {
			return err
		}
		g.at.Offset += n
		g.buffer = append(g.buffer[:0], g.buffer[n:]...)
	}
}

// appendToMove appends the bytes of a small run, wherever it lies.
func (s *Table) appendToMove(buffer []byte, m *moving) []byte {
	from := len(buffer)
	if m.sums == nil {
		buffer = append(buffer, s.Bytes(m.from)...)
		m.sums = checksums(&m.rows, buffer[from:])
		return buffer
	}
	buffer = append(buffer, make([]byte, m.from.Size)...)
	m.skip = !s.readRun(m, buffer[from:])
	return buffer
}

// copyLarge writes a run by itself.
func (s *Table) copyLarge(m *moving) (err error) {
	if m.sums == nil {
		m.sums, err = s.writeSummed(context.Background(), m.to, &m.rows, s.Bytes(m.from))
		return err
	}
	data := make([]byte, m.from.Size)
	if m.skip = !s.readRun(m, data); m.skip {
		return nil
	}
	return s.opts.Disk.Write(m.to, data)
}

// endMoveLocked binds the cells that still name what was copied.
func (s *Table) endMoveLocked(list []moving, where Where) (moved int64) {
	cells, t := int64(0), tierTo(where)
	for i := range list {
		m := &list[i]
		if m.skip {
			s.freeCopyLocked(m, t)
			continue
		}
		id := s.newExtentLocked(&m.rows, m.to, t)
		s.mu.used[t] += m.to.Size
		if t == onDisk {
			s.setSumsLocked(id, m.sums)
		}
		var n, k int64
		if m.shared {
			s.shareLocked(id, m.samples)
			n, k = s.swapSharedLocked(m, id)
		} else {
			s.liveLocked(id)
			n, k = s.swapLocked(m, id)
		}
		moved, cells = moved+n, cells+k
	}
	n := &s.mu.counters
	switch where {
	case ToDisk:
		n.SpilledBytes, n.SpilledCells = n.SpilledBytes+moved, n.SpilledCells+cells
	case ToMemory:
		n.PromotedBytes, n.PromotedCells = n.PromotedBytes+moved, n.PromotedCells+cells
	default:
		n.CompactedBytes += moved
	}
	return moved
}

func (s *Table) freeCopyLocked(m *moving, t tier) {
	if t == onDisk {
		s.opts.Disk.Free(m.to)
	} else {
		s.freeBlockLocked(m.to)
	}
}

// swapLocked lets the cells of a run name the rows of a new extent. Rows whose cell names something else meanwhile are freed.
func (s *Table) swapLocked(m *moving, id uint32) (moved, cells int64) {
	for from := 0; from < len(m.samples); {
		same, to := s.stillThereLocked(m, from), from+1
		for to < len(m.samples) && s.stillThereLocked(m, to) == same {
			to++
		}
		run := rowRun{id, uint32(from), uint32(to - from)}
		if same {
			moved += s.blockLocked(run).Size
			cells += int64(to - from)
			s.mu.extents.At(id).touched = s.mu.extents.At(m.run.extent).touched
			s.bindLocked(m.column, id, from, m.samples[from:to])
		} else {
			s.freeRowsLocked(run)
		}
		from = to
	}
	return moved, cells
}

// swapSharedLocked is swapLocked for a row that several cells name.
func (s *Table) swapSharedLocked(m *moving, id uint32) (moved, cells int64) {
	touched := s.mu.clock
	for i := range m.samples {
		if !s.stillThereLocked(m, i) {
			s.freeRowsLocked(rowRun{id, 0, 1})
			continue
		}
		if cells++; cells == 1 {
			touched = s.mu.extents.At(m.run.extent).touched
		}
		s.bindLocked(m.column, id, 0, m.samples[i:i+1])
	}
	if cells > 0 {
		s.mu.extents.At(id).touched = touched
		moved = m.to.Size
	}
	return moved, cells
}

// stillThereLocked reports whether the cell of row i names what was copied.
func (s *Table) stillThereLocked(m *moving, i int) bool {
	p := s.mu.partitions[m.column.partition]
	if p == nil || p.columns[m.column.field] != m.column {
		return false
	}
	row := m.run.from + uint32(i)
	if m.shared {
		row = m.run.from
	}
	pg := m.column.pages[m.samples[i].Index>>pageShift]
	return pg != nil && pg.cells[m.samples[i].Index&pageMask] == cell{m.run.extent, row, m.samples[i].Generation} &&
		s.mu.extents.At(m.run.extent).serial == m.serial
}
