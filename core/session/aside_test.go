//go:build zmq

package session_test

import (
	"context"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/session"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/wire"
)

// A put over a network too slow for its caller to be held up has the bytes of when it was started, and all of them.
func TestAPutOverASlowNetworkHasItsOwnCopy(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	cfg.PayloadPort = freePort(t)
	here := owner(t, cfg)
	_, port, err := zmq.ParseAddress(here.Info.Address)
	require.NoError(t, err)
	turn := int64(0)
	for name, delay := range map[string]time.Duration{"not so slow": 300 * time.Microsecond, "slow": 2 * time.Millisecond, "slower": 40 * time.Millisecond} {
		p := &proxy{delay: delay}
		startProxy(t, p, port, cfg.PayloadPort)
		s, err := session.Open(context.Background(), reaching(cfg, strings.Replace(here.Info.Address, "127.0.0.1", proxyHost, 1)))
		require.NoError(t, err)
		const rows, width = 3, 1_500_001 // 36 MB
		mem := foreigntest.New(t, rows*width*8+4096)
		values := make([]int64, rows*width)
		for i := range values {
			values[i] = int64(i)
		}
		column := mem.Ints([]int64{width}, values...)
		body, err := wire.Marshal(&putBody{Partition: "p", Keys: wire.Strings{"a", "b", "c"}, Fields: wire.Strings{"x"}})
		require.NoError(t, err)
		for _, waits := range []bool{true, false} {
			lent := unsafe.Slice((*int64)(unsafe.Add(unsafe.Pointer(nil), uintptr(column.Base))), len(values))
			turn++ // memory that is used again must not have the right bytes by chance
			for i, v := range values {
				lent[i] = v * turn
			}
			done := make(chan *client.Result, 1)
			_, err = s.Client.Start(&client.Request{Op: wire.OpPut, Body: body, Columns: []foreign.Raw{column}, Rows: rows, Waits: waits, Timeout: time.Minute},
				func(r *client.Result) { done <- r })
			require.NoError(t, err)
			clear(lent)
			p.calm.Store(true)
			require.NoError(t, (<-done).Err)
			p.calm.Store(false)
			data := get(t, here, wire.Strings{"a", "b", "c"}, 0)
			require.Len(t, data, len(values)*8)
			for i, got := range unsafe.Slice((*int64)(unsafe.Pointer(&data[0])), len(values)) {
				if got != int64(i)*turn {
					t.Fatalf("%s, %v: element %d is %d", name, waits, i, got)
				}
			}
		}
		p.calm.Store(true)
		require.NoError(t, s.Close(time.Second))
		p.close()
	}
	for range 3 { // the pipes through which Go copies from socket to socket end with the garbage
		runtime.GC()
	}
}
