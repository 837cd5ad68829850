// Package store holds the cells of one unit: what is in memory, and later what is on disk, behind one interface.
//
// A cell is (partition, field, sample). Its value is never modified in place: a write stages new bytes and a commit
// swaps them in; a reader takes a lease, and the memory of what it leased is not reused before the lease ends.
package store

import (
	"context"
	"fmt"
	"math"

	"transferqueue/core/schema"
)

// Block is a piece of unit memory: a byte range of one shared-memory segment of the unit.
type Block struct {
	Segment uint32
	Offset  int64
	Size    int64
}

// Run is a number of consecutive rows of a column that lie tightly in one block.
type Run struct {
	Rows  int
	Block Block
	// OnDisk says that the bytes lie on disk and have to be loaded, or read with a Streamer.
	OnDisk bool
}

// Leased is one column of a read: the rows in the order asked for, and where their bytes lie.
type Leased struct {
	Column schema.Column
	Runs   []Run
}

// Stats counts what a store holds. Used bytes are payload bytes of cells and reservations, including cells that were
// cleared but are still leased; they are exactly zero when nothing is stored, staged or leased. MemoryUsed and Staging
// together never exceed MemoryLimit.
type Stats struct {
	MemoryUsed  int64
	MemoryLimit int64 // 0: no limit
	Staging     int64 // memory in which bytes on their way to and from disk lie
	DiskUsed    int64
	DiskLimit   int64 // 0: no disk tier, math.MaxInt64: no limit
	Scratch     int64 // mapped disk space that stands in for staging
	Cells       int64
	Staged      int64 // transactions neither committed nor aborted
	Leases      int64
}

// Room is how many bytes more the store could take, if need be by moving others to disk.
func (s Stats) Room() int64 {
	if s.MemoryLimit == 0 || s.DiskLimit == math.MaxInt64 {
		return math.MaxInt64
	}
	return s.MemoryLimit - s.MemoryUsed - s.Staging + max(0, s.DiskLimit-s.DiskUsed)
}

// Store is one unit's table of cells. All methods may be called from any goroutine.
type Store interface {
	// Stage reserves room for all columns, all or nothing, and makes nothing visible. All columns have the same number
	// of rows. ResourceExhausted names used, limit and the bytes asked for, and changes nothing.
	Stage(partition string, columns []schema.Column) (Staged, error)

	// Read leases the cells of the given fields and samples, in that order; a sample may occur twice. A cell that is not
	// there, or belongs to another generation, fails the whole read with a *MissingError.
	Read(partition string, fields []string, samples []schema.Sample) (Lease, error)

	// Has reports whether every cell of the given fields and samples exists.
	Has(partition string, fields []string, samples []schema.Sample) bool

	// Delete removes the cells of the given fields (nil: all fields) of the samples. Cells that are not there, or belong to
	// another generation, are ignored. Memory is free when it returns, but for what is leased. It returns the bytes freed.
	Delete(partition string, fields []string, samples []schema.Sample) int64

	// Bytes is the memory of a block of this store that is staged or leased. The caller must hold it in one of these ways.
	Bytes(Block) []byte

	// OnFree registers a function that is called, without any lock held, after room was freed. It must not block.
	OnFree(func())

	// Inventory lists all cells.
	Inventory() []schema.Stock

	Stats() Stats
	// Close releases all memory. Nothing may be staged or leased; what is gives InvalidState.
	Close() error
}

// Staged is a write that is not visible yet. Exactly one of Commit and Abort ends it; a second end is ignored.
type Staged interface {
	// Blocks has one block per staged column; the writer fills them before Commit.
	Blocks() []Block
	// Commit binds row i of every column to samples[i] and makes all of them visible at once, freeing what they replace.
	// A sample of a newer generation than a cell replaces it. It cannot fail. Samples are distinct.
	Commit(samples []schema.Sample)
	// Abort gives the reservation back.
	Abort()
}

// Lease keeps what was read until Release, which may be called twice.
type Lease interface {
	Columns() []Leased
	Release()
}

// Preparer is a Staged that has to write to disk. Prepare does that when its blocks are filled, before Commit, and may take
// long. When it fails, or ctx ends, nothing is visible and the write has to be aborted. Commit does it too, but has no way to
// fail then.
type Preparer interface {
	Prepare(ctx context.Context) error
	// Writes reports whether Prepare has something to do.
	Writes() bool
}

// Numbered is a Staged whose commit is a change that its controller has written down before, and so may find half done when it
// has died.
type Numbered interface {
	// CommitChange is Commit with the number of the change in the controller's journal; 0: it has none.
	CommitChange(samples []schema.Sample, change uint64)
	// Txn is the number by which the unit knows it, also when the controller has died; 0: it ends with the controller's process,
	// unless it is held.
	Txn() uint64
	// OnDisk reports whether some of it goes to disk, where the number of the change lies then too.
	OnDisk() bool
}

// Holder is a Staged of a store that keeps values beyond its process. Hold, after Prepare, makes what was prepared one that a
// later process may commit, by the number that Txn returns from then on; Commit and Abort end that.
type Holder interface {
	Hold() error
}

// Hold calls Hold where there is one.
func Hold(s Staged) error {
	if h, ok := s.(Holder); ok {
		return h.Hold()
	}
	return nil
}

// OnDisk reports whether some of a staged write goes to disk.
func OnDisk(s Staged) bool {
	n, ok := s.(Numbered)
	return ok && n.OnDisk()
}

// CommitChange calls CommitChange where there is one, else Commit.
func CommitChange(s Staged, samples []schema.Sample, change uint64) {
	if n, ok := s.(Numbered); ok {
		n.CommitChange(samples, change)
		return
	}
	s.Commit(samples)
}

// TxnOf is the number by which the unit of a staged write knows it, 0: it has none.
func TxnOf(s Staged) uint64 {
	if n, ok := s.(Numbered); ok {
		return n.Txn()
	}
	return 0
}

// Confirmer is a Staged of a store that keeps values beyond its process. Confirm, after Commit, returns when what was committed
// is as durable as the store promises, and may take long. An error says that it is not; readers see it all the same.
type Confirmer interface {
	Confirm() error
	// Confirms reports whether Confirm has something to do.
	Confirms() bool
}

// Shedder is a Preparer that can do without memory for what it has written. PrepareAndShed is Prepare, after which the bytes of
// such rows are not in Blocks any more.
type Shedder interface {
	PrepareAndShed(ctx context.Context) error
}

// DiskStager is a Store that can send values to disk whatever their size, when memory has no room for a batch and nothing that
// could move: StageOnDisk is Stage for such a batch.
type DiskStager interface {
	StageOnDisk(partition string, columns []schema.Column) (Staged, error)
}

// Pinner is a Store whose cells may lie on disk. Pin is Read without reading the disk: it is quick, but the lease's blocks
// have no bytes before its Load.
type Pinner interface {
	Pin(partition string, fields []string, samples []schema.Sample) (Lease, error)
}

// Loader is a Lease that Pin has returned. Load may take long; Columns tells the truth after it. Loading twice is fine.
// *DamagedError names the cell whose bytes are not what was written.
type Loader interface {
	Load() error
	// Loads reports whether Load has something to do.
	Loads() bool
}

// Streamer is a Lease of a Pinner whose bytes can be read without loading them.
type Streamer interface {
	// Piece fills to with the bytes of a column from an offset on, counted over its rows in the order of the lease. sum is
	// what the Piece before has returned, 0 at the beginning of a row. Bytes on disk are compared with their checksums where
	// a row ends; *DamagedError names the cell that differs.
	Piece(column int, offset int64, sum uint32, to []byte) (uint32, error)
}

// Prepare calls Prepare where there is one.
func Prepare(ctx context.Context, s Staged) error {
	if p, ok := s.(Preparer); ok {
		return p.Prepare(ctx)
	}
	return nil
}

// PrepareAndShed calls PrepareAndShed where there is one, else Prepare.
func PrepareAndShed(ctx context.Context, s Staged) error {
	if p, ok := s.(Shedder); ok {
		return p.PrepareAndShed(ctx)
	}
	return Prepare(ctx, s)
}

// Writes reports whether a staged write has something to prepare.
func Writes(s Staged) bool {
	p, ok := s.(Preparer)
	return ok && p.Writes()
}

// Confirms reports whether a staged write has to be confirmed after its commit.
func Confirms(s Staged) bool {
	c, ok := s.(Confirmer)
	return ok && c.Confirms()
}

// Confirm calls Confirm where there is something to do.
func Confirm(s Staged) error {
	if Confirms(s) {
		return s.(Confirmer).Confirm()
	}
	return nil
}

// Load calls Load where there is one.
func Load(l Lease) error {
	if o, ok := l.(Loader); ok {
		return o.Load()
	}
	return nil
}

// Loads reports whether a lease has something to load.
func Loads(l Lease) bool {
	o, ok := l.(Loader)
	return ok && o.Loads()
}

// Counters counts what lies in the tiers of a store and what has happened there, in cells and bytes. Logical bytes count a value
// that several cells share once for each.
type Counters struct {
	MemoryCells, MemoryLogical int64
	MemoryPhysical             int64 // bytes of the pages that hold cells or are kept for the next
	DiskCells, DiskLogical     int64
	DiskPhysical               int64 // bytes that the files take on disk, less headers and index

	WrittenCells, WrittenBytes   int64 // went to disk when they were put
	SpilledCells, SpilledBytes   int64 // moved to disk to make room
	PromotedCells, PromotedBytes int64 // moved back to memory
	CompactedBytes               int64 // copied on disk to give space back
	FallbackCells                int64 // should lie on disk but lie in memory, because they could not be written
}

// Use says what a sample is needed for. The order is that in which samples may go to a slower tier.
type Use uint8

// The uses.
const (
	Consumed Use = iota // every task has consumed it
	Unready             // it has not all fields yet
	Wanted
)

// Advisor fills in what samples of a partition are needed for, as far as it knows: uses are Wanted before.
type Advisor func(partition string, samples []schema.Sample, uses []Use)

// DamagedError says which cell's bytes on disk cannot be read or are not what was written.
type DamagedError struct {
	Partition string
	Field     string
	Sample    schema.Sample
	Cause     error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("partition %q: field %q: sample %d: the value on disk is damaged: %v", e.Partition, e.Field, e.Sample.Index, e.Cause)
}

// Unwrap returns the cause.
func (e *DamagedError) Unwrap() error { return e.Cause }

// MissingError says which cell a read did not find.
type MissingError struct {
	Field  string
	Sample schema.Sample
	// Stale is true when the index holds a sample of another generation.
	Stale bool
}

func (e *MissingError) Error() string { return "field " + e.Field + " is not stored for this sample" }
