// Package inproc connects clients to a server in the same process. A request is a function call: Serve runs on the
// goroutine that calls, bodies and payloads are passed without a copy, and segments are those of the process itself.
package inproc

import (
	"context"
	"os"
	"sync"
	"time"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/transport/internal/roster"
	"transferqueue/core/transport/internal/servers"
	"transferqueue/core/wire"
)

const address = "the server of this process"

// Server makes connections to a handler. Its methods may be called from any goroutine.
type Server struct {
	handler transport.Handler
	roster  *roster.Roster
	mu      struct {
		sync.Mutex
		conns  map[*Conn]struct{}
		closed bool
	}
}

// NewServer puts a handler behind connections of this process.
func NewServer(h transport.Handler) *Server {
	s := &Server{handler: h, roster: roster.New(h.Gone)}
	s.mu.conns = map[*Conn]struct{}{}
	return s
}

// Dial connects a client. Unavailable after Close.
func (s *Server) Dial(peerID uint64) (*Conn, error) {
	c := &Conn{server: s, peer: transport.Peer{ID: peerID, PID: os.Getpid(), Local: true}}
	if s.isClosed() {
		return nil, failure.Lost(address, nil)
	}
	s.roster.Join(c.peer)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	s.mu.Lock()
	closed := s.mu.closed // while Join waited
	if !closed {
		s.mu.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	if closed {
		_ = c.Close()
		return nil, failure.Lost(address, nil)
	}
	return c, nil
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closed
}

// Close ends all connections and reports every peer as gone before it returns. Calls that wait fail with Unavailable.
func (s *Server) Close() error {
	s.mu.Lock()
	s.mu.closed = true
	conns := make([]*Conn, 0, len(s.mu.conns))
	for c := range s.mu.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	for _, c := range conns {
		c.Cut(0)
	}
	s.roster.End()
	return nil
}

// Conn is a client's connection. It implements transport.Conn.
type Conn struct {
	server *Server
	peer   transport.Peer
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	once   sync.Once
}

var _ transport.Poster = (*Conn)(nil)

// Call implements transport.Conn. The request must not be changed afterwards, not even when ctx ended first.
func (c *Conn) Call(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	started := time.Now()
	if ctx.Err() != nil {
		return nil, failure.Ended(ctx, started)
	}
	replies, end := c.Serve(ctx, req)
	defer end()
	return Await(ctx, c, replies, started)
}

// pending is a call that the server has taken.
type pending struct {
	c       *Conn
	started time.Time
	replies <-chan *wire.Reply
	end     func()
	err     error
}

// Begin implements transport.Beginner. It returns when the handler has, which most often has replied by then.
func (c *Conn) Begin(ctx context.Context, req *wire.Request) transport.Pending {
	p := &pending{c: c, started: time.Now()}
	if ctx.Err() != nil {
		p.err = failure.Ended(ctx, p.started)
		return p
	}
	p.replies, p.end = c.Serve(ctx, req)
	return p
}

// Ready implements transport.Pending.
func (p *pending) Ready() bool { return p.err != nil || len(p.replies) > 0 }

// Wait implements transport.Pending.
func (p *pending) Wait(ctx context.Context) (*wire.Reply, error) {
	if p.err != nil {
		return nil, p.err
	}
	defer p.end()
	return Await(ctx, p.c, p.replies, p.started)
}

// Await waits for the reply to a request that was begun at started.
func Await(ctx context.Context, c *Conn, replies <-chan *wire.Reply, started time.Time) (*wire.Reply, error) {
	var reply *wire.Reply
	select {
	case reply = <-replies:
	default:
		select {
		case reply = <-replies:
		case <-ctx.Done():
			return nil, failure.Ended(ctx, started)
		case <-c.Done():
			return nil, failure.Lost(address, nil)
		}
	}
	if err := reply.Err(); err != nil {
		return nil, err
	}
	return reply, nil
}

// Serve hands a request to the server and returns when Serve has returned; the reply comes on the channel, which is
// never closed. The context that the server sees ends with ctx, with the request's timeout, with the connection, and
// when end is called, which must happen once.
func (c *Conn) Serve(ctx context.Context, req *wire.Request) (replies <-chan *wire.Reply, end func()) {
	// It derives from the connection's context, so that a cut connection has ended it before the peer is gone.
	var serving context.Context
	var cancel context.CancelFunc
	deadline, limited := ctx.Deadline()
	if own := time.Now().Add(req.Timeout); req.Timeout > 0 && (!limited || own.Before(deadline)) {
		deadline, limited = own, true
	}
	if limited {
		serving, cancel = context.WithDeadline(c.ctx, deadline)
	} else {
		serving, cancel = context.WithCancel(c.ctx)
	}
	stop := func() bool { return true }
	if ctx.Done() != nil {
		stop = context.AfterFunc(ctx, cancel)
	}
	// Room for one: a second reply to the same request is dropped.
	out := make(chan *wire.Reply, 1)
	c.serve(serving, req, func(r *wire.Reply) {
		select {
		case out <- r:
		default:
		}
	})
	return out, func() {
		stop()
		cancel()
	}
}

// Post implements transport.Poster. It returns when the handler has, which most often has replied by then.
func (c *Conn) Post(req *wire.Request, done func(*wire.Reply, error)) {
	ctx, cancel := context.WithCancel(c.ctx)
	if req.Timeout > 0 {
		ctx, cancel = context.WithTimeout(c.ctx, req.Timeout)
	}
	// Either the first reply stops it, or the end of the connection runs it.
	stop := context.AfterFunc(c.ctx, func() { done(nil, failure.Lost(address, nil)) })
	c.serve(ctx, req, func(r *wire.Reply) {
		defer cancel()
		switch err := r.Err(); {
		case !stop():
		case err != nil:
			done(nil, err)
		default:
			done(r, nil)
		}
	})
}

// Notify implements transport.Conn.
func (c *Conn) Notify(req *wire.Request) error {
	if c.ctx.Err() != nil {
		return failure.Lost(address, nil)
	}
	c.serve(c.ctx, req, func(*wire.Reply) {})
	return nil
}

// serve calls the handler, unless the connection is closed.
func (c *Conn) serve(ctx context.Context, req *wire.Request, reply func(*wire.Reply)) {
	if c.ctx.Err() != nil {
		return
	}
	servers.Handle(ctx, c.server.handler, c.peer, req, reply)
}

// Segment implements transport.Conn.
func (c *Conn) Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error) {
	if ctx.Err() != nil {
		return -1, 0, failure.Ended(ctx, time.Now())
	}
	if c.ctx.Err() != nil {
		return -1, 0, failure.Lost(address, nil)
	}
	fd, size, err = c.server.handler.Segment(unit, segment)
	if err != nil {
		return -1, 0, tqerr.Wrap(tqerr.CodeOf(err), err, "segment %d of unit %d", segment, unit)
	}
	return fd, size, nil
}

// Done implements transport.Conn.
func (c *Conn) Done() <-chan struct{} { return c.ctx.Done() }

// Close implements transport.Conn. The server has heard that the peer is gone when it returns.
func (c *Conn) Close() error {
	c.Cut(0)
	return nil
}

// Cut ends the connection as a broken one ends. The server hears that the peer is gone only when no other connection of
// it exists and it does not come back within grace; with a negative grace, when the server is closed.
func (c *Conn) Cut(grace time.Duration) {
	c.once.Do(func() {
		c.cancel()
		c.server.mu.Lock()
		delete(c.server.mu.conns, c)
		c.server.mu.Unlock()
		c.server.roster.Leave(c.peer, grace)
	})
}
