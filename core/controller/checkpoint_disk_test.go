//go:build go1.25

package controller_test

import (
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
)

// tiers are the ways in which units keep values, with what that does to those of wideBytes.
var tiers = map[string]setup{
	"memory":                 {},
	"memory and a threshold": {disk: &unit.Disk{Threshold: 100}},
	"little memory":          {limit: roomLimit, putWait: time.Minute, disk: &unit.Disk{}},
	"very little memory":     {limit: wideBytes / 2, disk: &unit.Disk{}},
}

// observed lets somebody look at the units at every read and write of a file of a checkpoint.
type observed struct {
	vfs.FS
	look func()
}

func (w observed) Create(name string) (vfs.File, error) { return w.wrap(w.FS.Create(name)) }
func (w observed) Open(name string) (vfs.File, error)   { return w.wrap(w.FS.Open(name)) }

func (w observed) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return observedFile{f, w}, nil
}

type observedFile struct {
	vfs.File
	w observed
}

func (f observedFile) Write(p []byte) (int, error) {
	f.w.look()
	return f.File.Write(p)
}

func (f observedFile) Read(p []byte) (int, error) {
	f.w.look()
	return f.File.Read(p)
}

// most follows the most staging, and the most memory that counts against the limit, that the units have at a time.
func (s *system) most() (fs vfs.FS, staging, memory *atomic.Int64) {
	staging, memory = &atomic.Int64{}, &atomic.Int64{}
	return observed{vfs.OS{}, func() {
		for _, u := range s.units {
			st := u.Stats()
			staging.Store(max(staging.Load(), st.Staging+st.Scratch))
			memory.Store(max(memory.Load(), st.MemoryUsed+st.Staging))
		}
	}}, staging, memory
}

// Thirty values and a few that share one, much more than memory, are saved without loading any, and are loaded by units that
// keep them otherwise.
func TestCheckpointsOfTiersStream(t *testing.T) {
	const count = 30
	fill := func(s *system, u *user) {
		for i := range int64(count) {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, i))
			s.mem.Reset()
		}
		u.put(s.alike(wide, []string{"s0", "s1", "s2"}, 77, 77, 77))
		b := s.rows(narrow, []string{"o"}, 5)
		b.Fields, b.columns = append(b.Fields, "object"), append(b.columns, s.mem.Objects(1, make([]byte, 100_000)))
		u.put(b)
	}
	check := func(t *testing.T, u *user) {
		for i := range int64(count) {
			require.Equal(t, []int64{i}, u.values(fmt.Sprint("k", i)))
		}
		require.Equal(t, []int64{77, 77, 77}, u.values("s0", "s1", "s2"))
		require.Equal(t, make([]byte, 100_000), u.get("o").bytes["object"][0])
	}
	for from, saving := range tiers {
		for to, loading := range tiers {
			if testing.Short() && from != to && to != "little memory" {
				continue
			}
			t.Run(from+" to "+to, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "c")
				saving.units, loading.units = 2, 1
				within(t, saving, func(t *testing.T, s *system) {
					u := s.user()
					fill(s, u)
					synctest.Wait()
					fs, staging, _ := s.most()
					s.server.SetFS(fs)
					u.save(dir)
					require.Zero(t, staging.Load(), "no value was loaded")
					check(t, u)
				})
				saving.remote = true
				loading.remote = from != to
				within(t, loading, func(t *testing.T, s *system) {
					u := s.user()
					fs, _, memory := s.most()
					s.server.SetFS(fs)
					u.load(dir)
					if loading.limit > 0 {
						require.LessOrEqual(t, memory.Load(), loading.limit)
					}
					check(t, u)
					u.save(dir + "-again")
					u.load(dir + "-again") // in the place of what is there
					check(t, u)
				})
			})
		}
	}
}

// The same for a dump of some rows, whose values come beside those that are there.
func TestDumpsOfTiersStream(t *testing.T) {
	with(t, setup{limit: roomLimit, putWait: time.Minute, disk: &unit.Disk{}}, func(t *testing.T, s *system) {
		dir := filepath.Join(t.TempDir(), "d")
		u := s.user()
		for i := range int64(12) {
			u.put(s.rows(wide, []string{fmt.Sprint("k", i)}, i))
		}
		synctest.Wait()
		fs, staging, memory := s.most()
		s.server.SetFS(fs)
		_, err := u.tryDump(dir, keysOf(12)...)
		require.NoError(t, err)
		require.Zero(t, staging.Load())
		u.clear(keysOf(9)...)
		memory.Store(0)
		_, err = u.tryLoadRows(dir)
		require.NoError(t, err)
		require.LessOrEqual(t, memory.Load(), int64(roomLimit))
		require.Equal(t, []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, u.values(keysOf(12)...))
	})
}

// A value on disk that is damaged ends a save with the key of its sample, and what was saved before stays.
func TestASaveNamesADamagedValue(t *testing.T) {
	broken := &damaging{Disk: vfs.OSDisk{}}
	with(t, setup{disk: (unit.Disk{Threshold: 1}).OnDisk(broken)}, func(t *testing.T, s *system) {
		dir := filepath.Join(t.TempDir(), "c")
		u := s.user()
		u.put(s.rows(wide, []string{"good", "bad"}, 1, 2))
		u.save(dir)
		broken.on.Store(true)
		err := u.trySave(dir)
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err), "%v", err)
		require.ErrorContains(t, err, `partition "p": key "good": field "x": the value on disk is damaged`)
		broken.on.Store(false)
		u.clear("good", "bad")
		u.load(dir)
		require.Equal(t, []int64{1, 2}, u.values("good", "bad"))
	})
}

// damaging is a disk that can be made to give other bytes than were written.
type damaging struct {
	vfs.Disk
	on atomic.Bool
}

func (d *damaging) Create(name string) (vfs.DiskFile, error) {
	f, err := d.Disk.Create(name)
	return damagingFile{f, d}, err
}

type damagingFile struct {
	vfs.DiskFile
	d *damaging
}

func (f damagingFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.DiskFile.ReadAt(p, off)
	if f.d.on.Load() && n > 0 {
		p[0] ^= 1
	}
	return n, err
}

// A load into units that are too small says so, and changes nothing.
func TestALoadThatFindsNoRoomChangesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "c")
	within(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, keysOf(12), fill(12, 1)...))
		u.save(dir)
	})
	for name, o := range map[string]setup{
		"memory only": {limit: roomLimit}, "a disk that is too small": {limit: roomLimit, disk: &unit.Disk{Limit: 2 * wideBytes}},
	} {
		t.Run(name, func(t *testing.T) {
			with(t, o, func(t *testing.T, s *system) {
				u := s.user()
				u.put(s.rows(wide, []string{"old"}, 5))
				before := u.keys()
				err := u.tryLoad(dir)
				require.Equal(t, before, u.keys())
				synctest.Wait()
				st := s.stats()
				require.Equal(t, [4]int64{wideBytes, 0, 0, 1}, [4]int64{st.MemoryUsed + st.DiskUsed, st.Staged, st.Leases, st.Cells})
				require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), "%v", err)
				require.Equal(t, []int64{5}, u.values("old"))
			})
		})
	}
}
