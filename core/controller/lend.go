package controller

import (
	"slices"
	"sync"

	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

var _ transport.Lender = (*Server)(nil)

// Lend implements transport.Lender. The bytes of a write are those of the blocks of its PutReply, part by part; those of a
// read are the runs of its GetReply, column by column.
func (s *Server) Lend(peer transport.Peer, grant transport.Grant, stop func()) (memory [][]byte, done func(), err error) {
	s.clients.Lock()
	c := s.clients.byID[peer.ID]
	s.clients.Unlock()
	if c == nil {
		return nil, nil, errGone
	}
	if grant.Write {
		return c.lendWrite(grant.ID, stop)
	}
	return c.lendRead(grant.ID)
}

func (c *client) lendWrite(id uint64, stop func()) ([][]byte, func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.mu.txns[id]
	if t == nil {
		return nil, nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", id)
	}
	var memory [][]byte
	for _, sh := range t.shares {
		for _, b := range sh.staged.Blocks() {
			bytes, err := sh.unit.Bytes(b)
			if err != nil {
				return nil, nil, err
			}
			memory = append(memory, bytes)
		}
	}
	return memory, t.loans.begin(stop), nil
}

func (c *client) lendRead(id uint64) ([][]byte, func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.mu.leases[id] {
		if shared, ok := l.(*sharedLease); ok {
			shared.take()
			return shared.memory, shared.Release, nil
		}
	}
	return nil, nil, tqerr.New(tqerr.NotFound, "the lease %d of a read has ended", id)
}

// loans are the streams that write into the memory of one write. Nobody begins one after recall, because the write has left
// the table of its client before.
type loans struct {
	mu    sync.Mutex
	stops map[*byte]func()
	idle  sync.Cond
}

func (l *loans) begin(stop func()) (done func()) {
	key := new(byte)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stops == nil {
		l.stops = map[*byte]func(){}
		l.idle.L = &l.mu
	}
	l.stops[key] = stop
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.stops, key)
		l.idle.Broadcast()
	}
}

// recall stops the streams and returns when none touches the memory any more. A client that commits has none; one that has
// given a stream up may have sent its bytes again before the end of that stream was seen here.
func (l *loans) recall() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, stop := range l.stops {
		stop()
	}
	for len(l.stops) > 0 {
		l.idle.Wait()
	}
}

// sharedLease is a read whose memory streams copy out: it ends when the client and all streams have released it.
type sharedLease struct {
	leases []store.Lease
	memory [][]byte
	mu     sync.Mutex
	users  int
}

// shareRead makes the leases of a read one that streams can use. Memory of units in other processes is copied: a stream
// may still read when it is unmapped.
func (s *Server) shareRead(r *read, columns []wire.GetColumn) error {
	shared := &sharedLease{users: 1}
	s.mapped.RLock()
	defer s.mapped.RUnlock()
	for i := range columns {
		for _, run := range columns[i].Runs {
			n := s.node(run.Unit)
			b := store.Block{Segment: run.Block.Segment, Offset: run.Block.Offset, Size: run.Block.Size}
			bytes, err := n.Bytes(b)
			if err != nil {
				return err
			}
			if n.waits() {
				bytes = slices.Clone(bytes)
			}
			shared.memory = append(shared.memory, bytes)
		}
	}
	for _, cells := range r.cells {
		shared.leases = append(shared.leases, cells.Leases...)
	}
	r.cells = []*unit.Cells{{Leases: []store.Lease{shared}}}
	return nil
}

func (l *sharedLease) take() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users++
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
