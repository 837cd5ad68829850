// Package tqerr is the one error vocabulary of the project: a code, the operation, and a text that names the thing.
//
// The codes below are the source of the enum in capi/tq.h and of python/transfer_queue/_codes.py; `go generate` writes
// both and a test compares them. Numbers are wire format and ABI: new ones are only appended.
package tqerr

//go:generate go run transferqueue/core/internal/gen -root ../..

// Code says what kind of failure an error is. It decides the Python class a caller sees.
type Code uint8

// The codes, in the order of their numbers.
const (
	OK Code = iota
	InvalidArgument
	InvalidState
	NotFound
	AlreadyExists
	SchemaMismatch
	ResourceExhausted
	DeadlineExceeded
	Cancelled
	Unavailable
	IO
	Corruption
	VersionMismatch
	Unimplemented
	Internal
	// Failed is user code that failed inside the queue: a merge function, a data parser, a sampler.
	Failed
	// Conflict is a write that lost a race for a new key; the client library starts it over, callers never see it.
	Conflict
	// NotInitialized is a call in a process that has no session (AssertionError in Python, as callers of the peer expect).
	NotInitialized
	// SampleGone is a sample that was cleared while it was read, or whose index belongs to another sample now.
	SampleGone
	// WrongType is an argument of the wrong Python type (TypeError).
	WrongType
	// CapacityExceeded is the limit on the number of samples (RuntimeError in Python).
	CapacityExceeded
	// FileNotFound is a file or folder that does not exist (FileNotFoundError in Python).
	FileNotFound
	// FileExists is a file or folder that is there already (FileExistsError in Python).
	FileExists
	// DataLost is a value that was lost with the storage unit that held it.
	DataLost
)

var names = [...]string{
	"OK", "InvalidArgument", "InvalidState", "NotFound", "AlreadyExists", "SchemaMismatch", "ResourceExhausted",
	"DeadlineExceeded", "Cancelled", "Unavailable", "IO", "Corruption", "VersionMismatch", "Unimplemented", "Internal",
	"Failed", "Conflict", "NotInitialized", "SampleGone", "WrongType", "CapacityExceeded",
	"FileNotFound", "FileExists", "DataLost",
}

// String returns the name of the code.
func (c Code) String() string {
	if int(c) < len(names) {
		return names[c]
	}
	return "Unknown"
}

// Names lists the names of all codes; the index of a name is its number.
func Names() []string { return append([]string(nil), names[:]...) }

// Retryable reports whether the same request may succeed later without any change by the caller.
func (c Code) Retryable() bool {
	return c == Unavailable || c == ResourceExhausted || c == DeadlineExceeded || c == Conflict
}
