//go:build go1.25

package arena

import (
	"context"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// running runs fn in a bubble of fake time with an arena whose Run is running.
func running(t *testing.T, o Options, fn func(t *testing.T, a *Arena)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := open(t, o)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { a.Run(ctx); close(done) }()
		fn(t, a)
		synctest.Wait()
		require.NoError(t, a.Check())
		cancel()
		<-done
	})
}

func advance(d time.Duration) {
	time.Sleep(d) // fake time
	synctest.Wait()
}

func TestMemoryGoesBackAfterEverythingIsFreed(t *testing.T) {
	running(t, Options{SegmentBytes: 512 * mib}, func(t *testing.T, a *Arena) {
		b := alloc(t, a, 200*mib+13)
		require.NoError(t, a.Write(b.Segment, b.Offset, make([]byte, b.Size)))
		require.GreaterOrEqual(t, resident(t, a), b.Size)
		free(a, b)
		advance(100 * time.Millisecond)
		require.GreaterOrEqual(t, resident(t, a), b.Size, "a put within 100 ms must find warm pages")
		advance(100 * time.Millisecond)
		require.LessOrEqual(t, resident(t, a), int64(reserve))
		require.Equal(t, resident(t, a), a.Stats().Resident)
		require.NotZero(t, a.Stats().Warm)
		advance(idle)
		require.Zero(t, resident(t, a), "an idle arena holds nothing")
		require.Equal(t, 1, a.Stats().Ranges)
	})
}

func TestEveryLargeFreeRestartsTheWait(t *testing.T) {
	running(t, Options{SegmentBytes: 512 * mib}, func(t *testing.T, a *Arena) {
		b := alloc(t, a, 64*mib)
		fill(a, b, 1)
		for i := range int64(4) {
			a.Free(b.Segment, b.Offset+i*16*mib, 16*mib)
			advance(100 * time.Millisecond)
			require.Equal(t, b.Size, resident(t, a))
		}
		advance(100 * time.Millisecond)
		require.LessOrEqual(t, resident(t, a), int64(reserve))
	})
}

func TestFreesWithoutPauseReturnWhatIsNeverNeeded(t *testing.T) {
	running(t, Options{SegmentBytes: 512 * mib}, func(t *testing.T, a *Arena) {
		b := alloc(t, a, 128*mib)
		fill(a, b, 1)
		free(a, b)
		for range 40 {
			advance(50 * time.Millisecond)
			b = alloc(t, a, 32*mib)
			free(a, b)
		}
		require.LessOrEqual(t, resident(t, a), int64(reserve+32*mib))
		require.GreaterOrEqual(t, resident(t, a), int64(32*mib), "what every turn needs stays warm")
	})
}

func TestHalfOfTheRowsFreedHalvesResidentMemory(t *testing.T) {
	running(t, Options{SegmentBytes: 512 * mib}, func(t *testing.T, a *Arena) {
		const row, rows = 32 << 10, 4096
		b := alloc(t, a, row*rows)
		fill(a, b, 7)
		order := rand.Perm(rows)
		for _, i := range order[:rows/2] {
			a.Free(b.Segment, b.Offset+int64(i)*row, row)
		}
		advance(quiet)
		require.LessOrEqual(t, resident(t, a), int64(row*rows/2+reserve))
		for _, i := range order[rows/2:] {
			at := b.Offset + int64(i)*row
			require.Equal(t, byte(7), a.Bytes(b.Segment, at, row)[row-1], "live rows keep their bytes")
			a.Free(b.Segment, at, row)
		}
	})
}

func TestFreedBlockIsNotPopulated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := open(t, Options{SegmentBytes: 64 * mib, PopulateAhead: true})
		gone, kept := alloc(t, a, 8*mib), alloc(t, a, 3*mib+1)
		free(a, gone)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { a.Run(ctx); close(done) }()
		synctest.Wait()
		require.Equal(t, int64(3*mib+pageSize), resident(t, a))
		cancel()
		<-done
		free(a, kept)
	})
}
