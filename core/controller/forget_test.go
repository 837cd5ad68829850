//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// renew lets a unit without a disk die and come back.
func (s *system) renew(i int) {
	s.t.Helper()
	s.kill(i)
	synctest.Wait()
	h := s.hosts[i]
	require.NoError(s.t, h.server.Close())
	var err error
	h.server, err = remote.NewServer(remote.Options{Name: h.name, Jobs: s.jobs})
	require.NoError(s.t, err)
	h.net = memnet.New(uint64(i), h.server)
	h.dead.Store(false)
	s.units[i] = h.server.Unit()
	s.joinHosts()
}

// The memory of a dead process is not kept by the clients that have used it, but for what a view shows.
func TestAClientLetsGoOfTheMemoryOfADeadUnit(t *testing.T) {
	within(t, setup{units: 1, remote: true}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a"}, 1))
		mapped := len(u.Descriptors())
		require.Positive(t, mapped)
		for range 3 {
			s.renew(0)
			u.put(s.rows(wide, []string{"a"}, 2))
			synctest.Wait()
			require.Len(t, u.Descriptors(), mapped)
			require.Equal(t, []int64{2}, u.values("a"))
		}

		keys := keysOf(64)
		u.put(s.rows(wide, keys, fill(64, 7)...))
		before := len(u.Descriptors())
		body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keys, Views: true})
		require.NoError(t, err)
		view := u.start(&client.Request{Op: wire.OpGet, Flags: client.Views | client.DenseLayout, Body: body}).wait()
		require.NoError(t, view.Err)
		require.EqualValues(t, 1, s.stats().Leases, "it is a view")
		s.renew(0)
		u.put(s.rows(wide, []string{"a"}, 3))
		synctest.Wait()
		require.Greater(t, len(u.Descriptors()), before, "what is viewed stays")
		got, err := u.decoded(view)
		require.NoError(t, err)
		checkAll(t, got.ints["x"], 7)
		synctest.Wait()
		require.LessOrEqual(t, len(u.Descriptors()), before)
		require.Equal(t, []int64{3}, u.values("a"))
	})
}
