//go:build zmq

package zmq

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/wire"
)

// Many clients at once are served, each as it should be.
func TestManyClients(t *testing.T) {
	const n, dialers = 1000, 50
	s := run(t, serving{}, defaultLimits)
	conns := make([]*Conn, n)
	began := time.Now()
	var all sync.WaitGroup
	for d := range dialers {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := d; i < n; i += dialers {
				c, err := Dial(t.Context(), s.Address(), token, uint64(i+1), 0)
				if err != nil {
					t.Error(err)
					return
				}
				conns[i] = c
			}
		}()
	}
	all.Wait()
	require.False(t, t.Failed())
	t.Logf("%d clients in %s", n, time.Since(began))
	began = time.Now()
	for range 5 {
		for d := range dialers {
			all.Add(1)
			go func() {
				defer all.Done()
				for i := d; i < n; i += dialers {
					if _, err := conns[i].Call(t.Context(), &wire.Request{Body: []byte("x")}); err != nil {
						t.Error(err)
					}
				}
			}()
		}
		all.Wait()
	}
	t.Logf("%.0f requests per second", 5*n/time.Since(began).Seconds())
	for _, c := range conns {
		require.NoError(t, c.Close())
	}
}
