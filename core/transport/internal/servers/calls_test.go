//go:build go1.25

package servers

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// parked is a handler whose replies the test sends.
type parked struct {
	transport.Handler
	requests chan request
}

type request struct {
	ctx   context.Context
	op    wire.Op
	reply func(*wire.Reply)
}

func (p parked) Serve(ctx context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	p.requests <- request{ctx, req.Op, reply}
}

func TestWhatIsRepliedTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := parked{requests: make(chan request, 9)}
		c := NewCalls(h, transport.Peer{ID: 4})
		var sent []uint64
		reply := func(f *wire.Frame) { sent = append(sent, f.ID) }
		open := func(f *wire.Frame) request {
			require.True(t, c.Serve(t.Context(), f, reply))
			return <-h.requests
		}
		frame := wire.Frame{Op: uint16(wire.OpGet), ID: 1}
		r := open(&frame)
		require.Equal(t, wire.OpGet, r.op)
		require.False(t, c.Idle())
		require.False(t, c.Serve(t.Context(), &frame, reply), "its id is in use")
		frame.ID = 2
		second := open(&frame)
		r.reply(&wire.Reply{})
		r.reply(&wire.Reply{})
		require.Equal(t, []uint64{1}, sent, "only the first reply counts")
		require.Error(t, r.ctx.Err(), "its context has ended")
		require.NoError(t, second.ctx.Err())
		require.True(t, c.Cancel(2))
		require.Error(t, second.ctx.Err())
		require.False(t, c.Cancel(2))
		second.reply(&wire.Reply{})
		require.True(t, c.Idle())

		timed := open(&wire.Frame{ID: 3, Timeout: time.Second})
		<-timed.ctx.Done()
		timed.reply(&wire.Reply{})
		require.Equal(t, []uint64{1, 3}, sent, "the handler says that the time is over")
		c.Notified(t.Context(), &wire.Frame{ID: 4})
		(<-h.requests).reply(&wire.Reply{})
		late := open(&wire.Frame{ID: 5})
		c.End()
		late.reply(&wire.Reply{})
		require.Equal(t, []uint64{1, 3}, sent)
		require.False(t, c.Serve(t.Context(), &wire.Frame{ID: 6}, reply))
		require.Empty(t, h.requests)
	})
}
