package stream

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/servers"
)

// Listener takes connections whose first bytes are a ticket of its own. Its methods may be called from any goroutine.
type Listener struct {
	listener *net.TCPListener
	limits   Limits
	identity *Identity // nil: streams are not encrypted
	stop     chan struct{}
	running  sync.WaitGroup
	mu       struct {
		sync.Mutex
		closed  bool
		tickets map[[ticketSize]byte]*ticket
		conns   map[*net.TCPConn]struct{}
	}
}

type ticket struct {
	take    func(net.Conn)
	late    func()
	expires time.Time
	timer   *time.Timer // ends it some time after that
}

// Listen opens a port; 0: any free one. With an identity its streams are encrypted.
func Listen(host string, port int, l Limits, identity *Identity) (*Listener, error) {
	address := net.JoinHostPort(host, strconv.Itoa(port))
	made, err := net.Listen("tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, tqerr.New(tqerr.AlreadyExists, "tcp://%s: the port is taken", address)
	}
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "tcp://%s", address)
	}
	s := &Listener{listener: made.(*net.TCPListener), limits: l, identity: identity, stop: make(chan struct{})}
	s.mu.tickets = map[[ticketSize]byte]*ticket{}
	s.mu.conns = map[*net.TCPConn]struct{}{}
	s.running.Add(1)
	guard.Go("stream: accept connections", s.accept)
	return s, nil
}

// Port is where it listens.
func (s *Listener) Port() int { return s.listener.Addr().(*net.TCPAddr).Port }

// Ticket makes a ticket. Who shows it first and in time has its connection given to take, on a goroutine of its own; the
// connection is closed when take returns. late is called when nobody has.
func (s *Listener) Ticket(take func(net.Conn), late func()) []byte {
	var number [ticketSize]byte
	_, _ = rand.Read(number[:])
	t := &ticket{take: take, late: late, expires: time.Now().Add(s.limits.Greeting)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.mu.closed {
		s.mu.tickets[number] = t
		t.timer = time.AfterFunc(s.limits.Greeting, func() {
			if s.remove(number) != nil {
				late()
			}
		})
	}
	return number[:]
}

// use takes out a ticket that is shown; nil when it was used or is too old. Its timer may be late.
func (s *Listener) use(number [ticketSize]byte) *ticket {
	t := s.remove(number)
	if t != nil && !time.Now().Before(t.expires) {
		t.late()
		return nil
	}
	return t
}

func (s *Listener) remove(number [ticketSize]byte) *ticket {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.mu.tickets[number]
	if t != nil {
		t.timer.Stop()
		delete(s.mu.tickets, number)
	}
	return t
}

// accept takes connections.
func (s *Listener) accept() {
	defer s.running.Done()
	servers.Accept(s.listener.AcceptTCP, s.stop, s.start)
}

func (s *Listener) start(conn *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		_ = conn.Close()
		return
	}
	s.mu.conns[conn] = struct{}{}
	s.running.Add(1)
	guard.Go("stream: serve a connection", func() {
		defer s.running.Done()
		defer s.forget(conn)
		s.greet(conn)
	})
}

func (s *Listener) forget(conn *net.TCPConn) {
	_ = conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.conns, conn)
}

// greet reads the ticket, nothing else, and hands the connection over.
func (s *Listener) greet(accepted *net.TCPConn) {
	prepare(accepted)
	_ = accepted.SetDeadline(time.Now().Add(s.limits.Greeting))
	conn, err := s.identity.accept(accepted)
	if err != nil {
		return
	}
	var greeting [len(magic) + ticketSize]byte
	if _, err := io.ReadFull(conn, greeting[:]); err != nil || string(greeting[:len(magic)]) != magic {
		return
	}
	t := s.use([ticketSize]byte(greeting[len(magic):]))
	if t == nil {
		_ = writeStatus(conn, tqerr.New(tqerr.Unavailable, "the ticket of this stream was used already, or is older than %s", s.limits.Greeting))
		return
	}
	if writeStatus(conn, nil) != nil {
		t.late()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	t.take(conn)
}

// Close stops listening, closes all connections and returns when all have been given back. It may be called twice.
func (s *Listener) Close() error {
	s.mu.Lock()
	first := !s.mu.closed
	s.mu.closed = true
	for _, t := range s.mu.tickets {
		t.timer.Stop()
	}
	clear(s.mu.tickets)
	for conn := range s.mu.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	var err error
	if first {
		close(s.stop)
		err = s.listener.Close()
	}
	s.running.Wait()
	return err
}

// Sockets lists the listener and the connections, for who has to know their descriptors.
func (s *Listener) Sockets() []syscall.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	out := []syscall.Conn{s.listener}
	for conn := range s.mu.conns {
		out = append(out, conn)
	}
	return out
}

// Serve does the transfers of a stream until it ends.
func Serve(conn net.Conn, peer transport.Peer, lender transport.Lender, l Limits) {
	var head [headerSize]byte
	var t transfer
	for {
		if _, err := io.ReadFull(conn, head[:]); err != nil || t.parse(head[:]) != nil {
			return
		}
		if serve(conn, &t, peer, lender, l) != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Time{})
	}
}

// serve does one transfer. A refusal leaves the stream usable; an error ends it. Memory that was written is given back
// before the client hears of it.
func serve(conn net.Conn, t *transfer, peer transport.Peer, lender transport.Lender, l Limits) error {
	grant := transport.Grant{Write: t.kind == kindWrite, ID: t.grant}
	memory, done, refused := lender.Lend(peer, grant, func() { _ = conn.Close() })
	if refused == nil {
		memory, refused = cut(memory, t.offset, t.length)
	} else {
		done = func() {}
	}
	if t.kind == kindRead {
		defer done()
		if refused != nil {
			_ = conn.SetWriteDeadline(time.Now().Add(l.Stall))
			return writeStatus(conn, refused)
		}
		return writeBytes(conn, statusOf(nil), memory, l.Stall)
	}
	var err error
	if refused == nil {
		err = readBytes(conn, memory, l.Stall)
	} else {
		err = skip(conn, t.length, l.Stall)
	}
	done()
	if err != nil && tqerr.CodeOf(err) != tqerr.Corruption {
		return err
	}
	_ = conn.SetWriteDeadline(time.Now().Add(l.Stall))
	if refused == nil {
		refused = err
	}
	return writeStatus(conn, refused)
}

// skip reads what a refused client sends before it reads the refusal.
func skip(conn net.Conn, length uint64, stall time.Duration) error {
	scratch := make([]byte, min(length, pieceSize))
	for ; length > 0; length -= min(length, uint64(len(scratch))) {
		_ = conn.SetReadDeadline(time.Now().Add(stall))
		if _, err := io.ReadFull(conn, scratch[:min(length, uint64(len(scratch)))]); err != nil {
			return err
		}
	}
	var sum uint32
	return binary.Read(conn, binary.LittleEndian, &sum)
}
