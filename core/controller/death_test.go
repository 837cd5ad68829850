//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// deaths are requests during which a unit dies. "a" is on one unit and "b" on the other.
var deaths = map[string]struct {
	begin  func(s *system, u *user) *pending
	writes bool // what fails has changed nothing that can be seen
}{
	"inline put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(narrow, []string{"a", "b"}, 8, 9)) }, true},
	"staged put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(wide, []string{"a", "b"}, 8, 9)) }, true},
	"put of new keys": {func(s *system, u *user) *pending {
		return u.beginPut(s.rows(narrow, []string{"a", "c", "b", "d"}, 6, 7, 8, 9))
	}, true},
	"native update": {func(s *system, u *user) *pending {
		return u.beginPut(s.both(s.mem.Ragged(make([]int64, wide), make([]int64, 3*wide))).merge("add"))
	}, true},
	"inline native update": {func(s *system, u *user) *pending {
		b := s.both(s.mem.Ragged(make([]int64, 7), make([]int64, 3)))
		return u.beginPut(b.merge("replace"))
	}, true},
	"update by a callable": {func(s *system, u *user) *pending {
		b := s.both(s.mem.Ragged(make([]int64, wide), make([]int64, 3*wide))).merge("")
		b.Callable = []byte("sum")
		return u.beginPut(b)
	}, true},
	"parsed put": {func(s *system, u *user) *pending {
		b := s.rows(narrow, []string{"a", "b"}, 8, 9)
		b.Callable = []byte("parse")
		return u.beginPut(b)
	}, true},
	"get":         {func(_ *system, u *user) *pending { return u.beginGet("y") }, false},
	"get of much": {func(_ *system, u *user) *pending { return u.beginGet("x") }, false},
	"clear": {func(_ *system, u *user) *pending {
		return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a", "b"}}, 0)
	}, false},
	"clear of a field": {func(_ *system, u *user) *pending {
		return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"x"}}, 0)
	}, false},
	"clear of the partition": {func(_ *system, u *user) *pending {
		return u.begin(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, 0)
	}, false},
}

func (b batch) merge(name string) batch {
	b.Update, b.Merge = true, name
	return b
}

func (u *user) beginGet(field string) *pending {
	body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{field}, Inline: client.InlineLimit})
	require.NoError(u.t, err)
	return u.start(&client.Request{Op: wire.OpGet, Body: body})
}

// worked does what the callables of deaths do.
func worked(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
	if job.Kind == jobs.Merge {
		return sums(job, mem)
	}
	return []foreign.Raw{mem.Ints([]int64{narrow}, elements(job.Columns[0].Bytes)...)}, nil
}

// A unit dies before or after each message of each kind of request. The request fails with the unit's name or has happened, the
// other unit serves on, and nothing leaks.
func TestAUnitDiesAtEveryStep(t *testing.T) {
	for name, d := range deaths {
		for _, when := range []memnet.Action{memnet.CutBefore, memnet.CutAfter} {
			t.Run(name+map[memnet.Action]string{memnet.CutBefore: "/before", memnet.CutAfter: "/after"}[when], func(t *testing.T) {
				steps := 0
				for hit := true; hit; steps++ {
					within(t, setup{units: 2, remote: true}, func(_ *testing.T, s *system) { hit = s.die(d.begin, d.writes, when, steps) })
				}
				t.Logf("%d messages", steps-1)
				require.Greater(t, steps, 1)
			})
		}
	}
}

// die lets the first unit die around its message number step, and reports whether there was one.
func (s *system) die(begin func(*system, *user) *pending, writes bool, when memnet.Action, step int) (hit bool) {
	t := s.t
	s.python(worked)
	s.python(worked)
	u := s.spread(t)
	before := u.listed()
	seen := 0
	remove := s.hosts[0].net.Inject(memnet.Fault{Do: when, When: func(uint64, *wire.Request) bool {
		seen++
		hit = hit || seen == step+1
		return seen == step+1
	}})
	result := begin(s, u).released()
	synctest.Wait()
	remove()
	if !hit {
		require.NoError(t, result.Err)
		require.Equal(t, "ACTIVE", u.state("unit-0"))
		return false
	}
	s.kill(0)
	synctest.Wait()
	require.Equal(t, "UNAVAILABLE", u.state("unit-0"))
	require.Equal(t, "ACTIVE", u.state("unit-1"))
	if result.Err != nil {
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(result.Err), result.Err)
		require.ErrorContains(t, result.Err, "unit-0")
		if writes {
			require.Equal(t, before, u.listed())
		}
	}
	st := s.stats()
	require.Zero(t, st.Staged)
	require.Zero(t, st.Leases)
	s.goesOn(u)
	return true
}

// goesOn uses what is left of a session whose first unit is gone.
func (s *system) goesOn(u *user) {
	t := s.t
	for _, key := range u.keys() {
		got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}, Fields: []string{"y"}}, 0)
		if err != nil {
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), err)
			require.ErrorContains(t, err, "unit-0")
		} else if y := got.bytes["y"]; y != nil {
			require.Equal(t, [][]byte{[]byte(key)}, y)
		}
	}
	u.put(s.rows(narrow, []string{"later"}, 5))
	require.Equal(t, []int64{5}, u.values("later"))
	u.put(s.add(narrow, []string{"later"}, 5))
	require.Equal(t, []int64{10}, u.values("later"))
	clear := &wire.ClearRequest{Partition: "p", Keys: []string{"a", "b", "c", "d", "later"}}
	if err := u.try(wire.OpClear, clear, nil); err != nil {
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), err)
		u.ask(wire.OpClear, clear, nil)
	}
	require.Empty(t, u.keys())
	require.Zero(t, s.stats())
	u.put(s.rows(narrow, []string{"a"}, 3))
	require.Equal(t, []int64{3}, u.values("a"))
}

// listed is what a listing shows of everything: keys, tags, fields and consumption.
func (u *user) listed() any {
	u.t.Helper()
	var list wire.ListReply
	u.ask(wire.OpList, &wire.ListRequest{}, &list)
	var summary wire.StatusSummary
	u.ask(wire.OpStatus, nil, &summary)
	return []any{list, summary.Partitions}
}

func (u *user) unit(name string) (found wire.UnitInfo) {
	u.t.Helper()
	var reply wire.UnitsReply
	u.ask(wire.OpUnits, nil, &reply)
	for _, info := range reply.Units {
		if info.ID == name {
			found = info
		}
	}
	return found
}

func (u *user) state(name string) string { return u.unit(name).State }

// A unit without a disk that was cut off and joins again has dropped what it had: that is lost, by key, until it is written
// again. The unit has its old place and takes samples.
func TestAUnitComesBackEmpty(t *testing.T) {
	within(t, setup{units: 2, remote: true}, func(t *testing.T, s *system) {
		u := s.spread(t)
		s.hosts[0].net.Cut(s.hosts[0].peer.Load(), 0)
		synctest.Wait()
		had := s.hosts[0].server.Unit().Stats().Cells
		require.Positive(t, had, "cells stay until somebody else comes")
		s.joinHosts()
		s.units[0] = s.hosts[0].server.Unit()
		require.Zero(t, s.units[0].Stats())
		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{"a", "b"}}, 0)
		require.Equal(t, tqerr.DataLost, tqerr.CodeOf(err))
		require.Equal(t, had, u.unit("unit-0").LostCells)
		var reply wire.UnitsReply
		u.ask(wire.OpUnits, nil, &reply)
		require.Len(t, reply.Units, 2)
		for range 8 {
			u.put(batch{write: write{Partition: "p", Insert: 1, Fields: []string{"x"}}, columns: s.rows(narrow, nil, 1).columns})
		}
		require.Positive(t, s.units[0].Stats().Cells)
		u.put(s.rows(narrow, []string{"a", "b"}, 3, 4))
		got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"x"}}, 0)
		require.NoError(t, err)
		require.Equal(t, [][]int64{{3, 3, 3, 3}, {4, 4, 4, 4}}, got.ints["x"])
	})
}

// A unit that does not answer holds up only who needs it.
func TestAUnitHangs(t *testing.T) {
	within(t, setup{units: 2, remote: true}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		s.spread(t)
		keys := map[int]string{}
		for i, h := range s.hosts {
			for _, key := range []string{"a", "b"} {
				remove := h.net.Inject(memnet.Fault{Do: memnet.DelayReply, Delay: time.Hour, Op: wire.OpUnitRead})
				p := u.beginOne(key, time.Second)
				synctest.Wait()
				if !p.done() {
					keys[i] = key
				}
				p.released()
				remove()
			}
		}
		require.Len(t, keys, 2)
		remove := s.hosts[0].net.Inject(memnet.Fault{Do: memnet.DelayReply, Delay: time.Hour})
		p := u.beginOne(keys[0], time.Minute)
		synctest.Wait()
		clear := u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{keys[0]}}, time.Minute)
		require.NoError(t, other.beginOne(keys[1], time.Minute).released().Err)
		other.put(s.rows(narrow, []string{keys[1]}, 4))
		require.Equal(t, "ACTIVE", other.state("unit-0"))
		require.False(t, p.done() || clear.done())
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(p.released().Err))
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(clear.wait().Err))
		require.Equal(t, []string{keys[1]}, other.keys())
		remove()
		time.Sleep(2 * time.Hour) // the answers come, and the clear is finished
		require.EqualValues(t, 1, other.unit("unit-0").Samples+other.unit("unit-1").Samples)
	})
}

func (u *user) beginOne(key string, timeout time.Duration) *pending {
	body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: []string{key}, Fields: []string{"y"}, Inline: client.InlineLimit})
	require.NoError(u.t, err)
	return u.start(&client.Request{Op: wire.OpGet, Body: body, Timeout: timeout})
}
