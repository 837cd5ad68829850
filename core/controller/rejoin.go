package controller

import (
	"context"
	"hash/fnv"
	"slices"
	"strconv"

	"transferqueue/core/catalog"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// rejoin makes a unit that was just opened part of the session. What it holds is compared with what the catalog has on the unit
// whose place it takes, nil for none, in one step with its becoming known: nobody reads from it before.
func (s *Server) rejoin(ctx context.Context, n, old node) error {
	if lost, ok := lostUnit(old); ok && lost.Away() {
		for _, cells := range lost.Doubts() {
			n.Delete(cells.Partition, cells.Fields, cells.Samples, 0) // in line before the inventory
		}
	}
	stock, err := n.Inventory(ctx)
	if err != nil {
		n.close()
		return err
	}
	deletions, err := func() ([]unit.Deleting, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ctx.Err() != nil {
			n.close()
			return nil, tqerr.New(tqerr.Unavailable, "the session is closing")
		}
		if err := s.noteUnitLocked(n, old); err != nil {
			n.close()
			return nil, err
		}
		s.addLocked(n, old)
		return s.reconcileLocked(n, stock)
	}()
	for _, d := range deletions {
		<-d.Done()
		if err == nil && d.Err() != nil {
			err = d.Err()
			n.disconnect() // it may be joined again
		}
	}
	return err
}

// reconcileLocked makes the catalog agree with what a unit has, and deletes there what the catalog does not have; that is in
// line before every read. Called with mu held, or before the server is shared. The caller may wait for the deletions.
func (s *Server) reconcileLocked(n node, stock []schema.Stock) (deletions []unit.Deleting, err error) {
	if _, err := s.noteLocked(true, recordStock, newStockRecord(n.ID(), stock)); err != nil {
		return nil, err
	}
	found := s.mu.cat.Reconcile(n.ID(), stock)
	for _, cells := range found.Unknown {
		if d := n.Delete(cells.Partition, []string{cells.Field}, cells.Samples, 0); d != nil {
			deletions = append(deletions, d)
		}
	}
	for _, partition := range found.Changed {
		s.changed(partition, found.Events[partition])
	}
	return deletions, nil
}

// sessionNumber is the session as units know it, never 0.
func sessionNumber(session string) uint64 {
	if n, err := strconv.ParseUint(session, 16, 64); err == nil && n != 0 {
		return n
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(session))
	return h.Sum64() | 1
}

// Discard lets the durable units in other processes drop all their cells, because the session ends for good and nobody will know
// them. Call it before Close.
func (s *Server) Discard(ctx context.Context) error {
	all := slices.DeleteFunc(slices.Clone(s.nodes.Load().order), func(n node) bool { return n.Lost() != nil || !n.Durable() })
	return together(ctx, len(all), len(all), func(ctx context.Context, i int) error { return all[i].Discard(ctx) })
}

// confirms reports whether a write that was applied has to be waited for until it is durable.
func confirms(shares []share) bool {
	for i := range shares {
		if sh := &shares[i]; sh.staged != nil && store.Confirms(sh.staged) {
			return true
		}
	}
	return false
}

// confirm waits until what was committed is durable. It does not end earlier: what has happened has to be told.
func confirm(shares []share) (err error) {
	for i := range shares {
		if sh := &shares[i]; sh.staged != nil && store.Confirms(sh.staged) {
			if failed := store.Confirm(sh.staged); failed != nil && err == nil {
				err = tqerr.Wrap(tqerr.CodeOf(failed), failed, "whether unit %q has stored its part for good is not known", sh.unit.Name())
			}
		}
	}
	return err
}

func (c *call) lost() (any, error) {
	var r wire.LostRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	return lostReply(c.s.mu.cat.Lost(r.Partition)), nil
}

func lostReply(cells []catalog.LostCells) *wire.LostReply {
	reply := &wire.LostReply{Cells: make([]wire.LostCells, len(cells))}
	for i, l := range cells {
		known := make([]byte, len(l.Known))
		for k, is := range l.Known {
			if is {
				known[k] = 1
			}
		}
		reply.Cells[i] = wire.LostCells{Partition: l.Partition, Field: l.Field, Indexes: l.Indexes, Keys: l.Keys, Known: known}
	}
	return reply
}
