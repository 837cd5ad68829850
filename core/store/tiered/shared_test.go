//go:build go1.25

package tiered

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// putShared writes one row that so many samples share.
func putShared(t testing.TB, s *Store, from int64, count int, size int64) {
	t.Helper()
	column := bytesColumn("x", 1, size)
	column.Share = make([]uint32, count)
	tx, err := s.Stage("p", []schema.Column{column})
	require.NoError(t, err)
	copy(s.Bytes(tx.Blocks()[0]), slices.Repeat([]byte{7}, int(size)))
	require.NoError(t, store.Prepare(context.Background(), tx))
	tx.Commit(samples(from, count))
}

func requireShared(t testing.TB, s *Store, from int64, count int, size int64) {
	t.Helper()
	l, err := s.Read("p", []string{"x"}, samples(from, count))
	require.NoError(t, err)
	defer l.Release()
	rows := 0
	for _, run := range l.Columns()[0].Runs {
		require.True(t, slices.Equal(slices.Repeat([]byte{7}, int(size)), s.Bytes(run.Block)))
		rows += run.Rows
	}
	require.Equal(t, count, rows)
}

func TestSharedRowSpillsAndComesBackAsOne(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.6}, func(t *testing.T, s *Store, wait func()) {
		putShared(t, s, 0, 5, 30*kib)
		put(t, s, 100, 6, 10*kib)
		wait()
		require.Equal(t, store.Counters{
			MemoryCells: 6, MemoryLogical: 60 * kib, DiskCells: 5, DiskLogical: 150 * kib, DiskPhysical: 32 * kib,
			SpilledCells: 5, SpilledBytes: 30 * kib,
		}, withoutPhysical(s.Counters(), 32*kib))
		require.Equal(t, int64(30*kib), s.Stats().DiskUsed)
		s.Delete("p", nil, samples(1, 3))
		s.Delete("p", nil, samples(100, 6))
		require.Equal(t, int64(30*kib), s.Stats().DiskUsed, "two samples hold it still")
		requireShared(t, s, 4, 1, 30*kib)
		wait()
		require.Equal(t, int64(30*kib), s.Stats().DiskUsed, "once is not often enough")
		l, err := s.Read("p", []string{"x"}, []schema.Sample{{Index: 0, Generation: 1}, {Index: 4, Generation: 1}})
		require.NoError(t, err)
		require.Equal(t, int64(30*kib), s.Stats().Staging, "it is read from disk once")
		l.Release()
		wait()
		st := s.Stats()
		require.Equal(t, [2]int64{30 * kib, 0}, [2]int64{st.MemoryUsed, st.DiskUsed})
		require.Equal(t, int64(2), s.Counters().PromotedCells)
		s.Delete("p", nil, samples(0, 1))
		require.Equal(t, int64(30*kib), s.Stats().MemoryUsed)
		s.Delete("p", nil, samples(4, 1))
		require.Zero(t, s.Stats().MemoryUsed)
	})
}

// withoutPhysical replaces the pages on disk, of which there are a few more than bytes.
func withoutPhysical(n store.Counters, most int64) store.Counters {
	n.DiskPhysical = max(n.DiskPhysical, most)
	return n
}

func TestSharedRowIsWhatItsMostNeededHolderIs(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.6}, func(t *testing.T, s *Store, wait func()) {
		s.Advise(func(_ string, list []schema.Sample, uses []store.Use) {
			for i, sample := range list {
				uses[i] = store.Consumed
				if sample.Index == 3 {
					uses[i] = store.Wanted
				}
			}
		})
		putShared(t, s, 0, 4, 30*kib)
		put(t, s, 100, 6, 10*kib)
		wait()
		require.Equal(t, []int64{100, 101, 102}, onDisk(s))
	})
}

func TestLargeSharedRowGoesToDiskAtOnce(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.6, Threshold: 20 * kib}, func(t *testing.T, s *Store, _ func()) {
		putShared(t, s, 0, 8, 50*kib)
		n := s.Counters()
		require.Equal(t, [3]int64{8, 8 * 50 * kib, 50 * kib}, [3]int64{n.WrittenCells, n.DiskLogical, s.Stats().DiskUsed})
		requireShared(t, s, 0, 8, 50*kib)
		s.Delete("p", nil, samples(0, 7))
		requireShared(t, s, 0, 0, 50*kib)
		require.Equal(t, int64(50*kib), s.Stats().DiskUsed)
		s.Delete("p", nil, samples(7, 1))
		require.Zero(t, s.Stats().DiskUsed)
		require.Zero(t, s.Counters().DiskPhysical)
	})
}
