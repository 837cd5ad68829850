// Package transport carries requests from clients to a server. It moves messages and hands out shared memory; it knows
// nothing of what they mean. transport/inproc calls the server in the same process, transport/local goes over a unix
// socket, transport/zmq over TCP, transport/memnet is a network in memory that delays, drops, duplicates and cuts, for
// tests. All of them pass transporttest.
package transport

import (
	"context"

	"transferqueue/core/wire"
)

// Peer is a client as the server sees it. One Peer lives as long as the client's connection, or longer when the client
// comes back under the same ID.
type Peer struct {
	ID  uint64 // the client's own random number; retries after a lost connection carry it again
	PID int    // 0 when not known
	// Local is true when the client can map this server's segments.
	Local bool
	// Machine is where the client says that it is, when it is not Local; see internal/machine.
	Machine string
}

// Handler is a server behind a transport.
type Handler interface {
	// Serve answers one request. It is called on the goroutine that reads the connection, so it must not block: it calls
	// reply exactly once, before it returns or later from another goroutine. ctx ends when the request's timeout passes,
	// the client cancels it, or the client is gone; a late reply is dropped.
	Serve(ctx context.Context, peer Peer, req *wire.Request, reply func(*wire.Reply))
	// Gone says that the client has no connection any more and that none is expected back.
	Gone(peer Peer)
	// Segment gives a duplicate of the descriptor of a segment of a unit, which the caller closes, and its size.
	Segment(unit, segment uint32) (fd int, size int64, err error)
}

// Conn is a client's connection to a server. All methods may be called from any goroutine.
type Conn interface {
	// Call sends a request and waits for its reply. When ctx ends first it tells the server and returns ctx's error as
	// DeadlineExceeded or Cancelled. A connection that is gone gives Unavailable. A reply whose code is not OK is returned
	// as *tqerr.Error, never as a reply.
	Call(ctx context.Context, req *wire.Request) (*wire.Reply, error)
	// Notify sends a request without a reply. It does not block for long and reports only a connection that is gone.
	Notify(req *wire.Request) error
	// Segment gives the descriptor of a segment of a unit, which the caller closes, and its size.
	Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error)
	// Done is closed when the connection is gone.
	Done() <-chan struct{}
	Close() error
}

// Beginner is a Conn whose calls can be split: Begin sends on the caller's goroutine and does not wait, so that a request
// is on its way before anybody else has to be woken.
type Beginner interface {
	Begin(ctx context.Context, req *wire.Request) Pending
}

// Pending is a request that was sent, or has failed to be.
type Pending interface {
	// Ready reports that Wait returns at once.
	Ready() bool
	// Wait returns what Call would. It must be called exactly once, with the context of Begin.
	Wait(ctx context.Context) (*wire.Reply, error)
}

// Poster is a Conn whose requests can be lined up.
type Poster interface {
	Conn
	// Post sends a request on the caller's goroutine and does not wait: it arrives behind all that were posted before, however
	// many the server has not read yet. It cannot be called off. done is called once with what Call would return, perhaps
	// before Post returns, and must not block. The request must not be changed before.
	Post(req *wire.Request, done func(*wire.Reply, error))
}
