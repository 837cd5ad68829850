//go:build go1.25

package controller_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// How often a request waits for the answer of a unit in another process. A put in two steps waits for its memory and, as its
// commit is only put in line, for nothing else.
func TestRoundTrips(t *testing.T) {
	const trip = time.Second
	cases := map[string]struct {
		begin func(s *system, u *user) *pending
		trips int
	}{
		"inline put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(narrow, []string{"a", "b"}, 8, 9)) }, 1},
		"staged put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(wide, []string{"a", "b"}, 8, 9)) }, 1},
		"tags":       {func(_ *system, u *user) *pending { return u.beginPut(tagged("a")) }, 0},
		"inline get": {func(_ *system, u *user) *pending { return u.beginGet("y") }, 1},
		"staged get": {func(_ *system, u *user) *pending { return u.beginGet("x") }, 1},
		"inline update": {func(s *system, u *user) *pending {
			return u.beginPut(s.both(s.mem.Ragged([]int64{1}, []int64{2})).merge("concat"))
		}, 1},
		"staged update": {func(s *system, u *user) *pending { return u.beginPut(s.both(s.longer(3)).merge("replace")) }, 2},
		"clear": {func(_ *system, u *user) *pending {
			return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a", "b"}}, 0)
		}, 1},
		"list": {func(_ *system, u *user) *pending { return u.begin(wire.OpList, &wire.ListRequest{}, 0) }, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			within(t, setup{units: 2, remote: true}, func(t *testing.T, s *system) {
				u := s.spread(t)
				for _, h := range s.hosts {
					defer h.net.Inject(memnet.Fault{Do: memnet.DelayReply, Delay: trip})()
				}
				started := time.Now()
				require.NoError(t, c.begin(s, u).released().Err)
				require.Equal(t, time.Duration(c.trips)*trip, time.Since(started))
			})
		})
	}
}

func tagged(key string) batch {
	return batch{write: write{Partition: "p", Keys: []string{key}, Tags: wire.List{[]byte("\x81\xa1t\x01")}}, columns: []foreign.Raw{}}
}

// released waits for a result and gives back what it holds.
func (p *pending) released() *client.Result {
	r := p.wait()
	for _, c := range r.Columns {
		client.Release(c.Token)
		client.Release(c.OffsetsToken)
	}
	return r
}
