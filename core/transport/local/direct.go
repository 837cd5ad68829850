package local

import (
	"bufio"
	"context"
	"io"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

// Direct is a connection for one request at a time, without a goroutine: whoever waits for the reply reads it from the
// socket himself. A reply then wakes one thread, where a Conn needs two in turn: the one that reads, and the one that waits.
type Direct struct {
	path   string
	fd     int // the socket in blocking mode, unknown to Go's poller, which each reply would wake a thread of
	reader *bufio.Reader
	last   uint64
	mu     struct {
		sync.Mutex
		broken bool // cannot be used again
		closed bool
	}
}

// directBuffer holds a small reply, so that it takes one read.
const directBuffer = 80 << 10

// DialDirect connects to the server at path as the given peer, like Dial.
func DialDirect(ctx context.Context, path string, secret []byte, peerID uint64) (*Direct, error) {
	sock, _, err := connect(ctx, path, secret, peerID, defaultLimits)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sock.Close() }()
	fd, err := blocking(sock)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.ResourceExhausted, err, "socket %q", path)
	}
	d := &Direct{path: path, fd: fd}
	d.reader = bufio.NewReaderSize(socketReader(d.fd), directBuffer)
	return d, nil
}

// FD is the socket, readable when the reply is there or the connection is gone.
func (d *Direct) FD() int { return d.fd }

// Broken reports that the connection cannot be used again.
func (d *Direct) Broken() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.broken
}

// end makes a read that waits fail. It may be called at any time from any goroutine.
func (d *Direct) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.broken = true; !d.mu.closed {
		_ = unix.Shutdown(d.fd, unix.SHUT_RDWR)
	}
}

// Close gives the socket back. No request may be in flight. It may be called twice.
func (d *Direct) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil
	}
	d.mu.closed = true
	return unix.Close(d.fd)
}

type directPending struct {
	d       *Direct
	started time.Time
	stop    func() bool
	err     error
}

// Begin implements transport.Beginner. The end of ctx breaks the connection, and so ends the request at the server too.
func (d *Direct) Begin(ctx context.Context, req *wire.Request) transport.Pending {
	p := &directPending{d: d, started: time.Now(), stop: context.AfterFunc(ctx, d.end)}
	d.last++
	f := req.Frame(wire.FrameRequest)
	f.ID, f.Due = d.last, true
	if err := wire.WriteFrame(socketWriter(d.fd), f); err != nil {
		p.err = d.lost(ctx, p.started, err)
	}
	return p
}

// lost is the error of a request whose connection ended.
func (d *Direct) lost(ctx context.Context, started time.Time, cause error) error {
	d.end()
	if ctx.Err() != nil {
		return failure.Ended(ctx, started)
	}
	if failure.Coded(cause) && tqerr.CodeOf(cause) != tqerr.Corruption {
		return cause
	}
	return failure.Lost(d.path, cause)
}

// Ready implements transport.Pending.
func (p *directPending) Ready() bool {
	if p.err != nil {
		return true
	}
	fds := []unix.PollFd{{Fd: int32(p.d.fd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return n > 0 || (err != nil && err != unix.EINTR)
}

// Wait implements transport.Pending.
func (p *directPending) Wait(ctx context.Context) (*wire.Reply, error) {
	d := p.d
	defer func() {
		if !p.stop() {
			d.end() // has begun elsewhere: nobody may be given the connection before it shows as broken
		}
	}()
	if p.err != nil {
		return nil, p.err
	}
	var f wire.Frame
	err := wire.ReadFrame(d.reader, &f)
	if err == nil && (f.Type != wire.FrameReply || f.ID != d.last) {
		err = tqerr.New(tqerr.Corruption, "frame of type %d for request %d, want the reply to %d", f.Type, f.ID, d.last)
	}
	if err != nil {
		return nil, d.lost(ctx, p.started, err)
	}
	reply := f.Reply()
	if err := reply.Err(); err != nil {
		return nil, err
	}
	return reply, nil
}

// socketReader and socketWriter are a blocking socket without Go's poller between.
type (
	socketReader int
	socketWriter int
)

func (fd socketReader) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), b)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (fd socketWriter) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := unix.SendmsgN(int(fd), b[done:], nil, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}
