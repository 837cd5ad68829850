package remote

import (
	"context"
	"sync"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Conn is what a controller needs of a connection to a unit. transport.Poster has it.
type Conn interface {
	Post(req *wire.Request, done func(*wire.Reply, error))
	Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error)
	Done() <-chan struct{}
	Close() error
}

// Link is one connection to a unit on another host.
type Link interface {
	transport.Streamer
	Post(req *wire.Request, done func(*wire.Reply, error))
	// ReceiveFrom is Receive from an offset on.
	ReceiveFrom(ctx context.Context, grant transport.Grant, offset int64, pieces [][]byte) error
}

// Line is a Conn to a unit on another host that outlives its connections: when one breaks it makes another, and sends again
// what has no answer, in the order in which it was posted. It ends when no connection can be made or the unit has forgotten
// the controller.
type Line struct {
	dial func(ctx context.Context) (Link, error)
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	done chan struct{}
	// order is held by who sends, so that the unit gets requests in the order of the list. Answers do not need it.
	order sync.Mutex
	mu    struct {
		sync.Mutex
		link    Link // nil: there is none at the moment
		waiting []*posted
		acks    []uint64 // requests whose answers the unit does not know to have arrived
		err     error    // why it has ended
	}
}

// posted is a request without an answer.
type posted struct {
	req  *wire.Request // the same whenever it is sent
	done func(*wire.Reply, error)
}

// NewLine makes a line out of its first connection. dial makes another one as the same peer; it decides how long to try.
func NewLine(first Link, dial func(ctx context.Context) (Link, error)) *Line {
	l := &Line{dial: dial, done: make(chan struct{})}
	l.ctx, l.stop = context.WithCancel(context.Background())
	l.mu.link = first
	guard.Go("unit: keep a connection", func() { l.keep(first) })
	return l
}

// Post puts a request in line, see transport.Poster. Its sequence must be that of the one before and one more. It tells the unit of
// one answer that has arrived: as many as are given, in the long run, whatever the requests are that lie at the unit meanwhile.
func (l *Line) Post(req *wire.Request, done func(*wire.Reply, error)) {
	again := *req
	p := &posted{req: &again, done: done}
	l.order.Lock()
	defer l.order.Unlock()
	l.mu.Lock()
	link, err := l.mu.link, l.mu.err
	if err == nil {
		l.mu.waiting = append(l.mu.waiting, p)
		if len(l.mu.acks) > 0 {
			again.Ack, l.mu.acks = l.mu.acks[0], l.mu.acks[1:]
		}
	}
	l.mu.Unlock()
	switch {
	case err != nil:
		done(nil, err)
	case link != nil:
		l.send(link, p)
	}
}

func (l *Line) send(link Link, p *posted) {
	link.Post(p.req, func(reply *wire.Reply, err error) { l.answered(link, p, reply, err) })
}

// answered hands an answer on, unless it only says that the connection is gone.
func (l *Line) answered(link Link, p *posted, reply *wire.Reply, err error) {
	if tqerr.CodeOf(err) == tqerr.Unavailable && ended(link) {
		return
	}
	if l.take(p) {
		p.done(reply, err)
	}
}

// take removes a request that has an answer. A second answer finds it gone.
func (l *Line) take(p *posted) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, other := range l.mu.waiting {
		if other == p {
			l.mu.waiting = append(l.mu.waiting[:i], l.mu.waiting[i+1:]...)
			l.mu.acks = append(l.mu.acks, p.req.Sequence)
			return true
		}
	}
	return false
}

func ended(link Link) bool {
	select {
	case <-link.Done():
		return true
	default:
		return false
	}
}

// keep replaces connections that break.
func (l *Line) keep(link Link) {
	for {
		<-link.Done()
		l.mu.Lock()
		l.mu.link = nil
		l.mu.Unlock()
		_ = link.Close()
		fresh, err := l.dial(l.ctx)
		if err == nil && !fresh.Resumed() {
			_ = fresh.Close()
			err = tqerr.New(tqerr.Unavailable, "the unit was started anew, or has given its controller up")
		}
		if err != nil || !l.resume(fresh) {
			l.end(err)
			return
		}
		link = fresh
	}
}

// resume sends everything that has no answer on a new connection. It reports false when the line was closed.
func (l *Line) resume(link Link) bool {
	l.order.Lock()
	defer l.order.Unlock()
	l.mu.Lock()
	if l.ctx.Err() != nil {
		l.mu.Unlock()
		_ = link.Close()
		return false
	}
	l.mu.link = link
	waiting := append([]*posted(nil), l.mu.waiting...)
	l.mu.Unlock()
	for _, p := range waiting {
		l.send(link, p)
	}
	return true
}

// end makes everything fail.
func (l *Line) end(err error) {
	if err == nil || tqerr.CodeOf(err) != tqerr.Unavailable {
		err = tqerr.New(tqerr.Unavailable, "the connection is gone")
	}
	l.mu.Lock()
	l.mu.err = err
	waiting := l.mu.waiting
	l.mu.waiting = nil
	l.mu.Unlock()
	for _, p := range waiting {
		p.done(nil, err)
	}
	close(l.done) // behind what they tell
}

// now is the connection of the moment. Between two it is Unavailable.
func (l *Line) now() (Link, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.mu.err != nil:
		return nil, l.mu.err
	case l.mu.link == nil:
		return nil, tqerr.New(tqerr.Unavailable, "the connection is being made anew")
	}
	return l.mu.link, nil
}

// Segment implements Conn: memory of another host cannot be mapped.
func (l *Line) Segment(_ context.Context, _, segment uint32) (fd int, size int64, err error) {
	return -1, 0, tqerr.New(tqerr.Unimplemented, "segment %d is on another host", segment)
}

// Done implements Conn.
func (l *Line) Done() <-chan struct{} { return l.done }

// Close implements Conn. What waits fails with Unavailable.
func (l *Line) Close() error {
	l.stop()
	l.mu.Lock()
	link := l.mu.link
	l.mu.Unlock()
	if link != nil {
		_ = link.Close()
	}
	<-l.done
	return nil
}

// Descriptors lists the descriptors of the connection, which a forked child must close.
func (l *Line) Descriptors() []int {
	link, _ := l.now()
	if d, ok := link.(interface{ Descriptors() []int }); ok {
		return d.Descriptors()
	}
	return nil
}
