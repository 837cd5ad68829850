package controller

import (
	"errors"
	"sync"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

func asError(err error, target **tqerr.Error) bool { return errors.As(err, target) }

// client is what the server keeps for one client: outcomes of requests that it may send again, and everything that ends
// with it.
type client struct {
	peer transport.Peer
	mu   struct {
		sync.Mutex
		outcomes map[uint64]*outcome
		txns     map[uint64]*txn
		leases   map[uint64][]store.Lease
		watches  map[uint64]*watch
		next     uint64
		gone     bool
	}
}

// outcome is a sequenced request: in progress while reply is nil. The replies to send grow with every repetition.
type outcome struct {
	reply   *wire.Reply
	waiting []func(*wire.Reply)
}

func (s *Server) clientOf(peer transport.Peer) *client {
	s.clients.Lock()
	defer s.clients.Unlock()
	c := s.clients.byID[peer.ID]
	if c == nil {
		c = &client{peer: peer}
		c.mu.outcomes = map[uint64]*outcome{}
		c.mu.txns = map[uint64]*txn{}
		c.mu.leases = map[uint64][]store.Lease{}
		c.mu.watches = map[uint64]*watch{}
		c.mu.next = 1
		s.clients.byID[peer.ID] = c
	}
	return c
}

// first registers a sequenced request. When it has been here before it answers it with the first outcome, at once or as
// soon as there is one, and returns false.
func (c *client) first(sequence, ack uint64, reply func(*wire.Reply)) bool {
	c.mu.Lock()
	for old, out := range c.mu.outcomes {
		if old < ack && out.reply != nil {
			delete(c.mu.outcomes, old)
		}
	}
	out := c.mu.outcomes[sequence]
	if out == nil {
		c.mu.outcomes[sequence] = &outcome{waiting: []func(*wire.Reply){reply}}
		c.mu.Unlock()
		return true
	}
	if out.reply == nil {
		out.waiting = append(out.waiting, reply)
		c.mu.Unlock()
		return false
	}
	c.mu.Unlock()
	reply(out.reply)
	return false
}

// outcome stores and sends the reply of a sequenced request. A request that ended only because its sender went away has
// changed nothing and may run again.
func (c *client) outcome(sequence uint64, reply *wire.Reply) {
	c.mu.Lock()
	out := c.mu.outcomes[sequence]
	if out == nil {
		c.mu.Unlock()
		return
	}
	waiting := out.waiting
	out.reply, out.waiting = reply, nil
	if reply.Code == tqerr.Cancelled {
		delete(c.mu.outcomes, sequence)
	}
	c.mu.Unlock()
	for _, send := range waiting {
		send(reply)
	}
}

// keep registers something that ends with the client, under a new number. It reports false when the client is gone.
func keep[T any](c *client, table func() map[uint64]T, value T) (uint64, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.gone {
		return 0, false
	}
	id := c.mu.next
	c.mu.next++
	table()[id] = value
	return id, true
}

func (c *client) keepTxn(t *txn) bool {
	id, ok := keep(c, func() map[uint64]*txn { return c.mu.txns }, t)
	t.id = id
	return ok
}

// takeTxn removes a transaction, so that only one request ends it.
func (c *client) takeTxn(id uint64) *txn {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.mu.txns[id]
	delete(c.mu.txns, id)
	return t
}

func (c *client) keepLeases(leases []store.Lease) (uint64, bool) {
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

// Gone implements transport.Handler: staged work is aborted, leases end, watches close.
func (s *Server) Gone(peer transport.Peer) {
	s.clients.Lock()
	c := s.clients.byID[peer.ID]
	delete(s.clients.byID, peer.ID)
	s.clients.Unlock()
	if c == nil {
		return
	}
	c.mu.Lock()
	c.mu.gone = true
	txns, leases, watches := c.mu.txns, c.mu.leases, c.mu.watches
	c.mu.txns, c.mu.leases, c.mu.watches = map[uint64]*txn{}, map[uint64][]store.Lease{}, map[uint64]*watch{}
	c.mu.Unlock()
	for _, t := range txns {
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
}
