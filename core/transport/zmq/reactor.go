//go:build zmq

package zmq

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/internal/calls"
)

// contexts

// maxSockets is far above what a process opens; ZeroMQ's own limit is 1023 sockets.
const maxSockets = 16 << 10

func newContext() (*zmq4.Context, error) {
	ctx, err := zmq4.NewContext()
	if err != nil {
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ context")
	}
	ctx.SetRetryAfterEINTR(true)
	if err := errors.Join(ctx.SetMaxSockets(maxSockets), ctx.SetIpv6(true)); err != nil {
		return nil, errors.Join(tqerr.Wrap(tqerr.Internal, err, "ZeroMQ context"), ctx.Term())
	}
	return ctx, nil
}

// clientContext serves all connections that this process makes; it is never ended.
var clientContext = sync.OnceValues(newContext)

// reactor owns a socket: its goroutine alone sends and receives on it.
type reactor struct {
	sock *zmq4.Socket
	uses uint64 // of sock: the race detector sees nothing of a socket, but two goroutines that write this
	// file is a duplicate of the socket's descriptor, which tells that ZeroMQ has something to say.
	file    *os.File
	raw     syscall.RawConn
	receive func(parts [][]byte) // on the reactor's goroutine
	lost    func(*link, error)   // a message cannot be sent; on the reactor's goroutine
	ending  func()               // before the socket is closed; on the reactor's goroutine
	done    chan struct{}
	mu      struct {
		sync.Mutex
		dirty   []*link // links that may have something to send
		waiting map[*link]struct{}
		closing bool
	}
}

// newReactor takes a socket over, which it closes at its end.
func newReactor(sock *zmq4.Socket) (*reactor, error) {
	fd, err := sock.GetFd()
	if err == nil {
		fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		_ = sock.Close()
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	_ = unix.SetNonblock(fd, true) // it is; the file must know
	r := &reactor{sock: sock, file: os.NewFile(uintptr(fd), "zmq"), done: make(chan struct{}), ending: func() {}}
	r.mu.waiting = map[*link]struct{}{}
	if r.raw, err = r.file.SyscallConn(); err != nil {
		_ = errors.Join(r.file.Close(), sock.Close())
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "ZeroMQ socket")
	}
	return r, nil
}

func (r *reactor) start(name string) { guard.Go(name, r.run) }

// discard closes the socket of a reactor that does not run.
func (r *reactor) discard() error {
	r.uses++
	return errors.Join(r.file.Close(), r.sock.Close())
}

// batch is how many messages are received before those that wait to be sent have their turn.
const batch = 256

func (r *reactor) run() {
	defer close(r.done)
	defer func() {
		r.ending()
		_ = r.discard()
	}()
	for {
		closing := r.flush()
		if closing {
			return
		}
		for range batch {
			r.uses++
			parts, err := r.sock.RecvMessageBytes(zmq4.DONTWAIT)
			if err == nil {
				r.receive(parts)
				continue
			}
			if zmq4.AsErrno(err) != zmq4.Errno(syscall.EAGAIN) {
				return // the context was ended
			}
			r.park()
			break
		}
	}
}

// checkStalled is how often somebody looks for peers that take nothing, while there are any.
const checkStalled = 250 * time.Millisecond

// park waits until the socket has something to say, or wake was called.
func (r *reactor) park() {
	deadline := time.Time{}
	r.mu.Lock()
	if len(r.mu.waiting) > 0 {
		deadline = time.Now().Add(checkStalled)
	}
	r.mu.Unlock()
	_ = r.file.SetReadDeadline(deadline)
	// The descriptor only tells of changes, so the state is looked at whenever the poller is about to wait.
	_ = r.raw.Read(func(uintptr) bool {
		if r.pending() {
			return true
		}
		r.uses++
		events, err := r.sock.GetEvents()
		return err != nil || events&zmq4.POLLIN != 0
	})
}

func (r *reactor) pending() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.dirty) > 0 || r.mu.closing
}

// wake ends park, also one that has not begun.
func (r *reactor) wake() { _ = r.file.SetReadDeadline(time.Unix(1, 0)) }

// stop ends the reactor when it has sent what it may.
func (r *reactor) stop() {
	r.mu.Lock()
	r.mu.closing = true
	r.mu.Unlock()
	r.wake()
}

// flush sends what may be sent, and ends links whose peer takes nothing. It reports that the reactor is to end.
func (r *reactor) flush() (closing bool) {
	type letters struct {
		l        *link
		messages [][]byte
	}
	var out []letters
	var stalled []*link
	r.mu.Lock()
	for _, l := range r.mu.dirty {
		l.dirty = false
		if l.err == nil {
			out = append(out, letters{l, l.takeLocked()})
		}
	}
	r.mu.dirty = r.mu.dirty[:0]
	for l := range r.mu.waiting {
		if time.Since(l.since) > l.limits.stall {
			stalled = append(stalled, l)
		}
	}
	closing = r.mu.closing
	r.mu.Unlock()
	for _, o := range out {
		for _, m := range o.messages {
			if err := r.post(o.l.to, m); err != nil {
				r.lost(o.l, err)
				break
			}
		}
	}
	for _, l := range stalled {
		r.lost(l, calls.ErrFull)
	}
	return closing
}

// post gives a message to ZeroMQ, which refuses one to a peer that is not there.
func (r *reactor) post(to string, message []byte) error {
	r.uses++
	if to != "" {
		if _, err := r.sock.Send(to, zmq4.DONTWAIT|zmq4.SNDMORE); err != nil {
			return err
		}
	}
	_, err := r.sock.SendBytes(message, zmq4.DONTWAIT)
	return err
}
