//go:build zmq

package zmq

import (
	"context"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/calls"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// Conn is a client's connection to a Server. It implements transport.Streamer.
type Conn struct {
	*calls.Table
	address string // as it was given
	host    string
	port    int
	peerID  uint64
	limits  limits
	life    uint64
	resumed bool
	curve   bool
	unfit   atomic.Bool // the handshake of ZeroMQ failed
	silent  atomic.Bool
	payload string // HOST:PORT of the streams
	pin     []byte // of their certificate; none without CURVE

	dealer  *reactor
	monitor *reactor
	link    *link
	streams stream.Pool
	welcome chan wire.Frame
	taken   taken // on the reactor's goroutine
	mu      struct {
		sync.Mutex
		lifeline net.Conn
		ended    bool
	}
}

var _ transport.Streamer = (*Conn)(nil)

// receive hands replies to their callers. Replies that nobody waits for are dropped.
func (c *Conn) receive(parts [][]byte) {
	var f wire.Frame
	if len(parts) != 1 {
		c.fail(tqerr.New(tqerr.Corruption, "message of %d parts from a server", len(parts)))
		return
	}
	if err := wire.ParseFrame(parts[0], &f); err != nil {
		c.fail(err)
		return
	}
	switch f.Type {
	case wire.FrameReply:
		if credit := c.taken.add(f.Size()); credit != nil {
			c.link.tell(credit)
		}
		c.Answer(&f)
	case wire.FrameCredit:
		c.link.credit(f.Sequence)
	case wire.FrameWelcome:
		c.taken.add(f.Size())
		select {
		case c.welcome <- f:
		default:
		}
	default:
		c.fail(tqerr.New(tqerr.Corruption, "frame of type %d from a server", f.Type))
	}
}

// fail ends the connection and all calls. Only the first reason counts.
func (c *Conn) fail(cause error) {
	c.End(cause, func(lost error) {
		c.mu.Lock()
		c.mu.ended = true
		lifeline := c.mu.lifeline
		c.mu.Unlock()
		if lifeline != nil {
			_ = lifeline.Close()
		}
		c.streams.Close()
		c.dealer.stop()
		c.link.end(lost)
	})
}

// wait returns when the sockets are closed.
func (c *Conn) wait() {
	<-c.dealer.done
	<-c.monitor.done
}

// Segment implements transport.Conn: memory of another host cannot be mapped.
func (c *Conn) Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error) {
	if ctx.Err() != nil {
		return -1, 0, failure.Ended(ctx, time.Now())
	}
	return -1, 0, tqerr.New(tqerr.Unimplemented, "segment %d of unit %d is on another host, behind %s", segment, unit, c.address)
}

// openStream makes a payload stream with a ticket of the server.
func (c *Conn) openStream(ctx context.Context) (net.Conn, error) {
	reply, err := c.BeginFrame(ctx, &wire.Frame{Type: wire.FrameTicket}).Wait(ctx)
	if err != nil {
		return nil, err
	}
	return stream.Open(ctx, c.payload, reply.Body, c.pin)
}

// Send implements transport.Streamer.
func (c *Conn) Send(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error {
	return c.moved(ctx, c.streams.Send(ctx, grant, offset, pieces))
}

// Receive implements transport.Streamer.
func (c *Conn) Receive(ctx context.Context, grant transport.Grant, pieces [][]byte) error {
	return c.moved(ctx, c.streams.Receive(ctx, grant, pieces))
}

// ReceiveFrom is Receive from an offset of the granted bytes on.
func (c *Conn) ReceiveFrom(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error {
	return c.moved(ctx, c.streams.ReceiveFrom(ctx, grant, offset, pieces))
}

// moved words the end of a transfer.
func (c *Conn) moved(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return tqerr.New(tqerr.CodeOf(ctx.Err()), "the payload did not get through to %s in time", c.address)
	}
	select {
	case <-c.Done():
		return c.Why()
	default:
		return err
	}
}

func (c *Conn) lifeline() net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.lifeline
}

// Resumed implements transport.Streamer.
func (c *Conn) Resumed() bool { return c.resumed }

// Silent reports that the connection is gone because nothing came back from the server's host for some seconds.
func (c *Conn) Silent() bool { return c.silent.Load() }

// Life names the peer's presence at the server, for Dial.
func (c *Conn) Life() uint64 { return c.life }

// Close implements transport.Conn. Calls that wait fail with Unavailable.
func (c *Conn) Close() error {
	select {
	case <-c.Done(): // the life of a lost one goes on, on another connection
	default:
		lifeline := c.lifeline()
		_ = lifeline.SetWriteDeadline(time.Now().Add(c.limits.greeting))
		_, _ = lifeline.Write([]byte{goodbye})
	}
	c.fail(nil)
	c.wait()
	return nil
}

// Descriptors lists the descriptors of the connection, which a forked child must close.
func (c *Conn) Descriptors() []int {
	out := append(descriptors(c.streams.Sockets()), descriptors(socketOf(c.lifeline()))...)
	return append(out, socketsAt(func(_, peer string) bool { return peer == strconv.Itoa(c.port) })...)
}
