package controller

import (
	"context"
	"sync"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// client is what the server keeps for one client: the outcomes of requests that it may send again, and everything that
// ends with it.
type client struct {
	mu struct {
		sync.Mutex
		lanes   map[uint64]*lane
		txns    map[uint64]*txn
		leases  map[uint64][]store.Lease
		watches map[uint64]*watch
		next    uint64 // number of the next lease or watch
		gone    bool
	}
}

// clientOf returns the state of a peer, nil for one that is gone. A request's context has ended before its peer is gone, so
// a request that comes late does not bring the peer back.
func (s *Server) clientOf(ctx context.Context, peer transport.Peer) *client {
	s.clients.Lock()
	defer s.clients.Unlock()
	c := s.clients.byID[peer.ID]
	if c != nil || ctx.Err() != nil {
		return c
	}
	c = &client{}
	c.mu.lanes = map[uint64]*lane{}
	c.mu.txns = map[uint64]*txn{}
	c.mu.leases = map[uint64][]store.Lease{}
	c.mu.watches = map[uint64]*watch{}
	c.mu.next = 1
	if lanes, awaited := s.clients.awaited[peer.ID]; awaited {
		c.mu.lanes = lanes
		delete(s.clients.awaited, peer.ID)
	}
	s.clients.byID[peer.ID] = c
	return c
}

var errGone = tqerr.New(tqerr.Cancelled, "the client is gone")

// keep registers something that ends with the client, under a new number. It fails when the client is gone.
func keep[T any](c *client, table func() map[uint64]T, value T) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.gone {
		return 0, errGone
	}
	id := c.mu.next
	c.mu.next++
	table()[id] = value
	return id, nil
}

// keepTxn registers a transaction under the sequence of the request that began it.
func (c *client) keepTxn(id uint64, t *txn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.gone {
		return errGone
	}
	c.mu.txns[id] = t
	return nil
}

// takeTxn removes a transaction, so that only one request ends it.
func (c *client) takeTxn(id uint64) *txn {
	c.mu.Lock()
	t := c.mu.txns[id]
	delete(c.mu.txns, id)
	c.mu.Unlock()
	if t != nil {
		t.loans.Recall()
	}
	return t
}

func (c *client) keepLeases(leases []store.Lease) (uint64, error) {
	return keep(c, func() map[uint64][]store.Lease { return c.mu.leases }, leases)
}

func (c *client) releaseLease(id uint64) {
	c.mu.Lock()
	leases := c.mu.leases[id]
	delete(c.mu.leases, id)
	c.mu.Unlock()
	for _, l := range leases {
		l.Release()
	}
}

// Gone implements transport.Handler: staged work is aborted, leases end, watches close. Requests that wait have ended
// already, with their contexts, but for commits.
func (s *Server) Gone(peer transport.Peer) {
	s.clients.Lock()
	c := s.clients.byID[peer.ID]
	delete(s.clients.byID, peer.ID)
	s.clients.Unlock()
	if c == nil {
		return
	}
	s.forget(peer.ID)
	c.mu.Lock()
	c.mu.gone = true
	txns, leases, watches := c.mu.txns, c.mu.leases, c.mu.watches
	c.mu.txns, c.mu.leases, c.mu.watches = nil, nil, nil
	for _, l := range c.mu.lanes {
		if l.running != nil {
			l.running.cancel()
		}
	}
	c.mu.Unlock()
	for _, t := range txns {
		t.loans.Recall()
		t.abort()
	}
	for _, list := range leases {
		for _, l := range list {
			l.Release()
		}
	}
	for _, w := range watches {
		s.dropWatch(w)
	}
	s.dropSaves(c)
}

// lane is one of the places of a client for a request that may come again; the client uses it for one request after the
// other (wire.Request.Sequence). So what is remembered is bounded by what the client has in flight at a time, however
// long one of its requests waits.
type lane struct {
	count     uint64      // of the latest request
	running   *call       // nil when it has ended
	repeats   []*call     // the same request again, and requests to call it off, while it runs
	reply     *wire.Reply // its outcome; nil when it may run again
	undo      func()      // gives back what the reply granted
	calledOff bool        // it must not run again
}

func calledOff() *wire.Reply {
	return wire.ErrorReply(tqerr.New(tqerr.Cancelled, "the request was called off before it was done"))
}

func (c *client) laneLocked(number uint64) *lane {
	l := c.mu.lanes[number]
	if l == nil {
		l = &lane{}
		c.mu.lanes[number] = l
	}
	return l
}

// begin reports whether a request is to be run. One that is or was here already is answered with the first outcome instead,
// now or when there is one. An older one that arrives behind a younger one of its lane has been given up by the client.
func (c *client) begin(r *call) bool {
	number, count := wire.SplitSequence(r.req.Sequence)
	c.mu.Lock()
	l := c.laneLocked(number)
	answer := l.reply
	switch {
	case count > l.count:
		*l = lane{count: count, running: r}
		c.mu.Unlock()
		return true
	case count < l.count:
		answer = calledOff()
	case l.running != nil:
		l.repeats = append(l.repeats, r)
		c.mu.Unlock()
		return false
	case answer == nil:
		l.running = r
		c.mu.Unlock()
		return true
	}
	c.mu.Unlock()
	r.reply(answer)
	return false
}

// end keeps and sends the outcome of a request. A request that was cancelled has changed nothing: when that happened only
// because its connection broke and it has come again meanwhile, it runs again. A reply with a payload is not kept: it comes
// from a read, which may run again.
func (c *client) end(r *call, reply *wire.Reply) {
	number, count := wire.SplitSequence(r.req.Sequence)
	c.mu.Lock()
	l := c.mu.lanes[number]
	if l.count != count || l.running != r { // given up by the client
		c.mu.Unlock()
		r.takeBack()
		r.reply(reply)
		return
	}
	back := func() {}
	if l.calledOff && r.undo != nil {
		back, reply = r.takeBack, calledOff()
	}
	again := l.nextLocked(reply)
	waiting := l.repeats
	if l.running = again; again == nil {
		l.repeats = nil
		if reply.Code != tqerr.Cancelled && reply.Payload == nil || l.calledOff {
			l.reply, l.undo = reply, r.undo
		}
		if l.calledOff {
			l.undo = nil
		}
	}
	c.mu.Unlock()
	back()
	r.reply(reply)
	if again != nil {
		again.run()
		return
	}
	for _, w := range waiting {
		w.reply(reply)
	}
}

// nextLocked picks the repetition that runs a cancelled request again.
func (l *lane) nextLocked(reply *wire.Reply) *call {
	if reply.Code != tqerr.Cancelled || l.calledOff {
		return nil
	}
	for i, w := range l.repeats {
		if w.ctx.Err() == nil {
			l.repeats = append(l.repeats[:i:i], l.repeats[i+1:]...)
			return w
		}
	}
	return nil
}

// callOff ends the request with a sequence and answers r with its outcome. What it has granted is taken back; when it is
// running, it is cancelled; when it has not arrived, it will be refused.
func (c *client) callOff(r *call, sequence uint64) {
	number, count := wire.SplitSequence(sequence)
	c.mu.Lock()
	l := c.laneLocked(number)
	if count > l.count {
		*l = lane{count: count}
	}
	if count == l.count && l.running != nil {
		l.calledOff = true
		l.repeats = append(l.repeats, r)
		running := l.running
		c.mu.Unlock()
		running.cancel()
		return
	}
	answer, undo := calledOff(), func() {}
	if count == l.count {
		switch {
		case l.undo != nil:
			undo, l.undo = l.undo, nil
		case l.reply != nil:
			answer = l.reply
		}
		l.reply, l.calledOff = answer, true
	}
	c.mu.Unlock()
	undo()
	r.reply(answer)
}
