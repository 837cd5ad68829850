package controller

import (
	"context"
	"slices"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// writeSet names cells that somebody is about to write: the fields (nil: all) of the samples (nil: all) of a partition.
type writeSet struct {
	partition string
	fields    []string
	samples   []int64       // indexes, ascending
	all       bool          // every cell of every partition
	granted   chan struct{} // closed when every earlier set that it conflicts with has ended
}

func newWriteSet(partition string, fields []string, samples []schema.Sample, all bool) *writeSet {
	w := &writeSet{partition: partition, fields: fields, granted: make(chan struct{})}
	if all {
		return w
	}
	w.samples = make([]int64, len(samples))
	for i, s := range samples {
		w.samples[i] = s.Index
	}
	slices.Sort(w.samples)
	return w
}

func (w *writeSet) conflicts(o *writeSet) bool {
	if w.all || o.all {
		return true
	}
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
	for _, i := range few {
		at, both := slices.BinarySearch(many, i)
		if both {
			return true
		}
		many = many[at:]
	}
	return false
}

// covers reports that a set names all cells that another of the same write names.
func (w *writeSet) covers(o *writeSet) bool {
	if w.samples == nil || slices.Equal(w.samples, o.samples) {
		return true
	}
	return o.samples != nil && !slices.ContainsFunc(o.samples, func(i int64) bool {
		_, has := slices.BinarySearch(w.samples, i)
		return !has
	})
}

// writeSets orders writers of the same cells when one of them takes time (an update, a parsed put). A set is granted when no
// earlier one conflicts with it: arrival order, no deadlock, since a set is entered whole. Guarded by Server.mu.
type writeSets struct {
	list []*writeSet // in arrival order
}

// idle reports that no writer takes time, so that an instant write needs no set.
func (s *writeSets) idle() bool { return len(s.list) == 0 }

// free returns those of the samples that no set has.
func (s *writeSets) free(partition string, samples []schema.Sample) []schema.Sample {
	out := samples
	for _, w := range s.list {
		if !w.all && w.partition != partition {
			continue
		}
		if w.all || w.samples == nil {
			return nil
		}
		taken := func(x schema.Sample) bool {
			_, has := slices.BinarySearch(w.samples, x.Index)
			return has
		}
		if slices.ContainsFunc(out, taken) {
			out = slices.DeleteFunc(slices.Clone(out), taken)
		}
	}
	return out
}

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

// instant is a write that takes no time once it may happen.
type instant struct {
	cells func() *writeSet    // what it writes; called with mu held
	do    func() (any, error) // the write itself; called with mu held
	// conflict prepares the write for a world that has changed when do gives Conflict. nil: do does not.
	conflict func(ctx context.Context) error
	giveUp   func() // called instead of do when the wait for its turn ends in an error; nil: nothing
	// rest is set by do when units have to answer before the request is: it waits for that, without mu.
	rest func(ctx context.Context) (any, error)
}

// writing runs an instant write as soon as no slow writer that came before it holds its cells.
func (c *call) writing(w *instant) (any, error) {
	s := c.s
	set, result, err := s.attempt(w)
	if set == nil && !w.again(err) {
		if w.rest != nil && err == nil {
			return c.later(w.rest)
		}
		return result, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		for {
			if set == nil {
				if err := w.conflict(ctx); err != nil {
					return nil, err
				}
				set, result, err = s.attempt(w)
			}
			if set != nil {
				result, err = s.inTurn(ctx, set, w)
				set = nil
			}
			if !w.again(err) {
				break
			}
		}
		if w.rest != nil && err == nil {
			return w.rest(ctx)
		}
		return result, err
	})
}

func (w *instant) again(err error) bool {
	return w.conflict != nil && tqerr.CodeOf(err) == tqerr.Conflict
}

// attempt runs a write when it is its turn, else it returns the set that waits for it.
func (s *Server) attempt(w *instant) (*writeSet, any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mu.writes.idle() {
		if set := w.cells(); !s.mu.writes.enter(set) {
			return set, nil, nil
		} else {
			defer s.mu.writes.leave(set)
		}
	}
	result, err := w.do()
	return nil, result, err
}

// inTurn waits for the turn of a set and runs its write.
func (s *Server) inTurn(ctx context.Context, set *writeSet, w *instant) (any, error) {
	set, err := s.claim(ctx, set, w.cells)
	if err != nil {
		if w.giveUp != nil {
			w.giveUp()
		}
		return nil, err
	}
	defer s.mu.Unlock()
	defer s.mu.writes.leave(set)
	return w.do()
}

// claim waits until a set is granted, and returns with mu held unless it fails. When the keys of the write have come to mean
// other samples meanwhile, the write queues again with those.
func (s *Server) claim(ctx context.Context, set *writeSet, cells func() *writeSet) (*writeSet, error) {
	for {
		err := waitGranted(ctx, set)
		if err == nil {
			err = s.ctx.Err() // what was before it in the line may have ended only because the server closes
		}
		s.mu.Lock()
		if err != nil {
			s.mu.writes.leave(set)
			s.mu.Unlock()
			return nil, err
		}
		now := cells()
		if set.covers(now) {
			return set, nil
		}
		s.mu.writes.leave(set)
		s.mu.writes.enter(now)
		set = now
		s.mu.Unlock()
	}
}

func waitGranted(ctx context.Context, set *writeSet) error {
	select {
	case <-set.granted:
	case <-ctx.Done():
	}
	if ctx.Err() != nil { // time may have run out while this process was stopped, whatever came first
		return ctxError(ctx, "waiting for an earlier write of the same cells")
	}
	return nil
}
