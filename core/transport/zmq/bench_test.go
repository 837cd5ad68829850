//go:build zmq

package zmq

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

// BenchmarkSecurity is what encryption costs: connecting (both ends are in this process), a small call, the largest one whose
// payload travels with it, and a payload stream.
func BenchmarkSecurity(b *testing.B) {
	memory := make([]byte, 8<<20)
	for _, side := range []struct {
		name           string
		server, client Credentials
	}{{"PLAIN", token, token}, {"CURVE", secret, encrypted(b)}} {
		s := runWith(b, side.server, lending{serving{serve: func(_ context.Context, _ transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
			reply(&wire.Reply{Payload: req.Payload})
		}}, memory}, defaultLimits)
		b.Run("connect/"+side.name, func(b *testing.B) {
			for b.Loop() {
				c, err := Dial(b.Context(), s.Address(), side.client, 2, 0)
				require.NoError(b, err)
				require.NoError(b, c.Close())
			}
		})
		c := dialedWith(b, s, side.client, 1)
		for name, size := range map[string]int{"call of 100 bytes": 100, "call of 64 KiB": 64 << 10} {
			b.Run(name+"/"+side.name, func(b *testing.B) {
				b.SetBytes(int64(2 * size))
				for b.Loop() {
					_, err := c.Call(b.Context(), &wire.Request{Op: wire.OpList, Payload: memory[:size]})
					require.NoError(b, err)
				}
			})
		}
		b.Run("stream of 8 MiB/"+side.name, func(b *testing.B) {
			into := make([]byte, 8<<20)
			b.SetBytes(int64(len(into)))
			for b.Loop() {
				require.NoError(b, c.Receive(b.Context(), transport.Grant{}, [][]byte{into}))
			}
		})
	}
}
