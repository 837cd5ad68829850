// Package memnet is a network in memory that misbehaves on request: it delays, drops and duplicates messages and cuts
// connections, so that tests can show what survives that. Without faults it is transport/inproc.
//
// Which message a fault hits depends only on the order of the calls and on the seed. Waiting uses the time package, so
// inside a testing/synctest bubble delays take no time.
//
// A request that was hit by a fault goes on by itself: it reaches the server even when its caller has given up, and its
// context then ends only with its timeout or with the connection. That is what a message on a real network does.
package memnet

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/transport"
	"transferqueue/core/transport/inproc"
	"transferqueue/core/transport/internal/failure"
	"transferqueue/core/wire"
)

const address = "the server in memory"

// Action is what a fault does to a message.
type Action int

// The actions.
const (
	// DelayRequest lets the request arrive after Delay.
	DelayRequest Action = iota + 1
	// DelayReply lets the reply arrive Delay after it was sent.
	DelayReply
	// DropRequest loses the request; the caller waits until its context ends.
	DropRequest
	// DropReply loses the reply of a request that was served.
	DropReply
	// Duplicate serves the request twice, one right after the other. The caller gets the first reply.
	Duplicate
	// CutBefore cuts the connection before the request arrives.
	CutBefore
	// CutAfter cuts the connection when the request has been served and before its reply arrives.
	CutAfter
	// CutDuring cuts the connection Delay after the server has got the request, whether it is still being served or not.
	CutDuring
)

// Fault says which messages are hit, and by what. The zero values of the conditions match everything.
type Fault struct {
	Do    Action
	Delay time.Duration
	// Grace of the cuts is how long the peer may stay away before the server hears that it is gone;
	// negative: it never hears it, until the network is closed.
	Grace time.Duration

	Op     wire.Op                          // only these requests
	When   func(uint64, *wire.Request) bool // only these requests of the peer with this id
	Skip   int                              // leave the first matching ones alone
	Times  int                              // hit at most so many
	Chance float64                          // hit with this probability
}

// armed is a fault with its counts.
type armed struct {
	Fault
	seen, hit int
}

// Network is a server and the way to it. Its methods may be called from any goroutine.
type Network struct {
	server *inproc.Server
	mu     struct {
		sync.Mutex
		random *rand.Rand
		faults []*armed
		conns  map[*Conn]struct{}
	}
}

// New puts a handler behind a network without faults.
func New(seed uint64, h transport.Handler) *Network {
	n := &Network{server: inproc.NewServer(h)}
	n.mu.random = rand.New(rand.NewPCG(seed, seed))
	n.mu.conns = map[*Conn]struct{}{}
	return n
}

// Inject adds a fault and returns what removes it. The first fault that hits a message is the only one.
func (n *Network) Inject(f Fault) (remove func()) {
	a := &armed{Fault: f}
	n.mu.Lock()
	n.mu.faults = append(n.mu.faults, a)
	n.mu.Unlock()
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.mu.faults = slices.DeleteFunc(n.mu.faults, func(other *armed) bool { return other == a })
	}
}

// pick returns the fault that hits a request.
func (n *Network) pick(peerID uint64, req *wire.Request) (Fault, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, a := range n.mu.faults {
		if (a.Op != 0 && a.Op != req.Op) || (a.When != nil && !a.When(peerID, req)) {
			continue
		}
		a.seen++
		if a.seen <= a.Skip || (a.Times > 0 && a.hit >= a.Times) || (a.Chance > 0 && n.mu.random.Float64() >= a.Chance) {
			continue
		}
		a.hit++
		return a.Fault, true
	}
	return Fault{}, false
}

// Cut cuts all connections of a peer, as Fault.Grace describes.
func (n *Network) Cut(peerID uint64, grace time.Duration) {
	n.mu.Lock()
	var cut []*Conn
	for c := range n.mu.conns {
		if c.peerID == peerID {
			cut = append(cut, c)
		}
	}
	n.mu.Unlock()
	for _, c := range cut {
		c.cut(grace)
	}
}

// Dial connects a client. Unavailable after Close.
func (n *Network) Dial(peerID uint64) (*Conn, error) {
	inner, err := n.server.Dial(peerID)
	if err != nil {
		return nil, err
	}
	c := &Conn{network: n, inner: inner, peerID: peerID}
	n.mu.Lock()
	n.mu.conns[c] = struct{}{}
	n.mu.Unlock()
	return c, nil
}

// Close ends the server: all connections end, and every peer is reported as gone.
func (n *Network) Close() error { return n.server.Close() }

// Conn is a client's connection. It implements transport.Conn.
type Conn struct {
	network *Network
	inner   *inproc.Conn
	peerID  uint64
}

var _ transport.Poster = (*Conn)(nil)

// Call implements transport.Conn. The request must not be changed afterwards.
func (c *Conn) Call(ctx context.Context, req *wire.Request) (*wire.Reply, error) {
	fault, hit := c.network.pick(c.peerID, req)
	if !hit || ctx.Err() != nil {
		return c.inner.Call(ctx, req)
	}
	started := time.Now()
	replies := make(chan *wire.Reply, 2)
	guard.Go("memnet: "+req.Op.String(), func() { c.carry(context.WithoutCancel(ctx), fault, req, replies) })
	return inproc.Await(ctx, c.inner, replies, started)
}

// Notify implements transport.Conn. Faults of replies do not hit it.
func (c *Conn) Notify(req *wire.Request) error {
	fault, hit := c.network.pick(c.peerID, req)
	if !hit || fault.Do == DelayReply || fault.Do == DropReply {
		return c.inner.Notify(req)
	}
	select {
	case <-c.Done():
		return failure.Lost(address, nil)
	default:
	}
	switch fault.Do {
	case DelayRequest:
		guard.Go("memnet: notify", func() {
			if c.sleep(fault.Delay) {
				_ = c.inner.Notify(req)
			}
		})
	case Duplicate, CutAfter, CutDuring:
		_ = c.inner.Notify(req)
		if fault.Do == Duplicate {
			return c.inner.Notify(req)
		}
		c.cut(fault.Grace)
	case CutBefore:
		c.cut(fault.Grace)
	}
	return nil
}

// Post implements transport.Poster. Only cuts and delayed replies hit it: the others would change the order.
func (c *Conn) Post(req *wire.Request, done func(*wire.Reply, error)) {
	fault, hit := c.network.pick(c.peerID, req)
	if !hit {
		c.inner.Post(req, done)
		return
	}
	switch fault.Do {
	case CutBefore:
		c.cut(fault.Grace)
		done(nil, failure.Lost(address, nil))
	case CutDuring:
		c.inner.Post(req, done)
		c.cutLater(fault)
	case CutAfter, DelayReply:
		c.inner.Post(req, func(reply *wire.Reply, err error) {
			guard.Go("memnet: "+req.Op.String(), func() {
				if fault.Do == CutAfter {
					c.cut(fault.Grace)
				}
				if fault.Do == CutAfter || !c.sleep(fault.Delay) {
					reply, err = nil, failure.Lost(address, nil)
				}
				done(reply, err)
			})
		})
	default:
		c.inner.Post(req, done)
	}
}

// carry takes a request through its fault.
func (c *Conn) carry(ctx context.Context, fault Fault, req *wire.Request, replies chan<- *wire.Reply) {
	switch fault.Do {
	case DropRequest:
		return
	case CutBefore:
		c.cut(fault.Grace)
		return
	case DelayRequest:
		if !c.sleep(fault.Delay) {
			return
		}
	}
	first, end := c.inner.Serve(ctx, req)
	defer end()
	if fault.Do == CutDuring {
		c.cutLater(fault)
	}
	if fault.Do == Duplicate {
		second, endSecond := c.inner.Serve(ctx, req)
		defer endSecond()
		defer c.receive(second)
	}
	reply := c.receive(first)
	switch {
	case reply == nil || fault.Do == DropReply:
	case fault.Do == CutAfter:
		c.cut(fault.Grace)
	case fault.Do != DelayReply || c.sleep(fault.Delay):
		replies <- reply
	}
}

// receive waits for a reply; nil when the connection is cut first.
func (c *Conn) receive(replies <-chan *wire.Reply) *wire.Reply {
	select {
	case r := <-replies:
		return r
	case <-c.Done():
		return nil
	}
}

// sleep waits and reports whether the connection is still there.
func (c *Conn) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.Done():
		return false
	}
}

// Segment implements transport.Conn.
func (c *Conn) Segment(ctx context.Context, unit, segment uint32) (fd int, size int64, err error) {
	return c.inner.Segment(ctx, unit, segment)
}

// Done implements transport.Conn.
func (c *Conn) Done() <-chan struct{} { return c.inner.Done() }

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.cut(0)
	return nil
}

func (c *Conn) cutLater(fault Fault) {
	guard.Go("memnet: cut", func() {
		if c.sleep(fault.Delay) {
			c.cut(fault.Grace)
		}
	})
}

func (c *Conn) cut(grace time.Duration) {
	c.network.mu.Lock()
	delete(c.network.mu.conns, c)
	c.network.mu.Unlock()
	c.inner.Cut(grace)
}
