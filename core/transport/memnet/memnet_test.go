//go:build go1.25

package memnet_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/transport/transporttest"
	"transferqueue/core/wire"
)

func TestConformance(t *testing.T) {
	transporttest.Run(t, func(_ *testing.T, h transport.Handler) transporttest.Net {
		network := memnet.New(1, h)
		return transporttest.Net{
			Dial: func(peerID uint64) (transport.Conn, error) {
				c, err := network.Dial(peerID)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Close: network.Close,
		}
	})
}

// log is an echo server that writes down what happens and when.
type log struct {
	served chan string
	gone   chan time.Time
}

func newLog() *log {
	return &log{served: make(chan string, 1000), gone: make(chan time.Time, 10)}
}

func (l *log) Serve(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	l.served <- req.Op.String()
	reply(&wire.Reply{Body: req.Body})
}

func (l *log) Gone(transport.Peer) { l.gone <- time.Now() }

func (l *log) Segment(uint32, uint32) (int, int64, error) { panic("no segments here") }

// with runs a test of one connection in a bubble where time passes by itself.
func with(t *testing.T, run func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log)) {
	leaktest.Check(t)
	synctest.Test(t, func(t *testing.T) {
		l := newLog()
		n := memnet.New(7, l)
		defer func() { require.NoError(t, n.Close()) }()
		c, err := n.Dial(3)
		require.NoError(t, err)
		run(t, n, c, l)
	})
}

// call makes one call with ten seconds of patience and tells how long it took.
func call(t *testing.T, c *memnet.Conn, op wire.Op) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	started := time.Now()
	reply, err := c.Call(ctx, &wire.Request{Op: op, Body: []byte("b")})
	if err == nil {
		require.Equal(t, "b", string(reply.Body))
	}
	return time.Since(started), err
}

func TestFaults(t *testing.T) {
	cases := map[string]struct {
		fault  memnet.Fault
		served int
		took   time.Duration
		code   tqerr.Code
	}{
		"delay request":         {memnet.Fault{Do: memnet.DelayRequest, Delay: time.Second}, 1, time.Second, tqerr.OK},
		"delay reply":           {memnet.Fault{Do: memnet.DelayReply, Delay: time.Second}, 1, time.Second, tqerr.OK},
		"delay beyond patience": {memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute}, 0, 10 * time.Second, tqerr.DeadlineExceeded},
		"drop request":          {memnet.Fault{Do: memnet.DropRequest}, 0, 10 * time.Second, tqerr.DeadlineExceeded},
		"drop reply":            {memnet.Fault{Do: memnet.DropReply}, 1, 10 * time.Second, tqerr.DeadlineExceeded},
		"duplicate":             {memnet.Fault{Do: memnet.Duplicate}, 2, 0, tqerr.OK},
		"cut before":            {memnet.Fault{Do: memnet.CutBefore}, 0, 0, tqerr.Unavailable},
		"cut after":             {memnet.Fault{Do: memnet.CutAfter}, 1, 0, tqerr.Unavailable},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log) {
				test.fault.Op = wire.OpPut
				n.Inject(test.fault)
				took, err := call(t, c, wire.OpPut)
				require.Equal(t, test.code, tqerr.CodeOf(err))
				require.Equal(t, test.took, took)
				require.Len(t, l.served, test.served)
				if test.code != tqerr.Unavailable {
					took, err = call(t, c, wire.OpGet)
					require.NoError(t, err, "other operations are left alone")
					require.Zero(t, took)
				}
			})
		})
	}
}

func TestARequestArrivesAfterItsCallerGaveUp(t *testing.T) {
	with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log) {
		n.Inject(memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute})
		_, err := call(t, c, wire.OpPut)
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.Empty(t, l.served)
		require.Equal(t, "put", <-l.served)
	})
}

func TestWhichMessagesAreHit(t *testing.T) {
	hits := func(t *testing.T, f memnet.Fault) (out []bool) {
		with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, _ *log) {
			f.Do, f.Delay = memnet.DelayRequest, time.Second
			remove := n.Inject(f)
			for i := range 8 {
				if i == 7 {
					remove()
				}
				took, err := call(t, c, wire.OpPut)
				require.NoError(t, err)
				out = append(out, took > 0)
			}
		})
		return out
	}
	require.Equal(t, []bool{true, true, true, true, true, true, true, false}, hits(t, memnet.Fault{}))
	require.Equal(t, []bool{false, false, true, true, false, false, false, false}, hits(t, memnet.Fault{Skip: 2, Times: 2}))
	require.NotContains(t, hits(t, memnet.Fault{Op: wire.OpGet}), true)
	require.NotContains(t, hits(t, memnet.Fault{When: func(peer uint64, _ *wire.Request) bool { return peer != 3 }}), true)
	chance := hits(t, memnet.Fault{Chance: 0.5})
	require.Contains(t, chance[:7], true)
	require.Contains(t, chance[:7], false)
	require.Equal(t, chance, hits(t, memnet.Fault{Chance: 0.5}), "the seed decides")
}

func TestGraceOfACutPeer(t *testing.T) {
	with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log) {
		started := time.Now()
		n.Cut(3, time.Minute)
		<-c.Done()
		time.Sleep(59 * time.Second)
		back, err := n.Dial(3)
		require.NoError(t, err)
		time.Sleep(time.Hour)
		require.Empty(t, l.gone, "it came back in time")
		n.Cut(3, time.Minute)
		require.Equal(t, 59*time.Second+time.Hour+time.Minute, (<-l.gone).Sub(started))
		_, err = call(t, back, wire.OpPut)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	})
}

func TestAPeerThatIsNeverDeclaredGone(t *testing.T) {
	with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log) {
		n.Inject(memnet.Fault{Do: memnet.CutAfter, Grace: -1})
		_, err := call(t, c, wire.OpPut)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		time.Sleep(24 * time.Hour)
		require.Empty(t, l.gone)
		require.NoError(t, n.Close())
		require.Len(t, l.gone, 1)
	})
}

func TestFaultsOfNotifications(t *testing.T) {
	cases := map[memnet.Action]int{memnet.DelayReply: 1, memnet.DropReply: 1, memnet.DropRequest: 0, memnet.Duplicate: 2,
		memnet.DelayRequest: 1, memnet.CutBefore: 0, memnet.CutAfter: 1}
	for action, served := range cases {
		with(t, func(t *testing.T, n *memnet.Network, c *memnet.Conn, l *log) {
			n.Inject(memnet.Fault{Do: action, Delay: time.Second})
			require.NoError(t, c.Notify(&wire.Request{Op: wire.OpRelease}))
			time.Sleep(2 * time.Second)
			require.Len(t, l.served, served, "action %d", action)
			if action == memnet.CutBefore || action == memnet.CutAfter {
				require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(c.Notify(&wire.Request{})))
			}
		})
	}
}
