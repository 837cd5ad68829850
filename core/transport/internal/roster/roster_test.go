//go:build go1.25

package roster

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/guard"
	"transferqueue/core/transport"
)

var peer = transport.Peer{ID: 4, PID: 12, Local: true}

func TestWhoComesBackWaitsForTheEndOfItsOldLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		entered, proceed := make(chan struct{}), make(chan struct{})
		r := New(func(p transport.Peer) {
			require.Equal(t, peer, p)
			entered <- struct{}{}
			<-proceed
		})
		r.Join(peer)
		guard.Go("test: leave", func() { r.Leave(peer, 0) })
		<-entered
		joined := make(chan struct{})
		guard.Go("test: join", func() {
			r.Join(peer)
			close(joined)
		})
		synctest.Wait()
		select {
		case <-joined:
			t.Fatal("the new life began before the old one ended")
		default:
		}
		close(proceed)
		<-joined
		guard.Go("test: leave again", func() { r.Leave(peer, 0) })
		<-entered
	})
}

func TestGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gone := make(chan time.Duration, 8)
		started := time.Now()
		r := New(func(transport.Peer) { gone <- time.Since(started) })
		r.Join(peer)
		r.Leave(peer, time.Minute)
		time.Sleep(30 * time.Second)
		r.Join(peer)
		r.Join(peer)
		r.Leave(peer, time.Minute)
		time.Sleep(time.Hour)
		require.Empty(t, gone, "one connection is left")
		r.Leave(peer, time.Minute)
		time.Sleep(2 * time.Minute)
		require.Equal(t, 30*time.Second+time.Hour+time.Minute, <-gone)
		synctest.Wait()
		r.End()
		require.Empty(t, gone)
		require.Empty(t, r.mu.peers)
	})
}

func TestEndReportsWhoMightHaveComeBack(t *testing.T) {
	for _, grace := range []time.Duration{-1, time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			gone := make(chan transport.Peer, 8)
			r := New(func(p transport.Peer) { gone <- p })
			r.Join(peer)
			r.Leave(peer, grace)
			require.Empty(t, gone)
			r.End()
			require.Equal(t, peer, <-gone)
			time.Sleep(2 * time.Hour)
			require.Empty(t, gone)
		})
	}
}

func TestAPanicOfTheHandlerDoesNotLeaveThePeerBehind(t *testing.T) {
	t.Cleanup(guard.ResetForTest)
	r := New(func(transport.Peer) { panic("on purpose") })
	r.Join(peer)
	r.Leave(peer, 0)
	require.Error(t, guard.Poisoned())
	require.Empty(t, r.mu.peers)
	r.Join(peer)
}
