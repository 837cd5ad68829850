package controller

import (
	"sync"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

var _ transport.Lender = (*Server)(nil)

// Lend implements transport.Lender. The bytes of a write are those of the blocks of its PutReply, part by part; those of a
// read are the runs of its GetReply, column by column; without those of units on other hosts.
func (s *Server) Lend(peer transport.Peer, grant transport.Grant, stop func()) (memory [][]byte, done func(), err error) {
	s.clients.Lock()
	c := s.clients.byID[peer.ID]
	s.clients.Unlock()
	if c == nil {
		return nil, nil, s.errUnknown()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.gone {
		return nil, nil, s.errUnknown()
	}
	if grant.Write {
		return c.lendWriteLocked(grant.ID, stop)
	}
	return c.lendReadLocked(grant.ID, stop)
}

// errUnknown tells a client that is not known why: it is there, since it hears this, but its session has ended or gave it up.
func (s *Server) errUnknown() error {
	if s.ctx.Err() != nil {
		return errClosed
	}
	return tqerr.New(tqerr.Unavailable, "the session has given this client up")
}

func (c *client) lendWriteLocked(id uint64, stop func()) ([][]byte, func(), error) {
	t := c.mu.txns[id]
	switch {
	case t == nil:
		return nil, nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", id)
	case t.memory == nil:
		return nil, nil, tqerr.New(tqerr.InvalidState, "write %d was granted to a client that maps its memory", id)
	}
	return t.memory, t.loans.Begin(stop), nil
}

func (c *client) lendReadLocked(id uint64, stop func()) ([][]byte, func(), error) {
	for _, l := range c.mu.leases[id] {
		if shared, ok := l.(*sharedLease); ok {
			return shared.memory, shared.lend(stop), nil
		}
	}
	return nil, nil, tqerr.New(tqerr.NotFound, "the lease %d of a read has ended", id)
}

// findMemory looks up the memory of a staged write for streams. It may wait for units in other processes.
func (t *txn) findMemory() error {
	t.memory = [][]byte{}
	for _, sh := range t.shares {
		if sh.unit.away() != nil {
			continue // the client goes there
		}
		for _, b := range sh.staged.Blocks() {
			bytes, err := sh.unit.Bytes(b)
			if err != nil {
				return err
			}
			t.memory = append(t.memory, bytes)
		}
	}
	return nil
}

// sharedLease is a read whose memory streams copy out: it ends when the client and all streams have released it.
type sharedLease struct {
	leases []store.Lease
	memory [][]byte
	loans  *transport.Loans // of streams that Close has to stop before it unmaps the memory; nil: it stays mapped
	mu     sync.Mutex
	users  int
}

// shareRead makes the leases of a read one that streams can use. It may wait for units in other processes.
func (s *Server) shareRead(r *read, columns []wire.GetColumn) error {
	here, away := r.apart()
	if len(here) == 0 {
		return nil
	}
	shared := &sharedLease{users: 1}
	for i := range columns {
		for _, run := range columns[i].Runs {
			n := s.node(run.Unit)
			if n.away() != nil {
				continue // the client goes there
			}
			bytes, err := n.Bytes(store.Block{Segment: run.Block.Segment, Offset: run.Block.Offset, Size: run.Block.Size})
			if err != nil {
				return err
			}
			if n.waits() {
				shared.loans = &s.lent
			}
			shared.memory = append(shared.memory, bytes)
		}
	}
	for _, cells := range here {
		shared.leases = append(shared.leases, cells.Leases...)
	}
	r.cells = append([]*unit.Cells{{Leases: []store.Lease{shared}}}, away...)
	return nil
}

// lend counts a stream. Called with the lock of the client held, in whose table the lease is.
func (l *sharedLease) lend(stop func()) (done func()) {
	l.mu.Lock()
	l.users++
	l.mu.Unlock()
	if l.loans == nil {
		return l.Release
	}
	back := l.loans.Begin(stop)
	return func() {
		back()
		l.Release()
	}
}

// Columns implements store.Lease.
func (l *sharedLease) Columns() (out []store.Leased) {
	for _, inner := range l.leases {
		out = append(out, inner.Columns()...)
	}
	return out
}

// Release implements store.Lease for each user.
func (l *sharedLease) Release() {
	l.mu.Lock()
	l.users--
	last := l.users == 0
	l.mu.Unlock()
	if last {
		for _, inner := range l.leases {
			inner.Release()
		}
	}
}
