// Package sampler decides which ready samples a fetch hands out. A sampler sees a read-only view of the catalog, is called
// with the catalog locked, and never blocks. Samplers that are written in Python do block; see Python for how they differ.
//
// # Answers
//
// Samplers that know ranks remember what they have answered, by partition, task, rank and number of the batch, so that the
// pipeline stages of one rank get the same samples however late they ask. A sample that was chosen for a rank which has not
// asked yet is promised: nobody else gets it. Consumed samples stay in their answers, samples that were cleared leave them,
// and an answer that has lost all its samples is forgotten, so that the number of its batch may be used again.
package sampler

import (
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/tqerr"
)

// Ready is what a sampler picks from.
type Ready = catalog.Ready

// Request is the fetch that a sampler serves.
type Request = catalog.SampleRequest

// Pick is what a sampler decides.
type Pick = catalog.Pick

// Memory is what a sampler remembers beyond one call.
type Memory interface {
	// Cleared tells that samples of a partition are gone; their indexes may be used again.
	Cleared(partition string, indexes []int64)
	// Reset tells that the consumption of a task was forgotten, or with "" that of all. Promises to it end: it starts over.
	// What was answered is answered again.
	Reset(partition, task string)
	// ClearPartition forgets the answers of a partition.
	ClearPartition(partition string)
	// Save returns what Load needs to go on with the same answers, in a form of the sampler's own.
	Save() ([]byte, error)
	// Load replaces the state. After an error it is what it was.
	Load(state []byte) error
}

// Sampler is a sampler of a session: a Picker, or a Python. The controller serialises all calls of one sampler.
type Sampler interface {
	Memory
	// Name is the name of its class.
	Name() string
}

// Recorder is a sampler that can say what it has begun to remember. It does so from Record on.
type Recorder interface {
	Record()
	// Changes is what Sample has begun to remember since Recorded was called last, for Redo; nil: nothing. What the other
	// methods make it forget is not in it.
	Changes() ([]byte, error)
	Recorded()
	// Redo makes the sampler remember it. Nothing has happened in between that did not happen then.
	Redo(changes []byte) error
}

// Picker is a sampler that picks at once, with the catalog locked.
type Picker interface {
	Sampler
	catalog.Sampler
}

// Spec describes a sampler.
type Spec struct {
	Name    string `msgpack:"name"`    // of the class, "": Sequential
	Group   int    `msgpack:"group"`   // n_samples_per_prompt
	Ranks   int    `msgpack:"ranks"`   // dp_size
	Pickled []byte `msgpack:"pickled"` // the object, when Python runs it
}

// Make makes the sampler of a spec. One that Python runs is run by python, and a call of it takes limit at most.
func Make(spec Spec, python Runner, limit time.Duration) (Sampler, error) {
	switch {
	case len(spec.Pickled) == 0:
		return New(spec)
	case python == nil:
		return nil, tqerr.New(tqerr.Unimplemented, "the session has no Python to run the sampler %s", spec.Name)
	case limit <= 0:
		limit = defaultLimit
	}
	return NewPython(spec.Name, spec.Pickled, python, limit), nil
}

const defaultLimit = 30 * time.Second

// New makes the sampler of a spec that runs in Go. InvalidArgument for a name that none has and for a number below 1.
func New(spec Spec) (Picker, error) {
	if spec.Group < 1 && spec.Name != "" && spec.Name != sequentialName && spec.Name != rankAwareName {
		return nil, tqerr.New(tqerr.InvalidArgument, "%s: n_samples_per_prompt must be positive, got %d", spec.Name, spec.Group)
	}
	switch spec.Name {
	case "", sequentialName:
		return Sequential{}, nil
	case rankAwareName:
		return NewRankAware(), nil
	case groupName:
		return NewGroups(spec.Group), nil
	case streamName:
		return NewStream(spec.Group), nil
	case balancedName:
		if spec.Ranks < 1 {
			return nil, tqerr.New(tqerr.InvalidArgument, "%s: dp_size must be positive, got %d", spec.Name, spec.Ranks)
		}
		return NewBalanced(spec.Group, spec.Ranks), nil
	}
	return nil, tqerr.New(tqerr.InvalidArgument, "could not find sampler %q", spec.Name)
}
