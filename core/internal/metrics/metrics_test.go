package metrics_test

import (
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/metrics"
)

func observe(took ...time.Duration) metrics.Snapshot {
	var s metrics.Series
	for _, d := range took {
		s.Observe(d, 0, false)
	}
	return s.Snapshot()
}

func TestEveryDurationHasOneBucket(t *testing.T) {
	require.Equal(t, [...]time.Duration{
		1e6, 5e6, 10e6, 25e6, 50e6, 100e6, 250e6, 500e6, 1e9, 5e9,
	}, metrics.Bounds)
	for k, bound := range metrics.Bounds {
		for took, want := range map[time.Duration]int{bound: k, bound + 1: k + 1, bound - 1: k} {
			snapshot := observe(took)
			require.EqualValues(t, 1, snapshot.Buckets[want], "%s", took)
			require.EqualValues(t, 1, snapshot.Count())
			require.Equal(t, took, snapshot.Sum)
			require.Equal(t, took, snapshot.Mean())
		}
	}
	require.EqualValues(t, 1, observe(-time.Second).Buckets[0], "a clock that goes back breaks nothing")
	require.EqualValues(t, 1, observe(time.Hour).Buckets[len(metrics.Bounds)])
}

func TestQuantilesAreLinearWithinABucket(t *testing.T) {
	ms := time.Millisecond
	cases := []struct {
		name     string
		took     []time.Duration
		p50, p99 time.Duration
	}{
		{"none", nil, 0, 0},
		{"one in the first bucket", []time.Duration{ms / 10}, ms / 2, 990 * time.Microsecond},
		{"one in the second", []time.Duration{2 * ms}, 3 * ms, ms + 3960*time.Microsecond},
		{"two buckets, the bound between", []time.Duration{ms / 2, 2 * ms}, ms, ms + 3920*time.Microsecond},
		{"an empty bucket between", []time.Duration{ms / 2, ms / 2, ms / 2, 7 * ms}, 666666, 5*ms + 4800*time.Microsecond},
		{"beyond the last bound", []time.Duration{time.Minute}, 5 * time.Second, 5 * time.Second},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			snapshot := observe(c.took...)
			require.InDelta(t, c.p50, snapshot.Quantile(0.5), 1000)
			require.InDelta(t, c.p99, snapshot.Quantile(0.99), 1000)
			require.Zero(t, snapshot.Quantile(0))
		})
	}
	none := observe()
	require.Zero(t, none.Mean())
}

func TestNothingIsLostWhenManyCount(t *testing.T) {
	const goroutines, each = 8, 10000
	var s metrics.Series
	var running sync.WaitGroup
	for g := range goroutines {
		running.Add(1)
		go func() {
			defer running.Done()
			for i := range each {
				s.Arrive()
				s.Observe(time.Duration(g)*time.Millisecond, 3, i%10 == 0)
			}
		}()
	}
	running.Wait()
	snapshot := s.Snapshot()
	require.EqualValues(t, goroutines*each, snapshot.Count())
	require.EqualValues(t, goroutines*each, snapshot.Arrived)
	require.EqualValues(t, 3*goroutines*each, snapshot.Samples)
	require.EqualValues(t, goroutines*each/10, snapshot.Errors)
	require.Equal(t, (0+1+2+3+4+5+6+7)*each*time.Millisecond, snapshot.Sum)
}

func TestASeriesFillsCacheLines(t *testing.T) {
	require.Zero(t, unsafe.Sizeof(metrics.Series{})%64)
}

func TestResidentIsThatOfThisProcess(t *testing.T) {
	const size = 64 << 20
	memory, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Munmap(memory)) }()
	before := metrics.Resident()
	require.Positive(t, before)
	for i := 0; i < size; i += 4096 {
		memory[i] = 1
	}
	require.Greater(t, metrics.Resident(), before+size/2)
}

func BenchmarkObserve(b *testing.B) {
	var s metrics.Series
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.Observe(300*time.Microsecond, 1, false)
		}
	})
}
