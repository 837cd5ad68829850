package sampler

import "transferqueue/core/tqerr"

// Sequential hands out the samples with the smallest indexes and remembers nothing.
type Sequential struct{}

// Sample returns the first N ready samples, all consumed, or none when there are fewer.
func (Sequential) Sample(ready Ready, r Request) (sampled, consumed []int64, err error) {
	first := ready.First(r.N)
	if len(first) < r.N {
		return nil, nil, nil
	}
	return first, first, nil
}

// Cached is always false.
func (Sequential) Cached(Request) bool { return false }

// ClearPartition has nothing to forget.
func (Sequential) ClearPartition(string) {}

// Save returns nothing.
func (Sequential) Save() ([]byte, error) { return nil, nil }

// Load accepts only nothing.
func (Sequential) Load(state []byte) error {
	if len(state) > 0 {
		return tqerr.New(tqerr.InvalidArgument, "the sequential sampler has no state, got %d bytes", len(state))
	}
	return nil
}
