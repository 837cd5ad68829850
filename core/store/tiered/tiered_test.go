package tiered

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/arena"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
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

// open opens a store with defaults for what is not given.
func open(t testing.TB, o Options) *Store {
	t.Helper()
	o.Memory = openArena(t)
	if o.HighWatermark == 0 {
		o.HighWatermark, o.LowWatermark = 0.9, 0.7
	}
	if o.Disk.Dir == "" {
		o.Disk.Dir = filepath.Join(t.TempDir(), "tier")
	}
	s, err := New(o)
	require.NoError(t, err)
	return s
}

// TestConformance runs the suite over every way in which values are divided between the tiers. A test of the limit needs one
// that cannot be evaded: that of the memory when the disk is full, or that of the disk when all goes there.
func TestConformance(t *testing.T) {
	const never = 1 << 40
	for name, options := range map[string]func(limit int64) Options{
		"all in memory": func(limit int64) Options { return Options{MemoryLimit: limit, DiskLimit: 1, Threshold: never} },
		"all on disk":   func(limit int64) Options { return Options{DiskLimit: limit, Threshold: 0} },
		"divided": func(limit int64) Options {
			if limit == 1<<20 {
				return Options{MemoryLimit: limit, DiskLimit: 1, Threshold: never}
			}
			return Options{MemoryLimit: limit / 100, Threshold: 600}
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
				options := options(o.MemoryLimit)
				options.Disk = disktier.Options{SegmentBytes: 1 << 20}
				return open(t, options)
			})
		})
	}
}

func samples(from int64, count int) []schema.Sample {
	out := make([]schema.Sample, count)
	for i := range out {
		out[i] = schema.Sample{Index: from + int64(i), Generation: 1}
	}
	return out
}
