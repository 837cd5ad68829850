package table

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/arena"
	"transferqueue/core/schema"
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

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
		return New(Options{Memory: openArena(t), MemoryLimit: o.MemoryLimit})
	})
}

// uniform are columns of float32 rows.
func uniform(columns, rows int, numbers int64) []schema.Column {
	out := make([]schema.Column, columns)
	for i := range out {
		out[i] = schema.Column{
			Field: fmt.Sprint("field", i), Kind: schema.Tensor, DType: schema.Float32, Ragged: 1, Rows: rows,
			Form: schema.Uniform, Shape: []int64{numbers},
		}
	}
	return out
}

func names(columns []schema.Column) []string {
	out := make([]string, len(columns))
	for i := range out {
		out[i] = columns[i].Field
	}
	return out
}

func batch(from int64, rows int) []schema.Sample {
	out := make([]schema.Sample, rows)
	for i := range out {
		out[i] = schema.Sample{Index: from + int64(i), Generation: 1}
	}
	return out
}

func put(t testing.TB, s *Table, columns []schema.Column, samples []schema.Sample) {
	t.Helper()
	tx, err := s.Stage("p", columns)
	require.NoError(t, err)
	tx.Commit(samples)
}

func TestLimitText(t *testing.T) {
	s := New(Options{Memory: openArena(t), MemoryLimit: 8 << 20})
	put(t, s, uniform(1, 6, 1<<18), batch(0, 6))
	_, err := s.Stage("p", uniform(1, 3, 1<<18))
	require.EqualError(t, err, "unit memory: 3145728 bytes needed, 6291456 of 8388608 used; clear samples or raise memory_limit_bytes")
	require.NoError(t, s.Close(), "closing frees what is stored")
}

func TestCommitOfAnotherNumberOfSamplesPanics(t *testing.T) {
	s := New(Options{Memory: openArena(t)})
	tx, err := s.Stage("p", uniform(1, 2, 3))
	require.NoError(t, err)
	require.Panics(t, func() { tx.Commit(batch(0, 3)) })
	tx.Abort()
	require.NoError(t, s.Close())
}

func TestLargeColumnsStartOnAPage(t *testing.T) {
	s := New(Options{Memory: openArena(t)})
	tx, err := s.Stage("p", append(uniform(1, 1, 5), uniform(3, 1, 1<<15)[1:]...))
	require.NoError(t, err)
	require.Zero(t, tx.Blocks()[0].Offset%64)
	require.Zero(t, tx.Blocks()[1].Offset%4096)
	require.Zero(t, tx.Blocks()[2].Offset%4096)
	tx.Abort()
	require.NoError(t, s.Close())
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestClearedPartitionGivesItsGoMemoryBack(t *testing.T) {
	s := New(Options{Memory: openArena(t)})
	columns := uniform(4, 1, 2)
	before := heap()
	const rows = 50_000
	for i := range int64(rows) {
		put(t, s, columns, batch(i, 1)) // the dearest way: an extent per cell
	}
	full := heap() - before
	require.Less(t, full, int64(rows*4*120), "bytes of Go memory per cell")
	s.Delete("p", nil, batch(0, rows))
	require.NoError(t, s.Check())
	require.Less(t, heap()-before, int64(2<<20))
	require.NoError(t, s.Close())
}

func TestShapesAreNotCollected(t *testing.T) {
	s := New(Options{Memory: openArena(t)})
	for i := range int64(100) {
		put(t, s, uniform(1, 1, i), batch(i, 1))
	}
	require.Len(t, s.mu.interned, 100)
	s.Delete("p", nil, batch(0, 100))
	require.Empty(t, s.mu.interned)
	require.Zero(t, s.mu.layouts.Len())
	require.NoError(t, s.Close())
}
