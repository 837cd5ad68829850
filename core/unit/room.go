package unit

import (
	"context"
	"sync"
	"time"

	"transferqueue/core/tqerr"
)

// Freed tells everybody who waits that memory was freed. The zero value is ready.
type Freed struct {
	mu   sync.Mutex
	next chan struct{} // nil while nobody waits
}

// Wait returns a channel that is closed at the next signal. Take it before looking for room, or a signal may be missed.
func (f *Freed) Wait() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next == nil {
		f.next = make(chan struct{})
	}
	return f.next
}

// Signal wakes everybody.
func (f *Freed) Signal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next != nil {
		close(f.next)
		f.next = nil
	}
}

// WhenRoom tries something until it does not fail for want of room, whenever memory was freed, for wait at most. full is why it
// has failed before, nil when it has not been tried.
func WhenRoom(ctx context.Context, freed *Freed, wait time.Duration, full error, try func() error) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		next := freed.Wait()
		err := try()
		switch code := tqerr.CodeOf(err); {
		case code == tqerr.DeadlineExceeded && full != nil:
			return full // which is why there was not time enough
		case code != tqerr.ResourceExhausted:
			return err
		}
		full = err
		select {
		case <-next:
			continue
		case <-waiting.Done():
		}
		switch tqerr.CodeOf(ctx.Err()) {
		case tqerr.OK:
			return tqerr.Wrap(tqerr.ResourceExhausted, err, "no room after %s", wait)
		case tqerr.DeadlineExceeded:
			return err
		default:
			return Ended(ctx, "waiting for room")
		}
	}
}

// Ended is the error of work that stopped because its context did.
func Ended(ctx context.Context, doing string) error {
	code := tqerr.CodeOf(ctx.Err())
	if code == tqerr.DeadlineExceeded {
		return tqerr.New(code, "time is over while %s", doing)
	}
	return tqerr.New(code, "cancelled while %s", doing)
}
