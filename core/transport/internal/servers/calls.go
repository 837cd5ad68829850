package servers

import (
	"context"
	"sync"

	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Calls are the requests of one connection that may still be replied to. Its methods may be called from any goroutine. Its lock is
// a leaf.
type Calls struct {
	handler transport.Handler
	peer    transport.Peer
	mu      struct {
		sync.Mutex
		open map[uint64]context.CancelFunc // nil: the connection has ended
	}
}

// NewCalls makes the calls of a peer, none yet.
func NewCalls(h transport.Handler, peer transport.Peer) *Calls {
	c := &Calls{handler: h, peer: peer}
	c.mu.open = map[uint64]context.CancelFunc{}
	return c
}

// Serve has the handler serve a request in a context that ends with ctx and with the request's time. reply gets the frame of the
// first reply, unless the client calls the request off or the connection ends before. It reports false when an open request has
// the same id. The frame of the request may be reused when it returns.
func (c *Calls) Serve(ctx context.Context, f *wire.Frame, reply func(*wire.Frame)) bool {
	id := f.ID
	var cancel context.CancelFunc
	if f.Timeout != 0 {
		ctx, cancel = context.WithTimeout(ctx, f.Timeout)
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	if !c.open(id, cancel) {
		cancel()
		return false
	}
	Handle(ctx, c.handler, c.peer, f.Request(), func(r *wire.Reply) {
		if c.Cancel(id) {
			reply(r.Frame(id))
		}
	})
	return true
}

// Notified has the handler serve a request without a reply.
func (c *Calls) Notified(ctx context.Context, f *wire.Frame) {
	Handle(ctx, c.handler, c.peer, f.Request(), func(*wire.Reply) {})
}

func (c *Calls) open(id uint64, cancel context.CancelFunc) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, twice := c.mu.open[id]; twice || c.mu.open == nil {
		return false
	}
	c.mu.open[id] = cancel
	return true
}

// Cancel ends a request and reports whether it was open: whoever ends it has the right to reply.
func (c *Calls) Cancel(id uint64) bool {
	c.mu.Lock()
	cancel := c.mu.open[id]
	delete(c.mu.open, id)
	c.mu.Unlock()
	if cancel == nil {
		return false
	}
	cancel()
	return true
}

// Idle reports that no request is open.
func (c *Calls) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.mu.open) == 0
}

// End has nothing replied to any more. The contexts end with that of the connection.
func (c *Calls) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.open = nil
}
