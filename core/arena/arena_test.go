package arena

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
)

const mib = 1 << 20

func open(t testing.TB, o Options) *Arena {
	t.Helper()
	a, err := New(o)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, a.Check())
		require.NoError(t, a.Close())
	})
	return a
}

func alloc(t testing.TB, a *Arena, size int64) Block {
	t.Helper()
	b, err := a.Alloc(size)
	require.NoError(t, err)
	return b
}

func free(a *Arena, b Block) { a.Free(b.Segment, b.Offset, b.Size) }

func fill(a *Arena, b Block, v byte) {
	data := a.Bytes(b.Segment, b.Offset, b.Size)
	for i := range data {
		data[i] = v
	}
}

// resident asks the kernel how many bytes of memory the segments hold.
func resident(t testing.TB, a *Arena) int64 {
	t.Helper()
	total := int64(0)
	for _, s := range *a.segments.Load() {
		var st unix.Stat_t
		require.NoError(t, unix.Fstat(s.fd, &st))
		total += st.Blocks * 512
	}
	return total
}

func TestAllocAligns(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	for _, size := range []int64{1, 63, 100, 4096, 5000, pageAlignMin - 1, pageAlignMin, pageAlignMin + 1, mib + 3} {
		b := alloc(t, a, size)
		want := int64(smallAlign)
		if size >= pageAlignMin {
			want = pageSize
		}
		require.Zero(t, b.Offset%want, "size %d", size)
		require.Len(t, a.Bytes(b.Segment, b.Offset, b.Size), int(size))
		defer free(a, b)
	}
	require.NoError(t, a.Check())
	zero := alloc(t, a, 0)
	require.Equal(t, Block{}, zero)
	free(a, zero)
	require.Empty(t, a.Bytes(0, 0, 0))
	_, err := a.Alloc(-1)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
}

func TestFreeAnyPartOfAnAllocation(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	const row, rows = 777, 1000
	b := alloc(t, a, row*rows)
	require.Equal(t, int64(row*rows), a.Stats().Used)
	for left, i := range rand.Perm(rows) {
		a.Free(b.Segment, b.Offset+int64(i)*row, row)
		require.Equal(t, int64(row*(rows-left-1)), a.Stats().Used)
	}
	require.NoError(t, a.Check())
	require.Equal(t, 2, a.Stats().Ranges, "one warm and one cold range")
	require.Equal(t, b, alloc(t, a, b.Size), "the same place is used again")
	free(a, b)
	require.Panics(t, func() { a.Free(b.Segment, b.Offset+5, 1) })
	require.Panics(t, func() { a.Free(b.Segment, 32*mib, 1) }, "never allocated")
	require.Panics(t, func() { a.Free(7, 0, 1) })
}

func TestSegmentsGrowWhenNothingFits(t *testing.T) {
	leaktest.Check(t)
	a := open(t, Options{SegmentBytes: 8 * mib})
	first, second := alloc(t, a, 6*mib), alloc(t, a, 6*mib)
	require.Equal(t, uint32(0), first.Segment)
	require.Equal(t, uint32(1), second.Segment)
	huge := alloc(t, a, 5<<30+1)
	require.Equal(t, uint32(2), huge.Segment)
	data := a.Bytes(huge.Segment, huge.Offset, huge.Size)
	data[0], data[huge.Size-1] = 1, 2
	fd, size, err := a.Segment(2)
	require.NoError(t, err)
	require.GreaterOrEqual(t, size, huge.Size)
	require.NoError(t, unix.Close(fd))
	_, _, err = a.Segment(3)
	require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
	for _, b := range []Block{first, second, huge} {
		free(a, b)
	}
	require.Zero(t, a.Stats().Used)
}

func TestSegmentsAreSealed(t *testing.T) {
	a := open(t, Options{SegmentBytes: 8 * mib})
	fd, size, err := a.Segment(0)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(fd)) }()
	require.ErrorIs(t, unix.Ftruncate(fd, size-pageSize), unix.EPERM)
	require.ErrorIs(t, unix.Ftruncate(fd, size+pageSize), unix.EPERM)
}

func TestDefaultSegmentHoldsTheMachinesMemoryAndCostsNothing(t *testing.T) {
	a := open(t, Options{})
	var info unix.Sysinfo_t
	require.NoError(t, unix.Sysinfo(&info))
	require.GreaterOrEqual(t, a.Stats().Mapped, min(int64(info.Totalram)*int64(info.Unit), 1<<40))
	require.LessOrEqual(t, resident(t, a), int64(mib))
}

func TestClosedArena(t *testing.T) {
	a, err := New(Options{SegmentBytes: 8 * mib})
	require.NoError(t, err)
	b := alloc(t, a, 10)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close())
	free(a, b)
	_, err = a.Alloc(1)
	require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err))
	_, _, err = a.Segment(0)
	require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
}

func TestWarmPagesAreTakenFirst(t *testing.T) {
	a := open(t, Options{SegmentBytes: 64 * mib})
	low, high := alloc(t, a, 4*mib), alloc(t, a, 4*mib)
	free(a, low)
	a.Free(high.Segment, high.Offset, 2*mib)
	before := a.Stats().Resident
	again := alloc(t, a, 6*mib)
	require.Equal(t, low.Offset, again.Offset)
	require.Equal(t, before, a.Stats().Resident)
	free(a, again)
	a.Free(high.Segment, high.Offset+2*mib, 2*mib)
}

func TestConcurrentUse(t *testing.T) {
	leaktest.Check(t)
	a := open(t, Options{SegmentBytes: 64 * mib, PopulateAhead: true})
	ctx, cancel := context.WithCancel(t.Context())
	var run, users sync.WaitGroup
	run.Add(1)
	go func() { defer run.Done(); a.Run(ctx) }()
	for g := range byte(4) {
		users.Add(1)
		go func() {
			defer users.Done()
			rnd := rand.New(rand.NewPCG(uint64(g), 0))
			for range 100 {
				b, err := a.Alloc(1 + rnd.Int64N(2*mib))
				if err != nil {
					t.Error(err)
					return
				}
				data := a.Bytes(b.Segment, b.Offset, b.Size)
				data[0], data[b.Size-1] = g, g
				half := b.Size / 2
				a.Free(b.Segment, b.Offset+half, b.Size-half)
				if half > 0 && data[0] != g {
					t.Errorf("byte of another owner at %+v", b)
				}
				a.Free(b.Segment, b.Offset, half)
			}
		}()
	}
	users.Wait()
	cancel()
	run.Wait()
	require.Zero(t, a.Stats().Used)
}
