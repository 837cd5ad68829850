//go:build go1.25

package controller_test

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

// noise is a row that cannot be packed.
func noise(seed uint64) []int64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	out := make([]int64, wide)
	for i := range out {
		out[i] = rng.Int64()
	}
	return out
}

func sizeOf(t *testing.T, dir string) (sum int64) {
	require.NoError(t, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		require.NoError(t, err)
		if info, err := e.Info(); err == nil && !e.IsDir() {
			sum += info.Size()
		}
		return nil
	}))
	return sum
}

// What several samples share is written once by each unit, and is shared again by each unit into which it is loaded.
func TestSharedRowsAreSavedAndLoadedOnce(t *testing.T) {
	const count = 9
	of := func(i int) int { return i % 2 }
	store := func(s *system) {
		rows := make([][]int64, count)
		for i := range rows {
			rows[i] = noise(uint64(of(i)))
		}
		b := batch{write: write{Partition: "p", Keys: keysOf(count), Fields: []string{"x", "y", "z"}, Dedup: wire.Strings{"x"}}}
		b.columns = []foreign.Raw{s.mem.Ragged(rows...), s.same(narrow, fill(count, 3)...), s.mem.Objects(1, make([][]byte, count)...)}
		u := s.user()
		u.put(b)
		u.put(batch{write: write{Partition: "p", Keys: []string{"alone"}, Fields: []string{"x"}}, columns: []foreign.Raw{s.mem.Ragged(noise(0))}})
	}
	check := func(t *testing.T, s *system, units int64) {
		u := s.user()
		for i := range count {
			got := u.get(fmt.Sprint("k", i))
			require.Equal(t, noise(uint64(of(i))), got.ints["x"][0])
			require.Equal(t, fill(narrow, 3), got.ints["y"][0])
		}
		require.Equal(t, noise(0), u.get("alone").ints["x"][0])
		synctest.Wait()
		st := s.stats()
		require.LessOrEqual(t, st.MemoryUsed+st.DiskUsed, (2*units+1)*wideBytes+count*8*narrow)
		require.EqualValues(t, 3*count+1, st.Cells)
	}
	for name, disk := range map[string]*unit.Disk{"memory": nil, "disk": {Threshold: 1000}} {
		for units := range int64(3) {
			t.Run(fmt.Sprint(name, " ", units+1), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "c")
				within(t, setup{units: 2, disk: disk}, func(t *testing.T, s *system) {
					store(s)
					check(t, s, 2)
					s.user().save(dir)
					_, err := s.user().tryDump(dir+"-rows", append(keysOf(count), "alone")...)
					require.NoError(t, err)
				})
				require.Less(t, sizeOf(t, dir), int64(5*wideBytes+20_000))
				require.Less(t, sizeOf(t, dir+"-rows"), int64(5*wideBytes+20_000))
				with(t, setup{units: int(units) + 1, disk: disk}, func(t *testing.T, s *system) {
					s.user().load(dir)
					check(t, s, units+1)
					s.user().clear(append(keysOf(count), "alone")...)
					require.Zero(t, s.stats().Cells)
					_, err := s.user().tryLoadRows(dir + "-rows")
					require.NoError(t, err)
					check(t, s, units+1)
				})
			})
		}
	}
}
