package controller

import (
	"context"
	"errors"
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

// moveTo moves samples to one unit, all or nothing. source tells that an error is not due to that unit.
func (m *mover) moveTo(ctx context.Context, to node, g *leasedGroup, rows int, parts []*movedPart) (source bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, copyTime(parts))
	defer cancel()
	shares, source, err := m.copy(ctx, to, g.Partition, parts)
	if err != nil {
		return source, err
	}
	samples := g.Samples[:rows]
	for i := range shares {
		shares[i].staged.Commit(parts[i].Samples[:parts[i].rows])
	}
	if err = committed(ctx, to, shares); err == nil {
		err = m.flip(ctx, g.Partition, samples, to)
	}
	if err == nil || errors.Is(err, errUnsure) {
		return false, err
	}
	if len(shares) > 0 && to.Lost() == nil {
		forgotten(to.Delete(g.Partition, nil, samples, 0))
	}
	return false, err
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

// flip lets samples live on a unit that has committed their cells, and deletes them where they were.
func (m *mover) flip(ctx context.Context, partition string, samples []schema.Sample, to node) error {
	s := m.s
	number, err := func() (uint64, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, n := range []node{m.from, to} {
			if err := n.Lost(); err != nil {
				return 0, err
			}
		}
		if err := ctx.Err(); err != nil {
			return 0, ctxError(ctx, "samples move")
		}
		if err := s.mu.cat.CheckRelocate(partition, samples, m.from.ID(), to.ID()); err != nil {
			return 0, err
		}
		record := &moveRecord{Partition: partition, Samples: *wireSamples(samples), From: m.from.ID(), To: to.ID()}
		number, err := s.noteLocked(true, recordMove, record)
		if err != nil {
			return 0, errors.Join(errUnsure, err)
		}
		return number, s.mu.cat.Relocate(partition, samples, m.from.ID(), to.ID())
	}()
	if err != nil {
		return err
	}
	if number > 0 && s.journal.log.Sync(number) != nil {
		s.turnSoon() // until the state is written the old copies stay; Held finds them
		return nil
	}
	forgotten(m.from.Delete(partition, nil, samples, 0)) // an error is seen by what the unit still holds
	return nil
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

// errUnsure says that the journal may have a move which has not been made, so that neither copy may be deleted.
var errUnsure = errors.New("the journal does not take that samples move")
