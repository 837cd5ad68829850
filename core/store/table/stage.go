package table

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// staged is a reservation: one extent per column that the writer fills, 0 for a column without rows, and the places on disk
// of the rows that go there.
type staged struct {
	s         *Table
	partition string
	columns   []schema.Column
	extents   []uint32
	blocks    []store.Block
	parts     []diskPart
	rows      int
	memory    int64 // bytes in memory and in scratch space that are staging only
	outside   int64
	disk      int64 // bytes reserved on disk and not yet those of an extent
	prepared  bool
	hold      uint64   // its number after Hold; guarded by Table.mu
	shed      bool     // the rows on disk have no memory any more; a column of which all are has extent 0
	done      bool     // guarded by Table.mu
	journaled bool     // its commit is a change in a journal
	ending    []rowRun // staging that ends when the disk knows of that
}

// diskPart is a number of consecutive rows of a column that go to disk.
type diskPart struct {
	column   int
	from, to int
	bytes    store.Block // in the block the writer fills, relative to it
	extent   uint32      // 0 until Prepare
}

var (
	_ store.Preparer = (*staged)(nil)
	_ store.Holder   = (*staged)(nil)
)

// Stage implements store.Store.
func (s *Table) Stage(partition string, columns []schema.Column) (store.Staged, error) {
	return s.stage(partition, columns, false)
}

// StageOnDisk implements store.DiskStager. Without a disk it is Stage.
func (s *Table) StageOnDisk(partition string, columns []schema.Column) (store.Staged, error) {
	return s.stage(partition, columns, true)
}

func (s *Table) stage(partition string, columns []schema.Column, toDisk bool) (store.Staged, error) {
	sizes, err := measure(columns)
	if err != nil {
		return nil, err
	}
	tx := &staged{s: s, partition: partition, columns: columns}
	tx.extents, tx.blocks = make([]uint32, len(columns)), make([]store.Block, len(columns))
	if len(columns) > 0 {
		tx.rows = columns[0].Samples()
	}
	if s.opts.Disk != nil {
		forced := s.tooLarge(sizes)
		for i := range columns {
			tx.split(i, sizes[i], toDisk || forced != nil && forced[i])
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, tqerr.New(tqerr.InvalidState, "unit: the store is closed")
	}
	if err := s.reserveLocked(tx, sizes); err != nil {
		return nil, err
	}
	for i := range columns {
		if columns[i].Rows > 0 {
			tx.extents[i] = s.newExtentLocked(&columns[i], tx.blocks[i], tierOf(tx.blocks[i]))
		}
	}
	s.mu.staged++
	return tx, nil
}

func tierOf(b store.Block) tier {
	if b.Segment >= ScratchSegments {
		return inScratch
	}
	return inMemory
}

// tooLarge says which columns go to disk as a whole because memory could not hold all of them, were it empty: the largest.
func (s *Table) tooLarge(sizes []int64) []bool {
	total := int64(0)
	for _, size := range sizes {
		total += size
	}
	if limit := s.opts.MemoryLimit; limit == 0 || (total <= limit && total >= 0) {
		return nil
	}
	out := make([]bool, len(sizes))
	for range sizes {
		k := -1
		for i, size := range sizes {
			if !out[i] && (k < 0 || size > sizes[k]) {
				k = i
			}
		}
		if out[k], total = true, total-sizes[k]; total <= s.opts.MemoryLimit && total >= 0 {
			break
		}
	}
	return out
}

// split finds the rows of a column that go to disk.
func (tx *staged) split(i int, size int64, all bool) {
	c := &tx.columns[i]
	goes := func(bytes int64) bool {
		return bytes >= tx.s.opts.Threshold || bytes == 0 && tx.s.opts.KeepEmpty
	}
	add := func(from, to int, offset, n int64) {
		tx.parts = append(tx.parts, diskPart{column: i, from: from, to: to, bytes: store.Block{Offset: offset, Size: n}})
		tx.disk += n
	}
	switch {
	case c.Rows == 0:
		return
	case all || (c.Form == schema.Uniform && goes(c.RowBytes())):
		add(0, c.Rows, 0, size)
		return
	case c.Form == schema.Uniform:
		return
	}
	offsets := c.Offsets()
	for from := 0; from < c.Rows; from++ {
		to := from
		for to < c.Rows && goes(offsets[to+1]-offsets[to]) {
			to++
		}
		if to > from {
			add(from, to, offsets[from], offsets[to]-offsets[from])
			from = to
		}
	}
}

// reserveLocked allocates all blocks or none.
func (s *Table) reserveLocked(tx *staged, sizes []int64) error {
	need := int64(0)
	for _, size := range sizes {
		need += size
		if need < 0 {
			return tqerr.New(tqerr.InvalidArgument, "the columns have more bytes than 64 bit can count")
		}
	}
	diskBound := make([]int64, len(sizes))
	for i := range tx.parts {
		diskBound[tx.parts[i].column] += tx.parts[i].bytes.Size
	}
	outside := s.scratchColumnsLocked(sizes, diskBound, need)
	for i, size := range sizes {
		if outside != nil && outside[i] {
			need -= size
			tx.outside += size
		}
	}
	if err := s.diskRoomLocked(tx.disk + tx.outside); err != nil {
		return err
	}
	if limit := s.opts.MemoryLimit; limit > 0 && need > limit-s.memoryInUseLocked() {
		return s.noMemoryLocked(need)
	}
	for i, size := range sizes {
		var err error
		if outside != nil && outside[i] {
			tx.blocks[i], err = s.opts.Scratch.Alloc(size)
		} else {
			tx.blocks[i], err = s.allocLocked(size)
			tx.memory += diskBound[i]
		}
		if err != nil {
			for _, done := range tx.blocks[:i] {
				s.freeBlockLocked(done)
			}
			return err
		}
	}
	s.mu.used[inMemory] += need - tx.memory
	s.mu.used[onDisk] += tx.disk
	s.mu.staging += tx.memory
	s.mu.outside += tx.outside
	return nil
}

func (s *Table) noMemoryLocked(need int64) error {
	return tqerr.New(tqerr.ResourceExhausted, "unit memory: %d bytes needed, %d of %d used; clear samples or raise memory_limit_bytes",
		need, s.memoryInUseLocked(), s.opts.MemoryLimit)
}

// scratchColumnsLocked says which columns are staged in scratch space: those that go to disk as a whole, when memory has no
// room for all columns.
func (s *Table) scratchColumnsLocked(sizes, diskBound []int64, need int64) []bool {
	limit := s.opts.MemoryLimit
	if s.opts.Scratch == nil || limit == 0 || need <= limit-s.memoryInUseLocked() {
		return nil
	}
	out := make([]bool, len(sizes))
	for i := range sizes {
		out[i] = sizes[i] > 0 && sizes[i] == diskBound[i]
	}
	return out
}

func (s *Table) allocLocked(size int64) (store.Block, error) {
	b, err := s.arena.Alloc(size)
	return store.Block(b), err
}

func (s *Table) freeBlockLocked(b store.Block) {
	switch {
	case b.Size == 0:
	case b.Segment >= ScratchSegments:
		s.opts.Scratch.Free(b)
	default:
		s.arena.Free(b.Segment, b.Offset, b.Size)
	}
}

// Blocks implements store.Staged.
func (tx *staged) Blocks() []store.Block { return tx.blocks }

// Writes implements store.Preparer.
func (tx *staged) Writes() bool { return len(tx.parts) > 0 && !tx.prepared }

// Prepare implements store.Preparer: it writes what goes to disk.
func (tx *staged) Prepare(ctx context.Context) error {
	s := tx.s
	if tx.prepared || len(tx.parts) == 0 {
		return nil
	}
	blocks := make([]store.Block, 0, len(tx.parts))
	sums := make([][]uint32, len(tx.parts))
	var err error
	for i := range tx.parts {
		p := &tx.parts[i]
		var b store.Block
		if b, err = s.opts.Disk.Alloc(p.bytes.Size); err != nil {
			break
		}
		blocks = append(blocks, b)
		data := s.Bytes(tx.blocks[p.column])[p.bytes.Offset : p.bytes.Offset+p.bytes.Size]
		column := rowsOfColumn(&tx.columns[p.column], p.from, p.to)
		if sums[i], err = s.writeSummed(ctx, b, &column, data); err != nil {
			break
		}
	}
	if err == nil {
		err = s.opts.Disk.Secure(blocks, len(tx.columns)*tx.rows)
	}
	s.mu.Lock()
	if err != nil {
		for _, b := range blocks {
			s.opts.Disk.Free(b)
		}
		s.unlockAndTell(0)
		return err
	}
	defer s.mu.Unlock()
	for i := range tx.parts {
		p := &tx.parts[i]
		column := rowsOfColumn(&tx.columns[p.column], p.from, p.to)
		p.extent = s.newExtentLocked(&column, blocks[i], onDisk)
		s.setSumsLocked(p.extent, sums[i])
	}
	tx.prepared, tx.disk = true, 0
	return nil
}

// PrepareAndShed implements store.Shedder.
func (tx *staged) PrepareAndShed(ctx context.Context) error {
	if err := tx.Prepare(ctx); err != nil {
		return err
	}
	s := tx.s
	s.mu.Lock()
	freed := int64(0)
	if !tx.done && !tx.shed {
		freed = tx.shedLocked()
	}
	s.unlockAndTell(freed)
	return nil
}

// shedLocked gives back the memory of the rows that are on disk.
func (tx *staged) shedLocked() (freed int64) {
	s := tx.s
	freed = tx.memory
	s.mu.staging -= tx.memory
	s.mu.outside -= tx.outside
	s.mu.used[inMemory] += tx.memory
	s.mu.used[inScratch] += tx.outside
	tx.memory, tx.outside = 0, 0
	for i := range tx.parts {
		p := &tx.parts[i]
		id := tx.extents[p.column]
		if s.mu.extents.At(id).live == uint32(p.to-p.from) {
			tx.extents[p.column] = 0 // these are the last
		}
		s.freeRowsLocked(rowRun{id, uint32(p.from), uint32(p.to - p.from)})
	}
	tx.shed = true
	return freed
}

// rowsOfColumn is the rows [from, to) of a column.
func rowsOfColumn(c *schema.Column, from, to int) schema.Column {
	if from == 0 && to == c.Rows {
		return *c
	}
	return c.Slice(from, to)
}
