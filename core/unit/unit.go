// Package unit is one storage unit: a store of cells over shared memory and, when it has one, a local disk; and the work that
// is done where the cells lie, which is merging updates and parsing puts.
package unit

import (
	"context"
	"errors"

	"transferqueue/core/arena"
	"transferqueue/core/guard"
	"transferqueue/core/jobs"
	"transferqueue/core/store"
	"transferqueue/core/store/memtier"
	"transferqueue/core/store/table"
	"transferqueue/core/store/tiered"
)

// Options configure a unit.
type Options struct {
	ID          uint32
	Name        string
	Host        string
	MemoryLimit int64 // bytes, 0: none
	Disk        *Disk // nil: memory only
	Jobs        *jobs.Queue
}

// Unit is a storage unit. It is safe for use by any goroutine.
type Unit struct {
	store.Store
	opts  Options
	arena *arena.Arena
	tiers *tiered.Store      // the store, when it has a disk
	stop  context.CancelFunc // ends the arena's housekeeping
}

// New makes an empty unit.
func New(o Options) (*Unit, error) {
	a, err := arena.New(arena.Options{})
	if err != nil {
		return nil, err
	}
	u := &Unit{opts: o, arena: a}
	if o.Disk == nil {
		u.Store = memtier.New(memtier.Options{Arena: a, Limit: o.MemoryLimit})
	} else if u.tiers, err = o.Disk.open(a, o.MemoryLimit); err != nil {
		return nil, errors.Join(err, a.Close())
	} else {
		u.Store = u.tiers
	}
	ctx, stop := context.WithCancel(context.Background())
	guard.Go("arena of "+o.Name, func() { a.Run(ctx) })
	u.stop = stop
	return u, nil
}

// ID is the unit's number in its session.
func (u *Unit) ID() uint32 { return u.opts.ID }

// Name is the unit's id as users see it.
func (u *Unit) Name() string { return u.opts.Name }

// Host is the host the unit runs on.
func (u *Unit) Host() string { return u.opts.Host }

// Resident is the memory of the pages that hold cells or are kept for the next, in bytes.
func (u *Unit) Resident() int64 { return u.arena.Stats().Resident }

// Segment gives a duplicate of a segment's descriptor, which the caller closes, and its size.
func (u *Unit) Segment(segment uint32) (int, int64, error) {
	if segment >= table.ScratchSegments && u.tiers != nil {
		return u.tiers.Segment(segment)
	}
	return u.arena.Segment(segment)
}

// Descriptors lists the descriptors of the unit's segments.
func (u *Unit) Descriptors() []int {
	out := u.arena.Descriptors()
	if u.tiers != nil {
		out = append(out, u.tiers.Descriptors()...)
	}
	return out
}

// Close gives all memory back. Nothing may be staged or leased. A durable unit writes what is in memory to disk before; when it
// cannot, the error says so, and the rest is kept.
func (u *Unit) Close() error {
	var kept error
	if st := u.Stats(); u.Durable() && st.Staged == 0 && st.Leases == 0 {
		kept = u.flush()
		if u.Durable() && st.Cells == 0 && u.tiers.Tier().Owner() == "" {
			kept = errors.Join(kept, u.tiers.Tier().Scrap()) // it was started for nobody
		}
	}
	if err := u.Store.Close(); err != nil {
		return err
	}
	u.stop()
	err := errors.Join(kept, u.arena.Close())
	if u.tiers != nil {
		u.opts.Disk.cleanUp()
	}
	return err
}
