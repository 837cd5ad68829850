package disktier

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/arena"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/store"
	"transferqueue/core/store/storetest"
)

func openArena(t testing.TB) *arena.Arena {
	t.Helper()
	a, err := arena.New(arena.Options{SegmentBytes: 1 << 30})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, a.Check())
		require.Zero(t, a.Stats().Used, "the store gave everything back")
		require.NoError(t, a.Close())
	})
	return a
}

var durabilities = map[string]Durability{"none": None, "relaxed": Relaxed, "strict": Strict}

func TestConformance(t *testing.T) {
	for name, durability := range durabilities {
		for disk, fs := range map[string]func() vfs.Disk{
			"files": func() vfs.Disk { return vfs.OSDisk{} }, "memory": func() vfs.Disk { return vfs.NewMem(0) },
		} {
			t.Run(name+" in "+disk, func(t *testing.T) {
				storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
					dir := filepath.Join(t.TempDir(), "tier")
					s, err := OpenStore(Options{Dir: dir, Durability: durability, SegmentBytes: 1 << 20}.OnDisk(fs()), openArena(t), o.MemoryLimit)
					require.NoError(t, err)
					return s
				})
			})
		}
	}
}

func TestScratchLeavesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tier")
	s, err := OpenStore(Options{Dir: dir}, openArena(t), 0)
	require.NoError(t, err)
	put(t, s, 0, 10, 100_000)
	require.FileExists(t, filepath.Join(dir, "values-00000001"))
	require.NoError(t, s.Close())
	_, err = os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist, fmt.Sprint(err))
}
