package client

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
)

// line is a network in memory of which a test says when it carries something.
type line struct {
	transport.Streamer
	mu     sync.Mutex
	memory []byte
	room   int64         // bytes that it still carries before it stands still
	moves  chan struct{} // closed: it goes on
}

func (l *line) Done() <-chan struct{} { return nil }

func (l *line) Send(ctx context.Context, _ transport.Grant, offset int64, pieces [][]byte) error {
	for _, p := range pieces {
		l.mu.Lock()
		l.room -= int64(len(p))
		stuck := l.room < 0
		l.mu.Unlock()
		if stuck {
			select {
			case <-ctx.Done():
				return tqerr.New(tqerr.Cancelled, "cancelled")
			case <-l.moves:
			}
		}
		l.mu.Lock()
		offset += int64(copy(l.memory[offset:], p))
		l.mu.Unlock()
	}
	return nil
}

// Whatever of a put was sent when its caller's memory must be free: every byte arrives, as it was, at its place.
func TestWhatIsLeftIsSetAside(t *testing.T) {
	leaktest.Check(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	pool := bufpool.New()
	t.Cleanup(pool.Close)
	const most = 14 << 20
	source := make([]byte, most)
	partly := 0
	for range 30 {
		size := 1 + random.Int64N(most)
		for at := int64(0); at < size; at += 1 + random.Int64N(4096) {
			source[at] = byte(random.Uint32())
		}
		want := bytes.Clone(source[:size])
		o := &outgoing{target: target{id: 1}, offset: random.Int64N(100)}
		for rest := source[:size]; len(rest) > 0; {
			n := min(1+random.Int64N(6<<20), int64(len(rest)))
			o.pieces, rest = append(o.pieces, rest[:n]), rest[n:]
		}
		l := &line{memory: make([]byte, most+100), room: random.Int64N(size + size/2), moves: make(chan struct{})}
		first := o.offset
		c := New(Options{Conn: l, Pool: pool})
		release, err := c.setAside(t.Context(), o, time.Millisecond)
		require.NoError(t, err)
		clear(source[:size])
		if 0 < o.left() && o.left() < size {
			partly++
		}
		close(l.moves)
		require.NoError(t, c.send(t.Context(), o, 0))
		release()
		require.True(t, bytes.Equal(want, l.memory[first:first+size]))
		require.Empty(t, o.pieces)
	}
	require.Positive(t, partly, "of some a part was sent meanwhile")
}
