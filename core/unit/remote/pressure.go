package remote

import "transferqueue/core/wire"

// A unit with a disk makes room by itself, when it has refused a write. So that its controller learns of that without asking
// again and again, one request of the controller lies at the unit meanwhile, and is answered when something was freed.

// listen makes sure that the controller will hear of room that the unit makes from now on. It is called after a refusal.
func (u *Unit) listen() {
	u.state.Lock()
	if u.state.stats.DiskLimit == 0 {
		u.state.Unlock()
		return
	}
	if u.state.listening {
		u.state.again = true // that request may be answered already, for what was freed before the refusal
		u.state.Unlock()
		return
	}
	u.state.listening = true
	st := u.state.stats
	u.state.Unlock()
	u.postAs(&answer{u: u, done: make(chan struct{}), listens: true}, 0, wire.OpUnitStats, &wire.UnitStatsRequest{
		Wait: true, Memory: st.MemoryUsed + st.Staging, Disk: st.DiskUsed,
	}, nil)
}

// heard notes that the request of listen was answered, before anybody is told. It reports whether it has to be sent again.
func (u *Unit) heard() bool {
	u.state.Lock()
	defer u.state.Unlock()
	again := u.state.again
	u.state.listening, u.state.again = false, false
	return again
}

// report tells what the unit holds: now, or when it holds less than the controller knows.
func (l *life) report(r *request) (*wire.UnitReply, error) {
	var req wire.UnitStatsRequest
	if err := r.decode(&req); err != nil || !req.Wait {
		return nil, err
	}
	freed := l.freed.Wait()
	if st := l.unit.Stats(); st.MemoryUsed+st.Staging < req.Memory || st.DiskUsed < req.Disk {
		return nil, nil
	}
	if err := l.enter(); err != nil {
		return nil, err
	}
	return l.later(r, func() (*wire.UnitReply, error) {
		select {
		case <-freed:
			return nil, nil
		case <-r.ctx.Done():
			return nil, errGone
		}
	})
}
