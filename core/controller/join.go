package controller

import (
	"context"
	"math/rand/v2"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
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
		if at := &r.Units[i]; at.Name == "" || at.Socket == "" || len(at.Secret) == 0 {
			return nil, tqerr.New(tqerr.InvalidArgument, "unit %d, %q: name, socket and secret are needed", i, at.Name)
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
	conn, err := s.dial(ctx, at, rand.Uint64()|1)
	if err != nil {
		return tqerr.Wrap(tqerr.CodeOf(err), err, "unit %q", at.Name)
	}
	u, err := remote.Open(ctx, conn, remote.Address{
		ID: s.nextUnit(), Name: at.Name, Host: at.Host, Socket: at.Socket, Session: s.number, Hold: s.journal != nil, Keep: missed(old),
	})
	if err != nil {
		return err
	}
	if err := s.rejoin(ctx, outside{u, at.Secret}, old); err != nil {
		return err
	}
	if missed(old) {
		s.settleLater(u)
	}
	s.room.Signal()
	return nil
}

// joinAgain checks that a unit that is known by its name is the one at an address, which differs from one start of a unit to
// the next. Unavailable when the known one has gone.
func joinAgain(ctx context.Context, n node, at *wire.UnitAddress) error {
	known, ok := unmetered(n).(outside)
	if !ok {
		return tqerr.New(tqerr.AlreadyExists, "unit %q is one of the controller's own process", at.Name)
	}
	if err := known.Sync(ctx); err != nil || known.Socket() == at.Socket {
		return err
	}
	return tqerr.New(tqerr.AlreadyExists, "unit %q has joined already, at socket %q", at.Name, known.Socket())
}

func (s *Server) dial(ctx context.Context, at *wire.UnitAddress, peer uint64) (transport.Poster, error) {
	if s.opts.Dial != nil {
		return s.opts.Dial(ctx, at)
	}
	return local.Dial(ctx, at.Socket, at.Secret, peer)
}
