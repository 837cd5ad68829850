package controller

import (
	"context"
	"errors"
	"math"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// writesDisk reports whether staged rows have to go to disk before the write can be committed.
func (t *txn) writesDisk() bool {
	for _, sh := range t.shares {
		if p, ok := sh.staged.(store.Preparer); ok && p.Writes() {
			return true
		}
	}
	return false
}

// prepare writes what goes to disk on all units, all or nothing: when it fails, the write is aborted.
func (t *txn) prepare() error {
	for _, sh := range t.shares {
		if sh.staged == nil {
			continue
		}
		if err := store.Prepare(sh.staged); err != nil {
			t.abort()
			return err
		}
	}
	return nil
}

// prepareResults does the same for the results of a transformation; the caller aborts.
func prepareResults(results []*unit.Transformed) error {
	for _, r := range results {
		if err := store.Prepare(r.Staged); err != nil {
			return err
		}
	}
	return nil
}

// onDisk reports whether a write can have to do with disks.
func (t *txn) onDisk() bool {
	for _, sh := range t.shares {
		if sh.unit.Stats().DiskLimit > 0 {
			return true
		}
	}
	return false
}

// loads reports whether something of a read lies on disk.
func (r *read) loads() bool {
	for _, l := range r.leases {
		if o, ok := l.(store.Loader); ok && o.Loads() {
			return true
		}
	}
	return false
}

// load reads from disk what lies there.
func (r *read) load(ctx context.Context, partition string) error {
	for _, l := range r.leases {
		o, ok := l.(store.Loader)
		if !ok {
			continue
		}
		if ctx.Err() != nil {
			return ctxError(ctx, "reading values from disk")
		}
		if err := o.Load(); err != nil {
			return r.s.named(partition, err)
		}
	}
	return nil
}

// named gives an error about a damaged value the key of its sample.
func (s *Server) named(partition string, err error) error {
	var d *store.DamagedError
	if !errors.As(err, &d) {
		return err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	sample := ""
	if keys, known, err := s.mu.cat.KeysOf(partition, []int64{d.Sample.Index}); err == nil && known[0] {
		sample = "key \"" + keys[0] + "\""
	}
	if sample == "" {
		return tqerr.New(tqerr.Corruption, "%v", err)
	}
	return tqerr.New(tqerr.Corruption, "partition %q: %s: field %q: the value on disk is damaged: %v", partition, sample, d.Field, d.Cause)
}

// advise answers units that have to move cells. It is called without any lock of theirs.
func (s *Server) advise(partition string, samples []schema.Sample, uses []store.Use) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	s.mu.cat.Uses(partition, samples, func(i int, u catalog.Use) {
		switch u {
		case catalog.Consumed:
			uses[i] = store.Consumed
		case catalog.Unready:
			uses[i] = store.Unready
		default:
			uses[i] = store.Wanted
		}
	})
}

// unlimited turns the figure of a disk without a limit into that of users.
func unlimited(limit int64) int64 {
	if limit == math.MaxInt64 {
		return 0
	}
	return limit
}

// countDisk fills in what a unit with a disk counts.
func countDisk(u Unit, info *wire.UnitInfo) {
	n := u.Counters()
	info.DiskCells, info.DiskPhysical = n.DiskCells, n.DiskPhysical
	info.SpilledBytes, info.PromotedBytes = n.SpilledBytes, n.PromotedBytes
	info.CompactedBytes, info.FallbackCells = n.CompactedBytes, n.FallbackCells
}
