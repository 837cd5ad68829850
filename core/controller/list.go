package controller

import (
	"context"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func (c *call) list() (any, error) {
	var r wire.ListRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	reply := &wire.ListReply{}
	filter := catalog.ListFilter{Partition: r.Partition, Keys: r.Keys, Prefix: r.Prefix, Tags: r.Tags, Fields: r.Fields}
	listed, err := c.s.mu.cat.List(filter)
	for _, p := range listed {
		reply.Partitions = append(reply.Partitions, wire.ListedPartition{Name: p.Name, Keys: p.Keys, Tags: p.Tags})
	}
	return reply, err
}

// waiter is a request that waits for a partition to change. try is called with mu held, at once and after every change while
// ctx lasts; it reports that the wait is over.
type waiter struct {
	ctx  context.Context
	try  func() bool
	done chan struct{}
}

// await parks a request until try succeeds. Its result is what try left behind.
func (c *call) await(partition string, try func() bool, result func() (any, error), doing string) (any, error) {
	s := c.s
	s.mu.Lock()
	if try() {
		s.mu.Unlock()
		return result()
	}
	w := s.parkLocked(c.ctx, partition, try)
	s.mu.Unlock()
	return c.later(func(ctx context.Context) (any, error) {
		if err := s.until(ctx, w, partition, doing); err != nil {
			return nil, err
		}
		return result()
	})
}

// parkLocked begins to wait for changes of a partition.
func (s *Server) parkLocked(ctx context.Context, partition string, try func() bool) *waiter {
	w := &waiter{ctx: ctx, try: try, done: make(chan struct{})}
	s.mu.waiters[partition] = append(s.mu.waiters[partition], w)
	return w
}

// until waits for what was parked. It is met also when that happens while time runs out: what it took is taken.
func (s *Server) until(ctx context.Context, w *waiter, partition, doing string) error {
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	list := slices.DeleteFunc(s.mu.waiters[partition], func(o *waiter) bool { return o == w })
	if s.mu.waiters[partition] = list; len(list) == 0 {
		delete(s.mu.waiters, partition)
	}
	s.mu.Unlock()
	select {
	case <-w.done:
		return nil
	default:
		return ctxError(ctx, doing)
	}
}

// changed serves waiters and watches of a partition. Called with mu held after every change.
func (s *Server) changed(partition string, events []catalog.Event) {
	s.mu.changes++
	if list := s.mu.waiters[partition]; len(list) > 0 {
		list = slices.DeleteFunc(list, func(w *waiter) bool {
			met := w.ctx.Err() == nil && w.try()
			if met {
				close(w.done)
			}
			return met
		})
		if s.mu.waiters[partition] = list; len(list) == 0 {
			delete(s.mu.waiters, partition)
		}
	}
	for _, w := range s.mu.watches[partition] {
		w.addLocked(events)
	}
}

func (c *call) wait() (any, error) {
	var r wire.WaitRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if r.Keys == nil && r.Count <= 0 {
		return nil, tqerr.New(tqerr.InvalidArgument, "give keys or a count above 0, got count %d", r.Count)
	}
	reply := &wire.WaitReply{}
	spec := catalog.WaitSpec{Partition: r.Partition, Keys: r.Keys, Fields: r.Fields, Count: r.Count, Tags: r.Tags}
	var failed error
	try := func() bool {
		met, err := c.s.mu.cat.Match(spec)
		if met != nil {
			reply.Keys, reply.Tags, reply.Fields = met.Keys, met.Tags, met.Fields
		}
		failed = err
		return met != nil || err != nil
	}
	return c.await(r.Partition, try, func() (any, error) { return reply, failed }, "waiting for samples of partition \""+r.Partition+"\"")
}
