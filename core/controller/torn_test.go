//go:build go1.25

package controller_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/journal"
	"transferqueue/core/wire"
)

// A process that dies at any write to a file does not tear what a client writes to several disks: all of it is there afterwards,
// or nothing. What was acknowledged is there.
func TestACrashDoesNotTearAWriteOverDisks(t *testing.T) {
	more := fill(6, 10)
	writes := map[string]struct {
		make func(s *system) batch
		want []int64
	}{
		"put":       {func(s *system) batch { return s.rows(wide, keysOf(6), more...) }, more},
		"small put": {func(s *system) batch { return s.rows(narrow, keysOf(6), more...) }, more},
		"put of new keys too": {func(s *system) batch {
			return s.rows(narrow, keysOf(9), append(more[:6:6], more[:3]...)...)
		}, more},
		"put of equal rows": {func(s *system) batch { return s.alike(narrow, keysOf(6), 7, 8, 7, 7, 8, 7) }, []int64{7, 8, 7, 7, 8, 7}},
		"update":            {func(s *system) batch { return s.add(narrow, keysOf(6), more...) }, []int64{11, 12, 13, 14, 15, 16}},
	}
	crashes := map[string]struct {
		journal.Durability
		power bool
	}{"killed": {journal.Relaxed, false}, "killed, strict": {journal.Strict, false}, "power loss": {journal.Strict, true}}
	for name, write := range writes {
		for crash, how := range crashes {
			t.Run(name+"/"+crash, func(t *testing.T) {
				undone, done := 0, 0
				for at, more := 1, true; more; at += stride() {
					within(t, setup{units: 2, durable: true, journal: how.Durability}, func(t *testing.T, s *system) {
						happened, acknowledged := s.crashDuring(t, write.make(s), write.want, at, how.power)
						if more = !acknowledged; happened {
							done++
						} else {
							undone++
						}
					})
				}
				require.Greater(t, undone, 2/stride())
				require.Greater(t, done, 2/stride())
			})
		}
	}
}

// What a power loss takes from the journal was executed by a unit on another host already. The unit does not take a later change for
// it, and has no cell that nobody knows.
func TestAChangeIsNotTakenForOneThatAPowerLossHasTaken(t *testing.T) {
	within(t, setup{remote: true, journal: journal.Strict}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"k"}, 1))
		s.mortal.mu.Lock()
		s.mortal.power, s.mortal.synced = true, true
		s.mortal.mu.Unlock()
		u.beginPut(s.rows(narrow, []string{"k", "gone"}, 2, 2))
		<-s.mortal.died
		synctest.Wait()
		require.EqualValues(t, 2, s.stats().Cells)
		s.restart()
		require.EqualValues(t, 1, s.stats().Cells)
		u = s.user()
		require.Equal(t, []string{"k"}, u.keys())
		require.Equal(t, []int64{2}, u.values("k"), "the unit has executed it")
		s.mortal.dieAfter(1)
		u.beginPut(s.rows(narrow, []string{"k"}, 3))
		<-s.mortal.died
		s.restart()
		require.Equal(t, []int64{3}, s.user().values("k"), "it was written down")
		time.Sleep(2 * time.Minute)
	})
}

// crashDuring lets the process die at a write to a file that a put makes, and says whether the next one has all of the put.
func (s *system) crashDuring(t *testing.T, b batch, want []int64, at int, power bool) (happened, acknowledged bool) {
	first := s.user()
	before := []int64{1, 2, 3, 4, 5, 6}
	for i, key := range keysOf(6) { // over both units
		first.put(s.rows(narrow, []string{key}, before[i]))
	}
	require.NotZero(t, s.units[0].Stats().Cells)
	require.NotZero(t, s.units[1].Stats().Cells)
	s.mortal.doom(power, uint64(at))
	s.mortal.dieAfter(at)
	p := first.beginPut(b)
	select {
	case <-s.mortal.died:
	case r := <-p.result:
		require.NoError(t, r.Err)
		acknowledged = true
	}
	s.restart()
	u := s.user()
	got, keys := u.values(keysOf(6)...), u.keys()
	happened = slices.Equal(want, got)
	if !happened {
		require.False(t, acknowledged, "write %d", at)
		require.Equal(t, before, got, "write %d", at)
		require.Len(t, keys, 6, "write %d", at)
	} else {
		require.Len(t, keys, len(b.Keys), "write %d", at)
		u.values(keys...)
	}
	var lost wire.LostReply
	u.ask(wire.OpLost, &wire.LostRequest{}, &lost)
	require.Empty(t, lost.Cells, "write %d", at)
	u.put(s.rows(narrow, []string{"after"}, 1))
	require.Equal(t, []int64{1}, u.values("after"), fmt.Sprint("write ", at))
	time.Sleep(2 * time.Minute) // nobody is awaited any more
	return happened, acknowledged
}
