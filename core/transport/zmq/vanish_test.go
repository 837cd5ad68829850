//go:build zmq

package zmq

import (
	"context"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/stream"
	"transferqueue/core/wire"
)

const ownNetwork = "TQ_TEST_OWN_NETWORK"

// inOwnNetwork runs the test in a process with a network of its own, whose loopback interface it may switch; it reports true there.
func inOwnNetwork(t *testing.T) bool {
	if os.Getenv(ownNetwork) != "" {
		return true
	}
	again := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=60s")
	again.Env = append(os.Environ(), ownNetwork+"=1")
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}}
	out, err := again.CombinedOutput()
	if _, started := err.(*exec.ExitError); err != nil && !started {
		t.Skipf("no network namespaces here: %v", err)
	}
	require.NoError(t, err, "%s", out)
	return false
}

// noticed is when everybody must know that a host has vanished. The kernel says so after 4 to 4.2 s, a busy machine hears of it later.
const noticed = 5 * time.Second

// A network that carries nothing any more is noticed at both sides: by calls that wait, and by streams with bytes on their way, of
// the connection and past it.
func TestAHostThatVanishes(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	for name, side := range map[string]struct{ server, client Credentials }{
		"PLAIN": {token, token}, "CURVE": {secret, encrypted(t)},
	} {
		t.Run(name, func(t *testing.T) { vanish(t, side.server, side.client) })
	}
}

func vanish(t *testing.T, server, client Credentials) {
	loopback(t, true)
	ended, gone := make(chan time.Time, 1), make(chan transport.Peer, 1)
	l := defaultLimits
	l.grace = time.Millisecond
	waiting := make(chan struct{}, 1)
	s := runWith(t, server, serving{
		gone: func(p transport.Peer) { gone <- p },
		serve: func(ctx context.Context, _ transport.Peer, _ *wire.Request, _ func(*wire.Reply)) {
			context.AfterFunc(ctx, func() { ended <- time.Now() })
			waiting <- struct{}{}
		},
	}, l)
	c := dialedWith(t, s, client, 4)
	lost := make(chan error, 3)
	c.Post(&wire.Request{}, func(_ *wire.Reply, err error) { lost <- err })
	<-waiting
	tickets := 1
	past := &stream.Pool{Dial: func(ctx context.Context) (net.Conn, error) {
		if tickets--; tickets < 0 {
			return nil, tqerr.New(tqerr.NotFound, "there is no other way to it")
		}
		at := s.Ticket(serving{})
		return stream.Open(ctx, join("127.0.0.1", at.Port), at.Ticket, at.Pin)
	}}
	t.Cleanup(past.Close)
	payload := [][]byte{make([]byte, 1<<20)}
	turns := make(chan struct{}, 2)
	for _, send := range []func(context.Context, transport.Grant, int64, [][]byte) error{c.Send, past.Send} {
		guard.Go("test: send", func() {
			err := send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, payload)
			turns <- struct{}{}
			for err == nil {
				err = send(t.Context(), transport.Grant{Write: true, ID: 1}, 0, payload)
			}
			lost <- err
		})
	}
	<-turns
	<-turns
	began := time.Now()
	loopback(t, false)
	for range cap(lost) {
		err := <-lost
		took := time.Since(began)
		t.Logf("after %s: %v", took, err)
		require.Less(t, took, noticed)
		if tqerr.CodeOf(err) != tqerr.NotFound {
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
			require.ErrorContains(t, err, s.Address())
		}
	}
	require.True(t, c.Silent())
	require.Less(t, (<-ended).Sub(began), noticed, "the server")
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
