package sampler

import "transferqueue/core/tqerr"

const sequentialName = "SequentialSampler"

// Sequential hands out the samples with the smallest indexes and remembers nothing.
type Sequential struct{}

// Name is the name of the class.
func (Sequential) Name() string { return sequentialName }

// Check refuses a token budget.
func (Sequential) Check(r Request) error {
	_, err := configOf(sequentialName, r)
	return err
}

// Sample returns the first N ready samples, all consumed, or none when there are fewer.
func (Sequential) Sample(ready Ready, r Request) (Pick, error) {
	first := ready.First(r.N)
	if len(first) < r.N {
		return Pick{}, nil
	}
	return Pick{Sampled: first, Consumed: first}, nil
}

// Cached is always false.
func (Sequential) Cached(Request) bool { return false }

// Cleared has nothing to forget.
func (Sequential) Cleared(string, []int64) {}

// Reset has nothing to forget.
func (Sequential) Reset(string, string) {}

// ClearPartition has nothing to forget.
func (Sequential) ClearPartition(string) {}

// Save returns nothing.
func (Sequential) Save() ([]byte, error) { return nil, nil }

// Load accepts only nothing.
func (Sequential) Load(state []byte) error {
	if len(state) > 0 {
		return tqerr.New(tqerr.InvalidArgument, "%s has no state, got %d bytes", sequentialName, len(state))
	}
	return nil
}
