package drain

import (
	"errors"
	"maps"
	"slices"
	"time"

	"transferqueue/core/schema"
)

// mostFailed is how many cells that could not be moved a status names.
const mostFailed = 100

// FailedCell is a cell that has stayed because it, or another one of its sample, could not be copied.
type FailedCell struct {
	Partition, Field string
	Sample           schema.Sample
	Key              string
	Keyed            bool
	Attempts         int
	Reason           string
}

// Status is what has become of a job so far. At every instant the cells of Total are those that have moved, were cleared or
// written anew meanwhile, have failed, or remain.
type Status struct {
	State    State
	Phase    string
	Total    Counted
	Moved    Counted
	Dropped  int64
	Failed   int64
	Remain   int64
	Attempts int64 // batches that were tried
	Blocked  map[string]int64
	Cells    []FailedCell // the first of those that failed
	Elapsed  time.Duration
	ETA      time.Duration // -1: not known
	Err      string        // why it has not succeeded
}

// Status returns what has become of the job so far.
func (j *Job) Status() Status {
	j.mu.Lock()
	defer j.mu.Unlock()
	out := j.mu.Status
	out.Blocked, out.Cells, out.ETA = maps.Clone(out.Blocked), slices.Clone(out.Cells), -1
	if !out.State.Final() {
		out.Elapsed = time.Since(j.began)
	}
	switch left := out.Total.bytes() - out.Moved.bytes(); {
	case out.State.Final():
		out.ETA = 0
	case out.Moved.bytes() > 0:
		out.ETA = time.Duration(float64(out.Elapsed) * float64(max(left, 0)) / float64(out.Moved.bytes()))
	}
	return out
}

// fitLocked makes the counts add up: cells that have come meanwhile count as if they had always been there, and cells that have
// changed their tier as if they had been in the one that they have moved from.
func (j *Job) fitLocked() {
	s := &j.mu.Status
	for t := range NumTiers {
		shift(&s.Total.Cells, &s.Moved.Cells, t)
		shift(&s.Total.Bytes, &s.Moved.Bytes, t)
	}
	known := s.Moved.cells() + s.Failed + s.Dropped
	s.Total.Cells[Memory] += max(known-s.Total.cells(), 0)
	s.Remain = s.Total.cells() - known
}

func shift(total, moved *[NumTiers]int64, t int) {
	if more := moved[t] - total[t]; more > 0 {
		total[t] += more
		total[1-t] = max(total[1-t]-more, moved[1-t])
	}
}

// balanceLocked compares the counts with what the unit holds when nothing is on its way: what is gone was dropped.
func (j *Job) balanceLocked(held *Held) {
	if held.Moving {
		return
	}
	s := &j.mu.Status
	remain := max(held.cells()-s.Failed, 0)
	s.Dropped = 0
	j.fitLocked()
	s.Dropped = max(s.Remain-remain, 0)
	s.Total.Cells[Memory] += max(remain-s.Remain, 0)
	s.Remain = remain
}

// movedLocked counts cells that have moved.
func (j *Job) movedLocked(m *Moved) {
	j.mu.Moved.add(&m.Counted)
	j.fitLocked()
}

// Count adds cells of the unit that somebody else has moved.
func (j *Job) Count(c *Counted) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.movedLocked(&Moved{Counted: *c})
}

// failLocked records the cells of a sample that stays.
func (j *Job) failLocked(e *CellError, attempts int) {
	s := &j.mu.Status
	for _, field := range e.Fields {
		s.Failed++
		if len(s.Cells) == mostFailed {
			continue
		}
		reason := e.Cause.Error()
		if e.Field != "" && field != e.Field {
			reason = "another field of the sample could not be moved: " + e.Field
		}
		s.Cells = append(s.Cells, FailedCell{
			Partition: e.Partition, Field: field, Sample: e.Sample, Key: e.Key, Keyed: e.Keyed, Attempts: attempts, Reason: reason,
		})
	}
	j.fitLocked()
}

// forgiveLocked undoes failLocked for a sample.
func (j *Job) forgiveLocked(v victim, cells int64) {
	s := &j.mu.Status
	s.Failed -= cells
	s.Cells = slices.DeleteFunc(s.Cells, func(c FailedCell) bool { return c.Partition == v.partition && c.Sample == v.Sample })
	j.fitLocked()
}

// block notes why something does not move; only the latest walk counts.
func (j *Job) block(reason string, n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.mu.Blocked == nil {
		j.mu.Blocked = map[string]int64{}
	}
	if j.mu.Blocked[reason] += int64(n); j.mu.Blocked[reason] == 0 {
		delete(j.mu.Blocked, reason)
	}
}

func (j *Job) unblock() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.Blocked = nil
}

// lost tells the loss of the unit from other errors.
func lost(err error) bool {
	var l *LostError
	return errors.As(err, &l)
}
