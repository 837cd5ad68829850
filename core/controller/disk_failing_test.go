//go:build go1.25

package controller_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

const (
	smallRow  = 200  // elements of a row that lies in memory until it has to move
	mediumRow = 1000 // elements of one that goes to disk
)

// diskWork is what a unit does with its disk, and what has been acknowledged of it.
type diskWork struct {
	s      *system
	u      *user
	stored map[string]int64
	failed int
}

func (w *diskWork) put(width int, value int64, keys ...string) {
	b := w.s.rows(width, keys, fill(len(keys), value)...)
	w.done(b, value, keys)
}

func (w *diskWork) done(b batch, value int64, keys []string) {
	if _, err := w.u.tryPut(b); err != nil {
		w.failed++
		return
	}
	for _, key := range keys {
		w.stored[key] = value
	}
}

// update adds to a value; one that is not there was refused before.
func (w *diskWork) update(width int, key string, more int64) {
	if before, has := w.stored[key]; has {
		w.done(w.s.add(width, []string{key}, more), before+more, []string{key})
	}
}

func (w *diskWork) read(keys ...string) {
	for _, key := range keys {
		if _, has := w.stored[key]; !has {
			continue
		}
		got, err := w.u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{key}, Strict: true}, 0)
		if err != nil {
			w.failed++
			continue
		}
		for _, v := range got.ints["x"][0] {
			require.Equal(w.s.t, w.stored[key], v, "key %q", key)
		}
	}
}

// clear must work on any disk.
func (w *diskWork) clear(keys ...string) {
	w.u.clear(keys...)
	for _, key := range keys {
		delete(w.stored, key)
	}
	synctest.Wait()
}

// run puts, updates, overwrites and clears in both tiers, and makes cells spill, come back and be compacted.
func (w *diskWork) run() {
	small := func(i int) string { return fmt.Sprint("s", i) }
	for i := range 24 {
		w.put(smallRow, int64(i), small(i))
	}
	w.put(mediumRow, 100, "m0", "m1")
	w.update(mediumRow, "m0", 7)
	w.done(w.s.alike(mediumRow, []string{"e0", "e1", "e2"}, 50, 50, 50), 50, []string{"e0", "e1", "e2"})
	w.done(w.s.alike(smallRow, []string{"f0", "f1"}, 60, 60), 60, []string{"f0", "f1"})
	for i := 0; i < 24; i += 2 {
		w.clear(small(i), small(i+1))
		if i%6 == 0 {
			w.put(smallRow, int64(1000+i), small(i))
		}
	}
	w.read("s0", "s6", "m1", "e1", "f0")
	w.read("s0", "s6", "m1", "e1", "f0")
	synctest.Wait()
	w.update(smallRow, "s6", 1)
	w.clear("e0", "e1")
	w.put(mediumRow, 200, "m1")
	w.put(smallRow, 201, "e2")
	synctest.Wait()
}

// TestEveryCallOfTheDiskFails makes the i-th call fail, for all i, in every way. What was acknowledged is there afterwards, what
// was not has left no byte, and the unit goes on.
func TestEveryCallOfTheDiskFails(t *testing.T) {
	kinds := map[string]struct {
		err     error
		forever bool
		only    string
	}{
		"EIO": {err: unix.EIO}, "ENOSPC": {err: unix.ENOSPC}, "a disk that has gone": {err: unix.EIO, forever: true},
		"a disk that is full from then on": {err: unix.ENOSPC, forever: true, only: "write"},
	}
	for name, kind := range kinds {
		t.Run(name, func(t *testing.T) {
			for i, more := 0, true; more; i += stride() {
				mem := vfs.NewMem(0)
				disk := &vfs.FailingDisk{Disk: mem, At: -1, Err: kind.err, Only: kind.only}
				o := setup{
					limit: 8 * 8 * smallRow, putWait: time.Second, remote: i%2 == 1,
					disk: (unit.Disk{Threshold: 8 * mediumRow}).OnDisk(disk),
				}
				within(t, o, func(t *testing.T, s *system) {
					empty := mem.Used()
					w := &diskWork{s: s, u: s.user(), stored: map[string]int64{}}
					disk.FailNext(i)
					disk.Forever = kind.forever
					w.run()
					more = disk.Failed()
					disk.Heal()
					require.True(t, more || w.failed == 0, "call %d: something failed without a reason", i)
					w.failed = 0
					for key := range w.stored {
						w.read(key)
					}
					require.Zero(t, w.failed, "call %d: what was acknowledged can be read", i)
					require.Len(t, w.u.keys(), len(w.stored), "call %d", i)
					w.put(mediumRow, 300, "m1", "after")
					w.put(smallRow, 301, "s1")
					require.Zero(t, w.failed, "call %d: the unit goes on", i)
					s.check()
					w.clear(w.u.keys()...)
					require.Zero(t, s.stats().MemoryUsed+s.stats().DiskUsed, "call %d", i)
					heads := int64(1)
					if kind.forever {
						heads = 2 // a disk that has gone does not let the beginning of a file be removed either
					}
					require.LessOrEqual(t, mem.Used(), empty+heads*4096, "call %d: nothing but heads of files is left", i)
				})
				require.Zero(t, mem.Used(), "call %d: a unit that has ended leaves nothing", i)
			}
		})
	}
}

// TestAUnitThatCannotOpenItsDiskLeavesNothing makes the i-th call of its start fail.
func TestAUnitThatCannotOpenItsDiskLeavesNothing(t *testing.T) {
	for i, failed := 0, true; failed; i++ {
		mem := vfs.NewMem(0)
		disk := &vfs.FailingDisk{Disk: mem, At: i, Err: unix.EIO}
		path := t.TempDir()
		require.NoError(t, os.MkdirAll(filepath.Join(path, "transfer_queue_ssd_offload", "r", "u"), 0o700))
		d := (unit.Disk{Path: path, Run: "r", Unit: "u", Threshold: 1, HighWatermark: 0.9, LowWatermark: 0.7}).OnDisk(disk)
		u, err := unit.New(unit.Options{Name: "u", Disk: d})
		failed = disk.Failed()
		disk.Heal()
		if err == nil {
			require.NoError(t, u.Close())
			continue
		}
		require.NoError(t, os.MkdirAll(filepath.Join(path, "transfer_queue_ssd_offload", "r", "u"), 0o700)) // it was cleaned up
		u, err = unit.New(unit.Options{Name: "u", Disk: d})
		require.NoError(t, err, "after call %d has failed", i)
		require.NoError(t, u.Close())
	}
}
