package controller

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// findUnits puts the units of the earlier life in their places: those of this process, those that live elsewhere, and for
// those that are gone somebody who says so.
func (r *recovering) findUnits(ctx context.Context) error {
	if err := r.checkUnits(); err != nil {
		return err
	}
	s := r.s
	next := uint32(0) // no unit has had it
	for _, x := range r.units {
		next = max(next, x.ID+1)
		s.addLocked(absent{x, errNotAsked}, nil)
	}
	places := s.nodes.Load().order
	for i, x := range r.units {
		if x.Inside {
			// Clients may still map the memory of the dead process under the old number.
			u := r.here(x.Name)
			if err := r.recommit(u, &x); err != nil {
				return err
			}
			if err := r.reconcile(ctx, inside{u, next, s.sampleLimit(), s.opts.Machine}, places[i]); err != nil {
				return err
			}
			next++
		}
	}
	found := make([]sought, len(r.units))
	err := together(ctx, len(r.units), len(r.units), func(ctx context.Context, i int) error {
		if !r.units[i].Inside {
			found[i] = r.find(ctx, &r.units[i])
		}
		return nil
	})
	for i, f := range found {
		if f.node != nil && err == nil {
			err = r.place(f, places[i])
		}
	}
	return err
}

// sought is what has come of looking for a unit.
type sought struct {
	node
	compares bool           // it may hold what the catalog does not have, or the other way round
	stock    []schema.Stock // what it holds then
}

// recommit has a unit of this process commit what the process before has held and written down, and drop the rest. What lies on
// disk is older than a write of the same cells that the unit did not execute any more; it must not be taken for what was
// written, which is lost unless it was held.
func (r *recovering) recommit(u Unit, x *unitRecord) error {
	if err := recommitOwed(u, x.Owed); err != nil {
		return err
	}
	id, executed := x.ID, u.Changed()
	for i := range r.changes {
		ch := &r.changes[i]
		if ch.number > executed && ch.touches(id) {
			u.Delete(ch.partition, ch.fields, ch.on(id))
		}
		for _, part := range ch.staged {
			if part.Unit != id {
				continue
			}
			if err := u.Recommit(part.Txn, pickRuns(ch.samples, part.Rows), ch.number); err != nil {
				return err
			}
		}
	}
	u.DropHeld()
	return u.Secure()
}

// reconcile puts a unit that was started anew in the place of what it was, with what it still has.
func (r *recovering) reconcile(ctx context.Context, n, place node) error {
	stock, err := n.Inventory(ctx)
	if err != nil {
		return err
	}
	return r.place(sought{n, true, stock}, place)
}

// place puts a unit in its place.
func (r *recovering) place(f sought, place node) (err error) {
	r.s.addLocked(f.node, place)
	if !f.compares {
		return nil
	}
	deletions, err := r.s.reconcileLocked(f.node, f.stock)
	for _, d := range deletions {
		<-d.Done()
		if err == nil && f.Lost() == nil {
			err = d.Err()
		}
	}
	return err
}

func (r *recovering) here(name string) Unit {
	for _, u := range r.s.opts.Units {
		if u.Name() == name {
			return u
		}
	}
	return nil
}

// checkUnits makes sure that this process has the units that the one before it had.
func (r *recovering) checkUnits() error {
	refuse := func(name, how string) error {
		return tqerr.New(tqerr.InvalidState, "journal %s: it is of a session %s unit %q in the controller's process; start as many units there as before, or name another folder", r.dir, how, name)
	}
	before := map[string]bool{}
	for _, x := range r.units {
		before[x.Name] = x.Inside
		if here := r.here(x.Name) != nil; here != x.Inside {
			how := "with"
			if here {
				how = "without"
			}
			return refuse(x.Name, how)
		}
	}
	for _, u := range r.s.opts.Units {
		if !before[u.Name()] {
			return refuse(u.Name(), "without")
		}
	}
	return nil
}

// findTime is how long a unit has to answer a controller that was started anew.
const findTime = 5 * time.Second

// find connects to a unit and has it execute what it has missed.
func (r *recovering) find(ctx context.Context, x *unitRecord) sought {
	owed := r.owedTo(x)
	u, err := r.reach(ctx, x)
	if err == nil && u.Incarnation() != x.Incarnation {
		err = errors.Join(errOtherLife, u.Close())
	}
	f := sought{node: outside{u}}
	if err == nil {
		f.compares, err = catchUp(ctx, u, owed)
		f.compares = f.compares || x.Missed || len(x.Owed) > 0 || r.s.mu.drains.open() || u.Changed() > r.s.journal.log.Recovered()
		if err == nil && f.compares {
			f.stock, err = u.Inventory(ctx)
		}
		if err != nil {
			_ = u.Close()
		}
	}
	if err != nil {
		missed := *x
		missed.Missed, missed.Owed = true, owed
		return sought{node: absent{missed, err}}
	}
	return f
}

var (
	errNotAsked  error = tqerr.New(tqerr.Unavailable, "it was not asked yet")
	errOtherLife error = tqerr.New(tqerr.Unavailable, "it was started anew")
)

// reach opens a unit. One that has not noticed yet that its controller is dead is asked again.
func (r *recovering) reach(ctx context.Context, x *unitRecord) (*remote.Unit, error) {
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	at := &wire.UnitAddress{
		Name: x.Name, Host: x.Host, Socket: x.Socket, Secret: x.Secret, Address: x.Address, Machine: x.Machine, Key: x.Key,
	}
	for {
		conn, err := r.s.dial(ctx, at, rand.Uint64()|1)
		if err != nil {
			return nil, err
		}
		u, err := remote.Open(ctx, conn, remote.Address{
			ID: x.ID, Name: x.Name, Host: x.Host, Socket: x.Socket, Secret: x.Secret, Address: x.Address, Key: x.Key,
			Machine: x.Machine, Session: r.s.number, Keep: true, Hold: true,
		})
		if tqerr.CodeOf(err) != tqerr.AlreadyExists {
			return u, err
		}
		select {
		case <-time.After(findPause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

const findPause = 10 * time.Millisecond
