package stream

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
)

const (
	// stripe is how many bytes make another stream worth it; maxStreams bounds them.
	stripe     = 16 << 20
	maxStreams = 4
	// maxIdle streams of a pool wait for the next transfer.
	maxIdle = 8
	// A transfer breaks for good when nothing has arrived after so many attempts, and not before so long.
	attempts = 8
	patience = 3 * time.Second
	maxPause = 256 * time.Millisecond
)

// Open connects to a listener with a ticket, and with the fingerprint of its certificate when streams are encrypted.
// Unavailable when that fails, also for a ticket that came too late: another one may be in time.
func Open(ctx context.Context, address string, ticket, pin []byte) (net.Conn, error) {
	dialer := net.Dialer{Timeout: silence}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.Unavailable, err, "no stream to tcp://%s", address)
	}
	prepare(conn.(*net.TCPConn))
	Watch(conn)
	below := conn
	stop := context.AfterFunc(ctx, func() { _ = below.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var said *tqerr.Error
	if conn, err = connect(ctx, conn, pin); err != nil {
		_ = conn.Close()
		return nil, tqerr.Wrap(tqerr.Unavailable, err, "no encrypted stream to tcp://%s", address)
	}
	if _, err = conn.Write(append([]byte(magic), ticket...)); err == nil {
		said, err = readStatus(conn)
	}
	switch {
	case said != nil:
		err = tqerr.Wrap(said.Code, said, "stream to tcp://%s", address)
	case err != nil:
		err = tqerr.Wrap(tqerr.Unavailable, err, "no stream to tcp://%s", address)
	case !stop():
		err = tqerr.New(tqerr.Unavailable, "no stream to tcp://%s in time", address)
	default:
		return conn, nil
	}
	_ = conn.Close()
	return nil, err
}

// Pool keeps the streams of one connection. Its methods may be called from any goroutine.
type Pool struct {
	// Dial opens a stream. Unavailable may pass; its other errors are final.
	Dial func(ctx context.Context) (net.Conn, error)
	mu   struct {
		sync.Mutex
		idle   []net.Conn
		all    map[net.Conn]struct{}
		closed bool
	}
}

var errClosed = tqerr.New(tqerr.Unavailable, "the connection of this stream is gone")

// take returns a stream and whether it has served before: one that has may be broken without anybody knowing.
func (p *Pool) take(ctx context.Context) (conn net.Conn, used bool, err error) {
	p.mu.Lock()
	if n := len(p.mu.idle); n > 0 {
		conn = p.mu.idle[n-1]
		p.mu.idle = p.mu.idle[:n-1]
		p.mu.Unlock()
		return conn, true, nil
	}
	closed := p.mu.closed
	p.mu.Unlock()
	if closed {
		return nil, false, errClosed
	}
	if conn, err = p.Dial(ctx); err != nil {
		return nil, false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		_ = conn.Close()
		return nil, false, errClosed
	}
	if p.mu.all == nil {
		p.mu.all = map[net.Conn]struct{}{}
	}
	p.mu.all[conn] = struct{}{}
	return conn, false, nil
}

func (p *Pool) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.closed
}

// give takes a stream back; a broken one is dropped.
func (p *Pool) give(conn net.Conn, broken bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !broken && !p.mu.closed && len(p.mu.idle) < maxIdle {
		p.mu.idle = append(p.mu.idle, conn)
		return
	}
	delete(p.mu.all, conn)
	_ = conn.Close()
}

// Close ends all streams, those in use too.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.closed, p.mu.idle = true, nil
	for conn := range p.mu.all {
		_ = conn.Close()
	}
	clear(p.mu.all)
}

// Sockets lists the streams.
func (p *Pool) Sockets() (out []syscall.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.mu.all {
		if c, ok := conn.(syscall.Conn); ok {
			out = append(out, c)
		}
	}
	return out
}

// Send moves pieces to the server, see transport.Streamer.
func (p *Pool) Send(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error {
	return p.move(ctx, kindWrite, grant, uint64(offset), pieces)
}

// Receive fills pieces from the server, see transport.Streamer.
func (p *Pool) Receive(ctx context.Context, grant transport.Grant, pieces [][]byte) error {
	return p.move(ctx, kindRead, grant, 0, pieces)
}

// ReceiveFrom is Receive from an offset of the granted bytes on.
func (p *Pool) ReceiveFrom(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error {
	return p.move(ctx, kindRead, grant, uint64(offset), pieces)
}

// move splits a transfer over streams. The first failure ends the others.
func (p *Pool) move(ctx context.Context, kind uint8, grant transport.Grant, offset uint64, pieces [][]byte) error {
	total := totalOf(pieces)
	n := min(max(total/stripe, 1), maxStreams)
	if n == 1 {
		return p.part(ctx, &transfer{kind, grant.ID, offset, total}, pieces)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	for i := range n {
		from := total / n * i
		to := from + total/n
		if i == n-1 {
			to = total
		}
		part, err := cut(pieces, from, to-from)
		if err != nil {
			return err
		}
		running.Add(1)
		guard.Go("stream: part of a batch", func() {
			defer running.Done()
			if err := p.part(ctx, &transfer{kind, grant.ID, offset + from, to - from}, part); err != nil {
				cancel(err)
			}
		})
	}
	running.Wait()
	return context.Cause(ctx)
}

// part does a transfer on one stream, and on another one when that breaks.
func (p *Pool) part(ctx context.Context, t *transfer, pieces [][]byte) error {
	began := time.Now()
	again := func(failures int) bool {
		return (failures < attempts || time.Since(began) < patience) && !p.isClosed() && pause(ctx, failures)
	}
	for failures := 0; ; {
		conn, used, err := p.take(ctx)
		if err != nil {
			if failures++; tqerr.CodeOf(err) != tqerr.Unavailable || !again(failures) {
				return err
			}
			continue
		}
		err = once(ctx, conn, t, pieces)
		var said *tqerr.Error
		final := err == nil || errors.As(err, &said) && said.Code != tqerr.Corruption
		p.give(conn, !final)
		switch {
		case final:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case used: // the next one may be as old
		default:
			if failures++; !again(failures) {
				return tqerr.Wrap(tqerr.Unavailable, err, "stream to tcp://%s", conn.RemoteAddr())
			}
		}
	}
}

// pause waits longer after each failure; it reports that there is time left.
func pause(ctx context.Context, failures int) bool {
	timer := time.NewTimer(min(time.Millisecond<<min(failures, 16), maxPause))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// once does a transfer. An error that the server reports leaves the stream usable.
func once(ctx context.Context, conn net.Conn, t *transfer, pieces [][]byte) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err := carry(conn, t, pieces)
	if !stop() && err == nil {
		// The deadline was set, or will be in a moment: the stream is of no use any more, but the bytes are there.
		_ = conn.Close()
	}
	return err
}

func carry(conn net.Conn, t *transfer, pieces [][]byte) error {
	head := t.append(make([]byte, 0, headerSize))
	if t.kind == kindWrite {
		if err := writeBytes(conn, head, pieces, 0); err != nil {
			return err
		}
		return status(conn)
	}
	if _, err := conn.Write(head); err != nil {
		return err
	}
	if err := status(conn); err != nil {
		return err
	}
	return readBytes(conn, pieces, 0)
}

func status(conn net.Conn) error {
	said, err := readStatus(conn)
	if err == nil && said != nil {
		return said
	}
	return err
}
