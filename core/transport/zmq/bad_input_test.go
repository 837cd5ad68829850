//go:build zmq

package zmq

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// serving is a handler out of functions; without one it echoes.
type serving struct {
	serve func(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply))
	gone  func(transport.Peer)
}

func (s serving) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	if s.serve != nil {
		s.serve(ctx, peer, req, reply)
		return
	}
	reply(&wire.Reply{Body: req.Body})
}

func (s serving) Gone(peer transport.Peer) {
	if s.gone != nil {
		s.gone(peer)
	}
}

func (serving) Segment(uint32, uint32) (int, int64, error) { panic("remote clients do not ask") }

func (serving) Lend(transport.Peer, transport.Grant, func()) ([][]byte, func(), error) {
	return [][]byte{make([]byte, 1<<20)}, func() {}, nil
}

func requireAlive(t *testing.T, c *Conn) {
	t.Helper()
	reply, err := c.Call(t.Context(), &wire.Request{Body: []byte("alive")})
	require.NoError(t, err)
	require.Equal(t, "alive", string(reply.Body))
}

func TestNobodyGetsInWithoutTheToken(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	healthy := dialed(t, s, 1)
	for name, wrong := range map[string]string{
		"another": "another-token-of-length", "longer": string(token.Token) + "x", "shorter": string(token.Token[:len(token.Token)-1]),
	} {
		_, err := Dial(t.Context(), s.Address(), Credentials{Token: []byte(wrong)}, 2, 0)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, "the token is not that of the session at "+s.Address())
	}
	for _, bad := range []string{"", "short", strings.Repeat("x", 256), "with a space in between", "with\x00a zero byte"} {
		_, err := Dial(t.Context(), s.Address(), Credentials{Token: []byte(bad)}, 2, 0)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		_, err = listen("tcp://127.0.0.1:0", 0, Credentials{Token: []byte(bad)}, serving{}, defaultLimits)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	}
	requireAlive(t, healthy)
}

// rawSocket is a DEALER that says what it likes.
func rawSocket(t *testing.T, s *Server, configure func(*zmq4.Socket)) *zmq4.Socket {
	zctx, err := clientContext()
	require.NoError(t, err)
	sock, err := zctx.NewSocket(zmq4.DEALER)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sock.Close()) })
	require.NoError(t, sock.SetLinger(0))
	require.NoError(t, sock.SetRcvtimeo(10*time.Second))
	configure(sock)
	require.NoError(t, sock.Connect(s.Address()))
	return sock
}

func authenticated(sock *zmq4.Socket) {
	_ = sock.SetPlainUsername("tq")
	_ = sock.SetPlainPassword(string(token.Token))
}

func TestNothingIsReadBeforeAuthentication(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{serve: func(context.Context, transport.Peer, *wire.Request, func(*wire.Reply)) {
		t.Error("a request was served")
	}}, defaultLimits)
	for name, configure := range map[string]func(*zmq4.Socket){
		"no mechanism": func(*zmq4.Socket) {},
		"wrong token": func(sock *zmq4.Socket) {
			_ = sock.SetPlainUsername("tq")
			_ = sock.SetPlainPassword("not-the-token-of-this-session")
		},
	} {
		sock := rawSocket(t, s, configure)
		require.NoError(t, sock.SetRcvtimeo(200*time.Millisecond))
		_, err := sock.SendBytes(wire.Hello(4, nil).Append(nil), 0)
		require.NoError(t, err)
		_, err = sock.SendBytes((&wire.Frame{Type: wire.FrameRequest, ID: 1, Op: uint16(wire.OpList)}).Append(nil), 0)
		require.NoError(t, err)
		_, err = sock.RecvBytes(0)
		require.Error(t, err, name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Empty(t, s.mu.conns)
}

// welcomed is a raw socket that has said hello.
func welcomed(t *testing.T, s *Server) (*zmq4.Socket, wire.Admission) {
	sock := rawSocket(t, s, authenticated)
	_, err := sock.SendBytes(wire.Hello(5, nil).Append(nil), 0)
	require.NoError(t, err)
	raw, err := sock.RecvBytes(0)
	require.NoError(t, err)
	var f wire.Frame
	require.NoError(t, wire.ParseFrame(raw, &f))
	require.Equal(t, wire.FrameWelcome, f.Type)
	require.Zero(t, f.Op)
	var admission wire.Admission
	require.NoError(t, wire.Unmarshal(f.Body, &admission))
	return sock, admission
}

// admitted has its lifeline too.
func admitted(t *testing.T, s *Server) (*zmq4.Socket, net.Conn) {
	sock, admission := welcomed(t, s)
	lifeline, err := stream.Open(t.Context(), join("127.0.0.1", admission.Port), admission.Ticket, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = lifeline.Close() })
	_, err = io.ReadFull(lifeline, make([]byte, aliveSize))
	require.NoError(t, err)
	return sock, lifeline
}

// requireCut waits for the end of a lifeline.
func requireCut(t *testing.T, lifeline net.Conn) {
	t.Helper()
	require.NoError(t, lifeline.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := lifeline.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	var timeout net.Error
	require.False(t, asTimeout(err, &timeout), "the connection goes on")
}

func asTimeout(err error, as *net.Error) bool {
	e, ok := err.(net.Error)
	*as = e
	return ok && e.Timeout()
}

func TestMessagesThatMakeNoSense(t *testing.T) {
	request := (&wire.Frame{Type: wire.FrameRequest, ID: 1}).Append(nil)
	lying := append([]byte(nil), request...)
	binary.LittleEndian.PutUint32(lying[36:], wire.MaxBody-1)
	absurd := append([]byte(nil), request...)
	binary.LittleEndian.PutUint64(absurd[40:], 1<<63)
	for name, message := range map[string][]byte{
		"empty": {}, "short": request[:20], "garbage": []byte(strings.Repeat("garbage!", 8)), "length that lies": lying, "absurd length": absurd,
		"more than said": append(append([]byte(nil), request...), 1),
		"of a server":    (&wire.Frame{Type: wire.FrameWelcome}).Append(nil),
		"second hello":   wire.Hello(5, nil).Append(nil),
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			s := run(t, serving{}, defaultLimits)
			healthy := dialed(t, s, 1)
			sock, lifeline := admitted(t, s)
			_, err := sock.SendBytes(message, 0)
			require.NoError(t, err)
			requireCut(t, lifeline)
			requireAlive(t, healthy)
		})
	}
}

// A frame of ZMTP that announces more than any message has, before and after the handshake.
func TestAbsurdLengthsOnTheSocket(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	healthy := dialed(t, s, 1)
	greeting := append([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0}, make([]byte, 52)...)
	copy(greeting[12:], "PLAIN")
	for _, head := range [][]byte{{6}, {2}} { // a command, a message
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.Address(), scheme))
		require.NoError(t, err)
		_, err = conn.Write(binary.BigEndian.AppendUint64(append(append([]byte(nil), greeting...), head...), 1<<62))
		require.NoError(t, err)
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
		_, err = io.Copy(io.Discard, conn)
		require.NoError(t, err, "the server closes the connection")
		require.NoError(t, conn.Close())
	}
	requireAlive(t, healthy)
}

func TestANewerClient(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	sock := rawSocket(t, s, authenticated)
	hello := wire.Hello(5, nil)
	hello.Op = wire.Version + 1
	_, err := sock.SendBytes(hello.Append(nil), 0)
	require.NoError(t, err)
	raw, err := sock.RecvBytes(0)
	require.NoError(t, err)
	var f wire.Frame
	require.NoError(t, wire.ParseFrame(raw, &f))
	require.Equal(t, tqerr.VersionMismatch, tqerr.Code(f.Op))
	require.Contains(t, string(f.Body), "version 2")
}

func TestANewerServer(t *testing.T) {
	leaktest.Check(t)
	zctx, err := newContext()
	require.NoError(t, err)
	gate, err := zctx.NewSocket(zmq4.REP)
	require.NoError(t, errors.Join(err, gate.Bind("inproc://zeromq.zap.01")))
	router, err := zctx.NewSocket(zmq4.ROUTER)
	require.NoError(t, errors.Join(err, router.SetPlainServer(1), router.SetZapDomain("tq"), router.Bind("tcp://127.0.0.1:*")))
	bound, err := router.GetLastEndpoint()
	require.NoError(t, err)
	_, port, err := ParseAddress(strings.TrimRight(bound, "\x00"))
	require.NoError(t, err)
	for _, sock := range []*zmq4.Socket{gate, router} {
		require.NoError(t, errors.Join(sock.SetRcvtimeo(10*time.Second), sock.SetLinger(0)))
	}
	served := make(chan error, 1)
	go func() {
		asked, err := gate.RecvMessageBytes(0)
		if err == nil {
			_, err = gate.SendMessage(judge(asked, asked[zapMechanism:]))
		}
		var hello [][]byte
		if err == nil {
			hello, err = router.RecvMessageBytes(0)
		}
		if err == nil {
			_, err = router.SendMessage(hello[0], (&wire.Frame{Type: wire.FrameWelcome, ID: 1, Sequence: wire.Version + 1}).Append(nil))
		}
		served <- err
	}()
	address := scheme + join("127.0.0.1", port)
	_, err = Dial(t.Context(), address, token, 1, 0)
	require.Equal(t, tqerr.VersionMismatch, tqerr.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, address)
	require.ErrorContains(t, err, "version 2")
	require.NoError(t, errors.Join(<-served, gate.Close(), router.Close(), zctx.Term()))
}

func TestTickets(t *testing.T) {
	leaktest.Check(t)
	l := defaultLimits
	l.greeting = 1500 * time.Millisecond
	s := run(t, serving{}, l)
	c := dialed(t, s, 1)
	reply, err := c.BeginFrame(t.Context(), &wire.Frame{Type: wire.FrameTicket}).Wait(t.Context())
	require.NoError(t, err)
	first, err := stream.Open(t.Context(), c.payload, reply.Body, nil)
	require.NoError(t, err)
	defer first.Close()
	_, err = stream.Open(t.Context(), c.payload, reply.Body, nil)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "tcp://"+c.payload)
	require.ErrorContains(t, err, "was used already")

	reply, err = c.BeginFrame(t.Context(), &wire.Frame{Type: wire.FrameTicket}).Wait(t.Context())
	require.NoError(t, err)
	_, err = stream.Open(t.Context(), c.payload, make([]byte, len(reply.Body)), nil)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "a guess")
	granted := time.Now()
	require.Eventually(t, func() bool { return time.Since(granted) > l.greeting }, 30*time.Second, 10*time.Millisecond)
	_, err = stream.Open(t.Context(), c.payload, reply.Body, nil)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "too late")

	_, admission := welcomed(t, s) // and never shows its ticket
	require.Eventually(t, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.mu.conns) == 1
	}, 30*time.Second, 10*time.Millisecond, "it is forgotten")
	_, err = stream.Open(t.Context(), c.payload, admission.Ticket, nil)
	require.Error(t, err)
	requireAlive(t, c)
}

func TestAddressesOfNoUse(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	_, err := listen(s.Address(), 0, token, serving{}, defaultLimits)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, s.Address()+": the port is taken")
	_, err = listen("tcp://127.0.0.1:0", s.streams.Port(), token, serving{}, defaultLimits)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "tcp://127.0.0.1:"+strconv.Itoa(s.streams.Port()))
	for address, says := range map[string]string{
		"127.0.0.1:5": "does not begin with tcp://", "tcp://127.0.0.1": "has no port", "tcp://127.0.0.1:http2": `port "http2"`,
		"tcp://127.0.0.1:65536": `port "65536"`, "": "does not begin", "ipc://x": "does not begin",
	} {
		_, err := Dial(t.Context(), address, token, 1, 0)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), address)
		require.ErrorContains(t, err, strconv.Quote(address))
		require.ErrorContains(t, err, says)
	}
	_, err = Dial(t.Context(), "tcp://no-such-host.invalid:5000", token, 1, 0)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "no-such-host.invalid")
}

// answering is a TCP server that does one thing with each connection.
func answering(t *testing.T, do func(net.Conn)) (address string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			do(conn)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		<-ended
	})
	return scheme + l.Addr().String()
}

func TestServersThatAreNone(t *testing.T) {
	leaktest.Check(t)
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	closed := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		return scheme + l.Addr().String()
	}
	for name, c := range map[string]struct {
		address string
		says    string
	}{
		"nobody":      {closed(), "no server at"},
		"hangs up":    {answering(t, func(net.Conn) {}), "has closed the connection"},
		"garbage":     {answering(t, func(c net.Conn) { _, _ = c.Write([]byte(strings.Repeat("HTTP/1.1 400 Bad Request\r\n", 9))) }), "the server at"},
		"old greeter": {answering(t, func(c net.Conn) { _, _ = c.Write([]byte{0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 0}) }), "has closed the connection"},
	} {
		began := time.Now()
		_, err := dial(t.Context(), c.address, token, 1, 0, defaultLimits)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%s: %v", name, err)
		require.ErrorContains(t, err, c.address, name)
		require.ErrorContains(t, err, c.says, name)
		require.Less(t, time.Since(began), 5*time.Second)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	l := defaultLimits
	l.greeting = 300 * time.Millisecond
	_, err = dial(t.Context(), scheme+silent.Addr().String(), token, 1, 0, l)
	require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
	require.ErrorContains(t, err, silent.Addr().String())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = dial(ctx, scheme+silent.Addr().String(), token, 1, 0, l)
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
}

// A wrong token is told also when the server hung up before the client got round to say hello.
func TestAHelloThatComesTooLate(t *testing.T) {
	leaktest.Check(t)
	s := run(t, serving{}, defaultLimits)
	c := newClient(s.Address(), 1, defaultLimits)
	var err error
	c.host, c.port, err = resolve(t.Context(), s.Address())
	require.NoError(t, err)
	require.NoError(t, c.open(&Credentials{Token: []byte("not-the-token-of-this-session")}))
	require.Eventually(t, func() bool {
		events, err := c.monitor.sock.GetEvents()
		return err == nil && events&zmq4.POLLIN != 0
	}, 30*time.Second, time.Millisecond, "the reason has arrived, and nobody has read it")
	c.dealer.start("zmq: receive replies")
	said := make(chan error, 1)
	go func() { said <- c.greet(t.Context(), 0) }()
	require.Eventually(t, func() bool {
		c.dealer.mu.Lock()
		defer c.dealer.mu.Unlock()
		return c.link.sent > 0
	}, 30*time.Second, time.Millisecond)
	c.unsent(c.link, zmq4.Errno(syscall.EAGAIN)) // as it is when ZeroMQ has ended the way to the server already
	c.monitor.start("zmq: watch a connection")
	err = <-said
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%v", err)
	require.EqualError(t, err, "the token is not that of the session at "+s.Address())
	c.wait()
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(c.greet(t.Context(), 0)), "nor when it has not sent it yet")
}
