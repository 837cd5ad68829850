package controller

import (
	"bytes"
	"context"
	"math/rand/v2"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport/local"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// joinUnits adds units in other processes, one after another. It fails at the first that cannot be added; those before it
// stay, and the same request again adds the others.
func (c *call) joinUnits() (any, error) {
	var r wire.JoinUnitsRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	for i := range r.Units {
		if at := &r.Units[i]; at.Name == "" || (at.Socket == "" && at.Address == "") || len(at.Secret) == 0 {
			return nil, tqerr.New(tqerr.InvalidArgument, "unit %d, %q: name, socket or address, and secret are needed", i, at.Name)
		}
	}
	return c.later(func(ctx context.Context) (any, error) {
		select {
		case <-c.s.joining:
		case <-ctx.Done():
			return nil, ctxError(ctx, "waiting for other units to join")
		}
		defer func() { c.s.joining <- struct{}{} }()
		for i := range r.Units {
			if err := c.s.join(ctx, &r.Units[i]); err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
}

// join adds one unit, or puts it in the place of the one of its name that is gone. The caller has the right to, so that numbers
// are given once.
func (s *Server) join(ctx context.Context, at *wire.UnitAddress) error {
	var old node
	for _, n := range s.nodes.Load().order {
		if n.Name() != at.Name {
			continue
		}
		if old = n; n.Lost() != nil {
			continue
		}
		// One whose process has just ended may not be known to be lost yet.
		if err := joinAgain(ctx, n, at); tqerr.CodeOf(err) != tqerr.Unavailable {
			return err
		}
	}
	u, err := s.openUnit(ctx, at, old)
	if err != nil {
		return err
	}
	if err := s.rejoin(ctx, outside{u}, old); err != nil {
		return err
	}
	if missed(old) {
		s.settleLater(u)
	}
	s.room.Signal()
	return nil
}

// openUnit connects to a unit that may take the place of an old one.
func (s *Server) openUnit(ctx context.Context, at *wire.UnitAddress, old node) (*remote.Unit, error) {
	conn, err := s.dial(ctx, at, rand.Uint64()|1)
	if err != nil {
		return nil, tqerr.Wrap(tqerr.CodeOf(err), err, "unit %q", at.Name)
	}
	u, err := remote.Open(ctx, conn, remote.Address{
		ID: s.nextUnit(), Name: at.Name, Host: at.Host, Socket: at.Socket, Secret: at.Secret, Address: at.Address, Key: at.Key,
		Machine: s.machineOf(at), Session: s.number, Keep: keeps(old) || missed(old), Hold: s.journal != nil,
	})
	switch {
	case err != nil || s.journal == nil:
	case missed(old):
		err = payOwed(ctx, u, old)
	case keeps(old):
		err = u.Settle(ctx, true) // what this controller had there has ended for it when the unit was lost
	}
	if err != nil && u != nil {
		_ = u.Close()
	}
	return u, err
}

// joinAgain checks that a unit that is known by its name is the one at an address, which differs from one start of a unit to
// the next. Unavailable when the known one has gone.
func joinAgain(ctx context.Context, n node, at *wire.UnitAddress) error {
	known, ok := unmetered(n).(outside)
	if !ok {
		return tqerr.New(tqerr.AlreadyExists, "unit %q is one of the controller's own process", at.Name)
	}
	if err := known.Sync(ctx); err != nil || sameUnit(known.Address(), at) {
		return err
	}
	if known.Away() {
		return tqerr.New(tqerr.AlreadyExists, "unit %q has joined already, at %s", at.Name, known.Address().Address)
	}
	return tqerr.New(tqerr.AlreadyExists, "unit %q has joined already, at socket %q", at.Name, known.Socket())
}

// keeps reports that a unit which takes the place of a lost one may go on with the cells that it has in memory.
func keeps(old node) bool {
	lost, ok := lostUnit(old)
	return ok && lost.Keeps()
}

func lostUnit(n node) (outside, bool) {
	if n == nil {
		return outside{}, false
	}
	lost, ok := unmetered(n).(outside)
	return lost, ok
}

func sameUnit(known remote.Address, at *wire.UnitAddress) bool {
	return known.Socket == at.Socket && known.Address == at.Address && bytes.Equal(known.Secret, at.Secret)
}

// machineOf is where a unit is: one that does not say is reached by its socket, and so is here.
func (s *Server) machineOf(at *wire.UnitAddress) string {
	if at.Machine == "" {
		return s.opts.Machine
	}
	return at.Machine
}

func (s *Server) dial(ctx context.Context, at *wire.UnitAddress, peer uint64) (remote.Conn, error) {
	if s.opts.Dial != nil {
		return s.opts.Dial(ctx, at)
	}
	return local.Dial(ctx, at.Socket, at.Secret, peer)
}
