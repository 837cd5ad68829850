package wire

// RegisterSamplerRequest replaces the sampler of the session: one that runs in Go, by name and numbers, or one that Python
// runs, pickled.
type RegisterSamplerRequest struct {
	Name    string // of the class
	Group   int    // n_samples_per_prompt
	Ranks   int    // dp_size
	Pickled []byte // nil: runs in Go
}

// StreamRequest asks how far the stream of a partition is; without a task only for its production.
type StreamRequest struct {
	Partition string
	Task      string
}

// StreamReply says how far a stream is. A partition that does not exist is neither completed nor drained.
type StreamReply struct {
	Completed bool // a writer has said that nothing more comes
	Drained   bool // and the task has consumed everything
}
