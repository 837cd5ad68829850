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

// waiter is a request that waits for a partition to change. try is called with mu held, at once and after every change; it
// reports that the wait is over.
type waiter struct {
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
	w := &waiter{try: try, done: make(chan struct{})}
	s.mu.waiters[partition] = append(s.mu.waiters[partition], w)
	s.mu.Unlock()
	return c.later(func(ctx context.Context) (any, error) {
		select {
		case <-w.done:
			return result()
		case <-ctx.Done():
		}
		s.mu.Lock()
		list := slices.DeleteFunc(s.mu.waiters[partition], func(o *waiter) bool { return o == w })
		if s.mu.waiters[partition] = list; len(list) == 0 {
			delete(s.mu.waiters, partition)
		}
		s.mu.Unlock()
		select {
		case <-w.done: // it was met while time ran out: what it took is taken
			return result()
		default:
			return nil, ctxError(ctx, doing)
		}
	})
}

// changed serves waiters and watches of a partition. Called with mu held after every change.
func (s *Server) changed(partition string, events []catalog.Event) {
	if list := s.mu.waiters[partition]; len(list) > 0 {
		list = slices.DeleteFunc(list, func(w *waiter) bool {
			met := w.try()
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
		w.add(events)
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

// maxWatchEvents bounds what a watch keeps for a reader that does not come. Beyond it the watch ends with an error, because
// leaving events out silently would break its promise.
const maxWatchEvents = 1 << 20

// watch collects the changes of one partition for one reader.
type watch struct {
	id        uint64
	partition string
	events    []catalog.Event
	ready     chan struct{} // has one element while there are events
	overflow  bool
}

func (w *watch) add(events []catalog.Event) {
	if len(events) == 0 || w.overflow {
		return
	}
	if len(w.events)+len(events) > maxWatchEvents {
		w.events, w.overflow = nil, true
	} else {
		w.events = append(w.events, events...)
	}
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

func (c *call) watchOpen() (any, error) {
	var r wire.PartitionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	w := &watch{partition: r.Partition, ready: make(chan struct{}, 1)}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	id, ok := keep(c.client, func() map[uint64]*watch { return c.client.mu.watches }, w)
	if !ok {
		return nil, tqerr.New(tqerr.Cancelled, "the client is gone")
	}
	w.id = id
	c.s.mu.watches[r.Partition] = append(c.s.mu.watches[r.Partition], w)
	return &wire.WatchReply{Watch: id}, nil
}

func (c *call) watchOf() (*watch, error) {
	var r wire.WatchRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.client.mu.Lock()
	defer c.client.mu.Unlock()
	w := c.client.mu.watches[r.Watch]
	if w == nil {
		return nil, tqerr.New(tqerr.NotFound, "watch %d is not open", r.Watch)
	}
	return w, nil
}

func (c *call) watchNext() (any, error) {
	w, err := c.watchOf()
	if err != nil {
		return nil, err
	}
	select {
	case <-w.ready:
		return c.takeEvents(w)
	default:
	}
	return c.later(func(ctx context.Context) (any, error) {
		select {
		case <-w.ready:
			return c.takeEvents(w)
		case <-ctx.Done():
			return nil, ctxError(ctx, "watching partition \""+w.partition+"\"")
		}
	})
}

func (c *call) takeEvents(w *watch) (any, error) {
	c.s.mu.Lock()
	events, overflow := w.events, w.overflow
	w.events = nil
	c.s.mu.Unlock()
	if overflow {
		return nil, tqerr.New(tqerr.ResourceExhausted, "partition %q: more than %d changes were not read; open a new watch", w.partition, maxWatchEvents)
	}
	reply := &wire.EventsReply{Events: make([]wire.Event, len(events))}
	for i, e := range events {
		reply.Events[i] = wire.Event{Kind: e.Kind, Key: e.Key, Fields: e.Fields, Tags: e.Tags}
	}
	return reply, nil
}

func (c *call) watchClose() (any, error) {
	w, err := c.watchOf()
	if err != nil {
		return nil, nil //nolint:nilerr // closing what is closed is fine
	}
	c.client.mu.Lock()
	delete(c.client.mu.watches, w.id)
	c.client.mu.Unlock()
	c.s.dropWatch(w)
	return nil, nil
}

func (s *Server) dropWatch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.DeleteFunc(s.mu.watches[w.partition], func(o *watch) bool { return o == w })
	if s.mu.watches[w.partition] = list; len(list) == 0 {
		delete(s.mu.watches, w.partition)
	}
}
