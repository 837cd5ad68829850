//go:build zmq

package zmq

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

const stoppedAt = "TQ_TEST_STOPPED_AT"

// A process that is stopped still has a kernel that keeps its connections open. It loses them, and what waits for it is freed.
func TestAProcessThatIsStopped(t *testing.T) {
	if address := os.Getenv(stoppedAt); address != "" {
		c, err := Dial(t.Context(), address, token, 4, 0)
		require.NoError(t, err)
		for range 100 {
			c.Post(&wire.Request{}, func(*wire.Reply, error) {})
		}
		_, _ = os.Stdin.Read(make([]byte, 1))
		return
	}
	l := limits{window: 1 << 20, queued: 1 << 40, stall: 500 * time.Millisecond, greeting: 10 * time.Second}
	asked, gone := make(chan func(), 100), make(chan transport.Peer, 9)
	s := run(t, serving{
		gone: func(p transport.Peer) { gone <- p },
		serve: func(_ context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
			if peer.ID == 4 {
				asked <- func() { reply(&wire.Reply{Payload: make([]byte, 1<<20)}) }
				return
			}
			reply(&wire.Reply{Body: req.Body})
		},
	}, l)
	healthy := dialed(t, s, 1)
	child := exec.Command(os.Args[0], "-test.run=^TestAProcessThatIsStopped$", "-test.timeout=60s")
	child.Env = append(os.Environ(), stoppedAt+"="+s.Address())
	_, err := child.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	t.Cleanup(func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	})
	replies := make([]func(), 100)
	for i := range replies {
		replies[i] = <-asked
	}
	require.NoError(t, child.Process.Signal(syscall.SIGSTOP))
	require.Len(t, connections(s), 2)
	for _, reply := range replies {
		reply()
	}
	require.EqualValues(t, 4, (<-gone).ID)
	require.Eventually(t, func() bool { return len(connections(s)) == 1 }, 10*time.Second, 20*time.Millisecond)
	requireAlive(t, healthy)
}

// connections lists the sockets of the server's ROUTER that lead to somebody.
func connections(s *Server) []int {
	return socketsAt(func(own, peer string) bool { return own == strconv.Itoa(s.port) && peer != "" })
}
