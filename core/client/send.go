package client

import (
	"context"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// takeLane gives a sequence to a request. Lanes are reused from the top of a stack, so there are as many as there ever were
// requests in flight at a time.
func (c *Client) takeLane() (sequence uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mu.idle) == 0 {
		c.mu.idle = append(c.mu.idle, uint64(len(c.mu.counts)))
		c.mu.counts = append(c.mu.counts, 0)
	}
	last := len(c.mu.idle) - 1
	lane := c.mu.idle[last]
	c.mu.idle = c.mu.idle[:last]
	c.mu.counts[lane]++
	return wire.Sequence(lane, c.mu.counts[lane])
}

func (c *Client) giveLane(sequence uint64) {
	lane, _ := wire.SplitSequence(sequence)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.idle = append(c.mu.idle, lane)
}

func (c *Client) conn() transport.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.conn
}

// sent is a request on its way.
type sent struct {
	c       *Client
	ctx     context.Context
	cancel  context.CancelFunc
	req     *wire.Request
	conn    transport.Conn
	life    int               // of the client, when it was sent
	pending transport.Pending // nil: not sent yet
	direct  Direct            // what it was sent on, nil: conn
}

// begin sends a request on the caller's goroutine, so that it is on its way before another one has to be woken. then must
// follow. direct allows a connection that the caller of then waits for.
func (c *Client) begin(ctx context.Context, op wire.Op, body, payload []byte, timeout time.Duration, direct bool) *sent {
	s := &sent{c: c, ctx: ctx, cancel: func() {}, conn: c.conn(), life: c.life()}
	s.req = &wire.Request{Op: op, Timeout: timeout, Body: body, Payload: payload}
	if timeout > 0 {
		s.ctx, s.cancel = context.WithTimeout(ctx, timeout+answerGrace)
	}
	if sequenced[op] {
		s.req.Sequence = c.takeLane()
	}
	if direct {
		s.direct = c.directs.take(s.ctx, c.opts.Direct)
	}
	if s.direct != nil {
		s.pending = s.direct.Begin(s.ctx, s.req)
	} else if b, ok := s.conn.(transport.Beginner); ok && c.opts.Resend == 0 && (c.opts.Redial == nil || !ended(s.conn)) {
		s.pending = b.Begin(s.ctx, s.req)
	}
	return s
}

// then calls do with the answer: at once when it is there already and small, in Advance on a direct connection, else on a
// goroutine of the given name.
func (s *sent) then(name string, do func(*wire.Reply, error)) Started {
	switch {
	case s.direct != nil:
		return Started{FD: s.direct.FD(), Advance: func() bool {
			if !s.pending.Ready() {
				return false
			}
			reply, err := s.pending.Wait(s.ctx)
			s.c.directs.give(s.direct)
			if s.lost(err) {
				guard.Go(name, func() { do(s.end(s.elsewhere(err))) })
			} else {
				do(s.end(reply, err))
			}
			return true
		}}
	case s.pending == nil || !s.pending.Ready():
		guard.Go(name, func() { do(s.wait()) })
		return Started{}
	}
	reply, err := s.wait()
	if err != nil || s.req.Op != wire.OpGet || reply.Payload != nil {
		do(reply, err)
	} else {
		guard.Go(name, func() { do(reply, nil) })
	}
	return Started{}
}

// wait returns when the request has an answer, its time is over, or the connection is lost for good.
func (s *sent) wait() (*wire.Reply, error) { return s.end(s.answer()) }

// end settles a request that has come to its end here.
func (s *sent) end(reply *wire.Reply, err error) (*wire.Reply, error) {
	defer s.cancel()
	if s.req.Sequence != 0 {
		defer s.c.giveLane(s.req.Sequence)
	}
	if err != nil && s.req.Sequence != 0 && s.ctx.Err() != nil {
		return s.c.settle(s.req.Sequence, err)
	}
	return reply, err
}

func (s *sent) answer() (*wire.Reply, error) {
	if s.pending == nil {
		return s.c.repeat(s.ctx, s.req)
	}
	reply, err := s.pending.Wait(s.ctx)
	if err == nil || s.ctx.Err() != nil || s.c.opts.Redial == nil || !ended(s.conn) {
		return reply, err
	}
	return s.c.repeatIn(s.ctx, s.life, true, s.req)
}

// lost reports that a direct connection was lost with a request whose outcome can be found out.
func (s *sent) lost(err error) bool {
	return err != nil && s.ctx.Err() == nil && s.c.opts.Redial != nil && s.direct.Broken()
}

// elsewhere sends a request again whose direct connection was lost with err. When that was the end of the server, the common
// connection ends too.
func (s *sent) elsewhere(err error) (*wire.Reply, error) {
	if endsSoon(s.ctx, s.conn) {
		return s.c.repeatIn(s.ctx, s.life, true, s.req)
	}
	return nil, err
}

// endsSoon reports that a connection has ended, or does so while it is waited for.
func endsSoon(ctx context.Context, conn transport.Conn) bool {
	timer := time.NewTimer(lostTogether)
	defer timer.Stop()
	select {
	case <-conn.Done():
		return true
	case <-ctx.Done():
	case <-timer.C:
	}
	return false
}

// settle calls a request off that has ended with err here. It returns its outcome when it has one after all, and err when
// nothing has happened or the server cannot be asked.
func (c *Client) settle(sequence uint64, err error) (*wire.Reply, error) {
	ctx, cancel := context.WithTimeout(c.background, settleTime)
	defer cancel()
	reply, asked := c.callOff(ctx, sequence)
	switch tqerr.CodeOf(asked) {
	case tqerr.OK:
		return reply, nil
	case tqerr.Cancelled, tqerr.DeadlineExceeded, tqerr.Unavailable:
		return nil, err
	default:
		return nil, asked
	}
}

func (c *Client) callOff(ctx context.Context, sequence uint64) (*wire.Reply, error) {
	body, err := wire.Marshal(&wire.TxnRequest{Txn: sequence})
	if err != nil {
		return nil, err
	}
	return c.repeat(ctx, &wire.Request{Op: wire.OpAbort, Body: body})
}

// repeat sends a request again and again until it has an answer.
func (c *Client) repeat(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	return c.repeatIn(ctx, c.life(), false, req)
}

// life is the number of this client's presence at the server.
func (c *Client) life() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.life
}

// errForgotten says that nobody knows the outcome of a request any more.
func errForgotten(err error) error {
	return tqerr.Wrap(tqerr.Unavailable, err, "the session was not reached in time and has given this client up, "+
		"or was started anew; the request is not sent again, because it may have been done")
}

// repeatIn is repeat for a request that was begun in a life of the client: in another one nobody would know its outcome,
// if it was sent.
func (c *Client) repeatIn(ctx context.Context, life int, sent bool, req *wire.Request) (*wire.Reply, error) {
	for {
		conn := c.conn()
		sent = sent || !ended(conn)
		reply, err := c.once(ctx, conn, req)
		switch {
		case err != nil && ctx.Err() != nil:
			return nil, timeIsOver(ctx, err)
		case err == nil:
			return reply, nil
		case err == errLost:
		case c.opts.Redial != nil && ended(conn):
			if lost := c.redial(ctx, conn); lost != nil {
				if ctx.Err() != nil {
					return nil, timeIsOver(ctx, err)
				}
				if tqerr.CodeOf(lost) == tqerr.Unavailable {
					err = tqerr.Wrap(tqerr.Unavailable, err, "%s", lost)
				}
				return nil, err
			}
			if now := c.life(); now != life {
				if life = now; sent && req.Sequence != 0 && !c.opts.Remembered {
					return nil, errForgotten(err)
				}
			}
		default:
			return nil, err
		}
	}
}

// timeIsOver says why a request has ended whose connection was lost with err and not replaced in time.
func timeIsOver(ctx context.Context, err error) error {
	if tqerr.CodeOf(err) != tqerr.Unavailable {
		return err
	}
	return tqerr.Wrap(tqerr.CodeOf(ctx.Err()), err, "waiting for the session")
}

func ended(conn transport.Conn) bool {
	select {
	case <-conn.Done():
		return true
	default:
		return false
	}
}

// errLost says that no reply came in time and the request may be sent again.
var errLost error = tqerr.New(tqerr.DeadlineExceeded, "no reply")

// once sends a request once.
func (c *Client) once(ctx context.Context, conn transport.Conn, req *wire.Request) (*wire.Reply, error) {
	if c.opts.Resend == 0 {
		return conn.Call(ctx, req)
	}
	short, cancel := context.WithTimeout(ctx, c.opts.Resend)
	defer cancel()
	reply, err := conn.Call(short, req)
	if err != nil && short.Err() != nil && ctx.Err() == nil {
		return nil, errLost
	}
	return reply, err
}

// redial replaces a lost connection, unless somebody else has done so.
func (c *Client) redial(ctx context.Context, lost transport.Conn) error {
	began := time.Now()
	select {
	case c.redialing <- struct{}{}:
		defer func() { <-c.redialing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if c.conn() != lost {
		return nil
	}
	if c.redialed.err != nil && c.redialed.at.After(began) {
		return c.redialed.err // while we waited; trying for as long once more for everybody who waits would add up
	}
	fresh, err := c.opts.Redial(ctx)
	if err != nil {
		if ctx.Err() == nil {
			c.redialed.err, c.redialed.at = err, time.Now()
		}
		return err
	}
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		_ = fresh.Close()
		return tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	c.mu.conn = fresh
	c.directs.drop()
	if s, ok := fresh.(transport.Streamer); ok && !s.Resumed() {
		c.mu.life++
	}
	c.mu.Unlock()
	return lost.Close()
}

// release ends leases. On a connection that loses nothing a notification will do: when the connection ends, so do the leases.
func (c *Client) release(leases wire.Ints) {
	body, err := wire.Marshal(&wire.ReleaseRequest{Leases: leases})
	if err != nil {
		return
	}
	req := &wire.Request{Op: wire.OpRelease, Body: body}
	conn := c.conn()
	if _, streams := conn.(transport.Streamer); c.opts.Resend == 0 && (c.opts.Redial == nil || !streams) {
		_ = conn.Notify(req)
		return
	}
	guard.Go("client release", func() { _, _ = c.repeat(c.background, req) })
}
