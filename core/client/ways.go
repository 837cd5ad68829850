package client

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/local"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

// Units on another host than the controller are reached past it: one that is on this host through its own socket, which hands
// out its segments, any other one over streams to its port for payload, for which the controller brings tickets.

// ways are the units that the controller does not map, by their numbers in the session, which are never used again.
type ways struct {
	sync.Mutex
	byUnit map[uint32]*way
	closed bool
}

// way is how this client reaches one unit.
type way struct {
	c    *Client
	unit uint32
	// finding is held by who finds out; name and socket do not change afterwards.
	finding sync.Mutex
	found   bool
	name    string
	socket  atomic.Pointer[local.Conn] // nil: the unit is on another host
	streams stream.Pool
}

// way returns the way to a unit that has granted something.
func (c *Client) way(ctx context.Context, unit uint32) (*way, error) {
	c.ways.Lock()
	w := c.ways.byUnit[unit]
	switch {
	case c.ways.closed:
		c.ways.Unlock()
		return nil, tqerr.New(tqerr.InvalidState, "the client is closed")
	case w == nil:
		w = &way{c: c, unit: unit}
		w.streams.Dial = w.dial
		if c.ways.byUnit == nil {
			c.ways.byUnit = map[uint32]*way{}
		}
		c.ways.byUnit[unit] = w
	}
	c.ways.Unlock()
	return w, w.find(ctx)
}

// find looks where the unit is. Its socket is tried when both are on one machine; that it takes the secret proves that it is
// the unit's, and not that of another container at the same path.
func (w *way) find(ctx context.Context) error {
	w.finding.Lock()
	defer w.finding.Unlock()
	if w.found {
		return nil
	}
	at, err := w.ask(ctx, false)
	if err != nil {
		return err
	}
	w.name = at.Name
	if at.Socket != "" && at.Machine == w.c.opts.Machine {
		if conn, err := local.Dial(ctx, at.Socket, at.Secret, NewID()); err == nil {
			w.socket.Store(conn)
		}
	}
	w.found = true
	if c := w.c; c.background.Err() != nil { // close has been here, or waits for us
		return tqerr.New(tqerr.InvalidState, "the client is closed")
	}
	return nil
}

// ask asks the controller about the unit, and for a ticket.
func (w *way) ask(ctx context.Context, ticket bool) (*wire.ReachUnitReply, error) {
	body, err := wire.Marshal(&wire.ReachUnitRequest{Unit: w.unit, Ticket: ticket})
	if err != nil {
		return nil, err
	}
	reply, err := w.c.repeat(ctx, &wire.Request{Op: wire.OpReachUnit, Body: body})
	if err != nil {
		return nil, err
	}
	var at wire.ReachUnitReply
	return &at, wire.Unmarshal(reply.Body, &at)
}

func (w *way) dial(ctx context.Context) (net.Conn, error) {
	at, err := w.ask(ctx, true)
	if err != nil {
		return nil, err
	}
	return stream.Open(ctx, at.Streams, at.Ticket, at.Pin)
}

const (
	// unreachableFor is how long a client tries to reach a unit that the controller has not given up.
	unreachableFor   = 3 * time.Second
	unreachablePause = 20 * time.Millisecond
)

// move moves payload. A network that is away for a moment is waited for.
func (w *way) move(ctx context.Context, move func(*stream.Pool) error) error {
	for began := time.Now(); ; {
		err := move(&w.streams)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return tqerr.New(tqerr.CodeOf(ctx.Err()), "the payload did not get through to unit %q in time", w.name)
		case tqerr.CodeOf(err) != tqerr.Unavailable || time.Since(began) > unreachableFor:
			return tqerr.Wrap(tqerr.CodeOf(err), err, "unit %q", w.name)
		}
		if _, lost := w.ask(ctx, false); lost != nil {
			return lost
		}
		select {
		case <-time.After(unreachablePause):
		case <-ctx.Done():
		}
	}
}

func (w *way) close() {
	w.streams.Close()
	w.finding.Lock()
	defer w.finding.Unlock()
	if conn := w.socket.Load(); conn != nil {
		_ = conn.Close()
	}
}

func (w *ways) close() {
	w.Lock()
	all := w.byUnit
	w.byUnit, w.closed = nil, true
	w.Unlock()
	for _, one := range all {
		one.close()
	}
}

// source is whom to ask for a unit's segments; nil when its memory cannot be mapped here.
func (c *Client) source(unit uint32) transport.Conn {
	c.ways.Lock()
	w := c.ways.byUnit[unit]
	c.ways.Unlock()
	if w == nil {
		if c.remote() {
			return nil
		}
		return c.conn()
	}
	if conn := w.socket.Load(); conn != nil {
		return conn
	}
	return nil
}

// descriptors lists what a forked child must close.
func (w *ways) descriptors() (out []int) {
	w.Lock()
	defer w.Unlock()
	for _, one := range w.byUnit {
		for _, s := range one.streams.Sockets() {
			if raw, err := s.SyscallConn(); err == nil {
				_ = raw.Control(func(fd uintptr) { out = append(out, int(fd)) })
			}
		}
		if conn := one.socket.Load(); conn != nil {
			out = append(out, conn.Descriptors()...)
		}
	}
	return out
}

// target is where payload goes to or comes from over streams.
type target struct {
	way *way // nil: the controller
	id  uint64
}

func (t target) send(ctx context.Context, c *Client, offset int64, pieces [][]byte) error {
	grant := transport.Grant{Write: true, ID: t.id}
	if t.way == nil {
		return c.overStreams(ctx, func(s transport.Streamer) error { return s.Send(ctx, grant, offset, pieces) })
	}
	return t.way.move(ctx, func(p *stream.Pool) error { return p.Send(ctx, grant, offset, pieces) })
}

func (t target) receive(ctx context.Context, c *Client, pieces [][]byte) error {
	grant := transport.Grant{ID: t.id}
	if t.way == nil {
		return c.overStreams(ctx, func(s transport.Streamer) error { return s.Receive(ctx, grant, pieces) })
	}
	return t.way.move(ctx, func(p *stream.Pool) error { return p.Receive(ctx, grant, pieces) })
}

// targetOf finds the target of what a unit has granted: by its own number, or by that of the controller. mapped says that its
// memory can be mapped instead.
func (c *Client) targetOf(ctx context.Context, unit uint32, grants []wire.UnitGrant, id uint64) (t target, mapped bool, err error) {
	for _, g := range grants {
		if g.Unit == unit {
			w, err := c.way(ctx, unit)
			return target{way: w, id: g.ID}, err == nil && w.socket.Load() != nil, err
		}
	}
	return target{id: id}, !c.remote(), nil
}
