package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/calls"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

// Conn is a client's connection to a Server. It implements transport.Conn.
type Conn struct {
	*calls.Table // ends when the reader has ended
	path         string
	secret       []byte
	peerID       uint64
	session      uint64
	limits       limits
	sock         *net.UnixConn
	sender       *sender
}

var _ transport.Poster = (*Conn)(nil)

// Dial connects to the server at path as the given peer. A server that is not there, or is not one, is Unavailable; a
// wrong secret is InvalidArgument; another protocol is VersionMismatch. It gives up when ctx ends, or after ten seconds
// without an answer.
func Dial(ctx context.Context, path string, secret []byte, peerID uint64) (*Conn, error) {
	return dial(ctx, path, secret, peerID, defaultLimits)
}

func dial(ctx context.Context, path string, secret []byte, peerID uint64, l limits) (*Conn, error) {
	sock, session, err := connect(ctx, path, secret, peerID, l)
	if err != nil {
		return nil, err
	}
	c := &Conn{path: path, secret: append([]byte(nil), secret...), peerID: peerID, session: session, limits: l, sock: sock}
	if c.sender, err = newSender(sock, l, func(error) { _ = sock.Close() }); err != nil {
		_ = sock.Close()
		return nil, failure.Lost(c.address(), err)
	}
	c.Table = calls.New(c.address(), c.sender)
	guard.Go("local: read replies", c.read)
	return c, nil
}

func (c *Conn) address() string { return fmt.Sprintf("%q", c.path) }

// connect makes a socket whose server has welcomed us. Nothing behind the welcome has been read.
func connect(ctx context.Context, path string, secret []byte, peerID uint64, l limits) (*net.UnixConn, uint64, error) {
	if err := checkPath(path); err != nil {
		return nil, 0, err
	}
	started := time.Now()
	ctx, cancel := context.WithTimeout(ctx, l.greeting)
	defer cancel()
	sock, err := open(ctx, path)
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = sock.SetDeadline(time.Unix(1, 0)) })
		var session uint64
		session, err = greet(sock, path, secret, peerID)
		// When stop comes too late, the deadline is set now or in a moment, and the socket is of no use.
		if stop() && err == nil {
			return sock, session, nil
		}
		_ = sock.Close()
	}
	if ctx.Err() != nil {
		ended := failure.Ended(ctx, started)
		return nil, 0, tqerr.Wrap(tqerr.CodeOf(ended), ended, "socket %q", path)
	}
	return nil, 0, err
}

// open connects the socket. A server with too many clients in line makes connect fail at once with EAGAIN, so we
// wait and try again.
func open(ctx context.Context, path string) (*net.UnixConn, error) {
	var dialer net.Dialer
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		sock, err := dialer.DialContext(ctx, "unix", path)
		if err == nil {
			unixSock := sock.(*net.UnixConn)
			_ = unixSock.SetWriteBuffer(socketBuffer)
			return unixSock, nil
		}
		if errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done() // the dialer has read the deadline off it and is a moment ahead
			return nil, ctx.Err()
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return nil, tqerr.Wrap(tqerr.Unavailable, err, "no server at socket %q", path)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// greet sends the hello and reads the welcome. The secret goes only to a server of our own user or of root.
func greet(sock *net.UnixConn, path string, secret []byte, peerID uint64) (session uint64, err error) {
	uid, _, err := peerOf(sock)
	if err == nil && !mayConnect(uid, ownUser()) && ownUser() != 0 {
		return 0, tqerr.New(tqerr.Unavailable, "the server at socket %q belongs to user %d", path, uid)
	}
	if err == nil {
		err = wire.WriteFrame(sock, wire.Hello(peerID, secret))
	}
	var welcome wire.Frame
	if err == nil {
		err = wire.ReadFrame(sock, &welcome)
	}
	switch {
	case err != nil:
		return 0, tqerr.Wrap(tqerr.Unavailable, err, "the server at socket %q gave no answer", path)
	case welcome.Type != wire.FrameWelcome:
		return 0, tqerr.New(tqerr.Corruption, "the server at socket %q speaks another protocol", path)
	}
	if err := wire.CheckVersion(welcome.Sequence); err != nil {
		return 0, tqerr.Wrap(tqerr.VersionMismatch, err, "socket %q", path)
	}
	if code := tqerr.Code(welcome.Op); code != tqerr.OK {
		return 0, tqerr.New(code, "socket %q: %s", path, welcome.Body)
	}
	return welcome.ID, nil
}

// read hands replies to their callers until the connection ends. Replies that nobody waits for are dropped.
func (c *Conn) read() {
	cause := io.ErrUnexpectedEOF
	defer func() { c.fail(cause) }()
	r := bufio.NewReaderSize(c.sock, readBuffer)
	var f wire.Frame
	for {
		if err := wire.ReadFrame(r, &f); err != nil {
			cause = err
			return
		}
		if f.Type != wire.FrameReply {
			cause = tqerr.New(tqerr.Corruption, "frame of type %d from a server", f.Type)
			return
		}
		c.Answer(&f)
	}
}

// fail ends the connection and all calls.
func (c *Conn) fail(cause error) {
	_ = c.sock.Close()
	if errors.Is(cause, net.ErrClosed) {
		cause = nil // we closed it ourselves
	}
	c.End(cause, func(error) {})
}

// Close implements transport.Conn. Calls that wait fail with Unavailable.
func (c *Conn) Close() error {
	_ = c.sock.Close()
	<-c.Done()
	return nil
}

// SessionID is the random number of the server that welcomed this connection: a server that was started again has another.
func (c *Conn) SessionID() uint64 { return c.session }

// Descriptors lists the descriptors of the connection, which a forked child must close.
func (c *Conn) Descriptors() []int {
	if fd := descriptor(c.sock); fd >= 0 {
		return []int{fd}
	}
	return nil
}
