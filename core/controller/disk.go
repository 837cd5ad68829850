package controller

import (
	"context"
	"errors"
	"math"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// writesDisk reports whether staged rows have to go to disk before the write can be committed.
func (t *txn) writesDisk() bool {
	return slices.ContainsFunc(t.shares, func(sh share) bool { return sh.staged != nil && store.Writes(sh.staged) })
}

// prepare writes what goes to disk on all units, all or nothing: when it fails, the write is aborted.
func (t *txn) prepare(ctx context.Context) error {
	err := prepareShares(ctx, t.shares)
	if err == nil {
		err = t.s.hold(t.shares)
	}
	if err != nil {
		t.abort()
	}
	return err
}

// hold lets prepared shares of one write survive this process when a crash between their commits would tear it: when there are
// several, some of which end on a disk of this process. The journal then tells which of them are to be committed still. With a
// strict journal a disk may be several writes behind it, and each of these is held.
func (s *Server) hold(shares []share) error {
	if s.journal == nil {
		return nil
	}
	several, mine := 0, []store.Staged(nil)
	for _, sh := range shares {
		switch {
		case sh.staged == nil:
		case sh.unit.waits():
			several++
		case sh.unit.Durable() && store.OnDisk(sh.staged):
			mine = append(mine, sh.staged)
		}
	}
	if several += len(mine); several < 2 && !s.journal.log.Strict() {
		return nil
	}
	for _, staged := range mine {
		if err := store.Hold(staged); err != nil {
			return err
		}
	}
	return nil
}

// prepareShares writes what goes to disk of staged shares. The caller aborts all when it fails.
func prepareShares(ctx context.Context, shares []share) error {
	limit := 1 // units here write to the same disk, one after another
	if slices.ContainsFunc(shares, func(sh share) bool { return sh.unit.waits() }) {
		limit = len(shares)
	}
	err := together(ctx, len(shares), limit, func(ctx context.Context, i int) error {
		if shares[i].staged == nil {
			return nil
		}
		return store.Prepare(ctx, shares[i].staged)
	})
	if err != nil && ctx.Err() != nil {
		return ctxError(ctx, "writing values to disk")
	}
	return err
}

// prepareResults does the same for the results of a transformation.
func (t *txn) prepareResults(ctx context.Context, results []*unit.Transformed) error {
	shares := sharesOf(t.shares, results)
	if err := prepareShares(ctx, shares); err != nil {
		return err
	}
	return t.s.hold(shares)
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

// named gives an error about a damaged value the key of its sample.
func (s *Server) named(partition string, err error) error {
	var d *store.DamagedError
	if !errors.As(err, &d) {
		return err
	}
	d.Partition = partition
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

// countTiers fills in what a unit counts.
func countTiers(u node, info *wire.UnitInfo) {
	n := u.Counters()
	info.DiskCells, info.DiskPhysical = n.DiskCells, n.DiskPhysical
	info.SpilledBytes, info.PromotedBytes = n.SpilledBytes, n.PromotedBytes
	info.CompactedBytes, info.FallbackCells = n.CompactedBytes, n.FallbackCells
	info.DiskLogical, info.MemoryCells, info.MemoryLogical, info.MemoryPhysical = n.DiskLogical, n.MemoryCells, n.MemoryLogical, n.MemoryPhysical
	info.WrittenCells, info.WrittenBytes, info.SpilledCells, info.PromotedCells = n.WrittenCells, n.WrittenBytes, n.SpilledCells, n.PromotedCells
}
