package local

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// serving is a handler without segments; serve may be nil for an echo.
type serving struct {
	serve func(ctx context.Context, req *wire.Request, reply func(*wire.Reply))
}

func (s serving) Serve(ctx context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	if s.serve == nil {
		reply(&wire.Reply{Body: req.Body, Payload: req.Payload})
		return
	}
	s.serve(ctx, req, reply)
}

func (serving) Gone(transport.Peer) {}

func (serving) Segment(uint32, uint32) (int, int64, error) { panic("no segments here") }

// BenchmarkCall is the round trip of an echo; p50 and p99 in microseconds say more than the mean.
func BenchmarkCall(b *testing.B) {
	for _, size := range []int{64, 4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("payload=%d", size), func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "s")
			server, err := Listen(path, secret, serving{})
			require.NoError(b, err)
			defer server.Close()
			c, err := Dial(context.Background(), path, secret, 1)
			require.NoError(b, err)
			defer c.Close()
			req := &wire.Request{Op: wire.OpPut, Body: make([]byte, 64), Payload: make([]byte, size-64)}
			b.SetBytes(int64(2 * size))
			b.ReportAllocs()
			var took []time.Duration
			for b.Loop() {
				started := time.Now()
				if _, err := c.Call(context.Background(), req); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(started))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-us")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-us")
		})
	}
}
