package local

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

// Conn is a client's connection to a Server. It implements transport.Conn.
type Conn struct {
	path    string
	secret  []byte
	peerID  uint64
	session uint64
	limits  limits
	sock    *net.UnixConn
	sender  *sender
	done    chan struct{} // closed when the reader has ended
	mu      struct {
		sync.Mutex
		err     error // why the connection is gone
		last    uint64
		pending map[uint64]*waiter
	}
}

var _ transport.Poster = (*Conn)(nil)

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

var waiters = sync.Pool{New: func() any { return &waiter{reply: make(chan *wire.Reply, 1)} }}

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
	c := &Conn{path: path, secret: append([]byte(nil), secret...), peerID: peerID, session: session, limits: l, sock: sock,
		done: make(chan struct{})}
	c.mu.pending = map[uint64]*waiter{}
	if c.sender, err = newSender(sock, l, func(error) { _ = sock.Close() }); err != nil {
		_ = sock.Close()
		return nil, failure.Lost(c.address(), err)
	}
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
		if w := c.take(f.ID); w != nil {
			w.deliver(&wire.Reply{Code: tqerr.Code(f.Op), Body: f.Body, Payload: f.Payload}, nil)
		}
	}
}

// fail ends the connection and all calls, which find Done closed when they end by that.
func (c *Conn) fail(cause error) {
	_ = c.sock.Close()
	if errors.Is(cause, net.ErrClosed) {
		cause = nil // we closed it ourselves
	}
	c.mu.Lock()
	c.mu.err = failure.Lost(c.address(), cause)
	gone, pending := c.mu.err, c.mu.pending
	c.mu.pending = nil
	c.mu.Unlock()
	close(c.done)
	for _, w := range pending {
		w.deliver(nil, gone)
	}
}

// register makes an id for a call.
func (c *Conn) register(w *waiter) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return 0, c.mu.err
	}
	c.mu.last++
	c.mu.pending[c.mu.last] = w
	return c.mu.last, nil
}

// take removes a call, whose waiter then gets nothing more from anybody else.
func (c *Conn) take(id uint64) *waiter {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.mu.pending[id]
	delete(c.mu.pending, id)
	return w
}

// why is the reason for the end of the connection.
func (c *Conn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err == nil {
		return failure.Lost(c.address(), nil)
	}
	return c.mu.err
}

// pending is a call whose frame was sent, unless err says why not or the socket was full.
type pending struct {
	c       *Conn
	w       *waiter
	id      uint64
	started time.Time
	unsent  *wire.Frame
	err     error
}

// Call implements transport.Conn. The request's bytes may be reused when it returns.
func (c *Conn) Call(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	return c.Begin(ctx, req).Wait(ctx)
}

// Begin implements transport.Beginner. The request's bytes may be reused when Wait returns.
func (c *Conn) Begin(ctx context.Context, req *wire.Request) transport.Pending {
	p := &pending{c: c, started: time.Now()}
	if ctx.Err() != nil {
		p.err = failure.Ended(ctx, p.started)
		return p
	}
	p.w = waiters.Get().(*waiter)
	if p.id, p.err = c.register(p.w); p.err != nil {
		p.w = nil
		return p
	}
	f := &wire.Frame{Type: wire.FrameRequest, Op: uint16(req.Op), ID: p.id, Sequence: req.Sequence, Ack: req.Ack,
		Timeout: req.Timeout, Body: req.Body, Payload: req.Payload}
	if err := c.send(f, true); err == errFull {
		p.unsent = f
	} else {
		p.err = err
	}
	return p
}

// Ready implements transport.Pending.
func (p *pending) Ready() bool { return p.err != nil || (p.w != nil && len(p.w.reply) > 0) }

// Wait implements transport.Pending.
func (p *pending) Wait(ctx context.Context) (*wire.Reply, error) {
	c, w := p.c, p.w
	if w == nil {
		return nil, p.err
	}
	defer waiters.Put(w)
	if p.unsent != nil {
		p.err = c.submit(ctx, p.unsent)
	}
	if p.err != nil {
		if c.take(p.id) == nil {
			<-w.reply // the connection ended meanwhile and has told the waiter, who must be empty for the next call
		}
		if ctx.Err() != nil && p.err == ctx.Err() {
			return nil, failure.Ended(ctx, p.started)
		}
		return nil, p.err
	}
	var reply *wire.Reply
	select {
	case reply = <-w.reply:
	case <-ctx.Done():
		if c.take(p.id) != nil {
			_ = c.sender.send(&wire.Frame{Type: wire.FrameCancel, ID: p.id}, false)
			return nil, failure.Ended(ctx, p.started)
		}
		reply = <-w.reply // it won the race
	}
	if reply == nil {
		return nil, c.why()
	}
	if err := reply.Err(); err != nil {
		return nil, err
	}
	return reply, nil
}

// submit hands a frame to the socket. It waits while too much is on its way, until ctx ends or the connection is gone.
func (c *Conn) submit(ctx context.Context, f *wire.Frame) error {
	for {
		err := c.send(f, true)
		if err != errFull {
			return err
		}
		select {
		case <-c.sender.room():
		case <-ctx.Done():
			return ctx.Err()
		case <-c.done:
			return c.why()
		}
	}
}

// send is sender.send with the connection's reason for an error of the socket.
func (c *Conn) send(f *wire.Frame, limited bool) error {
	err := c.sender.send(f, limited)
	if err == nil || hasCode(err) {
		return err
	}
	return c.why()
}

// hasCode tells our errors from plain ones of the socket.
func hasCode(err error) bool {
	var known *tqerr.Error
	return errors.As(err, &known)
}

// Notify implements transport.Conn. The request's bytes may be reused when it returns.
func (c *Conn) Notify(req *wire.Request) error {
	return c.send(&wire.Frame{Type: wire.FrameNotify, Op: uint16(req.Op), Sequence: req.Sequence, Ack: req.Ack,
		Body: req.Body, Payload: req.Payload}, false)
}

// Post implements transport.Poster. What the socket does not take at once is copied, so that nothing overtakes it.
func (c *Conn) Post(req *wire.Request, done func(*wire.Reply, error)) {
	id, err := c.register(&waiter{done: done})
	if err != nil {
		done(nil, err)
		return
	}
	f := &wire.Frame{Type: wire.FrameRequest, Op: uint16(req.Op), ID: id, Sequence: req.Sequence, Ack: req.Ack,
		Timeout: req.Timeout, Body: req.Body, Payload: req.Payload}
	if err := c.send(f, false); err != nil {
		if w := c.take(id); w != nil { // else the end of the connection has told it
			done(nil, err)
		}
	}
}

// Done implements transport.Conn.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close implements transport.Conn. Calls that wait fail with Unavailable.
func (c *Conn) Close() error {
	_ = c.sock.Close()
	<-c.done
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
