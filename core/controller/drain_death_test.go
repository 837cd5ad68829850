//go:build go1.25

package controller_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// The controller dies at each write to a file while a unit is drained, alone or with its units. The next one goes on: nothing is
// lost or there twice, and the unit becomes empty.
func TestTheControllerDiesDuringADrain(t *testing.T) {
	for name, o := range map[string]setup{
		"units live on":     {remote: true, journal: journal.Relaxed},
		"units die too":     {durable: true, journal: journal.Relaxed},
		"power is lost":     {durable: true, journal: journal.Strict},
		"units, power lost": {remote: true, journal: journal.Strict},
	} {
		t.Run(name, func(t *testing.T) {
			o.units = 3
			at, died := 1, true
			for ; died; at += stride() {
				within(t, o, func(t *testing.T, s *system) { died = s.dieDraining(t, at, o.journal == journal.Strict) })
			}
			require.Greater(t, at, 3)
		})
	}
}

func (s *system) dieDraining(t *testing.T, at int, power bool) (died bool) {
	u := s.user()
	keys := keysOf(9)
	for i, key := range keys {
		u.put(s.rows(narrow, []string{key}, int64(i)))
	}
	s.mortal.doom(power, uint64(at))
	s.mortal.dieAfter(at)
	r := drainOf("unit-1")
	r.MaxBytes, r.MaxSlots = 1, 2 // each sample moves alone
	p := u.begin(wire.OpDrain, r, time.Hour)
	select {
	case <-s.mortal.died:
		died = true
	case <-time.After(time.Minute):
		require.NoError(t, p.wait().Err)
		s.mortal.die()
	}
	synctest.Wait()
	s.restart()
	u = s.user()
	if u.state("unit-1") == "ACTIVE" { // it has died before the job was written down
		require.True(t, died)
		require.Equal(t, "SUCCEEDED", u.drained(r).State)
	}
	end := u.job(wire.JobRequest{Job: 1, Wait: true})
	require.Equal(t, "SUCCEEDED", end.State, "write %d: %s", at, end.Err)
	require.Equal(t, "DRAINED", u.state("unit-1"))
	require.Zero(t, s.held(1), "write %d", at)
	require.EqualValues(t, len(keys), s.stats().Cells, "write %d", at)
	require.Equal(t, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8}, u.values(keys...), "write %d", at)
	var lost wire.LostReply
	u.ask(wire.OpLost, &wire.LostRequest{}, &lost)
	require.Empty(t, lost.Cells, "write %d", at)
	s.mortal.dieAfter(0)
	s.restart()
	u = s.user()
	require.Equal(t, "DRAINED", u.state("unit-1"), "write %d", at)
	require.Equal(t, "SUCCEEDED", u.job(wire.JobRequest{Job: 1}).State)
	u.uncordon("unit-1")
	s.restart()
	u = s.user()
	require.Equal(t, "ACTIVE", u.state("unit-1"), "write %d", at)
	require.Equal(t, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8}, u.values(keys...), "write %d", at)
	time.Sleep(2 * time.Minute) // nobody is awaited any more
	return died
}

// The deadline of a job goes on with the next controller. While there is none it stands still.
func TestADeadlineOutlivesTheController(t *testing.T) {
	within(t, setup{units: 2, remote: true, journal: journal.Relaxed, limit: 3 * wideBytes}, func(t *testing.T, s *system) {
		u := s.user()
		for i, key := range keysOf(5) {
			u.put(s.rows(wide, []string{key}, int64(i)))
		}
		r := drainOf("unit-0")
		r.DeadlineMS = 60_000
		began := time.Now()
		job := u.drain(r).Job
		for range 2 {
			time.Sleep(20 * time.Second)
			s.mortal.die()
			synctest.Wait()
			s.restart()
		}
		end := s.user().job(wire.JobRequest{Job: job, Wait: true})
		require.Equal(t, []string{"PARTIAL", "time was over after 1m0s"}, []string{end.State, end.Err})
		require.InDelta(t, 63, time.Since(began).Seconds(), 3.5)
		job = s.user().drain(r).Job
		time.Sleep(30 * time.Second)
		s.mortal.die()
		time.Sleep(10 * time.Minute)
		s.restart()
		began = time.Now()
		require.Equal(t, "PARTIAL", s.user().job(wire.JobRequest{Job: job, Wait: true}).State)
		require.InDelta(t, 32, time.Since(began).Seconds(), 2.5)
		require.Equal(t, []int64{0, 1, 2, 3, 4}, s.user().values(keysOf(5)...))
		time.Sleep(2 * time.Minute) // nobody is awaited any more
	})
}

// An uncordon that comes again, because the controller has died before its answer arrived, does not end what began meanwhile.
func TestAnUncordonHappensOnce(t *testing.T) {
	within(t, setup{units: 2, remote: true, journal: journal.Relaxed}, func(t *testing.T, s *system) {
		u := s.user()
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
		body, err := wire.Marshal(&wire.UncordonRequest{Unit: "unit-0"})
		require.NoError(t, err)
		peer := transport.Peer{ID: 99}
		ask := func() tqerr.Code {
			answers := make(chan *wire.Reply, 1)
			r := &wire.Request{Op: wire.OpUncordon, Sequence: wire.Sequence(1, 1), Body: body}
			s.server.Serve(t.Context(), peer, r, func(r *wire.Reply) { answers <- r })
			return (<-answers).Code
		}
		require.Equal(t, tqerr.OK, ask())
		require.Equal(t, "ACTIVE", u.state("unit-0"))
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-0")).State)
		s.mortal.die()
		synctest.Wait()
		s.restart()
		require.Equal(t, tqerr.OK, ask())
		require.Equal(t, "DRAINED", s.user().state("unit-0"))
		s.server.Gone(peer)
		time.Sleep(2 * time.Minute) // nobody is awaited any more
	})
}

// A unit that was drained and ends is no unit any more, for the next controller too; it is what it was when it joins again. One that
// ends with samples stays.
func TestADrainedUnitThatEndsIsNotListed(t *testing.T) {
	within(t, setup{units: 3, remote: true, journal: journal.Relaxed}, func(t *testing.T, s *system) {
		u := s.user()
		for i, key := range keysOf(9) {
			u.put(s.rows(narrow, []string{key}, int64(i)))
		}
		require.Equal(t, "SUCCEEDED", u.drained(drainOf("unit-1")).State)
		require.Equal(t, "DRAINED", u.state("unit-1"))
		listed := func() (units, metrics []string) {
			var list wire.UnitsReply
			s.user().ask(wire.OpUnits, nil, &list)
			for _, info := range list.Units {
				units = append(units, info.ID+" "+info.State)
			}
			var m wire.MetricsReply
			s.user().ask(wire.OpMetrics, nil, &m)
			for _, unit := range m.Units {
				metrics = append(metrics, unit.Info.ID+" "+unit.Info.State)
			}
			return units, metrics
		}
		for _, i := range []int{1, 2} {
			s.hosts[i].dead.Store(true)
			s.hosts[i].net.Cut(s.hosts[i].peer.Load(), 0)
		}
		synctest.Wait()
		left := []string{"unit-0 ACTIVE", "unit-2 UNAVAILABLE"}
		for range 2 {
			units, metrics := listed()
			require.Equal(t, left, units)
			require.Equal(t, left, metrics)
			s.restart()
		}
		s.hosts[1].dead.Store(false)
		s.hosts[2].dead.Store(false)
		s.joinHosts()
		units, _ := listed()
		require.ElementsMatch(t, []string{"unit-0 ACTIVE", "unit-1 DRAINED", "unit-2 ACTIVE"}, units)
		time.Sleep(2 * time.Minute) // nobody is awaited any more
	})
}

// A unit dies at each message of a drain. When it is the one that is drained, the job has failed and says why, and what has not moved
// is lost, and no more; when it is another one, its samples move elsewhere, and nothing of the source is lost.
func TestAUnitDiesDuringADrain(t *testing.T) {
	for victim, name := range []string{"another", "the source"} {
		for _, when := range []memnet.Action{memnet.CutBefore, memnet.CutAfter} {
			t.Run(name+map[memnet.Action]string{memnet.CutBefore: "/before", memnet.CutAfter: "/after"}[when], func(t *testing.T) {
				step := 0
				for hit := true; hit; step += stride() {
					within(t, setup{units: 3, remote: true}, func(t *testing.T, s *system) { hit = s.killDraining(t, victim, when, step) })
				}
				require.Greater(t, step, 5)
			})
		}
	}
}

// A target that is gone is refused by name, also beside one that is not.
func TestADrainToADeadUnit(t *testing.T) {
	within(t, setup{units: 3, remote: true}, func(t *testing.T, s *system) {
		u := s.user()
		s.kill(2)
		synctest.Wait()
		r := drainOf("unit-0")
		r.Targets = wire.Strings{"unit-1", "unit-2"}
		err := u.try(wire.OpDrain, r, nil)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), err)
		require.ErrorContains(t, err, `"unit-2"`)
		require.Equal(t, "ACTIVE", u.state("unit-0"))
	})
}

func (s *system) killDraining(t *testing.T, victim int, when memnet.Action, step int) (hit bool) {
	u := s.user()
	keys := keysOf(9)
	for i, key := range keys {
		u.put(s.rows(narrow, []string{key}, int64(i)))
	}
	synctest.Wait()
	if victim == 0 { // only what the source has is looked at
		for _, key := range keys {
			if s.lies(u, key) == 0 {
				u.clear(key)
			}
		}
		keys = u.keys()
	}
	seen := 0
	remove := s.hosts[victim].net.Inject(memnet.Fault{Do: when, When: func(uint64, *wire.Request) bool {
		seen++
		hit = hit || seen == step+1
		return seen == step+1
	}})
	r := drainOf("unit-1")
	r.MaxBytes, r.MaxSlots = 1, 2
	var job wire.JobReply
	if err := u.try(wire.OpDrain, r, &job); err != nil {
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), err)
		require.Equal(t, 1, victim)
		remove()
		s.kill(victim)
		return true
	}
	end := u.job(wire.JobRequest{Job: job.Job, Wait: true})
	synctest.Wait()
	remove()
	if hit {
		s.kill(victim)
		synctest.Wait()
	}
	if victim == 1 && hit {
		if end.State != "SUCCEEDED" { // else it has died when it was empty
			require.Equal(t, "FAILED", end.State)
			require.Contains(t, end.Err, "SOURCE_LOST")
		}
		for _, key := range keys {
			got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}}, 0)
			if err == nil {
				require.Equal(t, []int64{int64(key[1] - '0')}, got.ints["x"][0][:1])
				continue
			}
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%s: %v", key, err)
			require.NotEqual(t, "SUCCEEDED", end.State)
		}
		return hit
	}
	require.Equal(t, "SUCCEEDED", end.State, end.Err)
	require.Zero(t, s.held(1))
	for _, key := range keys {
		got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}}, 0)
		if err == nil {
			require.Equal(t, []int64{int64(key[1] - '0')}, got.ints["x"][0][:1])
			continue
		}
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%s: %v", key, err)
		require.True(t, hit)
	}
	return hit
}

// lies tells on which unit a key's sample is.
func (s *system) lies(u *user, key string) int {
	before := make([]int64, len(s.units))
	for i := range before {
		before[i] = s.units[i].Stats().Cells
	}
	b := s.rows(narrow, []string{key}, 77)
	b.Fields = wire.Strings{"where"}
	u.put(b)
	synctest.Wait()
	at := -1
	for i := range before {
		if s.units[i].Stats().Cells > before[i] {
			at = i
		}
	}
	u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{key}, Fields: wire.Strings{"where"}}, nil)
	synctest.Wait()
	return at
}

// spoiling is a disk that gives other bytes than were written for one value.
type spoiling struct {
	vfs.Disk
	value int64
	reads atomic.Int64
}

func (d *spoiling) Create(name string) (vfs.DiskFile, error) {
	f, err := d.Disk.Create(name)
	return spoiledFile{f, d}, err
}

type spoiledFile struct {
	vfs.DiskFile
	d *spoiling
}

func (f spoiledFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.DiskFile.ReadAt(p, off)
	pattern := binary.NativeEndian.AppendUint64(nil, uint64(f.d.value))
	if at := bytes.Index(p[:n], append(pattern, pattern...)); at >= 0 {
		f.d.reads.Add(1)
		p[at] ^= 1
	}
	return n, err
}

// A value whose bytes on disk are damaged stays with its sample and is named, after as many tries as were asked for. Everything else
// moves, and the unit is neither drained nor taken in again.
func TestADrainLeavesWhatIsDamaged(t *testing.T) {
	const bad = 0x0123456789abcdef
	for _, attempts := range []int{1, 3} {
		broken := &spoiling{Disk: vfs.OSDisk{}, value: bad}
		with(t, setup{units: 2, disk: (unit.Disk{Threshold: 4000}).OnDisk(broken)}, func(t *testing.T, s *system) {
			u := s.user()
			for i := range 12 {
				value := int64(i)
				if i == 5 {
					value = bad
				}
				b := s.rows(wide, []string{fmt.Sprint("k", i)}, value)
				b.Fields, b.columns = append(b.Fields, "y"), append(b.columns, s.same(narrow, int64(i)))
				u.put(b)
			}
			at := s.lies(u, "k5")
			name := fmt.Sprint("unit-", at)
			broken.reads.Store(0)
			r := drainOf(name)
			r.Attempts = attempts
			end := u.drained(r)
			require.Equal(t, "PARTIAL", end.State)
			require.EqualValues(t, attempts, broken.reads.Load(), "tries")
			require.Len(t, end.Cells, 2)
			require.EqualValues(t, 2, end.Failed)
			for i, field := range []string{"x", "y"} {
				c := end.Cells[i]
				require.Equal(t, []any{"p", "k5", true, field, attempts}, []any{c.Partition, c.Key, c.Keyed, c.Field, c.Attempts})
			}
			require.Contains(t, end.Cells[0].Reason, "checksum")
			require.Contains(t, end.Cells[1].Reason, "another field of the sample could not be moved: x")
			require.Equal(t, "CORDONED", u.state(name))
			require.EqualValues(t, 2, s.held(at).Cells)
			for i := range 12 {
				got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{fmt.Sprint("k", i)}, Fields: []string{"y"}}, 0)
				require.NoError(t, err)
				require.EqualValues(t, i, got.ints["y"][0][0])
			}
			u.put(s.rows(wide, []string{"k5"}, 5)) // which mends it
			require.Equal(t, "SUCCEEDED", u.drained(r).State)
			for i := range 12 {
				require.Equal(t, []int64{int64(i)}, u.values(fmt.Sprint("k", i)))
			}
		})
	}
}

// A unit that does not answer holds the first batches up for a while, and then all samples move to another one.
func TestADrainPassesAUnitThatHangs(t *testing.T) {
	for name, room := range map[string]int64{"all at once": 256 << 20, "one by one": 1} {
		t.Run(name, func(t *testing.T) {
			within(t, setup{units: 3, remote: true}, func(t *testing.T, s *system) { s.drainPastAHang(t, room) })
		})
	}
}

func (s *system) drainPastAHang(t *testing.T, room int64) {
	u := s.user()
	for i, key := range keysOf(9) {
		u.put(s.rows(narrow, []string{key}, int64(i)))
	}
	var mine []string
	for _, key := range keysOf(9) {
		if s.lies(u, key) == 1 {
			mine = append(mine, key)
		}
	}
	require.Len(t, mine, 3)
	remove := s.hosts[0].net.Inject(memnet.Fault{
		Do: memnet.DelayReply, Chance: 1, Delay: 10 * time.Minute, When: func(_ uint64, r *wire.Request) bool { return r.Op == wire.OpUnitStage },
	})
	r := drainOf("unit-1")
	r.MaxBytes = room
	job := u.drain(r).Job
	time.Sleep(time.Second)
	begun := time.Now()
	u.put(s.rows(narrow, mine, fill(len(mine), 70)...))
	require.InDelta(t, 29, time.Since(begun).Seconds(), 2, "who writes waits so long")
	end := u.job(wire.JobRequest{Job: job, Wait: true})
	remove()
	require.Equal(t, "SUCCEEDED", end.State, end.Err)
	require.InDelta(t, 30_000, end.ElapsedMS, 2000)
	require.Equal(t, fill(len(mine), 70), u.values(mine...))
	require.EqualValues(t, 6, s.held(2).Cells)
	time.Sleep(time.Hour)
}
