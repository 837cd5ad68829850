package controller

import (
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// clearAgain finishes a clear that the earlier life has begun.
func (s *Server) clearAgain(cl *catalog.Clearing) {
	s.mu.Lock()
	d := s.deleteLocked(cl, 0)
	s.mu.Unlock()
	s.finish(d)
}

// await lets clients of the earlier life find the outcomes of their requests.
func (s *Server) await() {
	s.clients.awaited = map[uint64]map[uint64]*lane{}
	for client, outcomes := range s.mu.outcomes {
		lanes := map[uint64]*lane{}
		for number, out := range outcomes {
			reply := out.reply
			if reply == nil {
				reply = (&call{req: &wire.Request{}}).makeReply(out.result, nil)
			}
			_, count := wire.SplitSequence(out.sequence)
			lanes[number] = &lane{count: count, reply: reply}
		}
		s.clients.awaited[client] = lanes
	}
}

// leastAwait is how long at least clients of an earlier life are awaited, and what they read from units is kept.
const leastAwait = 30 * time.Second

// stopAwaiting drops what is kept for clients of the earlier life that have not come in all the time for which they wait for a
// controller: outcomes; and what units hold for all of them: what they have leased, and staged without committing it, from
// where they read it back.
func (s *Server) stopAwaiting() {
	if !s.awaited() {
		return
	}
	s.clients.Lock()
	awaited := s.clients.awaited
	s.clients.awaited = nil
	s.clients.Unlock()
	for client := range awaited {
		s.forget(client)
	}
	for _, n := range s.nodes.Load().order {
		if u, ok := unmetered(n).(outside); ok && n.Lost() == nil {
			_ = u.Settle(s.ctx, true) // one that is lost has nobody who reads from it
		}
	}
}

// awaited returns when nobody of the earlier life is awaited any more; false: the server closes.
func (s *Server) awaited() bool {
	timer := time.NewTimer(max(s.opts.RestartWait, leastAwait))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// settleLater ends what an earlier life has left on a unit that was missed until now.
func (s *Server) settleLater(u *remote.Unit) {
	s.journal.start("controller unit of an earlier life", func() {
		if s.awaited() {
			_ = u.Settle(s.ctx, true)
		}
	})
}
