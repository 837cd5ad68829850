//go:build zmq

package zmq

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// broken ends a connection as a network does, without a goodbye.
func broken(c *Conn) {
	c.fail(nil)
	c.wait()
}

func TestAPeerComesBackOrIsGone(t *testing.T) {
	leaktest.Check(t)
	l := defaultLimits
	l.grace = 300 * time.Millisecond
	var gone atomic.Int32
	s := run(t, serving{gone: func(transport.Peer) { gone.Add(1) }}, l)
	first, err := Dial(t.Context(), s.Address(), token, 9, 0)
	require.NoError(t, err)
	require.False(t, first.Resumed())
	broken(first)
	second, err := Dial(t.Context(), s.Address(), token, 9, first.Life())
	require.NoError(t, err)
	require.True(t, second.Resumed())
	require.Equal(t, first.Life(), second.Life())
	require.Zero(t, gone.Load())
	broken(second)
	require.Eventually(t, func() bool { return gone.Load() == 1 }, 30*time.Second, time.Millisecond)
	third, err := Dial(t.Context(), s.Address(), token, 9, first.Life())
	require.NoError(t, err)
	require.False(t, third.Resumed(), "the server has forgotten the peer meanwhile")
	require.NotEqual(t, first.Life(), third.Life())
	requireAlive(t, third)
	require.NoError(t, third.Close())
	require.Eventually(t, func() bool { return gone.Load() == 2 }, 30*time.Second, time.Millisecond)
}

// held is a lifeline that closes only when it may.
type held struct {
	net.Conn
	may    chan struct{}
	writes *atomic.Int32
}

func (h held) Close() error {
	<-h.may
	return h.Conn.Close()
}

func (h held) Write(p []byte) (int, error) {
	h.writes.Add(1)
	return h.Conn.Write(p)
}

// Who closes a connection because it was lost, to make another one, does not end its life at the server, also when it is quicker
// than the end of the lifeline.
func TestALostConnectionSaysNoGoodbye(t *testing.T) {
	leaktest.Check(t)
	l := defaultLimits
	l.grace = time.Hour
	s := run(t, serving{}, l)
	first, err := Dial(t.Context(), s.Address(), token, 9, 0)
	require.NoError(t, err)
	lifeline := held{first.lifeline(), make(chan struct{}), &atomic.Int32{}}
	first.mu.Lock()
	first.mu.lifeline = lifeline
	first.mu.Unlock()
	guard.Go("test: the connection is lost", func() { first.fail(nil) })
	<-first.Done()
	closed := make(chan error, 1)
	guard.Go("test: close", func() { closed <- first.Close() })
	close(lifeline.may)
	require.NoError(t, <-closed)
	require.Zero(t, lifeline.writes.Load())
	next, err := Dial(t.Context(), s.Address(), token, 9, first.Life())
	require.NoError(t, err)
	require.True(t, next.Resumed())
	require.NoError(t, next.Close())
}

// Whoever takes nothing loses its connection, and only it.
func TestAPeerThatStopsReading(t *testing.T) {
	for name, l := range map[string]limits{
		"too much waits": {window: 1 << 20, queued: 2 << 20, stall: time.Hour, greeting: 10 * time.Second},
		"nothing moves":  {window: 1 << 20, queued: 1 << 40, stall: 500 * time.Millisecond, greeting: 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			s := run(t, serving{serve: func(_ context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
				reply(&wire.Reply{Body: req.Body, Payload: make([]byte, 300_000)})
			}}, l)
			healthy := dialed(t, s, 1)
			sock, lifeline := admitted(t, s)
			for i := range 20 {
				_, err := sock.SendBytes((&wire.Frame{Type: wire.FrameRequest, ID: uint64(i + 1)}).Append(nil), 0)
				require.NoError(t, err)
			}
			for range 20 {
				requireAlive(t, healthy)
			}
			requireCut(t, lifeline)
			for range 20 {
				requireAlive(t, healthy)
			}
		})
	}
}

// A server that takes nothing holds up only those who ask it, until their time is over.
func TestAServerThatStopsReading(t *testing.T) {
	leaktest.Check(t)
	release := make(chan struct{})
	l := limits{window: 1 << 20, queued: 2 << 20, stall: time.Hour, greeting: 10 * time.Second}
	s := run(t, serving{serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		<-release
		reply(&wire.Reply{Body: req.Body})
	}}, l)
	c, err := dial(t.Context(), s.Address(), token, 1, 0, l)
	require.NoError(t, err)
	payload := make([]byte, 900_000)
	full := false
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := c.Call(ctx, &wire.Request{Payload: payload})
		cancel()
		c.link.r.mu.Lock()
		full = full || c.link.queued+len(payload) > l.queued
		c.link.r.mu.Unlock()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
	}
	require.True(t, full, "what waits is bounded")
	require.NoError(t, c.Notify(&wire.Request{Body: []byte("does not wait")}))
	close(release)
	requireAlive(t, c)
	require.NoError(t, c.Close())
}

func TestPostsKeepTheirOrder(t *testing.T) {
	leaktest.Check(t)
	const n = 3000
	var arrived []uint64
	s := run(t, serving{serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
		arrived = append(arrived, req.Sequence)
		reply(&wire.Reply{Body: req.Body})
	}}, defaultLimits)
	c := dialed(t, s, 1)
	answers := make(chan error, n)
	for i := range uint64(n) {
		c.Post(&wire.Request{Sequence: i, Body: make([]byte, i*7%50_000)}, func(_ *wire.Reply, err error) { answers <- err })
	}
	for range n {
		require.NoError(t, <-answers)
	}
	for i, sequence := range arrived {
		require.EqualValues(t, i, sequence)
	}
	require.NoError(t, c.Close())
	c.Post(&wire.Request{}, func(_ *wire.Reply, err error) { answers <- err })
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-answers))
}

func TestAClientThatLeavesInEveryState(t *testing.T) {
	leaktest.Check(t)
	waiting := make(chan context.Context, 64)
	s := run(t, serving{serve: func(ctx context.Context, _ transport.Peer, _ *wire.Request, _ func(*wire.Reply)) { waiting <- ctx }}, defaultLimits)
	for range 5 {
		sock := rawSocket(t, s, authenticated) // before its hello
		require.NoError(t, sock.Disconnect(s.Address()))
		sock, _ = welcomed(t, s) // before its lifeline
		require.NoError(t, sock.Disconnect(s.Address()))
		sock, lifeline := admitted(t, s) // with a request that waits
		_, err := sock.SendBytes((&wire.Frame{Type: wire.FrameRequest, ID: 1}).Append(nil), 0)
		require.NoError(t, err)
		ctx := <-waiting
		require.NoError(t, lifeline.Close())
		<-ctx.Done()
		c := dialed(t, s, 77) // in the middle of a transfer
		broken := make(chan error, 1)
		go func() {
			broken <- c.Send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, [][]byte{make([]byte, 1<<20)})
		}()
		c.fail(nil)
		if err := <-broken; err != nil {
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		}
	}
}
