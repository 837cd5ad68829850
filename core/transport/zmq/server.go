//go:build zmq

package zmq

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/roster"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// Server listens on a TCP port for requests and on another one for payload. Its methods may be called from any goroutine,
// but not from its handler's Serve.
type Server struct {
	host    string
	port    int
	session uint64
	pin     []byte // of the certificate of the streams; none without CURVE
	limits  limits
	handler transport.Handler
	roster  *roster.Roster
	context *zmq4.Context
	router  *reactor
	gate    *reactor
	streams *stream.Listener
	workers *workers
	mu      struct {
		sync.Mutex
		closed bool
		conns  map[string]*conn  // by routing id
		lives  map[uint64]uint64 // of the peers that are not gone: a number that is another one when they were in between
	}
}

// Listen opens tcp://HOST:PORT for clients that know the token, and a port for payload (0: any free one) on the same host.
// A port that is taken is AlreadyExists.
func Listen(address string, payloadPort int, c Credentials, h transport.Handler) (*Server, error) {
	return listen(address, payloadPort, c, h, defaultLimits)
}

func listen(address string, payloadPort int, c Credentials, h transport.Handler, l limits) (*Server, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	host, port, err := resolve(context.Background(), address)
	if err != nil {
		return nil, err
	}
	s := &Server{host: host, port: port, session: rand.Uint64(), limits: l, handler: h, workers: newWorkers()}
	s.mu.conns, s.mu.lives = map[string]*conn{}, map[uint64]uint64{}
	s.roster = roster.New(s.gone)
	var identity *stream.Identity
	if c.curve() {
		if identity, err = stream.NewIdentity(); err != nil {
			return nil, err
		}
		s.pin = identity.Pin
	}
	if s.streams, err = stream.Listen(host, payloadPort, stream.Limits{Greeting: l.greeting, Stall: l.stall}, identity); err != nil {
		return nil, err
	}
	if s.context, err = newContext(); err == nil {
		err = s.open(&c)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// resolve turns an address into numbers.
func resolve(ctx context.Context, address string) (host string, port int, err error) {
	name, port, err := ParseAddress(address)
	if err != nil {
		return "", 0, err
	}
	found, err := net.DefaultResolver.LookupHost(ctx, name)
	if err != nil {
		return "", 0, tqerr.Wrap(tqerr.Unavailable, err, "address %q", address)
	}
	return found[0], port, nil
}

// open makes the sockets. The gate comes first, so that no connection finds it missing.
func (s *Server) open(c *Credentials) error {
	wanted, protect, err := c.atServer()
	if err != nil {
		return err
	}
	gate, err := s.context.NewSocket(zmq4.REP)
	if err == nil {
		err = gate.Bind("inproc://zeromq.zap.01")
	}
	if err != nil {
		return tqerr.Wrap(tqerr.Internal, err, "ZeroMQ authentication")
	}
	if s.gate, err = newReactor(gate); err != nil {
		return err
	}
	s.gate.receive = func(parts [][]byte) { _, _ = gate.SendMessage(judge(parts, wanted)) }
	s.gate.start("zmq: authenticate")
	router, err := s.context.NewSocket(zmq4.ROUTER)
	if err != nil {
		return tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	// A ROUTER cannot be told to drop a peer that was cut for taking nothing; the kernel does that, and what waits is free.
	if err := errors.Join(protect(router), router.SetZapDomain("tq"), router.SetRouterMandatory(1), setUp(router, s.limits),
		router.SetTcpMaxrt(2*s.limits.stall)); err != nil {
		return errors.Join(tqerr.Wrap(tqerr.Internal, err, "ZeroMQ socket"), router.Close())
	}
	if err := s.bind(router); err != nil {
		return errors.Join(err, router.Close())
	}
	if s.router, err = newReactor(router); err != nil {
		return err
	}
	s.router.receive, s.router.lost = s.receive, s.lost
	s.router.start("zmq: serve")
	return nil
}

func (s *Server) bind(router *zmq4.Socket) error {
	port := "*"
	if s.port != 0 {
		port = strconv.Itoa(s.port)
	}
	err := router.Bind(scheme + net.JoinHostPort(s.host, port))
	if zmq4.AsErrno(err) == zmq4.Errno(syscall.EADDRINUSE) {
		return tqerr.New(tqerr.AlreadyExists, "%s: the port is taken", s.Address())
	}
	if err != nil {
		return tqerr.Wrap(tqerr.IO, err, "%s", s.Address())
	}
	bound, err := router.GetLastEndpoint()
	if err == nil {
		_, s.port, err = ParseAddress(strings.TrimRight(bound, "\x00"))
	}
	return tqerr.Wrap(tqerr.Internal, err, "%s", s.Address())
}

// setUp sets the options that both sides have.
func setUp(sock *zmq4.Socket, l limits) error {
	return errors.Join(
		sock.SetSndhwm(0), sock.SetRcvhwm(0), sock.SetLinger(200*time.Millisecond), sock.SetMaxmsgsize(maxMessage),
		sock.SetHandshakeIvl(l.greeting), sock.SetTcpKeepalive(1), sock.SetTcpKeepaliveIdle(2), sock.SetTcpKeepaliveIntvl(1),
		sock.SetTcpKeepaliveCnt(3),
	)
}

// Address is where the server listens, with the number of its port.
func (s *Server) Address() string { return scheme + join(s.host, s.port) }

// receive handles a message; it runs on the reactor and only sorts.
func (s *Server) receive(parts [][]byte) {
	if len(parts) != 2 {
		return
	}
	to := string(parts[0])
	s.mu.Lock()
	c := s.mu.conns[to]
	s.mu.Unlock()
	var f wire.Frame
	err := wire.ParseFrame(parts[1], &f)
	switch {
	case c == nil && err == nil && f.Type == wire.FrameHello:
		s.welcome(to, &f)
	case c == nil:
		// It has lost its connection, which its lifeline tells, or has never made one.
	case err != nil:
		c.cut()
	default:
		c.receive(f)
	}
}

// welcome answers a hello.
func (s *Server) welcome(to string, hello *wire.Frame) {
	l := &link{r: s.router, to: to, limits: s.limits}
	answer := &wire.Frame{Type: wire.FrameWelcome, ID: s.session, Sequence: wire.Version}
	err := wire.CheckVersion(uint64(hello.Op))
	if err == nil {
		c := newConn(s, l, transport.Peer{ID: hello.ID, Machine: string(hello.Body)}, hello.Sequence)
		s.mu.Lock()
		if !s.mu.closed {
			s.mu.conns[to] = c
		}
		s.mu.Unlock()
		answer.Body, err = wire.Marshal(&wire.Admission{
			Port: s.streams.Port(), Ticket: s.streams.Ticket(c.live, func() { s.forget(c) }), Pin: s.pin,
		})
	}
	if err != nil {
		text := []byte(err.Error())
		answer.Op, answer.Body = uint16(tqerr.CodeOf(err)), text[:min(len(text), wire.MaxGreeting)]
	}
	_ = l.Send(answer, false)
}

// lost ends the connection behind a link that a message cannot be sent on.
func (s *Server) lost(l *link, err error) {
	l.end(err)
	s.mu.Lock()
	c := s.mu.conns[l.to]
	s.mu.Unlock()
	if c != nil && c.link == l {
		c.cut()
	}
}

func (s *Server) forget(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.conns, c.link.to)
}

// lifeOf returns the number of a peer's life and whether it had one before. The caller has joined the roster.
func (s *Server) lifeOf(peer, wanted uint64) (life uint64, resumed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if life = s.mu.lives[peer]; life == 0 {
		life = rand.Uint64() | 1
		s.mu.lives[peer] = life
	}
	return life, life == wanted
}

func (s *Server) gone(peer transport.Peer) {
	s.mu.Lock()
	delete(s.mu.lives, peer.ID)
	s.mu.Unlock()
	s.handler.Gone(peer)
}

// Ticket makes a ticket of a payload stream for somebody who has no connection to this server. The stream moves what lender
// lends; it lives until either side or the server ends it.
func (s *Server) Ticket(lender transport.Lender) wire.UnitTicket {
	ticket := s.streams.Ticket(func(conn net.Conn) {
		stream.Serve(conn, transport.Peer{}, lender, stream.Limits{Greeting: s.limits.greeting, Stall: s.limits.stall})
	}, func() {})
	return wire.UnitTicket{Port: s.streams.Port(), Ticket: ticket, Pin: s.pin}
}

// Close stops listening, ends all connections, and returns when every peer has been reported as gone. It may be called
// twice.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.mu.closed
	s.mu.closed = true
	s.mu.Unlock()
	for _, r := range []*reactor{s.router, s.gate} {
		if r != nil {
			r.stop()
			<-r.done
		}
	}
	err := s.streams.Close()
	s.roster.End()
	if first {
		s.workers.end()
	}
	if first && s.context != nil {
		err = errors.Join(err, s.context.Term())
	}
	return err
}

// Descriptors lists the descriptors of listeners and connections, which a forked child must close.
func (s *Server) Descriptors() []int {
	out := descriptors(s.streams.Sockets())
	return append(out, socketsAt(func(own, _ string) bool { return own == strconv.Itoa(s.port) })...)
}
