//go:build go1.25

package controller_test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// Memory of source and target is full of small values and their disks hold the rest, one of which is larger than memory: everything
// moves, beside what spills to make room, and no limit is passed at any moment.
func TestADrainOfFullMemory(t *testing.T) {
	disk := &unit.Disk{Threshold: 1 << 20, HighWatermark: 0.9, LowWatermark: 0.5}
	with(t, setup{units: 2, limit: roomLimit, putWait: time.Minute, disk: disk}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 24 {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		u.put(s.rows(20*wide, []string{"large"}, 99))
		synctest.Wait()
		stop, over := make(chan struct{}), atomic.Int64{}
		go func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Microsecond):
				}
				for _, unit := range s.units {
					st := unit.Stats()
					over.Store(max(over.Load(), st.MemoryUsed+st.Staging-roomLimit))
				}
			}
		}()
		for i, name := range []string{"unit-0", "unit-1"} {
			end := u.drained(drainOf(name))
			require.Equal(t, "SUCCEEDED", end.State, end.Err)
			require.Zero(t, s.held(i))
			for i := range 24 {
				require.Equal(t, []int64{int64(i)}, u.values(fmt.Sprint("k", i)))
			}
			require.Equal(t, []int64{99}, u.values("large"))
			u.uncordon(name)
		}
		close(stop)
		require.Zero(t, over.Load())
	})
}

// Room for a part of a batch on each of several units is room: what one of them cannot take as a whole is divided.
func TestADrainDividesWhatNoUnitHasRoomFor(t *testing.T) {
	for name, o := range map[string]setup{"bytes": {units: 3, limit: 8 * wideBytes}, "samples": {units: 3, samples: 24}} {
		t.Run(name, func(t *testing.T) {
			with(t, o, func(t *testing.T, s *system) {
				u := s.user()
				keys := keysOf(15)
				for i, key := range keys { // five on each unit, where three more have room
					u.put(s.rows(wide, []string{key}, int64(i)))
				}
				for i := range s.units {
					require.EqualValues(t, 5, s.held(i).Cells)
				}
				end := u.drained(drainOf("unit-0"))
				require.Equal(t, "SUCCEEDED", end.State, end.Err)
				require.Zero(t, s.held(0))
				require.Len(t, u.values(keys...), len(keys))
			})
		})
	}
}

// diskOf is the disk of unit i, a failing one for the first.
func diskOf(t *testing.T, i int, failing vfs.Disk) *unit.Disk {
	d := unit.Disk{
		Path: t.TempDir(), Run: "run", Unit: fmt.Sprint("unit-", i), Threshold: 8000, HighWatermark: 0.9, LowWatermark: 0.7,
	}
	if i > 0 {
		return &d
	}
	folder := filepath.Join(d.Path, "transfer_queue_ssd_offload", d.Run, d.Unit)
	require.NoError(t, os.MkdirAll(folder, 0o700))
	return d.OnDisk(failing)
}

// A disk that takes nothing any more is no target: what goes to disk goes to another unit.
func TestADrainAvoidsABrokenDisk(t *testing.T) {
	broken := &vfs.FailingDisk{Disk: vfs.OSDisk{}, At: -1, Only: "write", Forever: true, Err: tqerr.New(tqerr.IO, "broken")}
	for _, remote := range []bool{false, true} {
		broken.Heal()
		within(t, setup{units: 3, remote: remote, diskFor: func(i int) *unit.Disk { return diskOf(t, i, broken) }}, func(t *testing.T, s *system) {
			u := s.user()
			keys, widths := s.tiers(u, 28)
			synctest.Wait()
			before := s.units[1].Counters()
			broken.FailNext(0)
			broken.Forever = true
			end := u.drained(drainOf("unit-1"))
			require.True(t, broken.Failed())
			require.Equal(t, "SUCCEEDED", end.State, end.Err)
			require.Equal(t, before.DiskCells, end.Disk.CellsMoved)
			broken.Heal()
			s.requireAll(u, keys, widths)
		})
	}
}

// Values that several samples share are moved and stored once.
func TestADrainKeepsWhatIsShared(t *testing.T) {
	with(t, setup{units: 2, disk: &unit.Disk{Threshold: 8000}}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(12)
		values := make([]int64, len(keys))
		for i := range values {
			values[i] = int64(i % 3)
		}
		u.put(s.alike(wide, keys, values...))
		small := s.alike(narrow, keys, values...)
		small.Fields, small.Dedup = wire.Strings{"n"}, wire.Strings{"n"}
		u.put(small)
		synctest.Wait()
		memory, disk := s.stats().MemoryUsed, s.stats().DiskUsed
		require.EqualValues(t, 3*wideBytes, disk)
		for _, name := range []string{"unit-0", "unit-1"} {
			if u.state(name) != "ACTIVE" {
				continue
			}
			require.Equal(t, "SUCCEEDED", u.drained(drainOf(name)).State)
			require.Equal(t, []int64{memory, disk}, []int64{s.stats().MemoryUsed, s.stats().DiskUsed})
			require.Equal(t, values, u.values(keys...))
			u.uncordon(name)
		}
	})
}

// A writer that hangs does not keep what has found no room from moving when there is some.
func TestADrainDoesNotWaitForOneWriterAlone(t *testing.T) {
	with(t, setup{units: 2, limit: 4 * wideBytes}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(7)
		for i, key := range keys[:3] {
			u.put(s.rows(wide, []string{key}, int64(i)))
		}
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
		for i, key := range keys[3:] {
			u.put(s.rows(wide, []string{key}, int64(3+i)))
			u.move(&wire.MoveRequest{Partition: "p", Keys: wire.Strings{key}, To: "unit-1"})
		}
		require.Equal(t, []int64{3, 4}, []int64{s.held(0).Cells, s.held(1).Cells})
		b := s.add(wide, keys[:1], 100)
		b.Merge, b.Callable = "", []byte("sum")
		slow := s.user().beginPut(b)
		synctest.Wait()
		job := u.drain(drainOf("unit-0")).Job
		time.Sleep(time.Minute)
		require.EqualValues(t, 3, u.job(wire.JobRequest{Job: job}).Remain)
		u.clear(keys[3:]...)
		time.Sleep(time.Minute)
		status := u.job(wire.JobRequest{Job: job})
		require.Equal(t, "RUNNING", status.State)
		require.EqualValues(t, 1, status.Remain)
		s.python(sums)
		require.NoError(t, slow.wait().Err)
		require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: job, Wait: true}).State)
		require.Equal(t, []int64{100, 1, 2}, u.values(keys[:3]...))
	})
}

// Samples that fit on no unit together move to several, and of those that do not all fit as many as do.
func TestADrainSplitsWhatIsTooLarge(t *testing.T) {
	with(t, setup{units: 3, limit: 6 * wideBytes}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(14)
		for i, key := range keys[:6] {
			u.put(s.rows(wide, []string{key}, int64(i)))
		}
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
		for i, key := range keys[6:] {
			u.put(s.rows(wide, []string{key}, int64(6+i)))
		}
		require.Equal(t, []int64{6, 4, 4}, []int64{s.held(0).Cells, s.held(1).Cells, s.held(2).Cells})
		r := drainOf("unit-0")
		r.DeadlineMS = 3000
		end := u.drained(r)
		require.Equal(t, "PARTIAL", end.State)
		require.EqualValues(t, 4, end.Memory.CellsMoved)
		require.Equal(t, []wire.JobBlocked{{Reason: "NO_CAPACITY", Count: 2}}, end.Blocked)
		u.clear(keys[6], keys[7])
		require.Equal(t, "SUCCEEDED", u.drained(r).State)
		require.Equal(t, []int64{0, 1, 2, 3, 4, 5}, u.values(keys[:6]...))
	})
}

// What a checkpoint has brought can be drained like anything else.
func TestADrainAfterALoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		keys := keysOf(12)
		for i, key := range keys {
			u.put(s.rows(narrow, []string{key}, int64(i)))
		}
		u.save(dir)
		u.load(dir)
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
		require.Zero(t, s.held(0))
		require.Equal(t, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, u.values(keys...))
	})
}

// Slow updates of some samples keep these from moving, and nobody else; those who wait get their turn.
func TestADrainWaitsForSlowWriters(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 8 {
			u.put(s.rows(narrow, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		var slow []*pending
		for i := range 8 {
			b := s.add(narrow, []string{fmt.Sprint("k", i)}, 100)
			b.Merge, b.Callable = "", []byte("sum")
			if i < 4 {
				slow = append(slow, s.user().beginPut(b))
			}
		}
		synctest.Wait()
		job := u.drain(drainOf("unit-0")).Job
		time.Sleep(time.Second)
		status := u.job(wire.JobRequest{Job: job})
		require.Equal(t, "RUNNING", status.State)
		require.Equal(t, "WRITING", status.Blocked[0].Reason)
		for i := 4; i < 8; i++ { // they have moved, or are where they were
			u.put(s.add(narrow, []string{fmt.Sprint("k", i)}, 1000))
		}
		s.python(sums)
		for _, p := range slow {
			require.NoError(t, p.wait().Err)
		}
		require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: job, Wait: true}).State)
		require.Equal(t, []int64{100, 101, 102, 103, 1004, 1005, 1006, 1007}, u.values(keysOf(8)...))
		require.Zero(t, s.held(0))
	})
}

// A put that would fit only with the room of a unit that takes no samples fails at once. Rows that are there may wait for room there.
func TestAPutDoesNotWaitForAUnitOutOfService(t *testing.T) {
	with(t, setup{units: 2, limit: roomLimit, putWait: time.Minute}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
		u.put(s.rows(wide, []string{"c", "d"}, 3, 4))
		u.move(&wire.MoveRequest{Partition: "p", Keys: []string{"c", "d"}, To: "unit-1"})
		r := drainOf("unit-0")
		r.DeadlineMS = 1000
		require.Equal(t, "PARTIAL", u.drained(r).State) // one of them finds room
		require.Equal(t, "CORDONED", u.state("unit-0"))
		began := time.Now()
		_, err := u.tryPut(s.rows(wide, keysOf(4), 1, 2, 3, 4))
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), err)
		require.Less(t, time.Since(began), time.Second)
		_, err = u.tryPut(s.rows(wide, keysOf(3), 1, 2, 3))
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), err)
		require.GreaterOrEqual(t, time.Since(began), time.Minute, "others could go")
		there := s.user().beginPut(s.rows(7*wide/4, []string{"b", "new"}, 5, 6)) // "b" has stayed
		time.Sleep(time.Second)
		require.False(t, there.done(), "it fits into both")
		u.clear("c", "d")
		require.NoError(t, there.wait().Err)
		u.uncordon("unit-0")
		u.clear("a", "b", "new")
		u.put(s.rows(wide, keysOf(4), 1, 2, 3, 4))
	})
}

// A session that closes while a unit is drained does so at once.
func TestAServerClosesDuringADrain(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 8 {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		r := drainOf("unit-0")
		r.Rate = 1000
		u.drain(r)
		wait := u.begin(wire.OpJob, &wire.JobRequest{Job: 1, Wait: true}, time.Hour)
		time.Sleep(time.Second)
		begun := time.Now()
		s.server.Close()
		require.Less(t, time.Since(begun), time.Second)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(wait.wait().Err))
		s.closed = true
		require.Zero(t, s.stats().Leases+s.stats().Staged)
	})
}

// A dry run tells of each tier what the job then moves, and how many samples find no room.
func TestADryRunTellsWhatFits(t *testing.T) {
	cases := map[string]struct {
		setup
		fill   int // samples of the first unit, each with a wide and a narrow cell
		others int // wide samples of each of the other units
		tiers  string
		fits   [2]int64 // cells by tier
	}{
		"everything":        {setup{units: 2, limit: 20 * wideBytes}, 4, 0, "preserve", [2]int64{8, 0}},
		"a part":            {setup{units: 2, limit: 10 * wideBytes}, 6, 7, "preserve", [2]int64{4, 0}},
		"as many samples":   {setup{units: 2, samples: 20}, 6, 7, "preserve", [2]int64{6, 0}},
		"not in two halves": {setup{units: 3, limit: 8*wideBytes + wideBytes/2}, 6, 8, "preserve", [2]int64{0, 0}},
		"in two parts":      {setup{units: 3, limit: 8*wideBytes + wideBytes/2}, 6, 6, "preserve", [2]int64{8, 0}},
		"both tiers":        {setup{units: 2, disk: &unit.Disk{Threshold: 8000}}, 5, 1, "preserve", [2]int64{5, 5}},
		"no other disk":     {setup{units: 2}, 5, 1, "preserve", [2]int64{0, 0}},
		"out of the disk":   {setup{units: 2}, 5, 1, "memory", [2]int64{5, 5}},
		"to no disk":        {setup{units: 2}, 5, 1, "disk", [2]int64{0, 0}},
		"little of a disk":  {setup{units: 2, disk: &unit.Disk{Threshold: 8000, Limit: 9 * wideBytes}}, 6, 6, "preserve", [2]int64{3, 3}},
		"all to the disk":   {setup{units: 2, limit: 2 * wideBytes, disk: &unit.Disk{Threshold: 8000, Limit: 9 * wideBytes}}, 6, 6, "disk", [2]int64{2, 2}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if c.disk == nil && c.limit == 0 && c.samples == 0 {
				c.diskFor = func(i int) *unit.Disk {
					if i > 0 {
						return nil
					}
					return diskOf(t, i, vfs.OSDisk{})
				}
			}
			with(t, c.setup, func(t *testing.T, now *system) { now.planDrain(t, c.fill, c.others, c.tiers, c.fits) })
		})
	}
}

func (s *system) planDrain(t *testing.T, fill, others int, tiers string, fits [2]int64) {
	u := s.user()
	for i := range fill {
		b := s.rows(wide, []string{fmt.Sprint("k", i)}, int64(i))
		b.Fields, b.columns = append(b.Fields, "y"), append(b.columns, s.same(narrow, int64(i)))
		u.put(b)
		u.move(&wire.MoveRequest{Partition: "p", To: "unit-0"})
	}
	for unit := 1; unit < len(s.units); unit++ {
		for i := range others {
			b := s.rows(wide, []string{fmt.Sprint(unit, i)}, int64(i))
			b.Partition = fmt.Sprint("of ", unit)
			u.put(b)
			u.move(&wire.MoveRequest{Partition: b.Partition, To: fmt.Sprint("unit-", unit)})
		}
	}
	r := drainOf("unit-0")
	r.Tiers, r.DryRun, r.DeadlineMS = tiers, true, 5000
	plan := u.drain(r)
	require.Equal(t, "ACTIVE", u.state("unit-0"), "only asked")
	require.Equal(t, fits, [2]int64{plan.Memory.CellsFit, plan.Disk.CellsFit})
	r.DryRun = false
	end := u.drained(r)
	require.Equal(t, fits, [2]int64{end.Memory.CellsMoved, end.Disk.CellsMoved}, end.Err)
	require.Equal(t, [2]int64{plan.Memory.BytesFit, plan.Disk.BytesFit}, [2]int64{end.Memory.BytesMoved, end.Disk.BytesMoved})
	require.Equal(t, plan.Blocked, end.Blocked)
}
