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

// A try that gets room on one unit and not on another gives it back, which wakes everybody who waits, itself included. So one
// during which something was freed is not repeated at once, and later and later when that goes on.
const (
	firstPause = time.Millisecond
	mostPause  = 16 * time.Millisecond
)

// WhenRoom tries something until it does not fail for want of room, whenever memory was freed, for wait at most. full is why it
// has failed before, nil when it has not been tried.
func WhenRoom(ctx context.Context, freed *Freed, wait time.Duration, full error, try func() error) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	pause := firstPause
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
		again := true
		select {
		case <-next:
			again = sleep(waiting, pause)
			pause = min(2*pause, mostPause)
		default:
			pause = firstPause
			select {
			case <-next:
			case <-waiting.Done():
				again = false
			}
		}
		if again {
			continue
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

// sleep reports whether ctx has not ended meanwhile.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
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
