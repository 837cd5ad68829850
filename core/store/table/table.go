// Package table is the cells of one unit, whichever tier their bytes lie in: memory (an arena) or disk (segment files).
//
// What one Stage writes for one column is an extent: rows that lie tightly in one block, and a layout that says how their
// shapes are written down. A cell names an extent and a row of it. Each row is freed alone, so an extent ends when its last
// row does. Rows of an extent are in one of these states:
//
//	staged --Commit--> live --Delete, overwrite, Move--> free      when no lease covers the row
//	staged --Abort---> free    \-----------------------> zombie --last covering lease ends--> free
//
// Zombie bytes still count as used: the limit bounds what the unit holds, whoever holds it.
//
// Rows of Options.Threshold bytes and more go to disk, and so do those without bytes when Options.KeepEmpty says so. Their writer
// fills memory all the same, for which the table has an extent of its own; Prepare copies the rows to a disk extent, Commit binds
// the cells to that and frees the memory. A row that could not be written stays in memory, so Commit cannot fail. A lease of disk
// rows has memory too, filled by Load.
// Both kinds of memory are called staging and count against the memory limit; when that has no room, the column lies in
// scratch space, which is on disk but mapped.
//
// Move copies live rows to the other tier, or to another place on disk, while they stay readable: it copies, and points those
// cells to the copy that still name what was copied. It pins nothing, so that a cell that is cleared meanwhile is free at once.
//
// Everything is done run by run: a run is a number of consecutive rows of one extent, and a batch is usually one run per
// column. Records per row and per extent have no pointers. Table.mu guards all of it; locks of the arena and of the disk's
// index are taken under it, file calls are made without it.
package table

import (
	"math"
	"sync"

	"transferqueue/core/arena"
	"transferqueue/core/internal/slab"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// keepPins is how many pin records stay allocated between leases: the runs of a shuffled batch.
const keepPins = 16 << 10

// Disk holds the bytes of the disk tier. A segment of its blocks is a file.
type Disk interface {
	// Alloc finds a place for size bytes. Physical space is taken by the writing.
	Alloc(size int64) (store.Block, error)
	// Write fills an allocated block.
	Write(b store.Block, from []byte) error
	// Read reads a block. An error is about its bytes: they are not there, or the disk does not give them.
	Read(b store.Block, to []byte) error
	// Secure makes what was written to the blocks as durable as the disk tier promises, before so many rows in them are bound.
	Secure(blocks []store.Block, rows int) error

	// Free gives back any part of a block. Like Bind, Drop and End it is called under the table's lock, makes no file call
	// and cannot fail.
	Free(b store.Block)
	// Bind notes that the rows of a column, which lie tightly in a block and have these checksums, are the cells of samples.
	Bind(partition string, column *schema.Column, samples []schema.Sample, b store.Block, sums []uint32)
	// Drop notes that cells of the disk tier have ended, or have moved to memory.
	Drop(partition, field string, samples []schema.Sample)
	// Hold notes that the rows of a column are staged as rows of a write, given by index, which may be bound after a crash still;
	// Release notes that they are bound, or will never be.
	Hold(txn uint64, partition string, column *schema.Column, rows []schema.Sample, b store.Block, sums []uint32)
	Release(txn uint64)
	// Mark notes that what is noted until the next End executes a change of the owner; see store.Numbered.
	Mark(change uint64)
	// End makes what was noted since the last End one unit: after a crash all of it counts, or nothing.
	End()
	// Settle does the file calls of what was noted and freed. No lock is held.
	Settle()
	// Keep returns when what was noted survives the end of the process. Settle may leave some of that for later.
	Keep() error
}

// Options of a table.
type Options struct {
	// Memory holds the bytes of the memory tier, and staging. The table frees what it allocated there but does not close it.
	Memory *arena.Arena
	// MemoryLimit bounds the memory tier and staging together; 0 means no limit.
	MemoryLimit int64
	// Disk is the disk tier; nil: there is none.
	Disk Disk
	// DiskLimit bounds the bytes of values on disk, staged ones and zombies included; 0 means no limit.
	DiskLimit int64
	// Threshold sends rows of at least that many bytes to disk.
	Threshold int64
	// KeepEmpty sends rows without bytes to disk as well, where nothing but a note of them lies: a disk that outlives the process
	// is given all that costs no space there.
	KeepEmpty bool
	// Scratch is memory beyond the limit, for staging that has no room. nil: there is none, and such a write or read fails.
	// What writes stage there counts against the disk limit.
	Scratch Scratch
	// OnHot is called, without any lock, with cells on disk that were read for at least the second time. It must not block.
	OnHot func([]Cells)
}

// Scratch is mapped disk space. Its blocks have segment numbers from ScratchSegments on.
type Scratch interface {
	Alloc(size int64) (store.Block, error)
	Free(b store.Block)
	Bytes(b store.Block) []byte
}

// ScratchSegments is the number of the first segment of scratch space; those of the arena are below.
const ScratchSegments = 1 << 20

// tier says where an extent lies.
type tier uint8

const (
	inMemory tier = iota
	inScratch
	onDisk
)

// Table implements store.Store. A Commit with another number of samples than rows panics: it must not fail, and must not
// lose rows either.
type Table struct {
	opts  Options
	arena *arena.Arena
	mu    struct {
		sync.Mutex
		partitions map[string]*partition
		extents    slab.Slab[extent]
		layouts    slab.Slab[layout]
		interned   map[string]uint32 // layouts by key
		pins       slab.Slab[pin]
		dead       slab.Slab[deadRows]
		sums       map[uint32][]uint32        // checksums of the rows of disk extents that have several
		holders    map[uint32][]schema.Sample // of shared rows by extent: whose cells named them first; some may not any more
		held       map[uint64][]heldPart      // parts of writes that an earlier process has held, by number
		pages      []*page                    // empty ones, kept for the next commit
		scratch    []rowRun
		drops      dropper
		onFree     []func()
		used       [3]int64 // bytes of extents by tier, but for those of staging
		staging    int64    // bytes of memory extents that end at Commit, and of leases in memory
		outside    int64    // the same in scratch space
		moving     [3]int64 // bytes taken by copies that Move is making; they are in no figure but that of the room left
		serial     uint32   // of the last extent
		clock      uint32   // of touches
		cells      int64
		values     [3]int64 // cells by tier
		logical    [3]int64 // bytes of cells by tier, shared ones counted for each
		staged     int64
		leases     int64
		counters   store.Counters
		closed     bool
	}
}

var _ store.Store = (*Table)(nil)

// New makes an empty table.
func New(o Options) *Table {
	s := &Table{opts: o, arena: o.Memory}
	s.mu.partitions = map[string]*partition{}
	s.mu.interned = map[string]uint32{}
	s.mu.sums = map[uint32][]uint32{}
	s.mu.holders = map[uint32][]schema.Sample{}
	s.mu.held = map[uint64][]heldPart{}
	s.mu.pins.Keep = keepPins
	return s
}

// measure validates columns and returns the bytes of each.
func measure(columns []schema.Column) ([]int64, error) {
	sizes := make([]int64, len(columns))
	for i := range columns {
		c := &columns[i]
		if err := c.Validate(); err != nil {
			return nil, err
		}
		if c.Samples() != columns[0].Samples() {
			return nil, tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want %d as field %q",
				c.Field, c.Samples(), columns[0].Samples(), columns[0].Field)
		}
		if c.Rows > math.MaxUint32 {
			return nil, tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want at most %d", c.Field, c.Rows, uint32(math.MaxUint32))
		}
		for j := range i {
			if columns[j].Field == c.Field {
				return nil, tqerr.New(tqerr.InvalidArgument, "field %q: given twice", c.Field)
			}
		}
		sizes[i] = c.Bytes()
	}
	return sizes, nil
}

// unlockAndTell ends a method that may have freed bytes.
func (s *Table) unlockAndTell(freed int64) {
	if s.opts.Disk != nil {
		s.mu.drops.flush(s.opts.Disk)
		s.opts.Disk.End()
	}
	tell := s.mu.onFree
	s.mu.Unlock()
	if s.opts.Disk != nil {
		s.opts.Disk.Settle()
	}
	if freed == 0 {
		return
	}
	for _, fn := range tell {
		fn()
	}
}

// OnFree implements store.Store.
func (s *Table) OnFree(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.onFree = append(s.mu.onFree[:len(s.mu.onFree):len(s.mu.onFree)], fn)
}

// Tell calls what OnFree has registered.
func (s *Table) Tell() {
	s.mu.Lock()
	tell := s.mu.onFree
	s.mu.Unlock()
	for _, fn := range tell {
		fn()
	}
}

// memoryInUseLocked is what counts against the memory limit.
func (s *Table) memoryInUseLocked() int64 {
	return s.mu.used[inMemory] + s.mu.staging + s.mu.moving[inMemory]
}

// diskRoomLocked fails when the disk limit leaves no room for so many bytes.
func (s *Table) diskRoomLocked(need int64) error {
	used := s.mu.used[onDisk] + s.mu.outside + s.mu.moving[onDisk]
	if limit := s.opts.DiskLimit; limit > 0 && need > limit-used {
		return tqerr.New(tqerr.ResourceExhausted, "unit disk: %d bytes needed, %d of %d used; clear samples or raise disk_limit_bytes",
			need, used, limit)
	}
	return nil
}

// Bytes implements store.Store.
func (s *Table) Bytes(b store.Block) []byte {
	if b.Size == 0 {
		return nil
	}
	if b.Segment >= ScratchSegments {
		return s.opts.Scratch.Bytes(b)
	}
	return s.arena.Bytes(b.Segment, b.Offset, b.Size)
}

// Stats implements store.Store.
func (s *Table) Stats() store.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	diskLimit := s.opts.DiskLimit
	if s.opts.Disk != nil && diskLimit == 0 {
		diskLimit = math.MaxInt64
	}
	return store.Stats{
		MemoryUsed: s.mu.used[inMemory], MemoryLimit: s.opts.MemoryLimit, Staging: s.mu.staging,
		DiskUsed: s.mu.used[onDisk], DiskLimit: diskLimit, Scratch: s.mu.outside + s.mu.used[inScratch],
		Cells: s.mu.cells, Staged: s.mu.staged, Leases: s.mu.leases,
	}
}

// Counters counts what has happened in the table.
func (s *Table) Counters() store.Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.mu.counters
	n.MemoryCells, n.MemoryLogical = s.mu.values[inMemory]+s.mu.values[inScratch], s.mu.logical[inMemory]+s.mu.logical[inScratch]
	n.DiskCells, n.DiskLogical = s.mu.values[onDisk], s.mu.logical[onDisk]
	return n
}

// Close implements store.Store.
func (s *Table) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	if s.mu.staged > 0 || s.mu.leases > 0 {
		return tqerr.New(tqerr.InvalidState, "unit: %d writes are staged and %d reads are leased", s.mu.staged, s.mu.leases)
	}
	for _, p := range s.mu.partitions {
		for _, c := range p.columns {
			c.freeMemoryLocked(s)
		}
	}
	clear(s.mu.partitions)
	s.mu.pages, s.mu.scratch, s.mu.cells, s.mu.closed = nil, nil, 0, true
	return nil
}

// freeMemoryLocked gives back the arena's part of a column. What lies on disk stays there: it may be opened again.
func (c *column) freeMemoryLocked(s *Table) {
	var f freer
	for _, pg := range c.pages {
		for _, cell := range pg.cells {
			if cell.extent != 0 && s.mu.extents.At(cell.extent).tier == inMemory {
				f.add(s, cell)
			}
		}
	}
	f.flush(s)
}

// Closed reports whether Close has succeeded.
func (s *Table) Closed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closed
}
