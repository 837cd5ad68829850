// Package sampler decides which ready samples a fetch hands out. A sampler sees a read-only view of the catalog, is called
// with the catalog locked, and never blocks.
package sampler

import "transferqueue/core/catalog"

// Ready is what a sampler picks from.
type Ready = catalog.Ready

// Request is the fetch that a sampler serves.
type Request = catalog.SampleRequest

// Sampler picks samples. A sampler that answers the same request again with the same samples (same partition, task, rank
// and batch number, as Request.Sampling names them) keeps these answers until their partition is cleared.
//
// The controller serialises all calls of one sampler.
type Sampler interface {
	// Sample returns the samples to hand out and those that the task has consumed by that, which are usually the same. An
	// empty answer means that there are not enough. After an error nothing has changed.
	Sample(ready Ready, r Request) (sampled, consumed []int64, err error)
	// Cached reports whether Sample answers the request from memory, however few samples are ready.
	Cached(r Request) bool
	// ClearPartition forgets the answers of a partition.
	ClearPartition(partition string)
	// Save returns what Load needs to go on with the same answers, in a form of the sampler's own.
	Save() ([]byte, error)
	// Load replaces the state. After an error it is what it was.
	Load(state []byte) error
}
