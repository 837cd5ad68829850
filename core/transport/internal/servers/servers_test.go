//go:build go1.25

package servers

import (
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A process without descriptors tries again, more slowly each time, and takes the next connection when it can.
func TestAcceptWaitsForDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine, other := net.Pipe()
		defer func() { require.NoError(t, other.Close()) }()
		answers := []error{syscall.EMFILE, syscall.EMFILE, syscall.EMFILE, nil, net.ErrClosed}
		began := time.Now()
		var started []net.Conn
		Accept(func() (net.Conn, error) {
			err := answers[0]
			answers = answers[1:]
			return mine, err
		}, nil, func(c net.Conn) { started = append(started, c) })
		require.Equal(t, []net.Conn{mine}, started)
		require.Equal(t, (1+2+4)*time.Millisecond, time.Since(began))
		require.NoError(t, mine.Close())
	})
}

// The end of a server does not wait for a descriptor.
func TestAcceptEndsWhileItWaits(t *testing.T) {
	stop := make(chan struct{})
	close(stop)
	for range 20 {
		Accept(func() (net.Conn, error) { return nil, syscall.EMFILE }, stop, func(net.Conn) { t.Error("nothing was accepted") })
	}
}
