package local

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/transport/internal/calls"
	"transferqueue/core/wire"
)

// limits bound what a peer that does not read can cost.
type limits struct {
	// queued is how many bytes may wait for a peer. One frame may exceed it when nothing else waits.
	queued int
	// write is how long a peer may take no byte at all while some wait for it.
	write time.Duration
	// greeting is how long a peer may take to prove that it knows the secret, and a server to answer that.
	greeting time.Duration
}

var defaultLimits = limits{queued: 64 << 20, write: 30 * time.Second, greeting: 10 * time.Second}

const (
	// pieceSize is how much is written under one write deadline.
	pieceSize = 1 << 20
	// chunkSize is the least memory that is taken for frames that wait, so that small ones share it.
	chunkSize = 64 << 10
)

// sender writes frames to a socket and never blocks: what the socket does not take at once is copied and written by a
// goroutine of its own, which exists only while something waits. So whoever replies writes itself, without a hop, and a
// peer that does not read holds up nobody.
type sender struct {
	sock   *net.UnixConn
	raw    syscall.RawConn
	limits limits
	// lost is called once when the socket fails; without a lock held.
	lost func(error)
	mu   struct {
		sync.Mutex
		err      error
		flushing bool
		queue    [][]byte
		queued   int
		// room is closed when something was written; nil while nobody waits for that.
		room chan struct{}

		// Arguments and results of attempt, which is made once because a closure for each write is garbage.
		small []byte
		parts net.Buffers
		sent  int
		fail  error
	}
	attempt func(fd uintptr) bool
}

func newSender(sock *net.UnixConn, l limits, lost func(error)) (*sender, error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &sender{sock: sock, raw: raw, limits: l, lost: lost}
	s.attempt = s.tryLocked
	return s, nil
}

// tryLocked offers the bytes to the socket once. It always reports that it is done, for the caller must not wait.
func (s *sender) tryLocked(fd uintptr) bool {
	const flags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	for {
		if s.mu.parts == nil {
			s.mu.sent, s.mu.fail = unix.SendmsgN(int(fd), s.mu.small, nil, nil, flags)
		} else {
			s.mu.sent, s.mu.fail = unix.SendmsgBuffers(int(fd), s.mu.parts, nil, nil, flags)
		}
		if !errors.Is(s.mu.fail, unix.EINTR) {
			return true
		}
	}
}

// Send implements calls.Sender: it writes a frame or queues it.
func (s *sender) Send(f *wire.Frame, limited bool) error {
	if err := f.Check(); err != nil {
		return err
	}
	f.Due = f.Type == wire.FrameRequest
	s.mu.Lock()
	if s.mu.err != nil || s.mu.flushing {
		defer s.mu.Unlock()
		return s.queueLocked(f, limited)
	}
	err := s.writeLocked(f)
	s.mu.Unlock()
	if err != nil {
		s.lost(err)
	}
	return err
}

func (s *sender) queueLocked(f *wire.Frame, limited bool) error {
	if s.mu.err != nil {
		return s.mu.err
	}
	if limited && s.mu.queued > 0 && s.mu.queued+f.Size() > s.limits.queued {
		return calls.ErrFull
	}
	s.keepLocked(f.AppendHeader(nil))
	s.keepLocked(f.Body)
	s.keepLocked(f.Payload)
	return nil
}

// keepLocked copies bytes to the end of the queue.
func (s *sender) keepLocked(p []byte) {
	s.mu.queued += len(p)
	if last := len(s.mu.queue) - 1; last >= 0 && cap(s.mu.queue[last])-len(s.mu.queue[last]) >= len(p) {
		s.mu.queue[last] = append(s.mu.queue[last], p...)
		return
	}
	s.mu.queue = append(s.mu.queue, append(make([]byte, 0, max(len(p), chunkSize)), p...))
}

// writeLocked offers a frame to the socket and leaves the rest to flush.
func (s *sender) writeLocked(f *wire.Frame) error {
	s.mu.parts = nil
	if f.Small() {
		s.mu.small = f.Append(s.mu.small[:0])
	} else {
		s.mu.parts = f.Buffers()
	}
	if err := s.raw.Write(s.attempt); err != nil {
		s.mu.err = err
		return err
	}
	if errors.Is(s.mu.fail, unix.EAGAIN) {
		s.mu.sent, s.mu.fail = 0, nil
	}
	if s.mu.fail != nil {
		s.mu.err = s.mu.fail
		return s.mu.fail
	}
	if s.mu.sent < f.Size() {
		s.restLocked(s.mu.sent)
		s.mu.flushing = true
		guard.Go("local: write to a slow peer", s.flush)
	}
	s.mu.parts = nil
	return nil
}

// restLocked queues what lies behind the first sent bytes of the frame that was offered.
func (s *sender) restLocked(sent int) {
	parts := s.mu.parts
	if parts == nil {
		parts = net.Buffers{s.mu.small}
	}
	for _, p := range parts {
		skip := min(sent, len(p))
		sent -= skip
		if skip < len(p) {
			s.keepLocked(p[skip:])
		}
	}
}

// flush writes what waits until nothing does.
func (s *sender) flush() {
	for {
		s.mu.Lock()
		if len(s.mu.queue) == 0 {
			_ = s.sock.SetWriteDeadline(time.Time{})
			s.mu.flushing = false
			s.mu.queue = nil
			s.mu.Unlock()
			return
		}
		chunk := s.mu.queue[0]
		s.mu.queue[0] = nil
		s.mu.queue = s.mu.queue[1:]
		s.mu.Unlock()
		if err := s.flushChunk(chunk); err != nil {
			s.mu.Lock()
			s.mu.err, s.mu.queue, s.mu.queued = err, nil, 0
			s.signalLocked()
			s.mu.Unlock()
			s.lost(err)
			return
		}
	}
}

func (s *sender) flushChunk(chunk []byte) error {
	for len(chunk) > 0 {
		if err := s.sock.SetWriteDeadline(time.Now().Add(s.limits.write)); err != nil {
			return err
		}
		n, err := s.sock.Write(chunk[:min(len(chunk), pieceSize)])
		if err != nil {
			return err
		}
		chunk = chunk[n:]
		s.mu.Lock()
		s.mu.queued -= n
		s.signalLocked()
		s.mu.Unlock()
	}
	return nil
}

func (s *sender) signalLocked() {
	if s.mu.room != nil {
		close(s.mu.room)
		s.mu.room = nil
	}
}

// Room implements calls.Sender.
func (s *sender) Room() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.room == nil {
		s.mu.room = make(chan struct{})
	}
	room := s.mu.room
	if s.mu.queued == 0 || s.mu.err != nil {
		s.signalLocked()
	}
	return room
}
