// Package metrics counts requests of one kind: how many there were, how many failed, how many samples they touched, and
// how long they took, in the buckets of a histogram. Counting is a few atomic additions and takes no lock, so it may stand
// on any hot path. A snapshot reads the counters one after another; what is counted meanwhile may be in some of them.
package metrics

import (
	"sync/atomic"
	"time"
)

// Bounds are the upper bounds of the buckets, which include their bound. A last bucket has everything above.
var Bounds = [...]time.Duration{
	time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 5 * time.Second,
}

const buckets = len(Bounds) + 1

// Series counts requests of one kind. The zero value has counted nothing. It is safe for use by any goroutine, and fills
// whole cache lines, so that neighbours in an array do not slow each other down.
type Series struct {
	buckets [buckets]atomic.Int64
	nanos   atomic.Int64
	errors  atomic.Int64
	samples atomic.Int64
	arrived atomic.Int64
	_       [1]int64
}

// Arrive counts a request that begins, which may end without being observed.
func (s *Series) Arrive() { s.arrived.Add(1) }

// Observe counts a request that has ended.
func (s *Series) Observe(took time.Duration, samples int, failed bool) {
	k := 0
	for k < len(Bounds) && took > Bounds[k] {
		k++
	}
	s.buckets[k].Add(1)
	s.nanos.Add(int64(took))
	if samples != 0 {
		s.samples.Add(int64(samples))
	}
	if failed {
		s.errors.Add(1)
	}
}

// Snapshot is what a series had counted at one moment.
type Snapshot struct {
	Buckets [buckets]int64 // requests per bucket, not cumulated
	Sum     time.Duration
	Errors  int64
	Samples int64
	Arrived int64
}

// Snapshot reads the counters.
func (s *Series) Snapshot() Snapshot {
	out := Snapshot{
		Sum: time.Duration(s.nanos.Load()), Errors: s.errors.Load(), Samples: s.samples.Load(), Arrived: s.arrived.Load(),
	}
	for k := range s.buckets {
		out.Buckets[k] = s.buckets[k].Load()
	}
	return out
}

// Count is the number of requests that have ended.
func (s *Snapshot) Count() (n int64) {
	for _, in := range s.Buckets {
		n += in
	}
	return n
}

// Mean is the average duration, 0 for no request.
func (s *Snapshot) Mean() time.Duration {
	n := s.Count()
	if n == 0 {
		return 0
	}
	return s.Sum / time.Duration(n)
}

// Quantile estimates the duration that a share q of the requests did not exceed, linearly within a bucket. Of what is
// beyond the last bound only that is known, so the last bound is the largest answer. It is 0 for no request.
func (s *Snapshot) Quantile(q float64) time.Duration {
	rank, below := q*float64(s.Count()), int64(0)
	if rank == 0 {
		return 0
	}
	low := time.Duration(0)
	for k, high := range Bounds {
		if in := s.Buckets[k]; in > 0 && rank <= float64(below+in) {
			return low + time.Duration(float64(high-low)*(rank-float64(below))/float64(in))
		}
		below += s.Buckets[k]
		low = high
	}
	return low
}
