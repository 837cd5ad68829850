//go:build go1.25

package controller_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

func (u *user) move(r *wire.MoveRequest) []wire.Moved {
	u.t.Helper()
	var reply wire.MoveReply
	u.ask(wire.OpMove, r, &reply)
	return reply.Moved
}

// Chosen samples move with all their cells, and nothing else does; a drain then finds what the source has kept.
func TestAMoveLeavesTheOthersAlone(t *testing.T) {
	with(t, setup{units: 2, disk: &unit.Disk{Threshold: 8000}}, func(t *testing.T, s *system) {
		u := s.user()
		keys, widths := s.tiers(u, 28)
		synctest.Wait()
		before := [2]int64{s.units[0].Stats().Cells, s.units[1].Stats().Cells}
		moved := u.move(&wire.MoveRequest{Partition: "p", Keys: keys[3:9], To: "unit-1"})
		require.Len(t, moved, 1)
		require.Equal(t, []string{"unit-0", "unit-1"}, []string{moved[0].From, moved[0].To})
		require.Positive(t, moved[0].Samples)
		synctest.Wait()
		require.Equal(t, before[0]-moved[0].Cells, s.units[0].Stats().Cells)
		require.Equal(t, before[1]+moved[0].Cells, s.units[1].Stats().Cells)
		require.Empty(t, u.move(&wire.MoveRequest{Partition: "p", Keys: keys[3:9], To: "unit-1"}), "they are there")
		require.Equal(t, "ACTIVE", u.state("unit-0"))
		s.requireAll(u, keys, widths)
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
		require.Zero(t, s.held(0))
		s.requireAll(u, keys, widths)
		u.uncordon("unit-0")
		all := u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
		require.EqualValues(t, 28, all[0].Samples)
		require.Zero(t, s.held(1))
		s.requireAll(u, keys, widths)
		for _, bad := range []struct {
			request wire.MoveRequest
			code    tqerr.Code
		}{
			{wire.MoveRequest{Partition: "p", Keys: []string{"k1", "none"}, To: "unit-0"}, tqerr.NotFound},
			{wire.MoveRequest{Partition: "q", To: "unit-0"}, tqerr.NotFound},
			{wire.MoveRequest{Partition: "p", To: "other"}, tqerr.NotFound},
		} {
			err := u.try(wire.OpMove, &bad.request, nil)
			require.Equal(t, bad.code, tqerr.CodeOf(err), err)
		}
	})
}

// Units that hold more give to those that hold less, until all hold about the same.
func TestARebalance(t *testing.T) {
	with(t, setup{units: 3}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 30 {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-2"})
		require.EqualValues(t, 30, s.held(2).Cells)
		var plan, done, again wire.MoveReply
		u.ask(wire.OpRebalance, &wire.RebalanceRequest{DryRun: true}, &plan)
		require.ElementsMatch(t, []wire.Moved{
			{From: "unit-2", To: "unit-0", Bytes: 10 * wideBytes}, {From: "unit-2", To: "unit-1", Bytes: 10 * wideBytes},
		}, plan.Moved)
		require.EqualValues(t, 30, s.held(2).Cells, "only asked")
		u.ask(wire.OpRebalance, &wire.RebalanceRequest{}, &done)
		require.Equal(t, []int64{10, 10, 10}, []int64{s.held(0).Cells, s.held(1).Cells, s.held(2).Cells})
		u.ask(wire.OpRebalance, &wire.RebalanceRequest{}, &again)
		require.Empty(t, again.Moved)
		for i := range 30 {
			require.Equal(t, []int64{int64(i)}, u.values(fmt.Sprint("k", i)))
		}
	})
}

// Values that several samples share count for each of them, in what units hold as in what moves.
func TestARebalanceOfWhatIsShared(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(12)
		u.put(s.alike(wide, keys, make([]int64, len(keys))...))
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-1"})
		u.ask(wire.OpRebalance, &wire.RebalanceRequest{}, nil)
		require.Equal(t, []int64{6, 6}, []int64{s.held(0).Cells, s.held(1).Cells})
		require.Equal(t, make([]int64, len(keys)), u.values(keys...))
	})
}

// A key that is named twice is one sample.
func TestAMoveOfAKeyTwice(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a"}, 1))
		u.put(s.rows(wide, []string{"b"}, 2))
		for _, to := range []string{"unit-0", "unit-1"} {
			var samples int64
			for _, m := range u.move(&wire.MoveRequest{Partition: "p", Keys: []string{"b", "a", "b", "a"}, To: to}) {
				samples += m.Samples
			}
			require.LessOrEqual(t, samples, int64(2))
		}
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-1")).State)
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

// One large sample does not go back and forth.
func TestARebalanceDoesNotMoveTooMuch(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a"}, 1))
		var done wire.MoveReply
		u.ask(wire.OpRebalance, &wire.RebalanceRequest{}, &done)
		require.Len(t, done.Moved, 1)
		require.Zero(t, done.Moved[0].Samples)
	})
}

// The controller dies at each write to a file while samples move: nothing is lost, or there twice.
func TestTheControllerDiesDuringAMove(t *testing.T) {
	for name, o := range map[string]setup{
		"units live on": {remote: true, journal: journal.Relaxed}, "power is lost": {durable: true, journal: journal.Strict},
	} {
		t.Run(name, func(t *testing.T) {
			o.units = 2
			for at, died := 1, true; died; at += stride() {
				within(t, o, func(t *testing.T, s *system) {
					u := s.user()
					for i, key := range keysOf(6) {
						u.put(s.rows(narrow, []string{key}, int64(i)))
					}
					s.mortal.doom(o.journal == journal.Strict, uint64(at))
					s.mortal.dieAfter(at)
					p := u.begin(wire.OpMove, &wire.MoveRequest{Partition: "p", To: "unit-1"}, time.Hour)
					select {
					case <-s.mortal.died:
					case <-time.After(time.Minute):
						died = false
						require.NoError(t, p.wait().Err)
						s.mortal.die()
					}
					synctest.Wait()
					s.restart()
					u = s.user()
					require.EqualValues(t, 6, s.stats().Cells, "write %d", at)
					require.Equal(t, []int64{0, 1, 2, 3, 4, 5}, u.values(keysOf(6)...), "write %d", at)
					time.Sleep(2 * time.Minute)
				})
			}
		})
	}
}
