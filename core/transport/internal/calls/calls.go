// Package calls is the client's side of requests and replies, whatever carries their frames: it numbers the requests, hands
// each reply to the caller that waits for it, and tells all callers when the connection is gone.
//
// Locks: Table.mu is a leaf; nothing is sent or delivered under it.
package calls

import (
	"context"
	"sync"
	"time"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

// ErrFull says that more waits for the peer than the limit allows.
var ErrFull error = tqerr.New(tqerr.ResourceExhausted, "the peer does not read what is sent to it")

// Sender sends the frames of one connection. Its methods may be called from any goroutine and do not block.
type Sender interface {
	// Send sends a frame, or copies it to be sent later; its bytes may be reused. With limited, a frame that would have to wait
	// behind too many others is refused with ErrFull. An error that is not a *tqerr.Error says that the connection is gone.
	Send(f *wire.Frame, limited bool) error
	// Room returns a channel that is closed when bytes were sent, and at once when none wait or none can be sent any more.
	Room() <-chan struct{}
}

// Table has the calls of one connection that wait for replies. It implements what transport.Conn and transport.Poster want of
// requests.
type Table struct {
	address string
	sender  Sender
	done    chan struct{}
	waiters sync.Pool
	mu      struct {
		sync.Mutex
		err     error // why the connection is gone
		last    uint64
		waiting map[uint64]*waiter
	}
}

// New makes the table of a connection to an address, which is named in errors.
func New(address string, s Sender) *Table {
	t := &Table{address: address, sender: s, done: make(chan struct{})}
	t.waiters.New = func() any { return &waiter{reply: make(chan *wire.Reply, 1)} }
	t.mu.waiting = map[uint64]*waiter{}
	return t
}

// waiter is where the reply to a call arrives; nil when the connection is gone.
type waiter struct {
	reply chan *wire.Reply
	done  func(*wire.Reply, error) // of a posted request, instead
}

func (w *waiter) deliver(reply *wire.Reply, gone error) {
	if w.done == nil {
		w.reply <- reply
		return
	}
	if reply != nil {
		if gone = reply.Err(); gone != nil {
			reply = nil
		}
	}
	w.done(reply, gone)
}

// register makes an id for a call.
func (t *Table) register(w *waiter) (uint64, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.err != nil {
		return 0, t.mu.err
	}
	t.mu.last++
	t.mu.waiting[t.mu.last] = w
	return t.mu.last, nil
}

// take removes a call, whose waiter then gets nothing more from anybody else.
func (t *Table) take(id uint64) *waiter {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.mu.waiting[id]
	delete(t.mu.waiting, id)
	return w
}

// Answer hands a reply to its caller. One that nobody waits for is dropped.
func (t *Table) Answer(f *wire.Frame) {
	if w := t.take(f.ID); w != nil {
		w.deliver(f.Reply(), nil)
	}
}

// End ends the connection and all calls. Only the first reason counts: release is called with it, before the callers hear of it,
// who find Done closed.
func (t *Table) End(cause error, release func(lost error)) {
	t.mu.Lock()
	if t.mu.err != nil {
		t.mu.Unlock()
		return
	}
	lost := failure.Lost(t.address, cause)
	waiting := t.mu.waiting
	t.mu.err, t.mu.waiting = lost, nil
	close(t.done)
	t.mu.Unlock()
	release(lost)
	for _, w := range waiting {
		w.deliver(nil, lost)
	}
}

// Why is the reason for the end of the connection, also while it is ending.
func (t *Table) Why() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.err == nil {
		return failure.Lost(t.address, nil)
	}
	return t.mu.err
}

// Done implements transport.Conn.
func (t *Table) Done() <-chan struct{} { return t.done }

// send is Sender.Send with the connection's reason for its end.
func (t *Table) send(f *wire.Frame, limited bool) error {
	err := t.sender.Send(f, limited)
	if err == nil || failure.Coded(err) {
		return err
	}
	return t.Why()
}

// Call implements transport.Conn. The request's bytes may be reused when it returns.
func (t *Table) Call(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	return t.Begin(ctx, req).Wait(ctx)
}

// Begin implements transport.Beginner. The request's bytes may be reused when Wait returns.
func (t *Table) Begin(ctx context.Context, req *wire.Request) transport.Pending {
	return t.BeginFrame(ctx, req.Frame(wire.FrameRequest))
}

// BeginFrame is Begin for a frame that is replied to; it gets its id here.
func (t *Table) BeginFrame(ctx context.Context, f *wire.Frame) transport.Pending {
	p := &pending{t: t, started: time.Now()}
	if ctx.Err() != nil {
		p.err = failure.Ended(ctx, p.started)
		return p
	}
	p.w = t.waiters.Get().(*waiter)
	if p.id, p.err = t.register(p.w); p.err != nil {
		p.w = nil
		return p
	}
	f.ID = p.id
	if err := t.send(f, true); err == ErrFull {
		p.unsent = f
	} else {
		p.err = err
	}
	return p
}

// Notify implements transport.Conn. The request's bytes may be reused when it returns.
func (t *Table) Notify(req *wire.Request) error { return t.send(req.Frame(wire.FrameNotify), false) }

// Post implements transport.Poster. The request's bytes may be reused when it returns.
func (t *Table) Post(req *wire.Request, done func(*wire.Reply, error)) {
	f := req.Frame(wire.FrameRequest)
	var err error
	if f.ID, err = t.register(&waiter{done: done}); err != nil {
		done(nil, err)
		return
	}
	if err := t.send(f, false); err != nil && t.take(f.ID) != nil { // else the end of the connection has told it
		done(nil, err)
	}
}

// pending is a call whose frame was sent, unless err says why not or too much is on its way.
type pending struct {
	t       *Table
	w       *waiter
	id      uint64
	started time.Time
	unsent  *wire.Frame
	err     error
}

// Ready implements transport.Pending.
func (p *pending) Ready() bool { return p.err != nil || (p.w != nil && len(p.w.reply) > 0) }

// Wait implements transport.Pending.
func (p *pending) Wait(ctx context.Context) (*wire.Reply, error) {
	if p.w == nil {
		return nil, p.err
	}
	defer p.t.waiters.Put(p.w)
	if p.unsent != nil {
		p.err = p.submit(ctx)
	}
	if p.err != nil {
		if p.t.take(p.id) == nil {
			<-p.w.reply // the connection ended meanwhile and has told the waiter, who must be empty for the next call
		}
		return nil, p.err
	}
	var reply *wire.Reply
	select {
	case reply = <-p.w.reply:
	case <-ctx.Done():
		if p.t.take(p.id) != nil {
			_ = p.t.send(&wire.Frame{Type: wire.FrameCancel, ID: p.id}, false)
			return nil, failure.Ended(ctx, p.started)
		}
		reply = <-p.w.reply // it won the race
	}
	if reply == nil {
		return nil, p.t.Why()
	}
	if err := reply.Err(); err != nil {
		return nil, err
	}
	return reply, nil
}

// submit sends the frame when there is room for it, unless ctx ends or the connection is gone before.
func (p *pending) submit(ctx context.Context) error {
	for {
		err := p.t.send(p.unsent, true)
		if err != ErrFull {
			return err
		}
		select {
		case <-p.t.sender.Room():
		case <-ctx.Done():
			return failure.Ended(ctx, p.started)
		case <-p.t.done:
			return p.t.Why()
		}
	}
}
