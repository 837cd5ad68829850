//go:build go1.25

package controller_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/drain"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// drainOf is a request with the defaults of users.
func drainOf(unit string) *wire.DrainRequest {
	return &wire.DrainRequest{Unit: unit, MaxSlots: 4, MaxBytes: 256 << 20, Attempts: 3, Tiers: "preserve"}
}

func (u *user) drain(r *wire.DrainRequest) *wire.JobReply {
	u.t.Helper()
	var reply wire.JobReply
	u.ask(wire.OpDrain, r, &reply)
	return &reply
}

func (u *user) job(r wire.JobRequest) *wire.JobReply {
	u.t.Helper()
	var reply wire.JobReply
	require.NoError(u.t, decode(u.begin(wire.OpJob, &r, time.Hour).wait(), &reply))
	sum := reply.Memory.CellsMoved + reply.Disk.CellsMoved + reply.Dropped + reply.Failed + reply.Remain
	require.Equal(u.t, reply.Memory.CellsTotal+reply.Disk.CellsTotal, sum, "%+v", reply)
	return &reply
}

// drained drains a unit and waits for the end of that.
func (u *user) drained(r *wire.DrainRequest) *wire.JobReply {
	u.t.Helper()
	return u.job(wire.JobRequest{Job: u.drain(r).Job, Wait: true})
}

func (u *user) uncordon(unit string) {
	u.t.Helper()
	u.ask(wire.OpUncordon, &wire.UncordonRequest{Unit: unit}, nil)
}

// held is what a unit holds, without its limits.
func (s *system) held(i int) store.Stats {
	synctest.Wait()
	st := s.units[i].Stats()
	st.MemoryLimit, st.DiskLimit = 0, 0
	return st
}

// tiers puts values of many sizes in memory and on disk, one by one, so that all units have some. It returns the keys and widths.
func (s *system) tiers(u *user, n int) (keys []string, widths []int) {
	sizes := []int{1, 511, 512, 875, 1500, 20_000, 1 << 17}
	for i := range n {
		key, width := fmt.Sprint("k", i), sizes[i%len(sizes)]
		u.put(s.rows(width, []string{key}, int64(i)))
		keys, widths = append(keys, key), append(widths, width)
	}
	return keys, widths
}

func (s *system) requireAll(u *user, keys []string, widths []int) {
	s.t.Helper()
	for i, key := range keys {
		row := u.get(key).ints["x"][0]
		require.Equal(s.t, slices.Repeat([]int64{int64(i)}, widths[i]), row, key)
	}
}

// Everything moves, each cell once and to its tier, and nothing is left, to the byte.
func TestADrainMovesBothTiers(t *testing.T) {
	with(t, setup{units: 3, disk: &unit.Disk{Threshold: 8000}}, func(t *testing.T, s *system) {
		u := s.user()
		keys, widths := s.tiers(u, 42)
		synctest.Wait()
		before := s.units[1].Counters()
		require.Positive(t, before.MemoryCells)
		require.Positive(t, before.DiskCells)
		memory, disk := s.stats().MemoryUsed, s.stats().DiskUsed
		end := u.drained(drainOf("unit-1"))
		require.Equal(t, "SUCCEEDED", end.State, end.Err)
		require.Equal(t, wire.JobTier{
			CellsTotal: before.MemoryCells, CellsMoved: before.MemoryCells, BytesTotal: before.MemoryLogical, BytesMoved: before.MemoryLogical,
		}, end.Memory)
		require.Equal(t, wire.JobTier{
			CellsTotal: before.DiskCells, CellsMoved: before.DiskCells, BytesTotal: before.DiskLogical, BytesMoved: before.DiskLogical,
		}, end.Disk)
		require.Zero(t, s.held(1))
		require.Equal(t, []int64{memory, disk}, []int64{s.stats().MemoryUsed, s.stats().DiskUsed}, "each cell lies in the tier in which it lay")
		require.Equal(t, "DRAINED", u.state("unit-1"))
		s.requireAll(u, keys, widths)
		u.put(s.rows(narrow, keysOf(9), 1, 2, 3, 4, 5, 6, 7, 8, 9))
		require.Zero(t, s.held(1), "it takes no samples")
		u.uncordon("unit-1")
		require.Equal(t, "ACTIVE", u.state("unit-1"))
		again := u.drained(drainOf("unit-2"))
		require.Equal(t, "SUCCEEDED", again.State, again.Err)
		require.Positive(t, s.held(1).Cells, "it takes samples again")
	})
}

// What makes no sense is refused at once, and changes nothing.
func TestADrainIsRefused(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
		refused := func(r *wire.DrainRequest, code tqerr.Code, text string) {
			t.Helper()
			err := u.try(wire.OpDrain, r, nil)
			require.Equal(t, code, tqerr.CodeOf(err), err)
			require.ErrorContains(t, err, text)
		}
		refused(drainOf("other"), tqerr.NotFound, `"other"`)
		for _, change := range []func(r *wire.DrainRequest){
			func(r *wire.DrainRequest) { r.MaxSlots = 0 }, func(r *wire.DrainRequest) { r.MaxBytes = 0 }, func(r *wire.DrainRequest) { r.Rate = -1 },
			func(r *wire.DrainRequest) { r.DeadlineMS = -1 }, func(r *wire.DrainRequest) { r.Attempts = 0 }, func(r *wire.DrainRequest) { r.Tiers = "x" },
			func(r *wire.DrainRequest) { r.Targets = wire.Strings{"unit-0"} },
		} {
			r := drainOf("unit-0")
			change(r)
			refused(r, tqerr.InvalidArgument, "")
		}
		r := drainOf("unit-0")
		r.Targets = wire.Strings{"other"}
		refused(r, tqerr.NotFound, `"other"`)
		require.Equal(t, "ACTIVE", u.state("unit-0"))
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
		refused(drainOf("unit-0"), tqerr.InvalidState, "drained already")
		refused(drainOf("unit-1"), tqerr.InvalidState, `"unit-1" is the last one`)
		require.Equal(t, []int64{1, 2, 3, 4}, u.values(keysOf(4)...))
		err := u.try(wire.OpUncordon, &wire.UncordonRequest{Unit: "other"}, nil)
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err), err)
	})
}

// A view keeps its bytes while its cell moves, and the unit is not drained before the view is gone.
func TestAViewOutlivesADrain(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, keysOf(4), 0, 1, 2, 3))
		synctest.Wait()
		name := "unit-0"
		if s.units[1].Stats().Cells > 0 {
			name = "unit-1"
		}
		body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keysOf(4), Views: true, Inline: -1})
		require.NoError(t, err)
		view := u.start(&client.Request{Op: wire.OpGet, Flags: client.Views, Body: body}).wait()
		require.NoError(t, view.Err)
		job := u.drain(drainOf(name)).Job
		time.Sleep(time.Minute)
		status := u.job(wire.JobRequest{Job: job})
		require.Equal(t, []string{"RUNNING", "waiting"}, []string{status.State, status.Phase})
		require.Equal(t, []wire.JobBlocked{{Reason: "PINNED", Count: 1}}, status.Blocked)
		refused := u.try(wire.OpDrain, drainOf(name), nil)
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(refused), refused)
		refused = u.try(wire.OpUncordon, &wire.UncordonRequest{Unit: name}, nil)
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(refused), refused)
		require.Equal(t, "DRAINING", u.state(name))
		u.put(s.rows(wide, keysOf(4), 10, 11, 12, 13))
		for i := range 4 {
			c := &view.Columns[0]
			require.Equal(t, slices.Repeat([]int64{int64(i)}, wide), elements(c.Data[i*wide*8:(i+1)*wide*8]))
		}
		for i := range view.Columns {
			client.Release(view.Columns[i].Token)
			client.Release(view.Columns[i].OffsetsToken)
		}
		require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: job, Wait: true}).State)
		require.Equal(t, []int64{10, 11, 12, 13}, u.values(keysOf(4)...))
	})
}

// Without room anywhere nothing moves, nothing is lost, and the job says why; room that becomes free lets it go on.
func TestADrainWaitsForRoom(t *testing.T) {
	const room = 3 * wideBytes
	with(t, setup{units: 2, limit: room}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 5 {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		source := 0 // it has two, the other one three
		if s.units[1].Stats().Cells == 2 {
			source = 1
		}
		name := fmt.Sprint("unit-", source)
		r := drainOf(name)
		r.DryRun = true
		plan := u.drain(r)
		require.EqualValues(t, 2*wideBytes, plan.Memory.BytesTotal)
		require.Equal(t, []wire.JobBlocked{{Reason: "NO_CAPACITY", Count: 2}}, plan.Blocked)
		require.Equal(t, "ACTIVE", u.state(name), "only asked")
		r.DryRun, r.DeadlineMS = false, 3000
		end := u.drained(r)
		require.Equal(t, "PARTIAL", end.State)
		require.Equal(t, []wire.JobBlocked{{Reason: "NO_CAPACITY", Count: 2}}, end.Blocked)
		require.Less(t, end.Attempts, int64(40), "it tries seldom")
		require.EqualValues(t, 2, end.Remain)
		require.Equal(t, "CORDONED", u.state(name))
		require.Equal(t, []int64{0, 1, 2, 3, 4}, u.values(keysOf(5)...))
		r.DeadlineMS = 0
		job := u.drain(r).Job
		time.Sleep(time.Minute)
		require.Equal(t, "RUNNING", u.job(wire.JobRequest{Job: job}).State)
		u.clear(keysOf(5)...)
		require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: job, Wait: true}).State)
	})
}

// Units that have as many samples as they may are full too.
func TestADrainPlansWithTheLimitOfSamples(t *testing.T) {
	with(t, setup{units: 2, samples: 6}, func(t *testing.T, s *system) {
		u := s.user()
		for i := range 6 {
			u.put(s.rows(narrow, []string{fmt.Sprint("k", i)}, int64(i)))
		}
		r := drainOf("unit-0")
		r.DryRun = true
		require.Equal(t, []wire.JobBlocked{{Reason: "NO_CAPACITY", Count: 3}}, u.drain(r).Blocked)
		u.clear(keysOf(6)...)
		require.Empty(t, u.drain(r).Blocked)
	})
}

// A cancelled drain ends soon wherever it is, everything stays readable, and the next one succeeds.
func TestADrainIsCancelledAtAnyMoment(t *testing.T) {
	for round := range 8 {
		with(t, setup{units: 3, disk: &unit.Disk{Threshold: 8000}}, func(t *testing.T, s *system) {
			u := s.user()
			keys, widths := s.tiers(u, 21)
			remove := func() {}
			if s.hosts != nil { // it is cancelled between its messages
				remove = s.hosts[1].net.Inject(memnet.Fault{Do: memnet.DelayReply, Delay: time.Second, Chance: 1})
			}
			r := drainOf("unit-0")
			r.Rate = 1 << 20
			job := u.drain(r).Job
			time.Sleep(time.Duration(round) * 450 * time.Millisecond)
			u.job(wire.JobRequest{Job: job, Cancel: true})
			end := u.job(wire.JobRequest{Job: job, Wait: true})
			remove()
			require.Contains(t, []string{"CANCELLED", "SUCCEEDED"}, end.State, end.Err)
			s.check()
			s.requireAll(u, keys, widths)
			if end.State == "CANCELLED" {
				require.Equal(t, "CORDONED", u.state("unit-0"))
				require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
			}
			require.Zero(t, s.held(0))
			s.requireAll(u, keys, widths)
			s.quiet()
		})
	}
}

// Random operations while units are drained, cancelled, and taken in again.
func TestRandomOperationsDuringDrainsAgainstANaiveModel(t *testing.T) {
	for name, disk := range map[string]*unit.Disk{"memory": nil, "disk": {Threshold: 2000}} {
		t.Run(name, func(t *testing.T) {
			o := setup{units: 3, limit: 24 << 10, putWait: 5 * time.Second, disk: disk, drains: true}
			againstAModel(t, 2, 4, o, func(*system, int) {})
		})
	}
}

// moveAtRandom moves samples between units that stay.
func (u *user) moveAtRandom(rng *rand.Rand) {
	var err error
	switch rng.IntN(3) {
	case 0:
		err = u.try(wire.OpMove, &wire.MoveRequest{Partition: "p", To: fmt.Sprint("unit-", rng.IntN(len(u.s.units)))}, nil)
	case 1:
		err = u.try(wire.OpRebalance, &wire.RebalanceRequest{}, nil)
	}
	switch tqerr.CodeOf(err) {
	case tqerr.OK, tqerr.ResourceExhausted, tqerr.DeadlineExceeded, tqerr.NotFound: // full, not there yet; and see modelUser.ok
	default:
		u.t.Error(err)
	}
}

// drainAtRandom drains one unit after another until stop is closed, and moves samples in between.
func (u *user) drainAtRandom(rng *rand.Rand, stop <-chan struct{}) (succeeded int) {
	for {
		select {
		case <-stop:
			return succeeded
		default:
		}
		u.moveAtRandom(rng)
		i := rng.IntN(len(u.s.units))
		r := drainOf(fmt.Sprint("unit-", i))
		r.DeadlineMS = 2000
		r.MaxSlots, r.MaxBytes = 1+rng.IntN(4), 1<<(8+rng.IntN(8))
		var reply wire.JobReply
		if err := u.try(wire.OpDrain, r, &reply); err != nil {
			u.t.Error(err)
			return succeeded
		}
		if rng.IntN(4) == 0 {
			time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond)
			_ = u.try(wire.OpJob, &wire.JobRequest{Job: reply.Job, Cancel: true}, nil)
		}
		for id := reply.Job; !drain.State(reply.State).Final(); time.Sleep(time.Millisecond) {
			if err := u.try(wire.OpJob, &wire.JobRequest{Job: id}, &reply); err != nil {
				u.t.Error(err)
				return succeeded
			}
		}
		switch reply.State {
		case "SUCCEEDED":
			succeeded++
			if st := u.s.units[i].Stats(); st.Cells+st.MemoryUsed+st.DiskUsed+st.Leases+st.Staged != 0 {
				u.t.Errorf("unit %d is drained and holds %+v", i, st)
			}
		case "CANCELLED", "PARTIAL":
		default:
			u.t.Errorf("a drain has ended as %+v", reply)
		}
		if err := u.try(wire.OpUncordon, &wire.UncordonRequest{Unit: r.Unit}, nil); err != nil {
			u.t.Error(err)
		}
	}
}
