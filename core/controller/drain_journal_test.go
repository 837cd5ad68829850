//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// Whatever call of the journal's disk fails while samples move, once or until the disk is mended, every sample is in one place
// afterwards, without a restart or a drain.
func TestEveryCallOfTheJournalFailsDuringAMove(t *testing.T) {
	for name, durability := range map[string]journal.Durability{"relaxed": journal.Relaxed, "strict": journal.Strict} {
		for how, forever := range map[string]bool{"once": false, "until it is mended": true} {
			t.Run(name+"/"+how, func(t *testing.T) {
				at := 0
				for more := true; more; at++ {
					failing := &vfs.FailingDisk{At: -1, Err: []error{unix.EIO, unix.ENOSPC}[at%2]}
					o := setup{units: 2, remote: at%3 > 0, journal: durability, failing: failing}
					within(t, o, func(t *testing.T, s *system) { more = s.failMoving(t, failing, at, forever) })
				}
				require.Greater(t, at, 3)
			})
		}
	}
}

func (s *system) failMoving(t *testing.T, failing *vfs.FailingDisk, at int, forever bool) (failed bool) {
	u := s.user()
	for i, key := range keysOf(6) {
		u.put(s.rows(narrow, []string{key}, int64(i)))
	}
	failing.FailNext(at)
	failing.Forever = forever
	err := u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", To: "unit-1"}, nil)
	failed = failing.Failed()
	if err != nil {
		require.True(t, failed)
		require.Contains(t, []tqerr.Code{tqerr.IO, tqerr.ResourceExhausted}, tqerr.CodeOf(err), "call %d: %v", at, err)
	}
	failing.Heal()
	time.Sleep(3 * time.Second)
	synctest.Wait()
	require.EqualValues(t, 6, s.stats().Cells, "call %d", at)
	_ = u.try(wire.OpList, &wire.ListRequest{}, nil) // a journal that is broken is replaced when somebody asks
	time.Sleep(2 * time.Second)
	require.Equal(t, []int64{0, 1, 2, 3, 4, 5}, u.values(keysOf(6)...), "call %d", at)
	u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
	require.EqualValues(t, 6, s.held(0).Cells, "call %d", at)
	require.Zero(t, s.held(1), "call %d", at)
	return failed
}

// Samples that have come back to a unit before it could delete what they had left there stay.
func TestCopiesAreNotDeletedThatCameBack(t *testing.T) {
	failing := &vfs.FailingDisk{At: -1, Err: unix.EIO, Only: "sync"}
	for _, remote := range []bool{false, true} {
		within(t, setup{units: 2, remote: remote, journal: journal.Strict, failing: failing}, func(t *testing.T, s *system) {
			u := s.user()
			u.put(s.rows(narrow, keysOf(6), 0, 1, 2, 3, 4, 5))
			u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
			failing.FailNext(1) // after what says that samples move
			failing.Forever = true
			require.ErrorContains(t, u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", To: "unit-1"}, nil), "may not survive a crash")
			require.EqualValues(t, 12, s.stats().Cells)
			failing.Heal()
			for u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", Keys: keysOf(3), To: "unit-0"}, nil) != nil {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(3 * time.Second)
			require.Equal(t, []int64{3, 3}, []int64{s.held(0).Cells, s.held(1).Cells})
			require.Equal(t, []int64{0, 1, 2, 3, 4, 5}, u.values(keysOf(6)...))
		})
	}
}

// A change that the journal cannot take leaves nothing on the target, from this moment on.
func TestAMoveThatIsNotWrittenDownLeavesNothing(t *testing.T) {
	failing := &vfs.FailingDisk{Err: unix.ENOSPC, Only: "write"}
	for _, remote := range []bool{false, true} {
		failing.Heal()
		within(t, setup{units: 2, remote: remote, journal: journal.Relaxed, failing: failing}, func(t *testing.T, s *system) {
			u := s.user()
			u.put(s.rows(narrow, keysOf(2), 1, 2))
			from := 0
			if s.held(1).Cells > 0 {
				from = 1
			}
			failing.FailNext(1) // after what says that samples move
			began := time.Now()
			require.Error(t, u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", To: []string{"unit-1", "unit-0"}[from]}, nil))
			require.True(t, failing.Failed())
			require.Zero(t, s.held(1-from))
			require.Less(t, time.Since(began), 10*time.Millisecond)
			require.Equal(t, []int64{1, 2}, u.values(keysOf(2)...))
		})
	}
}

// Nothing is copied before the journal has for good that something moves: a power loss would leave copies that nobody looks for.
func TestNothingMovesBeforeItIsWrittenDown(t *testing.T) {
	failing := &vfs.FailingDisk{At: -1, Err: unix.EIO, Only: "sync"}
	within(t, setup{units: 2, remote: true, journal: journal.Strict, failing: failing}, func(t *testing.T, s *system) {
		u := s.user()
		for i, key := range keysOf(4) {
			u.put(s.rows(narrow, []string{key}, int64(i)))
		}
		staged := 0
		s.hosts[1].net.Inject(memnet.Fault{Do: memnet.DelayReply, When: func(_ uint64, r *wire.Request) bool {
			if r.Op == wire.OpUnitStage {
				staged++
			}
			return false
		}})
		failing.FailNext(0)
		failing.Forever = true
		require.Error(t, u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", To: "unit-1"}, nil))
		require.Zero(t, staged)
		failing.Heal()
		time.Sleep(3 * time.Second)
		_ = u.try(wire.OpList, &wire.ListRequest{}, nil)
		time.Sleep(3 * time.Second)
		failing.FailNext(0)
		failing.Forever = true
		require.ErrorContains(t, u.try(wire.OpDrain, drainOf("unit-0"), nil), "may not survive a crash")
		time.Sleep(time.Minute)
		require.Zero(t, staged)
		failing.Heal()
		time.Sleep(3 * time.Second)
		require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: 1, Wait: true}).State)
		require.Positive(t, staged)
		require.Zero(t, s.held(0))
		require.Equal(t, []int64{0, 1, 2, 3}, u.values(keysOf(4)...))
	})
}
