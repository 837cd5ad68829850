package controller

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// Moves that leave the source in service. What has moved when one fails stays where it is.

func (c *call) move() (any, error) {
	var r wire.MoveRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	s := c.s
	to, err := s.takes(r.To)
	if err != nil {
		return nil, err
	}
	s.mu.RLock()
	samples, err := s.mu.cat.Chosen(r.Partition, r.Keys)
	s.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		reply := &wire.MoveReply{}
		err := s.moveAside(ctx, func() error {
			for _, from := range s.nodes.Load().order {
				m := &mover{s: s, from: from, targets: []string{to.Name()}, tiers: keepTier}
				if from == to || len(s.on(from, r.Partition, samples)) == 0 {
					continue
				}
				moved, err := m.moveAll(ctx, r.Partition, samples)
				reply.Moved = append(reply.Moved, m.told(to, &moved))
				if err != nil {
					return err
				}
			}
			return nil
		})
		return reply, err
	})
}

// takes is the unit of a name, which takes samples.
func (s *Server) takes(name string) (node, error) {
	n := s.unitNamed(name)
	if n == nil {
		return nil, tqerr.New(tqerr.NotFound, "unit %q does not exist", name)
	}
	if err := n.Lost(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if duty := s.mu.cat.Duty(n.ID()); duty != catalog.Active {
		return nil, tqerr.New(tqerr.InvalidState, "unit %q is %s and takes no samples", name, duty)
	}
	return n, nil
}

// moveAside does something that moves samples. The journal says for how long, so that copies are looked for that a crash leaves.
func (s *Server) moveAside(ctx context.Context, do func() error) error {
	count := func(n int) (uint64, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		number, err := s.noteLocked(false, recordMoving, &movingRecord{s.mu.drains.moves + n})
		if err == nil || n < 0 {
			s.mu.drains.moves += n
		}
		return number, err
	}
	if !s.moving.begin() {
		return errClosed
	}
	defer s.moving.end()
	number, err := count(1)
	if err != nil {
		return err
	}
	if err = s.synced(number); err == nil {
		err = ctxOr(ctx, do())
	}
	_, _ = count(-1) // at worst the next life looks for nothing
	return err
}

// on returns those of the samples that live on a unit.
func (s *Server) on(n node, partition string, samples []schema.Sample) (out []schema.Sample) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, g := range s.mu.cat.GroupsOn(n.ID(), partition, samples) {
		out = append(out, g.Samples...)
	}
	return out
}

// The batches of such moves.
const (
	moveBytes   = 8 << 20
	moveSamples = 256
	moveWait    = 10 * time.Second // for a writer, then for the next one
)

// moveBeside is move for who is no drain. A drain of the unit counts what has moved, and does not look at what the unit holds
// meanwhile.
func (m *mover) moveBeside(ctx context.Context, b *drain.Batch, limit, most int64) (moved drain.Moved, err error) {
	s := m.s
	s.mu.Lock()
	moves := s.mu.drains.besideOf(m.from.Name())
	moves.begun++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		moves.ended++
		if d := s.mu.drains.of(m.from.Name()); d != nil {
			d.job.Count(&moved.Counted)
		}
	}()
	return m.move(ctx, b, limit, most)
}

// moveAll moves all samples that are on the source. Those that somebody writes it waits for at last, one by one.
func (m *mover) moveAll(ctx context.Context, partition string, samples []schema.Sample) (sum drain.Moved, err error) {
	wait := time.Duration(0)
	for size := moveSamples; ; {
		left := m.s.on(m.from, partition, samples)
		if len(left) == 0 {
			return sum, nil
		}
		before := sum.Samples
		for some := range slices.Chunk(left, size) {
			moved, err := m.moveBeside(ctx, &drain.Batch{Partition: partition, Samples: some, Wait: wait}, moveBytes, math.MaxInt64)
			sum.Add(&moved)
			if err != nil {
				return sum, err
			}
		}
		if size, wait = moveSamples, 0; sum.Samples == before {
			size, wait = 1, moveWait
		}
	}
}

func (m *mover) told(to node, moved *drain.Moved) wire.Moved {
	return wire.Moved{
		From: m.from.Name(), To: to.Name(), Samples: int64(moved.Samples), Cells: moved.Cells[drain.Memory] + moved.Cells[drain.LocalDisk],
		Bytes: moved.Bytes[drain.Memory] + moved.Bytes[drain.LocalDisk],
	}
}

func (c *call) rebalance() (any, error) {
	var r wire.RebalanceRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		plan, err := c.s.balance(ctx)
		if err != nil || r.DryRun {
			return &wire.MoveReply{Moved: plan}, err
		}
		reply := &wire.MoveReply{}
		err = c.s.moveAside(ctx, func() error {
			for i := range plan {
				m := &mover{s: c.s, from: c.s.unitNamed(plan[i].From), targets: []string{plan[i].To}, tiers: keepTier}
				moved, err := m.moveSome(ctx, plan[i].Bytes)
				reply.Moved = append(reply.Moved, m.told(c.s.unitNamed(plan[i].To), &moved))
				if err != nil {
					return err
				}
			}
			return nil
		})
		return reply, err
	})
}

// littleOf is the part of the mean by which units may differ from it.
const littleOf = 20

// balance plans which units give how many bytes to which, so that all that take samples hold about the same.
func (s *Server) balance(ctx context.Context) (plan []wire.Moved, err error) {
	type holder struct {
		name string
		more int64 // than the mean
	}
	var all []holder
	sum := int64(0)
	for _, n := range s.nodes.Load().order {
		if _, err := s.takes(n.Name()); err != nil {
			continue
		}
		if err := n.sync(ctx); err != nil {
			return nil, err
		}
		held := n.Counters()
		bytes := held.MemoryLogical + held.DiskLogical // as what moves is counted
		all = append(all, holder{n.Name(), bytes})
		sum += bytes
	}
	if len(all) < 2 {
		return nil, nil
	}
	mean := sum / int64(len(all))
	for i := range all {
		all[i].more -= mean
	}
	for {
		slices.SortStableFunc(all, func(a, b holder) int { return cmp.Compare(b.more, a.more) })
		first, last := &all[0], &all[len(all)-1]
		bytes := min(first.more, -last.more)
		if bytes <= mean/littleOf {
			return plan, nil
		}
		plan = append(plan, wire.Moved{From: first.name, To: last.name, Bytes: bytes})
		first.more -= bytes
		last.more += bytes
	}
}

// moveSome moves samples of so many bytes, not more. Those that somebody writes stay.
func (m *mover) moveSome(ctx context.Context, bytes int64) (sum drain.Moved, err error) {
	for at, end := (catalog.Cursor{}), false; !end && bytes > 0; {
		m.s.mu.RLock()
		partition, samples, next, last := m.s.mu.cat.Residents(m.from.ID(), at, moveSamples)
		m.s.mu.RUnlock()
		at, end = next, last
		for len(samples) > 0 && bytes > 0 {
			moved, err := m.moveBeside(ctx, &drain.Batch{Partition: partition, Samples: samples}, min(bytes, moveBytes), bytes)
			sum.Add(&moved)
			if err != nil {
				return sum, err
			}
			bytes -= moved.Bytes[drain.Memory] + moved.Bytes[drain.LocalDisk]
			if samples = moved.Left; moved.Samples == 0 && len(samples) > 0 {
				samples = samples[1:] // the first is too large
			}
		}
	}
	return sum, nil
}
