package controller

import (
	"context"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// Units on other hosts than the controller: their memory cannot be mapped here. A client reaches it by itself: it maps it on
// the unit's host, else it asks for tickets of streams. Where the controller needs bytes of such a unit, it moves them over
// streams of its own.

// machine is where the client is, as placement compares it.
func (c *call) machine() string { return c.from }

// reachUnit tells a client how to reach a unit past the controller.
func (c *call) reachUnit() (any, error) {
	var r wire.ReachUnitRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	n := c.s.node(r.Unit)
	if n == nil {
		return nil, tqerr.New(tqerr.NotFound, "unit %d does not exist", r.Unit)
	}
	u := n.away()
	if u == nil {
		return nil, tqerr.New(tqerr.InvalidArgument, "unit %q is reached through the controller", n.Name())
	}
	if err := u.Lost(); err != nil {
		return nil, err
	}
	at := u.Address()
	reply := &wire.ReachUnitReply{Name: at.Name, Machine: at.Machine}
	if at.Machine == c.machine() {
		reply.Socket, reply.Secret = at.Socket, at.Secret
	}
	if !r.Ticket {
		return reply, nil
	}
	return c.later(func(ctx context.Context) (any, error) {
		address, ticket, err := u.Ticket(ctx)
		if err != nil {
			return nil, err
		}
		reply.Streams, reply.Ticket, reply.Pin = address, ticket.Ticket, ticket.Pin
		return reply, nil
	})
}

// stagedBytes is the bytes of the blocks of a staged share: its memory, or a copy of that of a unit on another host.
func (sh *share) stagedBytes(ctx context.Context) ([][]byte, error) {
	if u := sh.unit.away(); u != nil {
		out := buffersFor(sh.cols)
		return out, u.Receive(ctx, remote.GrantOf(unmeteredPut(sh.staged)), 0, out)
	}
	out := make([][]byte, len(sh.cols))
	for k, b := range sh.staged.Blocks() {
		var err error
		if out[k], err = sh.unit.Bytes(b); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// toFill is memory for the bytes of a staged share. They are there when flush has returned.
func (sh *share) toFill() (blocks [][]byte, flush func(context.Context) error, err error) {
	u := sh.unit.away()
	if u == nil {
		blocks, err = sh.stagedBytes(context.Background())
		return blocks, func(context.Context) error { return nil }, err
	}
	blocks = buffersFor(sh.cols)
	return blocks, func(ctx context.Context) error {
		return u.Send(ctx, remote.GrantOf(unmeteredPut(sh.staged)), blocks)
	}, nil
}

func buffersFor(columns []schema.Column) [][]byte {
	out := make([][]byte, len(columns))
	for k := range columns {
		out[k] = make([]byte, columns[k].Bytes())
	}
	return out
}

// writeGrants lists the numbers of the shares on other hosts.
func writeGrants(shares []share) (out []wire.UnitGrant) {
	for i := range shares {
		if sh := &shares[i]; sh.unit.away() != nil && sh.staged != nil {
			out = append(out, wire.UnitGrant{Unit: sh.unit.ID(), ID: remote.GrantOf(unmeteredPut(sh.staged))})
		}
	}
	return out
}

// readGrants lists the first number of each share on another host.
func (r *read) readGrants() (out []wire.UnitGrant) {
	for k, cells := range r.cells {
		if sh := &r.shares[k]; sh.unit.away() != nil && len(cells.Leases) > 0 {
			out = append(out, wire.UnitGrant{Unit: sh.unit.ID(), ID: remote.LeaseGrant(cells.Leases[0])})
		}
	}
	return out
}

// mayView reports whether a client that cannot map what the controller maps could still map all that is read.
func (r *read) mayView(machine string) bool {
	for i := range r.shares {
		if u := r.shares[i].unit.away(); u == nil || u.Machine() != machine {
			return false
		}
	}
	return true
}

// apart takes the cells of units on other hosts out of those that the controller lends.
func (r *read) apart() (here, away []*unit.Cells) {
	for k, cells := range r.cells {
		if r.shares[k].unit.away() == nil {
			here = append(here, cells)
		} else {
			away = append(away, cells)
		}
	}
	return here, away
}
