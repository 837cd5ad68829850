// Package local connects the processes of one host over a unix socket. Requests and replies are frames of package wire;
// the memory of a server crosses as descriptors of its segments.
//
// A connection begins with a hello that carries the secret of the session and is answered by a welcome. Nothing behind
// the hello is read before the secret matches, and the kernel must say that the other end belongs to the same user, or
// to root. After that the client sends requests, cancels, notifications and segment requests, the server replies in any
// order.
//
// Locks: Server.mu, conn.mu and sender.mu are leaves. None is held while a handler is called.
package local

import (
	"crypto/subtle"
	"errors"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/roster"
	"transferqueue/core/transport/internal/servers"
	"transferqueue/core/wire"
)

// Server listens on a unix socket. Its methods may be called from any goroutine, but not from its handler's Serve.
type Server struct {
	path     string
	secret   []byte
	session  uint64
	handler  transport.Handler
	listener *net.UnixListener
	roster   *roster.Roster
	limits   limits
	stop     chan struct{}
	running  sync.WaitGroup
	mu       struct {
		sync.Mutex
		closed bool
		conns  map[*conn]struct{}
	}
}

// Listen creates the socket with mode 0600 and serves its connections until Close. A socket file that nobody answers at
// is replaced; one that somebody answers at is AlreadyExists, and a file that is no socket is left alone. A path that is
// too long is InvalidArgument.
func Listen(path string, secret []byte, h transport.Handler) (*Server, error) {
	return listen(path, secret, h, defaultLimits)
}

func listen(path string, secret []byte, h transport.Handler, l limits) (*Server, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	if len(secret) == 0 || len(secret) > wire.MaxGreeting {
		return nil, tqerr.New(tqerr.InvalidArgument, "secret of %d bytes, want 1 to %d", len(secret), wire.MaxGreeting)
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, tqerr.New(tqerr.AlreadyExists, "socket %q was taken by another server meanwhile", path)
	}
	if err != nil {
		return nil, tqerr.Wrap(tqerr.IO, err, "socket %q", path)
	}
	// Until here the umask decides who may connect; the secret and the user of the peer are checked all the same.
	if err := os.Chmod(path, 0o600); err != nil {
		_ = listener.Close()
		return nil, tqerr.Wrap(tqerr.IO, err, "socket %q", path)
	}
	s := &Server{path: path, secret: append([]byte(nil), secret...), session: rand.Uint64(), handler: h, listener: listener,
		roster: roster.New(h.Gone), limits: l, stop: make(chan struct{})}
	s.mu.conns = map[*conn]struct{}{}
	s.running.Add(1)
	guard.Go("local: accept connections", s.accept)
	return s, nil
}

// removeStale removes the socket file of a server that has died.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return tqerr.Wrap(tqerr.IO, err, "socket %q", path)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return tqerr.New(tqerr.AlreadyExists, "%q exists and is not a socket", path)
	}
	sock, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err == nil {
		_ = sock.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return tqerr.New(tqerr.AlreadyExists, "socket %q belongs to a server that runs", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return tqerr.Wrap(tqerr.IO, err, "stale socket %q", path)
	}
	return nil
}

// accept takes connections.
func (s *Server) accept() {
	defer s.running.Done()
	servers.Accept(s.listener.AcceptUnix, s.stop, s.start)
}

// start serves a connection on a goroutine of its own.
func (s *Server) start(sock *net.UnixConn) {
	_ = sock.SetWriteBuffer(socketBuffer)
	c, err := newConn(s, sock)
	if err != nil {
		_ = sock.Close()
		return
	}
	s.mu.Lock()
	closed := s.mu.closed
	if !closed {
		s.mu.conns[c] = struct{}{}
		s.running.Add(1)
	}
	s.mu.Unlock()
	if closed {
		_ = sock.Close()
		return
	}
	guard.Go("local: serve a connection", func() {
		defer s.running.Done()
		defer s.forget(c)
		c.run()
	})
}

func (s *Server) forget(c *conn) {
	_ = c.sock.Close()
	s.mu.Lock()
	delete(s.mu.conns, c)
	s.mu.Unlock()
}

// Close stops listening, removes the socket file, ends all connections, and returns when every peer has been reported as
// gone. It may be called twice.
func (s *Server) Close() error {
	s.mu.Lock()
	first := !s.mu.closed
	s.mu.closed = true
	for c := range s.mu.conns {
		_ = c.sock.Close()
	}
	s.mu.Unlock()
	var err error
	if first {
		close(s.stop)
		err = tqerr.Wrap(tqerr.IO, s.listener.Close(), "socket %q", s.path)
	}
	s.running.Wait()
	return err
}

// Descriptors lists the descriptors of the listener and of all connections, which a forked child must close.
func (s *Server) Descriptors() []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil
	}
	out := []int{descriptor(s.listener)}
	for c := range s.mu.conns {
		if fd := descriptor(c.sock); fd >= 0 {
			out = append(out, fd)
		}
	}
	return out
}

// SessionID is a random number of this server, which its welcome tells to clients.
func (s *Server) SessionID() uint64 { return s.session }

// admit checks a hello and the user behind it. The secret comes first: who does not know it learns nothing else.
func (s *Server) admit(hello *wire.Frame, uid uint32) error {
	if hello.Type != wire.FrameHello || subtle.ConstantTimeCompare(hello.Body, s.secret) != 1 {
		return tqerr.New(tqerr.InvalidArgument, "the secret is not that of this session")
	}
	if !mayConnect(uid, ownUser()) {
		return tqerr.New(tqerr.InvalidArgument, "user %d is not the user of this session", uid)
	}
	return wire.CheckVersion(uint64(hello.Op))
}
