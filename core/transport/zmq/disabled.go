//go:build !zmq

package zmq

import (
	"context"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

var errDisabled = tqerr.New(tqerr.Unimplemented, "this library was built without libzmq, which connections between hosts need")

// Server is a listening socket, which this build does not have.
type Server struct{}

// Listen gives Unimplemented: the library was built without libzmq.
func Listen(string, int, Credentials, transport.Handler) (*Server, error) { return nil, errDisabled }

// Address is where the server listens.
func (*Server) Address() string { return "" }

// Ticket is none.
func (*Server) Ticket(transport.Lender) wire.UnitTicket { return wire.UnitTicket{} }

// Close does nothing.
func (*Server) Close() error { return nil }

// Descriptors is empty.
func (*Server) Descriptors() []int { return nil }

// Dial gives Unimplemented: the library was built without libzmq.
func Dial(context.Context, string, Credentials, uint64, uint64) (*Conn, error) {
	return nil, errDisabled
}

// Conn is a connection, which this build cannot make.
type Conn struct{ transport.Streamer }

// Post gives Unimplemented.
func (*Conn) Post(_ *wire.Request, done func(*wire.Reply, error)) { done(nil, errDisabled) }

// ReceiveFrom gives Unimplemented.
func (*Conn) ReceiveFrom(context.Context, transport.Grant, int64, [][]byte) error { return errDisabled }

// Silent is false.
func (*Conn) Silent() bool { return false }

// Life is 0.
func (*Conn) Life() uint64 { return 0 }

// Descriptors is empty.
func (*Conn) Descriptors() []int { return nil }
