package transporttest

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
)

// testMemory moves bytes into the server's memory and out of it, as the transport does that.
func testMemory(t *testing.T, f *fixture) {
	if f.net.Remote {
		testStreams(t, f)
	} else {
		testSegment(t, f)
	}
}

func testNoMemory(t *testing.T, f *fixture) {
	if f.net.Remote {
		testNoGrant(t, f)
	} else {
		testNoSegment(t, f)
	}
}

// pieces cuts memory at the given lengths, the last piece gets the rest.
func pieces(memory []byte, lengths ...int) (out [][]byte) {
	for _, n := range lengths {
		n = min(n, len(memory))
		out, memory = append(out, memory[:n]), memory[n:]
	}
	return append(out, memory)
}

func noise(size int) []byte {
	out, random := make([]byte, size), rand.NewChaCha8([32]byte{})
	_, _ = random.Read(out)
	return out
}

func testStreams(t *testing.T, f *fixture) {
	for _, size := range []int{0, 1, 5000, 3 << 20, 130 << 20} {
		memory := make([]byte, size)
		var lent, ended atomic.Int32
		f.lend = func(peer transport.Peer, grant transport.Grant) ([][]byte, func(), error) {
			if peer.ID != 1 || peer.Local || grant.ID != 1<<63+7 {
				return nil, nil, tqerr.New(tqerr.NotFound, "peer %d has no grant %d", peer.ID, grant.ID)
			}
			lent.Add(1)
			return pieces(memory, 0, 1000, size/2, 3), func() { ended.Add(1) }, nil
		}
		c := f.dial(1).(transport.Streamer)
		sent := noise(size)
		require.NoError(t, c.Send(t.Context(), transport.Grant{Write: true, ID: 1<<63 + 7}, 0, pieces(sent, 17, size/3, 0, 4096, 4096)))
		require.Equal(t, lent.Load(), ended.Load(), "what was lent is back before the call returns")
		require.True(t, string(sent) == string(memory), "%d bytes arrive as they were sent", size)
		got := make([]byte, size)
		require.NoError(t, c.Receive(t.Context(), transport.Grant{ID: 1<<63 + 7}, pieces(got, 1, 1, 4000, size/2)))
		require.True(t, string(sent) == string(got), "%d bytes come back", size)
		require.NoError(t, c.Close())
		requireGone(t, f, 1)
	}
}

func testNoGrant(t *testing.T, f *fixture) {
	f.lend = func(_ transport.Peer, grant transport.Grant) ([][]byte, func(), error) {
		if grant.ID == 1 {
			return [][]byte{make([]byte, 100)}, func() {}, nil
		}
		return nil, nil, tqerr.New(tqerr.NotFound, "write %d is not in progress", grant.ID)
	}
	c := f.dial(1).(transport.Streamer)
	for range 3 {
		for _, size := range []int{10, 3 << 20} {
			err := c.Send(t.Context(), transport.Grant{Write: true, ID: 5}, 0, [][]byte{make([]byte, size)})
			require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
			require.ErrorContains(t, err, "write 5 is not in progress")
			err = c.Receive(t.Context(), transport.Grant{ID: 6}, [][]byte{make([]byte, size)})
			require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
		}
		err := c.Send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, [][]byte{make([]byte, 101)})
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "more than was granted")
		require.NoError(t, c.Send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, [][]byte{make([]byte, 100)}))
	}
	_, _, err := c.Segment(t.Context(), 1, 1)
	require.Equal(t, tqerr.Unimplemented, tqerr.CodeOf(err))
	require.NoError(t, c.Close())
	err = c.Send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, [][]byte{make([]byte, 100)})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
}
