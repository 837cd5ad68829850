//go:build zmq

package zmq

import (
	"context"
	"net"
	"sync"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/servers"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// conn is one connection of a server. The reactor sorts its messages; while there are any, a worker calls the handler.
type conn struct {
	server *Server
	link   *link
	peer   transport.Peer
	calls  *servers.Calls
	wanted uint64 // the life that the peer wants to go on with
	ctx    context.Context
	cancel context.CancelFunc
	mu     struct {
		sync.Mutex
		lifeline net.Conn // nil: not there yet, and nothing is served
		ended    bool
		inbox    []wire.Frame
		working  bool
		taken    taken
		streams  map[net.Conn]struct{}
	}
}

func newConn(s *Server, l *link, peer transport.Peer, wanted uint64) *conn {
	c := &conn{server: s, link: l, peer: peer, calls: servers.NewCalls(s.handler, peer), wanted: wanted}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.mu.streams = map[net.Conn]struct{}{}
	return c
}

// Bytes on a lifeline.
const (
	aliveSize = 9   // of the answer to its ticket: whether the life goes on, and its number
	goodbye   = 'b' // of the client, before it closes
)

// live is the connection from its lifeline's beginning to its end.
func (c *conn) live(lifeline net.Conn) {
	s := c.server
	stream.Watch(lifeline)
	defer s.forget(c)
	defer c.cancel()
	s.roster.Join(c.peer)
	grace := s.limits.grace
	defer func() { s.roster.Leave(c.peer, grace) }()
	life, resumed := s.lifeOf(c.peer.ID, c.wanted)
	c.mu.Lock()
	c.mu.lifeline = lifeline
	c.mu.Unlock()
	defer c.end()
	if _, err := lifeline.Write(alive(life, resumed)); err != nil {
		return
	}
	var last [1]byte
	if n, _ := lifeline.Read(last[:]); n == 1 && last[0] == goodbye {
		grace = 0
	}
}

// cut ends the connection, as a broken network would.
func (c *conn) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.lifeline != nil {
		_ = c.mu.lifeline.Close()
	}
}

// end cancels what is being served, before the peer is reported as gone.
func (c *conn) end() {
	c.link.end(tqerr.New(tqerr.Unavailable, "the connection is gone"))
	c.cancel()
	c.calls.End()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.ended, c.mu.inbox = true, nil
	_ = c.mu.lifeline.Close()
	for stream := range c.mu.streams {
		_ = stream.Close()
	}
}

// receive queues a frame for the worker.
func (c *conn) receive(f wire.Frame) {
	if f.Type == wire.FrameCredit {
		c.link.credit(f.Sequence)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.lifeline == nil || c.mu.ended {
		return
	}
	c.mu.inbox = append(c.mu.inbox, f)
	if !c.mu.working {
		c.mu.working = true
		c.server.workers.serve(c)
	}
}

// work serves what has arrived, in its order.
func (c *conn) work() {
	for {
		c.mu.Lock()
		if len(c.mu.inbox) == 0 {
			c.mu.inbox, c.mu.working = nil, false
			c.mu.Unlock()
			return
		}
		f := c.mu.inbox[0]
		c.mu.inbox = c.mu.inbox[1:]
		c.mu.Unlock()
		ok := c.serve(&f)
		c.mu.Lock()
		credit := c.mu.taken.add(f.Size())
		c.mu.Unlock()
		if credit != nil {
			c.link.tell(credit)
		}
		if !ok {
			c.cut()
		}
	}
}

// serve handles one frame and reports whether the connection goes on.
func (c *conn) serve(f *wire.Frame) bool {
	switch f.Type {
	case wire.FrameRequest:
		_ = c.calls.Serve(c.ctx, f, c.reply) // one that is being served already has come twice, and has one reply
		return true
	case wire.FrameNotify:
		c.calls.Notified(c.ctx, f)
		return true
	case wire.FrameCancel:
		c.calls.Cancel(f.ID)
		return true
	case wire.FrameTicket:
		ticket := c.server.streams.Ticket(c.stream, func() {})
		return c.link.Send(&wire.Frame{Type: wire.FrameReply, ID: f.ID, Body: ticket}, true) == nil
	default:
		return false
	}
}

// stream serves a payload stream of the peer.
func (c *conn) stream(conn net.Conn) {
	lender, ok := c.server.handler.(transport.Lender)
	c.mu.Lock()
	if !ok || c.mu.ended {
		c.mu.Unlock()
		return
	}
	c.mu.streams[conn] = struct{}{}
	c.mu.Unlock()
	stream.Serve(conn, c.peer, lender, stream.Limits{Greeting: c.server.limits.greeting, Stall: c.server.limits.stall})
	c.mu.Lock()
	delete(c.mu.streams, conn)
	c.mu.Unlock()
}

// reply sends a reply. One beyond the limits of a message becomes an error reply; a client that does not take its replies loses the
// connection.
func (c *conn) reply(f *wire.Frame) {
	err := c.link.Send(f, true)
	if tqerr.CodeOf(err) == tqerr.InvalidArgument {
		err = c.link.Send(wire.ErrorReply(err).Frame(f.ID), true)
	}
	if err != nil {
		c.cut()
	}
}
