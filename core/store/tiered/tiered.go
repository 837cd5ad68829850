// Package tiered is the store of a unit with memory and a local disk: a table whose large values go to disk when they are
// put, and whose memory is kept free by moving cells.
//
// Under pressure cells move to disk (spill): when more than HighWatermark of the memory limit is in use, until no more than
// LowWatermark is; or, when a write was refused for want of memory, until it fits. The order is: what all tasks have
// consumed, then what no task can use yet, then what was written or read longest ago. Cells that are leased are passed over,
// since their memory would not be free. A cell on disk moves back (promotion) when it is read for the second time and fits
// below LowWatermark; values of Threshold bytes and more stay on disk, and with a durable disk all do, because what is on disk
// must survive the process.
//
// A cell is readable at every instant: it moves by a copy, after which the cell names the copy. No value is dropped: one that
// can be moved nowhere stays, and writes are refused instead.
//
// One goroutine moves. It takes no lock while it asks the Advisor or copies.
package tiered

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"transferqueue/core/arena"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// Options of a store. Watermarks are shares of MemoryLimit, of which Low is the lower.
type Options struct {
	Memory        *arena.Arena
	MemoryLimit   int64 // bytes, 0: none, and no spilling
	DiskLimit     int64 // bytes of values, 0: none
	Threshold     int64 // values of at least that many bytes go to disk
	HighWatermark float64
	LowWatermark  float64
	Disk          disktier.Options
}

// Store implements store.Store.
type Store struct {
	*table.Table
	opts    Options
	tier    *disktier.Tier
	scratch *scratch
	advisor atomic.Pointer[store.Advisor]

	wake     chan struct{} // has room for one: the mover has something to look at
	stop     chan struct{}
	stopped  chan struct{}
	stopOnce sync.Once
	want     atomic.Int64 // the most bytes that a refused write has asked for since the mover looked

	mu struct {
		sync.Mutex
		hot    []table.Cells // to be promoted
		failed error         // why spilling got stuck; nil: it did not
	}
}

var (
	_ store.Store  = (*Store)(nil)
	_ store.Pinner = (*Store)(nil)
)

// hotMost bounds what waits for promotion. More is read from disk again and asked for again.
const hotMost = 1024

// New opens a store over what is in its folder.
func New(o Options) (*Store, error) {
	tier, err := disktier.Open(o.Disk)
	if err != nil {
		return nil, err
	}
	outside, err := newScratch(o.Disk.Dir)
	if err != nil {
		return nil, errors.Join(err, tier.Close())
	}
	s := &Store{
		opts: o, tier: tier, scratch: outside,
		wake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	to := table.Options{
		Memory: o.Memory, MemoryLimit: o.MemoryLimit, Disk: tier, DiskLimit: o.DiskLimit, Threshold: o.Threshold, Scratch: outside,
		KeepEmpty: o.Disk.Durability != disktier.None,
	}
	if o.MemoryLimit > 0 && o.Disk.Durability == disktier.None {
		to.OnHot = s.heated
	}
	s.Table = table.New(to)
	tier.Attach(s.Table)
	s.OnFree(s.kick)
	guard.Go("tiers", s.run)
	return s, nil
}

// Advise lets somebody say what samples are needed for, when cells have to move. It is called without any lock of the store.
func (s *Store) Advise(a store.Advisor) { s.advisor.Store(&a) }

// Counters counts what has happened, and what is on disk.
func (s *Store) Counters() store.Counters {
	n := s.Table.Counters()
	n.DiskPhysical = s.tier.Usage().Physical
	return n
}

// Tier is the files of the store.
func (s *Store) Tier() *disktier.Tier { return s.tier }

// Descriptors lists the descriptors of scratch space.
func (s *Store) Descriptors() []int { return s.scratch.arena.Descriptors() }

// Segment gives a duplicate of the descriptor of a scratch segment, which the caller closes, and its size.
func (s *Store) Segment(segment uint32) (fd int, size int64, err error) {
	return s.scratch.arena.Segment(segment - table.ScratchSegments)
}

func (s *Store) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Stage implements store.Store. A write that is refused for want of memory makes cells move; OnFree tells when to try again.
func (s *Store) Stage(partition string, columns []schema.Column) (store.Staged, error) {
	tx, err := s.Table.Stage(partition, columns)
	if s.opts.MemoryLimit > 0 && tqerr.CodeOf(err) == tqerr.ResourceExhausted {
		need := int64(0)
		for i := range columns {
			need += columns[i].Bytes()
		}
		s.demand(min(need, s.opts.MemoryLimit))
		return nil, s.explain(err)
	}
	if err != nil {
		return nil, err
	}
	return &staged{tx, s}, nil
}

// staged is a write after whose commit there may be pressure.
type staged struct {
	store.Staged
	s *Store
}

// StageOnDisk implements store.DiskStager. Nothing has to move for it.
func (s *Store) StageOnDisk(partition string, columns []schema.Column) (store.Staged, error) {
	tx, err := s.Table.StageOnDisk(partition, columns)
	if err != nil {
		return nil, err
	}
	return &staged{tx, s}, nil
}

// PrepareAndShed implements store.Shedder.
func (tx *staged) PrepareAndShed(ctx context.Context) error {
	return store.PrepareAndShed(ctx, tx.Staged)
}

// Prepare implements store.Preparer.
func (tx *staged) Prepare(ctx context.Context) error { return store.Prepare(ctx, tx.Staged) }

// Writes implements store.Preparer.
func (tx *staged) Writes() bool {
	p, ok := tx.Staged.(store.Preparer)
	return ok && p.Writes()
}

// Commit implements store.Staged.
func (tx *staged) Commit(samples []schema.Sample) { tx.CommitChange(samples, 0) }

// Txn implements store.Numbered.
func (tx *staged) Txn() uint64 { return store.TxnOf(tx.Staged) }

// Hold implements store.Holder.
func (tx *staged) Hold() error {
	if err := store.Hold(tx.Staged); err != nil || !tx.s.Durable() {
		return err
	}
	return tx.s.tier.Sync()
}

// OnDisk implements store.Numbered.
func (tx *staged) OnDisk() bool { return store.OnDisk(tx.Staged) }

// CommitChange implements store.Numbered.
func (tx *staged) CommitChange(samples []schema.Sample, change uint64) {
	store.CommitChange(tx.Staged, samples, change)
	s := tx.s
	if st := s.Stats(); s.opts.MemoryLimit > 0 && st.MemoryUsed+st.Staging > s.share(s.opts.HighWatermark) {
		s.kick()
	}
}

// Confirms implements store.Confirmer.
func (tx *staged) Confirms() bool { return tx.s.Durable() }

// Confirm implements store.Confirmer.
func (tx *staged) Confirm() error { return tx.s.Secure() }

// Durable reports whether what is on disk outlives the process.
func (s *Store) Durable() bool { return s.opts.Disk.Durability != disktier.None }

// Secure returns when all that has happened is as durable as the disk promises. What is in memory is not.
func (s *Store) Secure() error {
	if err := s.tier.Sync(); err != nil {
		return tqerr.Wrap(tqerr.CodeOf(err), err, "done, but it would not survive a crash now")
	}
	return nil
}

// explain adds why no memory becomes free to a refusal.
func (s *Store) explain(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.failed == nil {
		return err
	}
	return tqerr.New(tqerr.ResourceExhausted, "%v; moving cells to disk is stuck: %v", err, s.mu.failed)
}

func (s *Store) share(of float64) int64 { return int64(of * float64(s.opts.MemoryLimit)) }

func (s *Store) demand(bytes int64) {
	for {
		now := s.want.Load()
		if now >= bytes || s.want.CompareAndSwap(now, bytes) {
			break
		}
	}
	s.kick()
}

// heated notes cells that were read twice.
func (s *Store) heated(cells []table.Cells) {
	if st := s.Stats(); st.MemoryUsed+st.Staging > s.share(s.opts.LowWatermark) {
		return
	}
	s.mu.Lock()
	if room := hotMost - len(s.mu.hot); room > 0 {
		s.mu.hot = append(s.mu.hot, cells[:min(room, len(cells))]...)
	}
	s.mu.Unlock()
	s.kick()
}

// Close implements store.Store. What is on disk stays there unless it is scratch.
func (s *Store) Close() error {
	if s.Closed() {
		return nil
	}
	if st := s.Stats(); st.Staged > 0 || st.Leases > 0 {
		return s.Table.Close()
	}
	s.stopOnce.Do(func() { close(s.stop) })
	<-s.stopped
	if err := s.Table.Close(); err != nil {
		return err
	}
	return errors.Join(s.tier.Close(), s.scratch.arena.Close())
}
