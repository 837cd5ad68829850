package local

import (
	"bufio"
	"context"
	"io"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/servers"
	"transferqueue/core/wire"
)

// readBuffer holds the small frames that arrive together.
const readBuffer = 32 << 10

// conn is one connection of a server. Its goroutine reads frames and calls the handler; replies come from anywhere.
type conn struct {
	server *Server
	sock   *net.UnixConn
	sender *sender
	peer   transport.Peer
	calls  *servers.Calls  // since the hello
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
}

func newConn(s *Server, sock *net.UnixConn) (*conn, error) {
	c := &conn{server: s, sock: sock}
	var err error
	c.sender, err = newSender(sock, s.limits, func(error) { _ = sock.Close() })
	if err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// run serves the connection until it ends. Whatever ends it, the client sees the end of its stream.
func (c *conn) run() {
	defer c.cancel()
	if !c.greet() {
		return
	}
	c.server.roster.Join(c.peer)
	defer c.server.roster.Leave(c.peer, 0)
	defer c.end()
	if c.sender.Send(&wire.Frame{Type: wire.FrameWelcome, ID: c.server.session, Sequence: wire.Version}, false) != nil {
		return
	}
	r := bufio.NewReaderSize(c.sock, readBuffer)
	var f wire.Frame
	for wire.ReadFrame(r, &f) == nil && c.serve(&f) {
	}
}

// greet reads the hello and answers a bad one. It reads from the socket itself and no more than a hello can have,
// whatever the frame calls itself.
func (c *conn) greet() bool {
	_ = c.sock.SetReadDeadline(time.Now().Add(c.server.limits.greeting))
	var hello wire.Frame
	if wire.ReadFrame(io.LimitReader(c.sock, wire.HeaderSize+wire.MaxGreeting), &hello) != nil {
		return false
	}
	uid, pid, err := peerOf(c.sock)
	if err == nil {
		err = c.server.admit(&hello, uid)
	}
	if err != nil {
		text := []byte(err.Error())
		_ = c.sender.Send(&wire.Frame{Type: wire.FrameWelcome, Op: uint16(tqerr.CodeOf(err)), Sequence: wire.Version,
			Body: text[:min(len(text), wire.MaxGreeting)]}, false)
		return false
	}
	_ = c.sock.SetReadDeadline(time.Time{})
	c.peer = transport.Peer{ID: hello.ID, PID: pid, Local: true}
	c.calls = servers.NewCalls(c.server.handler, c.peer)
	return true
}

// end cancels what is being served, before the peer is reported as gone.
func (c *conn) end() {
	_ = c.sock.Close()
	c.cancel()
	c.calls.End()
}

// serve handles one frame and reports whether the connection goes on.
func (c *conn) serve(f *wire.Frame) bool {
	switch f.Type {
	case wire.FrameRequest:
		return c.calls.Serve(c.ctx, f, c.reply)
	case wire.FrameNotify:
		c.calls.Notified(c.ctx, f)
		return true
	case wire.FrameCancel:
		c.calls.Cancel(f.ID)
		return true
	case wire.FrameSegment:
		return c.segment(f)
	default:
		return false
	}
}

// reply sends a reply. One beyond the limits of a frame becomes an error reply; a client that does not read its replies loses the
// connection.
func (c *conn) reply(f *wire.Frame) {
	if err := f.Check(); err != nil {
		f = wire.ErrorReply(err).Frame(f.ID)
	}
	if c.sender.Send(f, true) != nil {
		_ = c.sock.Close()
	}
}

// segment answers with a descriptor beside the frame. Clients ask on a connection that they make for it: a descriptor is
// lost when a plain read passes over it, and replies in between would tear the frame.
func (c *conn) segment(f *wire.Frame) bool {
	if !c.calls.Idle() {
		return false
	}
	fd, size, err := c.server.handler.Segment(uint32(f.ID), uint32(f.Sequence))
	answer := wire.Frame{Type: wire.FrameSegment, ID: f.ID, Sequence: f.Sequence, Ack: uint64(size)}
	var rights []byte
	if err == nil {
		defer unix.Close(fd)
		rights = unix.UnixRights(fd)
	} else {
		r := wire.ErrorReply(err)
		answer.Op, answer.Body, answer.Ack = uint16(r.Code), r.Body, 0
	}
	_ = c.sock.SetWriteDeadline(time.Now().Add(c.server.limits.greeting))
	_, _, err = c.sock.WriteMsgUnix(answer.Append(nil), rights, nil)
	return err == nil && c.sock.SetWriteDeadline(time.Time{}) == nil
}
