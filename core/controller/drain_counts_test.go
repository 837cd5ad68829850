//go:build go1.25

package controller_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Samples that a move takes off a unit while it is drained have moved too.
func TestAMoveBesideADrainIsCounted(t *testing.T) {
	with(t, setup{units: 3}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(12)
		for i, key := range keys {
			u.put(s.rows(wide, []string{key}, int64(i)))
		}
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
		r := drainOf("unit-0")
		r.Rate = wideBytes
		job := u.drain(r).Job
		time.Sleep(3 * time.Second)
		moved := u.move(&wire.MoveRequest{Partition: "p", Keys: keys[6:], To: "unit-2"})
		require.Equal(t, "unit-0", moved[0].From)
		require.Positive(t, moved[0].Cells)
		u.clear(keys[5])
		end := u.job(wire.JobRequest{Job: job, Wait: true})
		require.Equal(t, "SUCCEEDED", end.State, end.Err)
		require.Equal(t, []int64{12, 11, 1}, []int64{end.Memory.CellsTotal, end.Memory.CellsMoved, end.Dropped})
		require.EqualValues(t, 11*wideBytes, end.Memory.BytesMoved)
		require.Zero(t, s.held(0))
		require.Equal(t, []int64{0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11}, u.values(append(keys[:5:5], keys[6:]...)...))
	})
}

// A sample that is damaged and then cleared is no failure of the job that goes on.
func TestADrainForgetsWhatWasDamagedAndCleared(t *testing.T) {
	const bad = 0x0123456789abcdef
	broken := &spoiling{Disk: vfs.OSDisk{}, value: bad}
	with(t, setup{units: 2, disk: (unit.Disk{Threshold: 4000}).OnDisk(broken)}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"bad"}, bad))
		for i, key := range keysOf(8) {
			u.put(s.rows(wide, []string{key}, int64(i)))
		}
		u.move(&wire.MoveRequest{Partition: "p", Keys: keysOf(8), To: fmt.Sprint("unit-", s.lies(u, "bad"))})
		r := drainOf(fmt.Sprint("unit-", s.lies(u, "bad")))
		r.Rate, r.Attempts = wideBytes, 1
		job := u.drain(r).Job
		time.Sleep(3 * time.Second)
		status := u.job(wire.JobRequest{Job: job})
		require.Equal(t, "RUNNING", status.State)
		require.EqualValues(t, []any{int64(1), "bad"}, []any{status.Failed, status.Cells[0].Key})
		u.clear("bad")
		end := u.job(wire.JobRequest{Job: job, Wait: true})
		require.Equal(t, "SUCCEEDED", end.State, end.Err)
		require.Empty(t, end.Cells)
		require.Equal(t, []int64{0, 1, 8}, []int64{end.Failed, end.Dropped, end.Disk.CellsMoved})
		require.Equal(t, []int64{0, 1, 2, 3, 4, 5, 6, 7}, u.values(keysOf(8)...))
	})
}

// Samples that are larger than a batch move as many at a time as have max_inflight_bytes together, and one that is larger than that alone.
func TestLargeSamplesKeepToTheBytesInFlight(t *testing.T) {
	for room, want := range map[int64]int{wideBytes / 2: 1, 2*wideBytes + 1: 2, 100 * wideBytes: 4} {
		within(t, setup{units: 2, remote: true}, func(t *testing.T, s *system) {
			u := s.user()
			for i := range 8 {
				b := s.rows(wide, []string{"k"}, int64(i))
				b.Partition = fmt.Sprint("p", i)
				u.put(b)
				u.move(&wire.MoveRequest{Partition: b.Partition, To: "unit-0"})
			}
			now, most := 0, 0
			s.hosts[1].net.Inject(memnet.Fault{
				Do: memnet.DelayReply, Chance: 1, Delay: 10 * time.Millisecond, When: func(_ uint64, r *wire.Request) bool {
					switch r.Op {
					case wire.OpUnitStage:
						now++
						most = max(most, now)
						return true
					case wire.OpUnitCommit:
						now--
					}
					return false
				},
			})
			r := drainOf("unit-0")
			r.MaxBytes = room
			end := u.drained(r)
			synctest.Wait()
			require.Equal(t, "SUCCEEDED", end.State, end.Err)
			require.EqualValues(t, 8, end.Memory.CellsMoved)
			require.Equal(t, want, most)
		})
	}
}
