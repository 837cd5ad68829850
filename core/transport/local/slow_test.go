package local

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// ask sends requests and reads no reply.
func ask(t *testing.T, sock *net.UnixConn, n int) {
	for i := range n {
		require.NoError(t, wire.WriteFrame(sock, &wire.Frame{Type: wire.FrameRequest, ID: uint64(i + 1)}))
	}
}

// large answers every request with a payload that starts with its number.
func large(size int) serving {
	var served atomic.Uint32
	return serving{serve: func(_ context.Context, _ *wire.Request, reply func(*wire.Reply)) {
		n := byte(served.Add(1) - 1)
		payload := bytes.Repeat([]byte{n}, size)
		reply(&wire.Reply{Body: []byte{n}, Payload: payload})
		clear(payload) // the bytes belong to the handler again
	}}
}

func TestASlowReaderGetsEverythingInTheEnd(t *testing.T) {
	for _, size := range []int{100, 10_000, 300_000, 5 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			_, path := run(t, large(size), defaultLimits)
			sock := welcomed(t, path)
			n := min(100, 16<<20/size)
			ask(t, sock, n)
			r := bufio.NewReader(sock)
			var f wire.Frame
			for i := range n {
				require.NoError(t, wire.ReadFrame(r, &f))
				require.Equal(t, uint64(i+1), f.ID)
				require.Equal(t, []byte{byte(i)}, f.Body)
				require.True(t, bytes.Equal(bytes.Repeat([]byte{byte(i)}, size), f.Payload), "reply %d", i)
			}
		})
	}
}

func TestAReaderThatStopsLosesItsConnectionOnly(t *testing.T) {
	cases := map[string]limits{
		"too much is queued":    {queued: 1 << 20, write: time.Hour, greeting: time.Hour},
		"nothing moves anymore": {queued: 1 << 40, write: 500 * time.Millisecond, greeting: time.Hour},
	}
	for name, l := range cases {
		t.Run(name, func(t *testing.T) {
			_, path := run(t, large(600_000), l)
			healthy := dialed(t, path)
			stuck := welcomed(t, path)
			ask(t, stuck, 1)
			for i := 1; ; i++ {
				_, err := healthy.Call(t.Context(), &wire.Request{})
				require.NoError(t, err)
				f := wire.Frame{Type: wire.FrameRequest, ID: uint64(i + 1)}
				if wire.WriteFrame(stuck, &f) != nil {
					break // the server has closed it
				}
			}
			requireEnd(t, stuck)
		})
	}
}

// stalled is a server that welcomes a client and reads when it is told to.
func stalled(t *testing.T, l limits) (c *Conn, read func(*wire.Frame)) {
	leaktest.Check(t)
	ends, err := net.ListenUnix("unix", &net.UnixAddr{Name: t.TempDir() + "/s", Net: "unix"})
	require.NoError(t, err)
	defer ends.Close()
	accepted := make(chan *net.UnixConn, 1)
	guard.Go("test: accept", func() {
		sock, err := ends.AcceptUnix()
		if err != nil {
			t.Error(err)
			return
		}
		var hello wire.Frame
		_ = wire.ReadFrame(sock, &hello)
		_ = wire.WriteFrame(sock, &wire.Frame{Type: wire.FrameWelcome, Sequence: wire.Version})
		accepted <- sock
	})
	c, err = dial(t.Context(), ends.Addr().String(), secret, 1, l)
	require.NoError(t, err)
	sock := <-accepted
	t.Cleanup(func() {
		_ = sock.Close()
		require.NoError(t, c.Close())
	})
	r := bufio.NewReader(sock)
	return c, func(f *wire.Frame) { require.NoError(t, wire.ReadFrame(r, f)) }
}

func TestAServerThatDoesNotRead(t *testing.T) {
	l := limits{queued: 4 << 20, write: time.Hour, greeting: time.Minute}
	c, read := stalled(t, l)
	payload := bytes.Repeat([]byte("p"), 3<<20)
	sent := 0
	for ; ; sent++ {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := c.Call(ctx, &wire.Request{Op: wire.OpPut, Payload: payload})
		cancel()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		c.sender.mu.Lock()
		full := c.sender.mu.queued+len(payload) > l.queued
		c.sender.mu.Unlock()
		if full {
			break
		}
	}
	clear(payload) // calls that have returned no longer use their bytes
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := c.Call(ctx, &wire.Request{Op: wire.OpGet, Payload: payload})
	require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "it waited for room")
	require.NoError(t, c.Notify(&wire.Request{Op: wire.OpRelease, Body: []byte("leases")}), "a notification does not wait")

	waits := make(chan error, 1)
	guard.Go("test: call", func() {
		_, err := c.Call(t.Context(), &wire.Request{Op: wire.OpList, Payload: payload})
		waits <- err
	})
	var f wire.Frame
	for i := range sent + 1 {
		read(&f)
		require.Equal(t, uint16(wire.OpPut), f.Op)
		require.Equal(t, bytes.Repeat([]byte("p"), len(payload)), f.Payload, "call %d", i)
		read(&f)
		require.Equal(t, wire.FrameCancel, f.Type)
	}
	read(&f)
	require.Equal(t, wire.FrameNotify, f.Type, "the call that found no room has sent nothing")
	require.Equal(t, "leases", string(f.Body))
	read(&f)
	require.Equal(t, uint16(wire.OpList), f.Op, "it was sent when there was room")
	require.NoError(t, c.Close())
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-waits))
}

func TestAServerThatStopsReadingIsLost(t *testing.T) {
	c, _ := stalled(t, limits{queued: 1 << 20, write: 30 * time.Millisecond, greeting: time.Minute})
	_, err := c.Call(t.Context(), &wire.Request{Payload: make([]byte, 8<<20)})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	<-c.Done()
}

func TestAReplyBeyondTheLimitsIsAnError(t *testing.T) {
	_, path := run(t, serving{serve: func(_ context.Context, _ *wire.Request, reply func(*wire.Reply)) {
		reply(&wire.Reply{Body: make([]byte, wire.MaxBody+1)})
	}}, defaultLimits)
	c := dialed(t, path)
	_, err := c.Call(t.Context(), &wire.Request{})
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "limit 268435456")
	_, err = c.Call(t.Context(), &wire.Request{Body: make([]byte, wire.MaxBody+1)})
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "and so is a request")
}
