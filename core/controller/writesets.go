package controller

import (
	"context"
	"slices"

	"transferqueue/core/schema"
)

// writeSet names cells that somebody is about to write: the fields (nil: all) of the samples (nil: all) of a partition.
type writeSet struct {
	partition string
	fields    []string
	samples   map[int64]struct{}
	granted   chan struct{} // closed when every earlier set that it conflicts with has ended
}

func newWriteSet(partition string, fields []string, samples []schema.Sample, all bool) *writeSet {
	w := &writeSet{partition: partition, fields: fields, granted: make(chan struct{})}
	if !all {
		w.samples = make(map[int64]struct{}, len(samples))
		for _, s := range samples {
			w.samples[s.Index] = struct{}{}
		}
	}
	return w
}

func (w *writeSet) conflicts(o *writeSet) bool {
	if w.partition != o.partition {
		return false
	}
	if w.fields != nil && o.fields != nil && !slices.ContainsFunc(w.fields, func(f string) bool {
		return slices.Contains(o.fields, f)
	}) {
		return false
	}
	if w.samples == nil || o.samples == nil {
		return true
	}
	few, many := w.samples, o.samples
	if len(few) > len(many) {
		few, many = many, few
	}
	for i := range few {
		if _, both := many[i]; both {
			return true
		}
	}
	return false
}

// writeSets orders writers of the same cells when one of them takes time (an update, a parsed put). A set is granted when no
// earlier one conflicts with it: arrival order, no deadlock, since a set is entered whole. Guarded by Server.mu.
type writeSets struct {
	list []*writeSet // in arrival order
}

// idle reports that no writer takes time, so that an instant write needs no set.
func (s *writeSets) idle() bool { return len(s.list) == 0 }

// enter appends a set and reports whether it is granted already.
func (s *writeSets) enter(w *writeSet) bool {
	free := !slices.ContainsFunc(s.list, w.conflicts)
	s.list = append(s.list, w)
	if free {
		close(w.granted)
	}
	return free
}

// leave removes a set and grants those that waited for it.
func (s *writeSets) leave(w *writeSet) {
	s.list = slices.DeleteFunc(s.list, func(o *writeSet) bool { return o == w })
	for i, next := range s.list {
		select {
		case <-next.granted:
			continue
		default:
		}
		if !slices.ContainsFunc(s.list[:i], next.conflicts) {
			close(next.granted)
		}
	}
}

// writing runs an instant write (do, with mu held) as soon as no slow writer holds its cells. cells names them, with mu
// held; it is asked only when there are slow writers. giveUp is called instead of do when the wait ends in an error.
func (c *call) writing(cells func() *writeSet, do func() (any, error), giveUp func()) (any, error) {
	s := c.s
	s.mu.Lock()
	if s.mu.writes.idle() {
		defer s.mu.Unlock()
		return do()
	}
	set := cells()
	granted := s.mu.writes.enter(set)
	if granted {
		defer s.mu.Unlock()
		defer s.mu.writes.leave(set)
		return do()
	}
	s.mu.Unlock()
	return c.later(func(ctx context.Context) (any, error) {
		err := waitGranted(ctx, set)
		s.mu.Lock()
		defer s.mu.Unlock()
		defer s.mu.writes.leave(set)
		if err != nil {
			giveUp()
			return nil, err
		}
		return do()
	})
}

func waitGranted(ctx context.Context, set *writeSet) error {
	select {
	case <-set.granted:
		return nil
	case <-ctx.Done():
		return ctxError(ctx, "waiting for an earlier write of the same cells")
	}
}
