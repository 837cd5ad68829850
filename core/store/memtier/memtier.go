// Package memtier is the memory tier of a unit: a table of cells whose bytes lie in an arena.
//
// What one Stage writes for one column is an extent: rows that lie tightly in one block, and a layout that says how their
// shapes are written down. A cell names an extent and a row of it. Each row is freed alone, so an extent ends when its last
// row does. Rows of an extent are in one of these states:
//
//	staged --Commit--> live --Delete, overwrite--> free      when no lease covers the row
//	staged --Abort---> free    \-----------------> zombie --last covering lease ends--> free
//
// Zombie bytes still count as used: the limit bounds what the unit holds, whoever holds it.
//
// Everything is done run by run: a run is a number of consecutive rows of one extent, and a batch is usually one run per
// column. Records per row and per extent have no pointers. Store.mu guards all of it; arena locks are taken under it.
package memtier

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

// Options of a memory tier.
type Options struct {
	// Arena holds the bytes. The store frees what it allocated there but does not close it.
	Arena *arena.Arena
	// Limit bounds staged, live and zombie bytes together; 0 means no limit.
	Limit int64
}

// Store implements store.Store. A Commit with another number of samples than rows panics: it must not fail, and must not
// lose rows either.
type Store struct {
	arena *arena.Arena
	limit int64
	mu    struct {
		sync.Mutex
		partitions map[string]*partition
		extents    slab.Slab[extent]
		layouts    slab.Slab[layout]
		interned   map[string]uint32 // layouts by key
		pins       slab.Slab[pin]
		dead       slab.Slab[deadRows]
		pages      []*page // empty ones, kept for the next commit
		scratch    []rowRun
		onFree     []func()
		used       int64
		cells      int64
		staged     int64
		leases     int64
		closed     bool
	}
}

var _ store.Store = (*Store)(nil)

// New makes an empty store.
func New(o Options) *Store {
	s := &Store{arena: o.Arena, limit: o.Limit}
	s.mu.partitions = map[string]*partition{}
	s.mu.interned = map[string]uint32{}
	s.mu.pins.Keep = keepPins
	return s
}

// staged is a reservation: one extent per column, 0 for a column without rows.
type staged struct {
	s         *Store
	partition string
	fields    []string
	extents   []uint32
	blocks    []store.Block
	rows      int
	done      bool // guarded by Store.mu
}

// Stage implements store.Store.
func (s *Store) Stage(partition string, columns []schema.Column) (store.Staged, error) {
	sizes, err := measure(columns)
	if err != nil {
		return nil, err
	}
	tx := &staged{s: s, partition: partition}
	tx.fields, tx.extents, tx.blocks = make([]string, len(columns)), make([]uint32, len(columns)), make([]store.Block, len(columns))
	if len(columns) > 0 {
		tx.rows = columns[0].Rows
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, tqerr.New(tqerr.InvalidState, "unit memory: the store is closed")
	}
	if err := s.reserveLocked(tx, sizes); err != nil {
		return nil, err
	}
	for i := range columns {
		tx.fields[i] = columns[i].Field
		if tx.rows > 0 {
			tx.extents[i] = s.newExtentLocked(&columns[i], tx.blocks[i])
		}
	}
	s.mu.staged++
	return tx, nil
}

// measure validates columns and returns the bytes of each.
func measure(columns []schema.Column) ([]int64, error) {
	sizes := make([]int64, len(columns))
	for i := range columns {
		c := &columns[i]
		if err := c.Validate(); err != nil {
			return nil, err
		}
		if c.Rows != columns[0].Rows {
			return nil, tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want %d as field %q", c.Field, c.Rows, columns[0].Rows, columns[0].Field)
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

// reserveLocked allocates all blocks or none.
func (s *Store) reserveLocked(tx *staged, sizes []int64) error {
	need := int64(0)
	for _, size := range sizes {
		need += size
		if need < 0 {
			return tqerr.New(tqerr.InvalidArgument, "the columns have more bytes than 64 bit can count")
		}
	}
	if s.limit > 0 && need > s.limit-s.mu.used {
		return tqerr.New(tqerr.ResourceExhausted, "unit memory: %d bytes needed, %d of %d used; clear samples or raise memory_limit_bytes",
			need, s.mu.used, s.limit)
	}
	for i, size := range sizes {
		b, err := s.arena.Alloc(size)
		if err != nil {
			for _, done := range tx.blocks[:i] {
				s.arena.Free(done.Segment, done.Offset, done.Size)
			}
			return err
		}
		tx.blocks[i] = store.Block(b)
	}
	s.mu.used += need
	return nil
}

// Blocks implements store.Staged.
func (tx *staged) Blocks() []store.Block { return tx.blocks }

// Abort implements store.Staged.
func (tx *staged) Abort() {
	s := tx.s
	s.mu.Lock()
	freed := int64(0)
	if !tx.done {
		tx.done = true
		s.mu.staged--
		for _, id := range tx.extents {
			if id != 0 {
				freed += s.freeRowsLocked(rowRun{id, 0, s.mu.extents.At(id).rows})
			}
		}
	}
	s.unlockAndTell(freed)
}

// unlockAndTell ends a method that may have freed memory.
func (s *Store) unlockAndTell(freed int64) {
	tell := s.mu.onFree
	s.mu.Unlock()
	if freed == 0 {
		return
	}
	for _, fn := range tell {
		fn()
	}
}

// OnFree implements store.Store.
func (s *Store) OnFree(fn func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.onFree = append(s.mu.onFree[:len(s.mu.onFree):len(s.mu.onFree)], fn)
}

// Bytes implements store.Store.
func (s *Store) Bytes(b store.Block) []byte { return s.arena.Bytes(b.Segment, b.Offset, b.Size) }

// Stats implements store.Store.
func (s *Store) Stats() store.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return store.Stats{
		MemoryUsed: s.mu.used, MemoryLimit: s.limit,
		Cells: s.mu.cells, Staged: s.mu.staged, Leases: s.mu.leases,
	}
}

// Close implements store.Store.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	if s.mu.staged > 0 || s.mu.leases > 0 {
		return tqerr.New(tqerr.InvalidState, "unit memory: %d writes are staged and %d reads are leased", s.mu.staged, s.mu.leases)
	}
	for _, p := range s.mu.partitions {
		for _, c := range p.columns {
			var f freer
			for _, pg := range c.pages {
				for _, cell := range pg.cells {
					if cell.extent != 0 {
						f.add(s, cell)
					}
				}
			}
			f.flush(s)
		}
	}
	clear(s.mu.partitions)
	s.mu.pages, s.mu.scratch, s.mu.cells, s.mu.closed = nil, nil, 0, true
	return nil
}
