package remote

import (
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// Clients of other hosts than the unit's move payload over streams of their own, past the controller. It hands them tickets,
// and the numbers of the writes and leases that it has made for them.

var _ transport.Lender = (*life)(nil)

// Tickets makes tickets of streams that reach what a lender lends.
type Tickets func(lender transport.Lender) wire.UnitTicket

// ServeStreams lets controllers ask for tickets.
func (s *Server) ServeStreams(t Tickets) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.tickets = t
}

// ticket answers with a ticket of a stream that reaches what this life has staged and leased.
func (l *life) ticket(*request) (*wire.UnitReply, error) {
	if l.tickets == nil {
		return nil, tqerr.New(tqerr.InvalidState, "the unit does not listen for other hosts")
	}
	t := l.tickets(l)
	return &wire.UnitReply{Ticket: &t}, nil
}

var _ transport.Lender = (*Server)(nil)

// Lend implements transport.Lender for streams of the controller's own.
func (s *Server) Lend(peer transport.Peer, grant transport.Grant, stop func()) (memory [][]byte, done func(), err error) {
	s.mu.Lock()
	l := s.mu.life
	s.mu.Unlock()
	if l == nil || l.peer != peer.ID {
		return nil, nil, tqerr.New(tqerr.InvalidState, "unit %q was not opened by this controller", s.opts.Name)
	}
	return l.Lend(peer, grant, stop)
}

// Lend implements transport.Lender. The bytes of a write are those of its blocks; those of a read are the runs of its columns;
// what is staged may be read back. Of a read that leaves on disk what lies there they are the runs in memory.
func (l *life) Lend(_ transport.Peer, grant transport.Grant, stop func()) (memory [][]byte, done func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.ended {
		return nil, nil, tqerr.New(tqerr.Unavailable, "the unit has lost its controller")
	}
	if t := l.mu.txns[grant.ID]; t != nil && t.staged != nil {
		if t.shed || grant.Write && (t.users > 0 || t.filled) {
			return nil, nil, tqerr.New(tqerr.InvalidState, "write %d is being finished", grant.ID)
		}
		for _, b := range t.staged.Blocks() {
			memory = append(memory, l.unit.Bytes(b))
		}
		return memory, t.loans.Begin(stop), nil
	}
	lease := l.mu.leases[grant.ID]
	switch {
	case grant.Write:
		return nil, nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", grant.ID)
	case lease == nil:
		return nil, nil, tqerr.New(tqerr.NotFound, "the lease %d of a read has ended", grant.ID)
	case !lease.later && store.Loads(lease.Lease):
		return nil, nil, tqerr.New(tqerr.InvalidState, "the lease %d of a read is not loaded yet", grant.ID)
	}
	for _, c := range lease.Columns() {
		for _, run := range c.Runs {
			if !run.OnDisk {
				memory = append(memory, l.unit.Bytes(run.Block))
			}
		}
	}
	lease.use()
	back := l.lent.Begin(stop)
	return memory, func() {
		lease.leave()
		back()
	}, nil
}
