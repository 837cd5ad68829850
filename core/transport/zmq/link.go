//go:build zmq

package zmq

import (
	"time"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport/internal/calls"
	"transferqueue/core/wire"
)

// link is the way to one peer. Its fields are guarded by reactor.mu.
type link struct {
	r      *reactor
	to     string // routing id at a ROUTER, "" at a DEALER
	limits limits
	urgent [][]byte // credits, which no window holds up: two peers would wait for each other
	queue  [][]byte
	queued int
	sent   uint64 // bytes
	taken  uint64 // of those, by what the peer has said
	dirty  bool
	err    error
	since  time.Time     // of the last progress while something waits
	room   chan struct{} // closed when something was sent; nil while nobody waits for that
}

// Send implements calls.Sender.
func (l *link) Send(f *wire.Frame, limited bool) error {
	if err := f.Check(); err != nil {
		return err
	}
	if f.Size() > maxMessage {
		return tqerr.New(tqerr.InvalidArgument, "message of %d bytes, limit %d", f.Size(), maxMessage)
	}
	message := f.Append(make([]byte, 0, f.Size()))
	r := l.r
	r.mu.Lock()
	if l.err != nil {
		defer r.mu.Unlock()
		return l.err
	}
	if limited && l.queued > 0 && l.queued+len(message) > l.limits.queued {
		r.mu.Unlock()
		return calls.ErrFull
	}
	l.queue, l.queued = append(l.queue, message), l.queued+len(message)
	wake := l.markLocked()
	r.mu.Unlock()
	if wake {
		r.wake()
	}
	return nil
}

// tell sends a frame ahead of all others and outside the window.
func (l *link) tell(f *wire.Frame) {
	r := l.r
	r.mu.Lock()
	wake := false
	if l.err == nil {
		l.urgent = append(l.urgent, f.Append(nil))
		wake = l.markLocked()
	}
	r.mu.Unlock()
	if wake {
		r.wake()
	}
}

// markLocked has the reactor look at the link. It reports that the reactor must be woken.
func (l *link) markLocked() bool {
	if l.dirty {
		return false
	}
	l.dirty = true
	l.r.mu.dirty = append(l.r.mu.dirty, l)
	return len(l.r.mu.dirty) == 1
}

// credit notes what the peer has taken. It is called on the reactor's goroutine.
func (l *link) credit(taken uint64) {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	if taken > l.taken && taken <= l.sent {
		l.taken, l.since = taken, time.Now()
	}
	if len(l.queue) > 0 {
		l.markLocked()
	}
}

// end makes the link refuse everything.
func (l *link) end(err error) {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	l.endLocked(err)
}

func (l *link) endLocked(err error) {
	if l.err == nil {
		l.err, l.urgent, l.queue, l.queued = err, nil, nil, 0
		delete(l.r.mu.waiting, l)
		l.signalLocked()
	}
}

func (l *link) signalLocked() {
	if l.room != nil {
		close(l.room)
		l.room = nil
	}
}

// Room implements calls.Sender.
func (l *link) Room() <-chan struct{} {
	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	if l.room == nil {
		l.room = make(chan struct{})
	}
	room := l.room
	if l.queued == 0 || l.err != nil {
		l.signalLocked()
	}
	return room
}

// takeLocked removes the messages that the window has room for. Credit comes late by up to creditStep, so one that is
// larger goes when less than half of it is in use.
func (l *link) takeLocked() [][]byte {
	n := 0
	for n < len(l.queue) {
		size := uint64(len(l.queue[n]))
		window, flying := uint64(l.limits.window), l.sent-l.taken
		if flying+size > window && flying > window/2 {
			break
		}
		l.sent += size
		l.queued -= int(size)
		n++
	}
	out := append(l.urgent, l.queue[:n]...)
	l.urgent, l.queue = nil, l.queue[n:]
	if n > 0 {
		l.since = time.Now()
		l.signalLocked()
	}
	if len(l.queue) == 0 {
		l.queue = nil
		delete(l.r.mu.waiting, l)
	} else {
		l.r.mu.waiting[l] = struct{}{}
	}
	return out
}

// taken counts what a peer has sent and we have taken, and tells it from time to time.
type taken struct {
	bytes, told uint64
}

// creditStep is how much is taken before it is told. The window of the other side has several of them.
const creditStep = 256 << 10

// add returns the credit that is due, nil for none.
func (t *taken) add(size int) *wire.Frame {
	t.bytes += uint64(size)
	if t.bytes-t.told < creditStep {
		return nil
	}
	t.told = t.bytes
	return &wire.Frame{Type: wire.FrameCredit, Sequence: t.bytes}
}
