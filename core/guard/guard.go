// Package guard decides what a panic does to a library inside somebody's process: it must neither end the process nor
// leave half-changed state in use. The first panic poisons the library: all stacks go to stderr once, and from then on
// Poisoned returns an Internal error, which every exported call and every transport returns instead of doing anything.
// There is no way back but a new process.
//
// A panic can only be recovered on its own goroutine, so all goroutines of the core start through Go; a test over the
// source checks it.
package guard

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"

	"transferqueue/core/tqerr"
)

var (
	poison atomic.Pointer[tqerr.Error]
	// stderr is replaced by tests.
	stderr io.Writer = os.Stderr

	listeners struct {
		sync.Mutex
		fns []func()
	}
)

// OnPoison has fn called on a goroutine of its own when a panic poisons the library, so that nobody goes on waiting for
// an answer that the panic took with it.
func OnPoison(fn func()) {
	listeners.Lock()
	defer listeners.Unlock()
	listeners.fns = append(listeners.fns, fn)
}

// maxStacks bounds the stacks that are printed; thousands of goroutines would take minutes.
const maxStacks = 1 << 20

// Go runs fn on a new goroutine. A panic in it poisons the library and ends only that goroutine, after its deferred
// calls; the name says in the report what it was doing.
func Go(name string, fn func()) {
	go func() {
		defer func() {
			if r := recover(); r != nil {
				Poison(fmt.Sprintf("%v (in %s)", r, name))
			}
		}()
		fn()
	}()
}

// Recover is deferred by functions that are called from outside. It turns a panic into a poisoned library and stores
// the Internal error in *err, and does nothing without a panic.
func Recover(err *error) {
	if r := recover(); r != nil {
		Poison(r)
		*err = Poisoned()
	}
}

// Poison marks the library as broken because of a panic with the given value. Only the first one counts.
func Poison(value any) {
	reason := tqerr.New(tqerr.Internal, "the library has panicked and is out of use until the process restarts: %v", value)
	if !poison.CompareAndSwap(nil, reason) {
		return
	}
	stacks := make([]byte, maxStacks)
	stacks = stacks[:runtime.Stack(stacks, true)]
	fmt.Fprintf(stderr, "transfer_queue: panic: %v\n\n%s\n", value, stacks)
	listeners.Lock()
	defer listeners.Unlock()
	for _, fn := range listeners.fns {
		Go("poison listener", fn)
	}
}

// Poisoned returns the Internal error of a poisoned library, else nil. It costs one atomic load.
func Poisoned() error {
	if reason := poison.Load(); reason != nil {
		return reason
	}
	return nil
}

// ResetForTest makes the library usable again after a test has poisoned it.
func ResetForTest() { poison.Store(nil) }
