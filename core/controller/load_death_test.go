//go:build go1.25

package controller_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/store/disktier"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/unit"
	"transferqueue/core/unit/remote"
	"transferqueue/core/wire"
)

// What the keys of "p" have before and after a load: those of a checkpoint are written again after it, so that the checkpoint's cells
// and those that they replace cannot be told apart by their names.
var (
	saved = map[string]int64{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}
	since = map[string]int64{"a": 11, "b": 12, "d": 14, "e": 15, "f": 16, "new": 17, "more": 18}
)

// loadDeath is a way to die in a load and to come back.
type loadDeath struct {
	setup
	power bool
	// back makes the next controller; nil: restart.
	back func(s *system)
	// small reports that a value lies in memory, and may be lost with the process of its unit.
	small func(value int64) bool
	// loses reports that what a unit has done in part may be lost.
	loses bool
}

func (d *loadDeath) width(value int64) int {
	if d.small == nil || d.small(value) {
		return narrow
	}
	return 64
}

// loadable makes a checkpoint and then another state of the session.
func (s *system) loadable(u *user, dir string, d *loadDeath) {
	write := func(values map[string]int64) {
		for _, key := range slices.Sorted(maps.Keys(values)) {
			u.put(s.rows(d.width(values[key]), []string{key}, values[key]))
		}
	}
	write(saved)
	u.save(dir)
	u.clear("c") // whose index is of another sample then
	write(since)
}

// has returns the values of all keys that can be read, and the keys that have lost theirs.
func (u *user) has() (values map[string]int64, lost []string) {
	values = map[string]int64{}
	var reply wire.LostReply
	u.ask(wire.OpLost, &wire.LostRequest{}, &reply)
	for _, cells := range reply.Cells {
		lost = append(lost, cells.Keys...)
	}
	for _, key := range u.keys() {
		if !slices.Contains(lost, key) {
			values[key] = u.values(key)[0]
		}
	}
	return values, lost
}

// requireOne checks that a session has all that was before a load, or all of the checkpoint, but for what is told as lost.
func (d *loadDeath) requireOne(t *testing.T, u *user) (done bool) {
	values, lost := u.has()
	want := maps.Clone(since)
	if done = slices.Contains(u.keys(), "c"); done {
		want = maps.Clone(saved)
	}
	for _, key := range lost {
		require.True(t, done && d.loses || d.small != nil && d.small(want[key]), "%s is lost", key)
		delete(want, key)
	}
	require.Equal(t, want, values)
	return done
}

// die lets the controller die before a step of a load, and looks what the next one has.
func (d *loadDeath) die(t *testing.T, s *system, dir string, step int) (done, acknowledged bool) {
	u := s.user()
	s.loadable(u, dir, d)
	s.mortal.doom(d.power, uint64(step))
	s.mortal.dieBefore(step)
	p := u.begin(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "all", Path: dir}, 0)
	select {
	case <-s.mortal.died:
	case r := <-p.result:
		require.NoError(t, r.Err)
		acknowledged = true
	}
	if d.back == nil {
		s.restart()
	} else {
		d.back(s)
	}
	done = d.requireOne(t, s.user())
	require.True(t, done || !acknowledged)
	s.check()
	u = s.user()
	u.put(s.rows(narrow, []string{"after"}, 1))
	u.load(dir)
	values, _ := u.has()
	require.Equal(t, saved, values)
	s.restart()
	require.True(t, d.requireOne(t, s.user()))
	time.Sleep(2 * time.Minute) // nobody is awaited any more
	return done, acknowledged
}

// A controller that dies at any moment of a load leaves what was before, or the checkpoint: all of it, and nothing else. What
// that cannot hold for is lost, and told by key.
func TestADeathInALoadLeavesTheOneOrTheOther(t *testing.T) {
	odd := func(value int64) bool { return value%2 == 1 }
	evenAfter := func(value int64) bool { return (value > 10) == (value%2 == 0) }
	missed := func(s *system) {
		s.hosts[0].dead.Store(true)
		s.restart()
		s.hosts[0].dead.Store(false)
		s.joinHosts()
	}
	away := setup{units: 2, remote: true, journal: journal.Relaxed}
	tiers := setup{units: 1, durable: true, journal: journal.Relaxed, disk: &unit.Disk{Threshold: 100}}
	strictly := func(o setup) setup {
		o.journal = journal.Strict
		return o
	}
	one := func(o setup) setup { // where the checkpoint's cells lie beside those that they replace
		o.units = 1
		return o
	}
	disks := &elsewhere{dir: t.TempDir()}
	kept := one(away)
	kept.diskFor = disks.fresh
	durable := setup{units: 2, durable: true, journal: journal.Relaxed}
	for name, d := range map[string]loadDeath{
		"units elsewhere":              {setup: away},
		"units elsewhere, power loss":  {setup: strictly(away), power: true},
		"a unit elsewhere":             {setup: one(away)},
		"a unit is missed":             {setup: away, back: missed},
		"durable units":                {setup: durable},
		"durable units, strict":        {setup: strictly(durable)},
		"durable units, power loss":    {setup: strictly(durable), power: true},
		"a durable unit":               {setup: one(durable)},
		"two tiers":                    {setup: tiers, small: odd},
		"two tiers, others":            {setup: tiers, small: evenAfter},
		"two tiers, all others":        {setup: tiers, small: func(value int64) bool { return value < 10 }},
		"two tiers, power loss":        {setup: strictly(tiers), small: evenAfter, power: true},
		"units elsewhere die as well":  {setup: away, small: func(int64) bool { return true }, back: func(s *system) { s.startAnew(nil) }},
		"durable units elsewhere, too": {setup: kept, loses: true, back: func(s *system) { s.startAnew(disks.killed) }},
	} {
		t.Run(name, func(t *testing.T) {
			dir, undone, done := t.TempDir(), 0, 0
			for step, more := 1, true; more; step += stride() {
				within(t, d.setup, func(t *testing.T, s *system) {
					t.Logf("step %d", step)
					happened, acknowledged := d.die(t, s, fmt.Sprint(dir, "/", step), step)
					if more = !acknowledged; happened {
						done++
					} else {
						undone++
					}
				})
				if t.Failed() {
					return
				}
			}
			t.Log(undone, "undone,", done, "done")
			require.Greater(t, undone, 2/stride())
			require.Greater(t, done, 2/stride())
		})
	}
}

// startAnew replaces the controller when the processes of all units are gone with it; they come back with what is on their disks.
func (s *system) startAnew(disk func(i int) *unit.Disk) {
	s.mortal.die()
	synctest.Wait()
	for i, h := range s.hosts {
		h.dead.Store(true)
		require.NoError(s.t, h.net.Close())
		if h.disk != nil {
			h.disk = disk(i)
		}
	}
	s.restart()
	synctest.Wait()
	for i, h := range s.hosts {
		s.end(h.server)
		var err error
		h.server, err = remote.NewServer(remote.Options{Name: h.name, Disk: h.disk, Jobs: s.jobs})
		require.NoError(s.t, err)
		h.net, s.units[i] = memnet.New(uint64(i), h.server), h.server.Unit()
		h.dead.Store(false)
	}
	s.joinHosts()
}

// elsewhere is the disks of durable units in processes of their own.
type elsewhere struct {
	dir   string
	disks [2]*vfs.Mem
}

func (e *elsewhere) fresh(i int) *unit.Disk {
	e.disks[i] = vfs.NewMem(0)
	return e.disk(i)
}

// killed is the disk that a unit finds when its process before was killed.
func (e *elsewhere) killed(i int) *unit.Disk {
	e.disks[i] = e.disks[i].Killed()
	return e.disk(i)
}

func (e *elsewhere) disk(i int) *unit.Disk {
	return unit.Disk{
		Path: e.dir, Durability: disktier.Relaxed, Namespace: "n", Name: fmt.Sprintf("unit-%d", i), Threshold: 1,
		HighWatermark: 0.9, LowWatermark: 0.7, Headroom: headroom,
	}.OnDisk(e.disks[i])
}

// Whatever call fails of the disk on which the journal and the durable units lie, a load has happened or has not, in the process that
// goes on, when what is broken had time to be replaced, and in the next one.
func TestEveryCallOfALoadFails(t *testing.T) {
	d, dir := &loadDeath{}, t.TempDir()
	for _, durability := range []journal.Durability{journal.Relaxed, journal.Strict} {
		for at, more := 0, true; more; at++ {
			for _, goesOn := range []bool{false, true} {
				failing := &vfs.FailingDisk{At: -1, Err: []error{unix.EIO, unix.ENOSPC}[at%2]}
				o := setup{units: 2, durable: true, journal: durability, failing: failing}
				within(t, o, func(t *testing.T, s *system) {
					path, u := fmt.Sprint(dir, "/", at), s.user()
					s.loadable(u, path, d)
					failing.FailNext(at)
					outcome := u.tryLoad(path)
					done := outcome == nil || strings.Contains(outcome.Error(), "done, but it would not survive")
					more = failing.Failed()
					failing.Heal()
					if goesOn {
						_ = u.try(wire.OpList, &wire.ListRequest{}, nil)
						time.Sleep(2 * time.Second)
						seen := d.requireOne(t, u)
						require.True(t, seen || !done, "call %d, which said: %v", at, outcome)
						done = seen
					}
					s.setup.failing = nil
					s.restart()
					require.Equal(t, done, d.requireOne(t, s.user()), "call %d, which said: %v", at, outcome)
					time.Sleep(2 * time.Minute)
				})
				if t.Failed() {
					return
				}
			}
		}
	}
}
