package local

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

func direct(t *testing.T, path string, peer uint64) *Direct {
	d, err := DialDirect(context.Background(), path, secret, peer)
	require.NoError(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// requireReadable waits until a direct connection has something to read.
func requireReadable(t *testing.T, p transport.Pending) {
	t.Helper()
	require.Eventually(t, p.Ready, 10*time.Second, time.Millisecond)
}

func TestDirectCarriesOneRequestAfterTheOther(t *testing.T) {
	_, path := run(t, serving{}, defaultLimits)
	d := direct(t, path, 1)
	for size := range 4 {
		payload := make([]byte, size*(100<<10)) // also beyond the reader's buffer
		p := d.Begin(context.Background(), &wire.Request{Op: wire.OpGet, Body: []byte("hello"), Payload: payload})
		requireReadable(t, p)
		reply, err := p.Wait(context.Background())
		require.NoError(t, err)
		require.Equal(t, "hello", string(reply.Body))
		require.Len(t, reply.Payload, len(payload))
	}
	require.False(t, d.Broken())
}

func TestDirectAnErrorReplyLeavesTheConnectionUsable(t *testing.T) {
	_, path := run(t, serving{func(_ context.Context, _ *wire.Request, reply func(*wire.Reply)) {
		reply(wire.ErrorReply(tqerr.WithOp("get", tqerr.New(tqerr.NotFound, "no such key"))))
	}}, defaultLimits)
	d := direct(t, path, 1)
	for range 2 {
		_, err := d.Begin(context.Background(), &wire.Request{Op: wire.OpGet}).Wait(context.Background())
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
		require.EqualError(t, err, "get: no such key")
	}
	require.False(t, d.Broken())
}

func TestDirectTheEndOfTheContextEndsTheRequestOnBothSides(t *testing.T) {
	ended := make(chan struct{})
	_, path := run(t, serving{func(ctx context.Context, _ *wire.Request, _ func(*wire.Reply)) {
		context.AfterFunc(ctx, func() { close(ended) })
	}}, defaultLimits)
	d := direct(t, path, 1)
	ctx, cancel := context.WithCancel(context.Background())
	p := d.Begin(ctx, &wire.Request{Op: wire.OpGet})
	require.False(t, p.Ready())
	cancel()
	requireReadable(t, p)
	_, err := p.Wait(ctx)
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
	require.True(t, d.Broken())
	<-ended
}

func TestDirectAServerThatEndsIsUnavailable(t *testing.T) {
	s, path := run(t, serving{func(context.Context, *wire.Request, func(*wire.Reply)) {}}, defaultLimits)
	d := direct(t, path, 1)
	p := d.Begin(context.Background(), &wire.Request{Op: wire.OpGet})
	require.NoError(t, s.Close())
	requireReadable(t, p)
	_, err := p.Wait(context.Background())
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.Contains(t, err.Error(), path)
	p = d.Begin(context.Background(), &wire.Request{Op: wire.OpGet})
	_, err = p.Wait(context.Background())
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
}

func TestDirectBelongsToItsPeer(t *testing.T) {
	gone := make(chan transport.Peer, 1)
	_, path := run(t, leaving{gone}, defaultLimits)
	c := dialed(t, path)
	d := direct(t, path, c.peerID)
	_, err := d.Begin(context.Background(), &wire.Request{Op: wire.OpGet}).Wait(context.Background())
	require.NoError(t, err)
	require.NoError(t, d.Close())
	requireEcho(t, c)
	require.Empty(t, gone, "the peer has another connection")
	require.NoError(t, c.Close())
	require.Equal(t, c.peerID, (<-gone).ID)
}

// A reply is to wake its reader and nobody else.
func TestDirectIsUnknownToThePoller(t *testing.T) {
	_, path := run(t, serving{}, defaultLimits)
	d := direct(t, path, 1)
	polled := map[int]bool{}
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err != nil || target != "anon_inode:[eventpoll]" {
			continue
		}
		info, err := os.ReadFile("/proc/self/fdinfo/" + e.Name())
		require.NoError(t, err)
		for _, line := range strings.Split(string(info), "\n") {
			if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "tfd:" {
				fd, err := strconv.Atoi(fields[1])
				require.NoError(t, err)
				polled[fd] = true
			}
		}
	}
	require.NotEmpty(t, polled, "the server's sockets are polled")
	require.NotContains(t, polled, d.FD())
	require.NoError(t, d.Close())
	require.NoError(t, d.Close(), "twice")
}

// leaving is an echo that reports who is gone.
type leaving struct{ gone chan transport.Peer }

func (l leaving) Serve(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	reply(&wire.Reply{Body: req.Body, Payload: req.Payload})
}

func (l leaving) Gone(p transport.Peer) { l.gone <- p }

func (leaving) Segment(uint32, uint32) (int, int64, error) { panic("no segments here") }
