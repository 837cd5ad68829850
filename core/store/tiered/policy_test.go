//go:build go1.25

package tiered

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

const kib = 1 << 10

func bytesColumn(field string, rows int, size int64) schema.Column {
	return schema.Column{
		Field: field, Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: []int64{size},
	}
}

// put writes one value per sample, whose bytes are its index.
func put(t testing.TB, s *Store, from int64, count int, size int64) {
	t.Helper()
	tx, err := s.Stage("p", []schema.Column{bytesColumn("x", count, size)})
	require.NoError(t, err)
	b := s.Bytes(tx.Blocks()[0])
	for i := range b {
		b[i] = byte(from + int64(i)/size)
	}
	require.NoError(t, store.Prepare(context.Background(), tx))
	tx.Commit(samples(from, count))
}

func requireValue(t testing.TB, s *Store, index, size int64) {
	t.Helper()
	l, err := s.Read("p", []string{"x"}, samples(index, 1))
	require.NoError(t, err)
	require.Equal(t, slices.Repeat([]byte{byte(index)}, int(size)), s.Bytes(l.Columns()[0].Runs[0].Block))
	l.Release()
}

// onDisk lists the samples that lie on disk.
func onDisk(s *Store) (out []int64) {
	s.EachOnDisk(func() {}, func(_ string, _ *schema.Column, list []schema.Sample, _ store.Block, _ []uint32) {
		for _, sample := range list {
			out = append(out, sample.Index)
		}
	})
	slices.Sort(out)
	return out
}

// settled runs a test whose mover has come to rest whenever wait returns.
func settled(t *testing.T, o Options, test func(t *testing.T, s *Store, wait func())) {
	t.Helper()
	o.Threshold = max(o.Threshold, 1)
	if o.Threshold == 1 {
		o.Threshold = 1 << 40
	}
	synctest.Test(t, func(t *testing.T) {
		s := open(t, o)
		test(t, s, synctest.Wait)
		require.NoError(t, s.Check())
		require.NoError(t, s.Close())
	})
}

func TestSpillStopsAtTheLowWatermark(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.5}, func(t *testing.T, s *Store, wait func()) {
		put(t, s, 0, 8, 10*kib)
		wait()
		require.Empty(t, onDisk(s), "the high watermark is not passed")
		put(t, s, 8, 1, 10*kib)
		wait()
		require.Equal(t, int64(50*kib), s.Stats().MemoryUsed)
		require.Len(t, onDisk(s), 4)
		require.Equal(t, store.Counters{
			MemoryCells: 5, MemoryLogical: 50 * kib, DiskCells: 4, DiskLogical: 40 * kib, DiskPhysical: 40 * kib,
			SpilledCells: 4, SpilledBytes: 40 * kib,
		}, s.Counters())
		for i := range int64(9) {
			requireValue(t, s, i, 10*kib)
		}
	})
}

func TestWhatIsNeededLeastSpillsFirst(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.5}, func(t *testing.T, s *Store, wait func()) {
		s.Advise(func(_ string, list []schema.Sample, uses []store.Use) {
			for i, sample := range list {
				uses[i] = map[int64]store.Use{5: store.Consumed, 3: store.Unready}[sample.Index]
				if sample.Index != 5 && sample.Index != 3 {
					uses[i] = store.Wanted
				}
			}
		})
		for i := range int64(8) {
			put(t, s, i, 1, 10*kib)
		}
		requireValue(t, s, 0, 10*kib) // so that 1 is what was touched longest ago
		put(t, s, 8, 1, 10*kib)
		wait()
		require.Equal(t, []int64{1, 2, 3, 5}, onDisk(s))
	})
}

func TestOnlyAsMuchMovesAsIsNeeded(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.95, LowWatermark: 0.9}, func(t *testing.T, s *Store, wait func()) {
		for i := range int64(9) {
			put(t, s, i, 1, 10*kib)
		}
		var told atomic.Int64
		s.OnFree(func() { told.Add(1) })
		_, err := s.Stage("p", []schema.Column{bytesColumn("x", 3, 10*kib)})
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
		wait()
		require.Positive(t, told.Load(), "who waits is told")
		require.Equal(t, []int64{0, 1}, onDisk(s))
		put(t, s, 9, 3, 10*kib)
	})
}

func TestLeasedCellsDoNotMove(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib}, func(t *testing.T, s *Store, wait func()) {
		put(t, s, 0, 1, 80*kib)
		l, err := s.Read("p", []string{"x"}, samples(0, 1))
		require.NoError(t, err)
		_, err = s.Stage("p", []schema.Column{bytesColumn("x", 1, 30*kib)})
		require.Error(t, err)
		wait()
		require.Empty(t, onDisk(s), "its memory would not be free")
		l.Release()
		_, err = s.Stage("p", []schema.Column{bytesColumn("x", 1, 30*kib)})
		require.Error(t, err)
		wait()
		require.Equal(t, []int64{0}, onDisk(s))
		put(t, s, 1, 1, 30*kib)
	})
}

func TestPromotion(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, HighWatermark: 0.8, LowWatermark: 0.5}, func(t *testing.T, s *Store, wait func()) {
		put(t, s, 0, 9, 10*kib)
		wait()
		moved := onDisk(s)
		require.Len(t, moved, 4)
		for range 3 {
			requireValue(t, s, moved[0], 10*kib)
			wait()
		}
		require.Equal(t, moved, onDisk(s), "memory is at the low watermark")
		for i := range int64(9) {
			if !slices.Contains(moved, i) {
				s.Delete("p", nil, samples(i, 1))
			}
		}
		requireValue(t, s, moved[0], 10*kib)
		wait()
		require.Equal(t, moved[1:], onDisk(s))
		require.Equal(t, int64(10*kib), s.Stats().MemoryUsed)
		require.Equal(t, int64(1), s.Counters().PromotedCells)
		requireValue(t, s, moved[0], 10*kib)
		requireValue(t, s, moved[1], 10*kib)
	})
}

func TestValuesOfTheThresholdStayOnDisk(t *testing.T) {
	settled(t, Options{MemoryLimit: 1000 * kib, Threshold: 10 * kib}, func(t *testing.T, s *Store, wait func()) {
		put(t, s, 0, 1, 10*kib-1)
		put(t, s, 1, 1, 10*kib)
		for range 3 {
			requireValue(t, s, 1, 10*kib)
			wait()
		}
		require.Equal(t, []int64{1}, onDisk(s))
	})
}

func TestValuesLargerThanMemoryGoToDisk(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib}, func(t *testing.T, s *Store, wait func()) {
		put(t, s, 0, 9, 10*kib)
		wait()
		put(t, s, 100, 3, 300*kib)
		require.LessOrEqual(t, s.Stats().MemoryUsed, int64(100*kib))
		l, err := s.Read("p", []string{"x"}, samples(100, 3))
		require.NoError(t, err)
		require.GreaterOrEqual(t, l.Columns()[0].Runs[0].Block.Segment, uint32(table.ScratchSegments))
		require.LessOrEqual(t, s.Stats().MemoryUsed+s.Stats().Staging, int64(100*kib))
		l.Release()
		for i := range int64(3) {
			requireValue(t, s, 100+i, 300*kib)
		}
		require.Zero(t, s.Stats().Scratch)
		s.Delete("p", nil, samples(100, 3))
		require.Less(t, s.Stats().DiskUsed, int64(100*kib))
	})
}

func TestAPutOfManyColumnsLargerThanMemoryIsDivided(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib}, func(t *testing.T, s *Store, wait func()) {
		tx, err := s.Stage("p", []schema.Column{bytesColumn("a", 1, 60*kib), bytesColumn("b", 1, 70*kib), bytesColumn("c", 1, 30*kib)})
		require.NoError(t, err)
		tx.Commit(samples(0, 1))
		require.Equal(t, int64(70*kib), s.Stats().DiskUsed)
		require.Equal(t, int64(90*kib), s.Stats().MemoryUsed)
		s.Delete("p", nil, samples(0, 1))
	})
}

func TestAFullDiskIsExplained(t *testing.T) {
	settled(t, Options{MemoryLimit: 100 * kib, DiskLimit: 50 * kib}, func(t *testing.T, s *Store, wait func()) {
		for i := range int64(14) {
			for {
				tx, err := s.Stage("p", []schema.Column{bytesColumn("x", 1, 10*kib)})
				if err == nil {
					tx.Commit(samples(i, 1))
					break
				}
				wait()
				st := s.Stats()
				require.LessOrEqual(t, st.DiskUsed, st.DiskLimit)
			}
			wait()
		}
		st := s.Stats()
		require.LessOrEqual(t, st.DiskUsed, int64(50*kib))
		_, err := s.Stage("p", []schema.Column{bytesColumn("x", 2, 10*kib)})
		require.Error(t, err)
		wait()
		_, err = s.Stage("p", []schema.Column{bytesColumn("x", 2, 10*kib)})
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "unit memory: 20480 bytes needed")
		require.ErrorContains(t, err, "of 102400 used; clear samples or raise memory_limit_bytes")
		require.ErrorContains(t, err, "unit disk:")
		require.ErrorContains(t, err, "of 51200 used; clear samples or raise disk_limit_bytes")
		require.Equal(t, int64(14), s.Stats().Cells, "no value is dropped")
	})
}
