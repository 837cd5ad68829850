//go:build zmq

package zmq

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/transport/transporttest"
)

var token = Credentials{Token: []byte("0123456789abcdef-token")}

// The context of this process keeps threads and descriptors, which no test leaves behind.
func TestMain(m *testing.M) {
	if ctx, err := clientContext(); err == nil {
		if sock, err := ctx.NewSocket(7); err == nil {
			_ = sock.Close()
		}
	}
	os.Exit(m.Run())
}

// secret is a server's key, and encrypted what a client needs of it.
var secret = Credentials{Token: token.Token, Key: bytes.Repeat([]byte{9}, KeySize)}

func encrypted(t testing.TB) Credentials {
	public, err := PublicKey(secret.Key)
	require.NoError(t, err)
	return Credentials{Token: token.Token, Key: public}
}

// run starts a server.
func run(t testing.TB, h transport.Handler, l limits) *Server { return runWith(t, token, h, l) }

func runWith(t testing.TB, c Credentials, h transport.Handler, l limits) *Server {
	s, err := listen("tcp://127.0.0.1:0", 0, c, h, l)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func dialed(t testing.TB, s *Server, peer uint64) *Conn { return dialedWith(t, s, token, peer) }

func dialedWith(t testing.TB, s *Server, c Credentials, peer uint64) *Conn {
	conn, err := Dial(t.Context(), s.Address(), c, peer, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return conn
}

func TestConformance(t *testing.T) {
	for name, side := range map[string]struct{ server, client Credentials }{
		"PLAIN": {token, token}, "CURVE": {secret, encrypted(t)},
	} {
		t.Run(name, func(t *testing.T) {
			transporttest.Run(t, func(t *testing.T, h transport.Handler) transporttest.Net {
				s := runWith(t, side.server, h, defaultLimits)
				return transporttest.Net{
					Dial: func(peerID uint64) (transport.Conn, error) {
						c, err := Dial(t.Context(), s.Address(), side.client, peerID, 0)
						if err != nil {
							return nil, err
						}
						return c, nil
					},
					Close: s.Close, Remote: true,
				}
			})
		})
	}
}
