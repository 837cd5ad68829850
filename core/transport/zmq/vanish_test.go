//go:build zmq

package zmq

import (
	"context"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

const ownNetwork = "TQ_TEST_OWN_NETWORK"

// A network that carries nothing any more is noticed within five seconds at both sides, by calls that wait too. The test
// runs in a network of its own, which it switches off.
func TestAHostThatVanishes(t *testing.T) {
	if os.Getenv(ownNetwork) == "" {
		again := exec.Command(os.Args[0], "-test.run=^TestAHostThatVanishes$", "-test.timeout=60s")
		again.Env = append(os.Environ(), ownNetwork+"=1")
		again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}}
		out, err := again.CombinedOutput()
		if _, started := err.(*exec.ExitError); err != nil && !started {
			t.Skipf("no network namespaces here: %v", err)
		}
		require.NoError(t, err, "%s", out)
		return
	}
	loopback(t, true)
	const promised = 5 * time.Second
	ended, gone := make(chan time.Time, 1), make(chan transport.Peer, 1)
	l := defaultLimits
	l.grace = time.Millisecond
	waiting := make(chan struct{}, 1)
	s := run(t, serving{
		gone: func(p transport.Peer) { gone <- p },
		serve: func(ctx context.Context, _ transport.Peer, _ *wire.Request, _ func(*wire.Reply)) {
			context.AfterFunc(ctx, func() { ended <- time.Now() })
			waiting <- struct{}{}
		},
	}, l)
	c := dialed(t, s, 4)
	lost := make(chan error, 1)
	c.Post(&wire.Request{}, func(_ *wire.Reply, err error) { lost <- err })
	<-waiting
	began := time.Now()
	loopback(t, false)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-lost))
	took := time.Since(began)
	t.Logf("after %s", took)
	require.Less(t, took, promised, "the client")
	require.Less(t, (<-ended).Sub(began), promised, "the server")
	require.EqualValues(t, 4, (<-gone).ID)
	_, err := c.Call(t.Context(), &wire.Request{})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, s.Address())
}

// loopback switches the loopback interface of this network on or off.
func loopback(t *testing.T, up bool) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	r, err := unix.NewIfreq("lo")
	require.NoError(t, err)
	if up {
		r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOOPBACK)
	} else {
		r.SetUint16(unix.IFF_LOOPBACK)
	}
	require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r))
}
