//go:build zmq

package zmq

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// Conn is a client's connection to a Server. It implements transport.Streamer.
type Conn struct {
	address string // as it was given
	host    string
	port    int
	peerID  uint64
	limits  limits
	life    uint64
	resumed bool
	payload string // HOST:PORT of the streams

	dealer   *reactor
	monitor  *reactor
	link     *link
	lifeline net.Conn
	streams  stream.Pool
	welcome  chan wire.Frame
	taken    taken // on the reactor's goroutine
	done     chan struct{}
	mu       struct {
		sync.Mutex
		err     error // why the connection is gone
		last    uint64
		pending map[uint64]*waiter
	}
}

var _ transport.Streamer = (*Conn)(nil)

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

// Dial connects to the server at tcp://HOST:PORT as the given peer. life is that of an earlier connection of the peer to
// the session, 0 for none; Resumed then says whether the server still knew it. A server that is not there, or is not one,
// is Unavailable; a wrong token is InvalidArgument; another protocol is VersionMismatch. It gives up when ctx ends, or after
// ten seconds without an answer.
func Dial(ctx context.Context, address string, token []byte, peerID, life uint64) (*Conn, error) {
	return dial(ctx, address, token, peerID, life, defaultLimits)
}

func dial(ctx context.Context, address string, token []byte, peerID, life uint64, l limits) (*Conn, error) {
	started := time.Now()
	if err := CheckToken(token); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.greeting)
	defer cancel()
	c := newClient(address, peerID, l)
	var err error
	if c.host, c.port, err = resolve(ctx, address); err == nil {
		err = c.open(token)
	}
	if err == nil {
		c.start()
		err = c.greet(ctx, life)
	}
	if err == nil {
		return c, nil
	}
	c.fail(nil)
	c.wait()
	if ctx.Err() != nil {
		ended := failure.Ended(ctx, started)
		return nil, tqerr.Wrap(tqerr.CodeOf(ended), ended, "%s", address)
	}
	return nil, err
}

func newClient(address string, peerID uint64, l limits) *Conn {
	c := &Conn{address: address, peerID: peerID, limits: l, welcome: make(chan wire.Frame, 1), done: make(chan struct{})}
	c.mu.pending = map[uint64]*waiter{}
	c.streams.Dial = c.openStream
	return c
}

var monitors atomic.Uint64

// open makes the sockets and begins to connect. Nobody reads them before start.
func (c *Conn) open(token []byte) error {
	zctx, err := clientContext()
	if err != nil {
		return err
	}
	sock, err := zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	if err := errors.Join(setUp(sock, c.limits), sock.SetHandshakeIvl(2*c.limits.greeting), sock.SetLinger(0), sock.SetReconnectIvl(-1),
		sock.SetPlainUsername("tq"), sock.SetPlainPassword(string(token))); err != nil {
		return errors.Join(tqerr.Wrap(tqerr.Internal, err, "ZeroMQ socket"), sock.Close())
	}
	monitor, err := watch(zctx, sock)
	if err != nil {
		return errors.Join(err, sock.Close())
	}
	dealer, err := newReactor(sock)
	if err != nil {
		return errors.Join(err, monitor.discard())
	}
	if err := sock.Connect(scheme + join(c.host, c.port)); err != nil {
		return errors.Join(tqerr.Wrap(tqerr.Unavailable, err, "%s", c.address), dealer.discard(), monitor.discard())
	}
	c.dealer, c.monitor, c.link = dealer, monitor, &link{r: dealer, limits: c.limits}
	dealer.receive, monitor.receive = c.receive, c.event
	// An event that nobody reads any more would hold up ZeroMQ's own thread, so the one who watches ends last.
	dealer.ending = func() { _ = sock.Monitor("", 0) }
	dealer.lost = c.unsent
	return nil
}

// watch makes the socket that tells what happens to the connection of another one.
func watch(zctx *zmq4.Context, sock *zmq4.Socket) (*reactor, error) {
	address := fmt.Sprintf("inproc://tq-monitor-%d", monitors.Add(1))
	events := zmq4.EVENT_MONITOR_STOPPED | zmq4.EVENT_CLOSED | zmq4.EVENT_DISCONNECTED | zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL |
		zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq4.EVENT_HANDSHAKE_FAILED_AUTH
	if err := sock.Monitor(address, events); err != nil {
		return nil, tqerr.Wrap(tqerr.Internal, err, "ZeroMQ socket")
	}
	pair, err := zctx.NewSocket(zmq4.PAIR)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	if err := errors.Join(pair.SetLinger(0), pair.Connect(address)); err != nil {
		return nil, errors.Join(tqerr.Wrap(tqerr.Internal, err, "ZeroMQ socket"), pair.Close())
	}
	return newReactor(pair)
}

func (c *Conn) start() {
	c.dealer.start("zmq: receive replies")
	c.monitor.start("zmq: watch a connection")
}

// unsent ends the connection over a message that cannot be sent. ZeroMQ refuses one when the server has hung up; why, the
// monitor tells, to whom it was said before.
func (c *Conn) unsent(l *link, err error) {
	if zmq4.AsErrno(err) != zmq4.Errno(syscall.EAGAIN) {
		c.fail(err)
		return
	}
	l.end(failure.Lost(c.address, nil))
	time.AfterFunc(time.Second, func() { c.fail(tqerr.New(tqerr.Unavailable, "the server at %s has closed the connection", c.address)) })
}

// event hears what happens to the connection. Nothing connects it again: who needs another one dials.
func (c *Conn) event(parts [][]byte) {
	if len(parts) == 0 || len(parts[0]) < 2 {
		return
	}
	switch zmq4.Event(binary.NativeEndian.Uint16(parts[0])) {
	case zmq4.EVENT_MONITOR_STOPPED:
		c.monitor.stop()
	case zmq4.EVENT_HANDSHAKE_FAILED_AUTH:
		c.fail(tqerr.New(tqerr.InvalidArgument, "the token is not that of the session at %s", c.address))
	case zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
		c.fail(tqerr.New(tqerr.Unavailable, "the server at %s speaks another protocol", c.address))
	case zmq4.EVENT_CLOSED:
		c.fail(tqerr.New(tqerr.Unavailable, "no server at %s", c.address))
	case zmq4.EVENT_DISCONNECTED:
		c.fail(tqerr.New(tqerr.Unavailable, "the server at %s has closed the connection", c.address))
	}
}

// greet says hello and opens the lifeline.
func (c *Conn) greet(ctx context.Context, life uint64) error {
	hello := wire.Hello(c.peerID, nil)
	hello.Sequence = life
	if err := c.link.send(hello, false); err != nil {
		return c.cause()
	}
	var welcome wire.Frame
	select {
	case welcome = <-c.welcome:
	case <-c.done:
		return c.cause()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := wire.CheckVersion(welcome.Sequence); err != nil {
		return tqerr.Wrap(tqerr.VersionMismatch, err, "%s", c.address)
	}
	if code := tqerr.Code(welcome.Op); code != tqerr.OK {
		return tqerr.New(code, "%s: %s", c.address, welcome.Body)
	}
	var admission wire.Admission
	if err := wire.Unmarshal(welcome.Body, &admission); err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "%s", c.address)
	}
	c.payload = join(c.host, admission.Port)
	lifeline, err := stream.Open(ctx, c.payload, admission.Ticket)
	if err != nil {
		return tqerr.Wrap(tqerr.CodeOf(err), err, "%s", c.address)
	}
	probe(lifeline)
	return c.revive(ctx, lifeline)
}

func alive(life uint64, resumed bool) []byte {
	b := append(make([]byte, 0, aliveSize), 0)
	if resumed {
		b[0] = 1
	}
	return binary.LittleEndian.AppendUint64(b, life)
}

// revive waits until the server has taken the lifeline, and then watches it.
func (c *Conn) revive(ctx context.Context, lifeline net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = lifeline.SetDeadline(time.Unix(1, 0)) })
	var answer [aliveSize]byte
	_, err := io.ReadFull(lifeline, answer[:])
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = lifeline.Close()
		return tqerr.Wrap(tqerr.Unavailable, err, "the server at %s has closed the connection", c.address)
	}
	c.resumed, c.life = answer[0] == 1, binary.LittleEndian.Uint64(answer[1:])
	c.mu.Lock()
	gone := c.mu.err != nil
	if !gone {
		c.lifeline = lifeline
	}
	c.mu.Unlock()
	if gone {
		_ = lifeline.Close()
		return c.cause()
	}
	guard.Go("zmq: watch a lifeline", func() {
		var b [1]byte
		_, err := lifeline.Read(b[:])
		c.fail(err)
	})
	return nil
}

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
		if w := c.take(f.ID); w != nil {
			w.deliver(&wire.Reply{Code: tqerr.Code(f.Op), Body: f.Body, Payload: f.Payload}, nil)
		}
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
	c.mu.Lock()
	if c.mu.err != nil {
		c.mu.Unlock()
		return
	}
	c.mu.err = failure.Lost(c.address, cause)
	lost, pending, lifeline := c.mu.err, c.mu.pending, c.lifeline
	c.mu.pending = nil
	close(c.done) // before anybody sees the error
	c.mu.Unlock()
	if lifeline != nil {
		_ = lifeline.Close()
	}
	c.streams.Close()
	if c.dealer != nil {
		c.dealer.stop()
	}
	if c.link != nil {
		c.link.end(lost)
	}
	for _, w := range pending {
		w.deliver(nil, lost)
	}
}

// wait returns when the sockets are closed.
func (c *Conn) wait() {
	for _, r := range []*reactor{c.dealer, c.monitor} {
		if r != nil {
			<-r.done
		}
	}
}

// why is the reason for the end of the connection.
func (c *Conn) why() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err == nil {
		return failure.Lost(c.address, nil)
	}
	return c.mu.err
}

// cause is what ended a connection that never stood.
func (c *Conn) cause() error {
	lost := c.why()
	if cause := errors.Unwrap(lost); cause != nil {
		return cause
	}
	return lost
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

// pending is a call whose frame was sent, unless err says why not or too much is on its way.
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
	return c.begin(ctx, &wire.Frame{Type: wire.FrameRequest, Op: uint16(req.Op), Sequence: req.Sequence, Ack: req.Ack,
		Timeout: req.Timeout, Body: req.Body, Payload: req.Payload})
}

func (c *Conn) begin(ctx context.Context, f *wire.Frame) *pending {
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
	f.ID = p.id
	if err := c.link.send(f, true); err == error(errFull) {
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
			_ = c.link.send(&wire.Frame{Type: wire.FrameCancel, ID: p.id}, false)
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

// submit waits while too much is on its way, until ctx ends or the connection is gone.
func (c *Conn) submit(ctx context.Context, f *wire.Frame) error {
	for {
		err := c.link.send(f, true)
		if err != error(errFull) {
			return err
		}
		select {
		case <-c.link.wait():
		case <-ctx.Done():
			return ctx.Err()
		case <-c.done:
			return c.why()
		}
	}
}

// Notify implements transport.Conn. The request's bytes may be reused when it returns.
func (c *Conn) Notify(req *wire.Request) error {
	return c.link.send(&wire.Frame{Type: wire.FrameNotify, Op: uint16(req.Op), Sequence: req.Sequence, Ack: req.Ack,
		Body: req.Body, Payload: req.Payload}, false)
}

// Post sends a request on the caller's goroutine and does not wait: it arrives behind all that were posted before, however
// many wait. It cannot be called off. done is called once with what Call would return, perhaps before Post returns, and must
// not block.
func (c *Conn) Post(req *wire.Request, done func(*wire.Reply, error)) {
	id, err := c.register(&waiter{done: done})
	if err != nil {
		done(nil, err)
		return
	}
	err = c.link.send(&wire.Frame{Type: wire.FrameRequest, Op: uint16(req.Op), ID: id, Sequence: req.Sequence, Ack: req.Ack,
		Timeout: req.Timeout, Body: req.Body, Payload: req.Payload}, false)
	if err != nil && c.take(id) != nil { // else the end of the connection has told it
		done(nil, err)
	}
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
	reply, err := c.begin(ctx, &wire.Frame{Type: wire.FrameTicket}).Wait(ctx)
	if err != nil {
		return nil, err
	}
	return stream.Open(ctx, c.payload, reply.Body)
}

// Send implements transport.Streamer.
func (c *Conn) Send(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error {
	return c.moved(ctx, c.streams.Send(ctx, grant, offset, pieces))
}

// Receive implements transport.Streamer.
func (c *Conn) Receive(ctx context.Context, grant transport.Grant, pieces [][]byte) error {
	return c.moved(ctx, c.streams.Receive(ctx, grant, pieces))
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
	case <-c.done:
		return c.why()
	default:
		return err
	}
}

// Resumed implements transport.Streamer.
func (c *Conn) Resumed() bool { return c.resumed }

// Life names the peer's presence at the server, for Dial.
func (c *Conn) Life() uint64 { return c.life }

// Done implements transport.Conn.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close implements transport.Conn. Calls that wait fail with Unavailable.
func (c *Conn) Close() error {
	c.mu.Lock()
	lost := c.mu.err != nil
	c.mu.Unlock()
	if !lost { // the life of a lost one goes on, on another connection
		_ = c.lifeline.SetWriteDeadline(time.Now().Add(c.limits.greeting))
		_, _ = c.lifeline.Write([]byte{goodbye})
	}
	c.fail(nil)
	c.wait()
	return nil
}

// Descriptors lists the descriptors of the connection, which a forked child must close.
func (c *Conn) Descriptors() []int {
	out := descriptors(c.streams.Sockets())
	out = append(out, descriptors(socketOf(c.lifeline))...)
	return append(out, socketsAt(func(_, peer string) bool { return peer == strconv.Itoa(c.port) })...)
}
