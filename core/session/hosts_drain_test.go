//go:build zmq

package session_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/drain"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// drained drains a unit and waits for the end of that.
func drained(t *testing.T, s *session.Session, unit string) wire.JobReply {
	t.Helper()
	var reply wire.JobReply
	require.NoError(t, ask(s, wire.OpDrain, &wire.DrainRequest{Unit: unit, MaxSlots: 4, MaxBytes: 256 << 20, Attempts: 3, Tiers: "preserve"}, &reply))
	require.Eventually(t, func() bool {
		require.NoError(t, ask(s, wire.OpJob, &wire.JobRequest{Job: reply.Job}, &reply))
		return drain.State(reply.State).Final()
	}, 30*time.Second, 5*time.Millisecond)
	return reply
}

// Units on two other hosts and one of the controller's own give what they have to each other, in both tiers, while a client on one of
// the hosts reads and writes; rows that several samples share stay shared.
func TestDrainsAcrossHosts(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	withB, withC := withDisk(t, cfg, 0, 20_000), withDisk(t, cfg, 0, 20_000)
	startedB, startedC := spawnOn(t, withB, "unit-b", "b"), spawnOn(t, withC, "unit-c", "c")
	on(t, "a")
	here := owner(t, in(withDisk(t, cfg, 0, 20_000), func(c *session.Config) { c.Units = 1 }))
	require.NoError(t, joinAway(here, startedB(), startedC()))
	on(t, "b")
	other := &writer{open(t, reaching(cfg, here.Info.Address)), foreigntest.New(t, 64<<20)}
	w := &writer{here, foreigntest.New(t, 64<<20)}
	var keys []string
	var want []int64
	for i := range int64(24) {
		keys, want = append(keys, fmt.Sprint("k", i)), append(want, i)
		by, width := w, narrow
		if i%2 == 1 {
			by = other
		}
		if i%3 == 0 {
			width = wide
		}
		require.NoError(t, by.put(putBody{Keys: keys[len(keys)-1:]}, width, i))
	}
	same := putBody{Dedup: wire.Strings{"x"}, Keys: wire.Strings{"s0", "s1", "s2", "s3"}}
	require.NoError(t, other.put(same, wide, 7, 8, 7, 8))
	keys, want = append(keys, same.Keys...), append(want, 7, 8, 7, 8)
	var units wire.UnitsReply
	require.NoError(t, ask(here, wire.OpUnits, nil, &units))
	own := units.Units[0].ID
	for round, unit := range []string{"unit-b", own, "unit-c", "unit-b", own} {
		stored := int64(0)
		for _, name := range []string{own, "unit-b", "unit-c"} {
			n := countsOf(t, here, name)
			stored += n.DiskUsed + n.MemoryUsed
		}
		end := drained(t, here, unit)
		require.Equal(t, "SUCCEEDED", end.State, "%+v", end)
		n := countsOf(t, here, unit)
		require.Equal(t, []any{"DRAINED", int64(0), int64(0), int64(0)}, []any{n.State, n.Cells, n.MemoryUsed, n.DiskUsed})
		sum := int64(0)
		for _, name := range []string{own, "unit-b", "unit-c"} {
			n := countsOf(t, here, name)
			sum += n.DiskUsed + n.MemoryUsed
		}
		require.Equal(t, stored, sum, "what is shared stays shared")
		for _, r := range []*writer{w, other} {
			got, err := r.values(keys...)
			require.NoError(t, err, "round %d", round)
			require.Equal(t, want, got)
		}
		want[round] += 100
		require.NoError(t, other.put(putBody{Keys: keys[round : round+1]}, wide, want[round]))
		require.NoError(t, ask(here, wire.OpUncordon, &wire.UncordonRequest{Unit: unit}, nil))
	}
	require.NoError(t, other.s.Close(time.Second))
}

// When the payload of the source does not come, though the unit answers, that is what a drain and a move say. The unit is not lost, and
// everything moves when it does.
func TestThePayloadOfADrainedUnitIsCutOff(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	port := freePort(t)
	startB, startC := spawnWith(t, cfg, "unit-b", "b", port), spawnOn(t, cfg, "unit-c", "c")
	on(t, "a")
	here := owner(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	unit := startB()
	control, payload := &proxy{}, &proxy{}
	control.calm.Store(true)
	payload.calm.Store(true)
	startProxy(t, control, portOf(t, unit.Info.Address))
	startProxy(t, payload, port)
	require.NoError(t, joinAway(here, unit.behindProxy()))
	w := &writer{here, foreigntest.New(t, 64<<20)}
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"a", "b"}}, wide, 1, 2))
	require.NoError(t, joinAway(here, startC()))
	payload.down.Store(true) // for new streams; what tells that the host lives is one that is open
	err := ask(here, wire.OpMove, &wire.MoveRequest{Partition: "p", To: "unit-c"}, nil)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), err)
	require.ErrorContains(t, err, `unit "unit-b" answers, but its payload does not come`)
	r := &wire.DrainRequest{Unit: "unit-b", MaxSlots: 4, MaxBytes: 256 << 20, Attempts: 1, Tiers: "preserve"}
	var job wire.JobReply
	require.NoError(t, ask(here, wire.OpDrain, r, &job))
	require.Eventually(t, func() bool {
		require.NoError(t, ask(here, wire.OpJob, &wire.JobRequest{Job: job.Job}, &job))
		require.False(t, drain.State(job.State).Final(), job.Err)
		return len(job.Blocked) == 1 && job.Blocked[0] == wire.JobBlocked{Reason: drain.StreamBroken, Count: 2}
	}, 30*time.Second, 5*time.Millisecond)
	payload.down.Store(false)
	require.NoError(t, ask(here, wire.OpJob, &wire.JobRequest{Job: job.Job, Wait: true}, &job))
	require.Equal(t, "SUCCEEDED", job.State, "%+v", job)
	got, err := w.values("a", "b")
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2}, got)
	requireClean(t, here) // before the proxies end
}
