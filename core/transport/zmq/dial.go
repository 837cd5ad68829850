//go:build zmq

package zmq

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"transferqueue/core/guard"
	"transferqueue/core/internal/machine"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/internal/calls"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// Dial connects to the server at tcp://HOST:PORT as the given peer. life is that of an earlier connection of the peer to
// the session, 0 for none; Resumed then says whether the server still knew it. A server that is not there, or is not one,
// is Unavailable; a wrong token is InvalidArgument; another protocol is VersionMismatch. It gives up when ctx ends, or after
// ten seconds without an answer.
func Dial(ctx context.Context, address string, given Credentials, peerID, life uint64) (*Conn, error) {
	return dial(ctx, address, given, peerID, life, defaultLimits)
}

func dial(ctx context.Context, address string, given Credentials, peerID, life uint64, l limits) (*Conn, error) {
	started := time.Now()
	if err := given.check(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, l.greeting)
	defer cancel()
	c := newClient(address, peerID, l)
	c.curve = given.curve()
	var err error
	if c.host, c.port, err = resolve(ctx, address); err == nil {
		err = c.open(&given)
	}
	if err == nil {
		c.start()
		if err = c.greet(ctx, life); err == nil {
			return c, nil
		}
		c.fail(nil)
		c.wait()
	}
	if c.unfit.Load() {
		err = c.diagnosis(ctx, err)
	}
	if ctx.Err() != nil {
		ended := failure.Ended(ctx, started)
		return nil, tqerr.Wrap(tqerr.CodeOf(ended), ended, "%s", address)
	}
	return nil, err
}

func newClient(address string, peerID uint64, l limits) *Conn {
	c := &Conn{address: address, peerID: peerID, limits: l, welcome: make(chan wire.Frame, 1)}
	c.streams.Dial = c.openStream
	return c
}

var monitors atomic.Uint64

// open makes the sockets and begins to connect. Nobody reads them before start.
func (c *Conn) open(given *Credentials) error {
	zctx, err := clientContext()
	if err != nil {
		return err
	}
	sock, err := zctx.NewSocket(zmq4.DEALER)
	if err != nil {
		return tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	if err := errors.Join(setUp(sock, c.limits), sock.SetHandshakeIvl(2*c.limits.greeting), sock.SetLinger(0), sock.SetReconnectIvl(-1),
		given.atClient(sock)); err != nil {
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
	c.Table = calls.New(c.address, c.link)
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
	case zmq4.EVENT_HANDSHAKE_FAILED_PROTOCOL:
		c.unfit.Store(true)
		c.fail(tqerr.New(tqerr.Unavailable, "the server at %s speaks another protocol", c.address))
	case zmq4.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
		c.unfit.Store(true)
		c.fail(tqerr.New(tqerr.Unavailable, "the server at %s has closed the connection in the middle of its greeting", c.address))
	case zmq4.EVENT_CLOSED:
		c.fail(tqerr.New(tqerr.Unavailable, "no server at %s", c.address))
	case zmq4.EVENT_DISCONNECTED:
		c.fail(tqerr.New(tqerr.Unavailable, "the server at %s has closed the connection", c.address))
	}
}

// greet says hello and opens the lifeline.
func (c *Conn) greet(ctx context.Context, life uint64) error {
	hello := wire.Hello(c.peerID, []byte(machine.ID()))
	hello.Sequence = life
	if err := c.link.Send(hello, false); err != nil {
		return c.cause()
	}
	var welcome wire.Frame
	select {
	case welcome = <-c.welcome:
	case <-c.Done():
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
	if c.curve != (len(admission.Pin) == stream.PinSize) {
		return tqerr.New(tqerr.Corruption, "%s: a fingerprint of %d bytes", c.address, len(admission.Pin))
	}
	c.payload, c.pin = join(c.host, admission.Port), admission.Pin
	lifeline, err := stream.Open(ctx, c.payload, admission.Ticket, c.pin)
	if err != nil {
		return tqerr.Wrap(tqerr.CodeOf(err), err, "%s", c.address)
	}
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
	gone := c.mu.ended
	if !gone {
		c.mu.lifeline = lifeline
	}
	c.mu.Unlock()
	if gone {
		_ = lifeline.Close()
		return c.cause()
	}
	guard.Go("zmq: watch a lifeline", func() {
		var b [1]byte
		_, err := lifeline.Read(b[:])
		var errno syscall.Errno
		c.silent.Store(errors.As(err, &errno) && errno != syscall.ECONNRESET)
		c.fail(err)
	})
	return nil
}

// cause is what ended a connection that never stood.
func (c *Conn) cause() error {
	lost := c.Why()
	if cause := errors.Unwrap(lost); cause != nil {
		return cause
	}
	return lost
}
