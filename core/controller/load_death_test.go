//go:build go1.25

package controller_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/journal"
	"transferqueue/core/wire"
)

// before and after a load, what the keys of "p" have: those of a checkpoint are written again and again after it, so that the
// checkpoint's cells and those that they replace cannot be told apart by their names.
var (
	saved = map[string]int64{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}
	since = map[string]int64{"a": 11, "b": 12, "d": 14, "e": 15, "f": 16, "new": 17, "more": 18}
)

// loadable makes a checkpoint and then another state of the session.
func (s *system) loadable(u *user, dir string, width int) {
	write := func(values map[string]int64) {
		for _, key := range []string{"a", "b", "c", "d", "e", "f", "new", "more"} {
			if v, is := values[key]; is {
				u.put(s.rows(width, []string{key}, v))
			}
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
	slices.Sort(lost)
	for _, key := range u.keys() {
		if !slices.Contains(lost, key) {
			values[key] = u.values(key)[0]
		}
	}
	return values, lost
}

// A controller that dies at any moment of a load leaves what was before, or the checkpoint: all of it, and nothing else.
func TestADeathInALoadLeavesTheOneOrTheOther(t *testing.T) {
	setups := map[string]struct {
		setup
		power bool
	}{
		"units elsewhere, relaxed":    {setup{units: 2, remote: true, journal: journal.Relaxed}, false},
		"units elsewhere, power loss": {setup{units: 2, remote: true, journal: journal.Strict}, true},
		"durable units, relaxed":      {setup{units: 2, durable: true, journal: journal.Relaxed}, false},
		"durable units, strict":       {setup{units: 2, durable: true, journal: journal.Strict}, false},
		"durable units, power loss":   {setup{units: 2, durable: true, journal: journal.Strict}, true},
	}
	for name, o := range setups {
		t.Run(name, func(t *testing.T) {
			dir, undone, done := t.TempDir(), 0, 0
			for step, more := 1, true; more; step += stride() {
				within(t, o.setup, func(t *testing.T, s *system) {
					path := fmt.Sprint(dir, "/", step)
					u := s.user()
					s.loadable(u, path, narrow)
					s.mortal.doom(o.power, uint64(step))
					s.mortal.dieBefore(step)
					p := u.begin(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "all", Path: path}, 0)
					select {
					case <-s.mortal.died:
					case r := <-p.result:
						require.NoError(t, r.Err)
						more = false
					}
					s.restart()
					u = s.user()
					values, lost := u.has()
					require.Empty(t, lost, "step %d", step)
					if values["c"] == 3 {
						done++
						require.Equal(t, saved, values, "step %d", step)
					} else {
						undone++
						require.True(t, more, "it was acknowledged")
						require.Equal(t, since, values, "step %d", step)
					}
					s.check()
					u.put(s.rows(narrow, []string{"after"}, 1))
					u.load(path)
					values, _ = u.has()
					require.Equal(t, saved, values, "step %d", step)
					s.restart()
					values, lost = s.user().has()
					require.Empty(t, lost)
					require.Equal(t, saved, values, "step %d", step)
					time.Sleep(2 * time.Minute) // nobody is awaited any more
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
