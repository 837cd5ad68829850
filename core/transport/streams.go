package transport

import "context"

// Grant names memory of a server that a client may reach: that of a write in progress, by the sequence of its first request,
// or that of a read, by its lease. Its bytes count from 0 in the order in which the reply that granted it lists its blocks.
type Grant struct {
	Write bool
	ID    uint64
}

// Streamer is a Conn to a server whose memory the client cannot map. Payload goes over streams beside the connection,
// several at a time when there is much; a stream that breaks is replaced and its bytes are sent again.
type Streamer interface {
	Conn
	// Send writes pieces, one behind the other, to the memory of a write from an offset on. Nil says that all of it has
	// arrived. The pieces must not change before it returns.
	Send(ctx context.Context, grant Grant, offset int64, pieces [][]byte) error
	// Receive fills pieces, one behind the other, from the memory of a read. After an error they hold anything.
	Receive(ctx context.Context, grant Grant, pieces [][]byte) error
	// Resumed tells whether the server still knew the peer when this connection was made, so that it answers a repeated
	// request with the first outcome.
	Resumed() bool
}

// Lender is a Handler that lends streams the memory of what it has granted.
type Lender interface {
	// Lend gives the memory of a grant of a peer until done is called, which must happen. The server calls stop, from any
	// goroutine, when it needs the memory back, and waits for done. NotFound is a grant that has ended or never was.
	Lend(peer Peer, grant Grant, stop func()) (memory [][]byte, done func(), err error)
}
