package controller

import (
	"context"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// maxWatchEvents bounds what a watch keeps for a reader that does not come. Beyond it the watch ends with an error,
// because leaving events out silently would break its promise. It is changed by tests.
var maxWatchEvents = 1 << 20

// maxReplyEvents bounds one reply, so that a reader that comes late is not sent more than a message can hold.
const maxReplyEvents = 1 << 14

// watch collects the changes of one partition for one reader.
type watch struct {
	id        uint64
	partition string
	ready     chan struct{} // has one element while there is something to say
	// Guarded by Server.mu.
	events   []catalog.Event
	overflow bool
}

func (w *watch) addLocked(events []catalog.Event) {
	if len(events) == 0 || w.overflow {
		return
	}
	if len(w.events)+len(events) > maxWatchEvents {
		w.events, w.overflow = nil, true
	} else {
		w.events = append(w.events, events...)
	}
	w.signal()
}

func (w *watch) signal() {
	select {
	case w.ready <- struct{}{}:
	default:
	}
}

// takeLocked removes the oldest events, nil when another reader has them.
func (w *watch) takeLocked() ([]catalog.Event, error) {
	if w.overflow {
		w.signal() // it stays so
		return nil, tqerr.New(tqerr.ResourceExhausted, "partition %q: more than %d changes were not read; open a new watch", w.partition, maxWatchEvents)
	}
	n := min(len(w.events), maxReplyEvents)
	taken := w.events[:n:n]
	if w.events = w.events[n:]; len(w.events) > 0 {
		w.signal()
	} else {
		w.events = nil
	}
	return taken, nil
}

func (w *watch) putBackLocked(events []catalog.Event) {
	if !w.overflow {
		w.events = slices.Concat(events, w.events)
		w.signal()
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
	id, err := keep(c.client, func() map[uint64]*watch { return c.client.mu.watches }, w)
	if err != nil {
		return nil, err
	}
	w.id = id
	c.s.mu.watches[r.Partition] = append(c.s.mu.watches[r.Partition], w)
	c.undo = func() { c.closeWatch(w) }
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
		if result, err := c.takeEvents(w); result != nil || err != nil {
			return result, err
		}
	default:
	}
	return c.later(func(ctx context.Context) (any, error) {
		for {
			select {
			case <-w.ready:
				if result, err := c.takeEvents(w); result != nil || err != nil {
					return result, err
				}
			case <-ctx.Done():
				return nil, ctxError(ctx, "watching partition \""+w.partition+"\"")
			}
		}
	})
}

// takeEvents makes the reply of a watch that was ready; nil when it is not any more.
func (c *call) takeEvents(w *watch) (any, error) {
	c.s.mu.Lock()
	events, err := w.takeLocked()
	c.s.mu.Unlock()
	if err != nil || len(events) == 0 {
		return nil, err
	}
	c.undo = func() {
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		w.putBackLocked(events)
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
	c.closeWatch(w)
	return nil, nil
}

func (c *call) closeWatch(w *watch) {
	c.client.mu.Lock()
	delete(c.client.mu.watches, w.id)
	c.client.mu.Unlock()
	c.s.dropWatch(w)
}

func (s *Server) dropWatch(w *watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := slices.DeleteFunc(s.mu.watches[w.partition], func(o *watch) bool { return o == w })
	if s.mu.watches[w.partition] = list; len(list) == 0 {
		delete(s.mu.watches, w.partition)
	}
}
