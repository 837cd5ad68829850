package client

import (
	"context"
	"time"

	"transferqueue/core/wire"
)

// A unit whose process has died and that has come back has another number, and new memory. That of the dead process is freed when
// nobody maps it any more: the client lets go of it when it maps memory of a unit that it has not seen before.

// forgetPatience is how long the listing of the units may take; without it the memory stays mapped until the next time.
const forgetPatience = 10 * time.Second

// forgetGone unmaps memory of units that are gone.
func (c *Client) forgetGone() {
	ctx, cancel := context.WithTimeout(c.background, forgetPatience)
	defer cancel()
	reply, err := c.conn().Call(ctx, &wire.Request{Op: wire.OpUnits})
	var units wire.UnitsReply
	if err != nil || wire.Unmarshal(reply.Body, &units) != nil {
		return
	}
	there, last := map[uint32]bool{}, uint32(0)
	for i := range units.Units {
		u := &units.Units[i]
		there[u.Number], last = u.State != unavailable, max(last, u.Number)
	}
	c.segments.part(func(unit uint32) bool { return unit < last && !there[unit] })
}

// unavailable is the state of a unit whose process is not there.
const unavailable = "UNAVAILABLE"

// part lets go of units. What results view stays until they end.
func (s *segments) part(from func(unit uint32) bool) {
	s.using.Lock()
	defer s.using.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return
	}
	for key, m := range s.mu.byKey {
		if !from(key.unit) {
			continue
		}
		delete(s.mu.byKey, key)
		if m.Close() != nil {
			s.mu.parted[m] = struct{}{}
		}
	}
}
