//go:build zmq

package zmq

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/transport/transporttest"
)

var token = []byte("0123456789abcdef-token")

// The context of this process keeps threads and descriptors, which no test leaves behind.
func TestMain(m *testing.M) {
	if ctx, err := clientContext(); err == nil {
		if sock, err := ctx.NewSocket(7); err == nil {
			_ = sock.Close()
		}
	}
	os.Exit(m.Run())
}

// run starts a server.
func run(t testing.TB, h transport.Handler, l limits) *Server {
	s, err := listen("tcp://127.0.0.1:0", 0, token, h, l)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func dialed(t testing.TB, s *Server, peer uint64) *Conn {
	c, err := Dial(t.Context(), s.Address(), token, peer, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestConformance(t *testing.T) {
	transporttest.Run(t, func(t *testing.T, h transport.Handler) transporttest.Net {
		s := run(t, h, defaultLimits)
		return transporttest.Net{
			Dial: func(peerID uint64) (transport.Conn, error) {
				c, err := Dial(t.Context(), s.Address(), token, peerID, 0)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Close: s.Close, Remote: true,
		}
	})
}
