package controller

import (
	"context"
	"slices"
	"time"

	"transferqueue/core/drain"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/unit"
)

// answerTime is how long a unit that does not answer holds those up who write to samples that move; a copy may take longer when it
// has more bytes than slowBytes make in that time.
const (
	answerTime = 30 * time.Second
	slowBytes  = 1 << 20 // per second
)

func copyTime(parts []*movedPart) time.Duration {
	var all drain.Counted
	for _, p := range parts {
		p.count(&all)
	}
	return answerTime + time.Duration((all.Bytes[drain.Memory]+all.Bytes[drain.LocalDisk])/slowBytes)*time.Second
}

// moveTo moves samples to one unit, all or nothing. elsewhere tells that an error is not due to that unit.
func (m *mover) moveTo(ctx context.Context, to node, g *leasedGroup, rows int, parts []*movedPart) (elsewhere bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, copyTime(parts))
	defer cancel()
	shares, elsewhere, err := m.copy(ctx, to, g.Partition, parts)
	if err != nil {
		return elsewhere, err
	}
	samples := g.Samples[:rows]
	for i := range shares {
		shares[i].staged.Commit(parts[i].Samples[:parts[i].rows])
	}
	unsure := false
	if err = committed(ctx, to, shares); err == nil {
		elsewhere, unsure, err = m.flip(ctx, g.Partition, samples, to)
	}
	switch {
	case err == nil || len(shares) == 0 || to.Lost() != nil:
	case unsure && !m.s.settle(ctx):
		m.s.deleteLater(to, g.Partition, samples)
	default:
		forgotten(to.Delete(g.Partition, nil, samples, 0))
	}
	return elsewhere, err
}

// committed waits until a unit has committed what it was told to, for good.
func committed(ctx context.Context, n node, shares []share) error {
	if len(shares) == 0 {
		return n.Lost()
	}
	if n.waits() {
		if err := n.sync(ctx); err != nil {
			return err
		}
	}
	if !confirms(shares) {
		return n.Lost()
	}
	done := make(chan error, 1)
	guard.Go("controller move", func() { done <- confirm(shares) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctxError(ctx, "a unit makes what was moved to it durable")
	}
}

// flip lets samples live on a unit that has committed their cells, and deletes them where they were. unwritten tells that the journal
// does not take it, and unsure that it may have it nevertheless, so that neither copy may be deleted yet.
func (m *mover) flip(ctx context.Context, partition string, samples []schema.Sample, to node) (unwritten, unsure bool, err error) {
	s := m.s
	var number uint64
	err = func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, n := range []node{m.from, to} {
			if err := n.Lost(); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return ctxError(ctx, "samples move")
		}
		if err := s.mu.cat.CheckRelocate(partition, samples, m.from.ID(), to.ID()); err != nil {
			return err
		}
		record := &moveRecord{Partition: partition, Samples: *wireSamples(samples), From: m.from.ID(), To: to.ID()}
		var err error
		if number, err = s.noteLocked(true, recordMove, record); err != nil {
			unwritten, unsure = true, number > 0
			return err
		}
		return s.mu.cat.Relocate(partition, samples, m.from.ID(), to.ID())
	}()
	switch {
	case err != nil:
	case s.synced(number) != nil && !s.settle(ctx):
		s.deleteLater(m.from, partition, samples)
	default:
		forgotten(m.from.Delete(partition, nil, samples, 0)) // an error is seen by what the unit still holds
	}
	return unwritten, unsure, err
}

// deleteLater deletes copies of samples when it is certain for good where these live.
func (s *Server) deleteLater(n node, partition string, samples []schema.Sample) {
	s.journal.start("controller move", func() {
		if s.settle(s.ctx) {
			s.deleteCopies(n, partition, samples)
		}
	})
}

// deleteCopies deletes copies of those samples that do not live on a unit. They may be moving back to it, so it waits for its turn.
func (s *Server) deleteCopies(n node, partition string, samples []schema.Sample) {
	set := newWriteSet(partition, nil, samples, false)
	s.mu.Lock()
	if !s.mu.writes.enter(set) {
		s.mu.Unlock()
		if _, err := s.claim(s.ctx, set, func() *writeSet { return set }); err != nil {
			return
		}
	}
	gone := samples
	for _, g := range s.mu.cat.GroupsOn(n.ID(), partition, samples) {
		gone = slices.DeleteFunc(slices.Clone(gone), func(x schema.Sample) bool { return slices.Contains(g.Samples, x) })
	}
	deleting := n.Delete(partition, nil, gone, 0)
	s.mu.Unlock()
	forgotten(deleting)
	s.leave(set)
}

// forgetTime is how long a unit that does not answer holds a batch up.
const forgetTime = 5 * time.Second

// forgotten waits until a unit has deleted copies. When it does not answer they are found later: by the comparison that follows when
// it joins again, or by Held.
func forgotten(d unit.Deleting) {
	if d == nil {
		return
	}
	timer := time.NewTimer(forgetTime)
	defer timer.Stop()
	select {
	case <-d.Done():
	case <-timer.C:
	}
}
