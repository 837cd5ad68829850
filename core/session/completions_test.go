package session_test

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// waiter is what a thread or a loop does with a queue.
type waiter struct {
	*client.Completions
	t *testing.T
	s *session.Session
}

func newWaiter(t *testing.T, s *session.Session) *waiter {
	q, err := client.NewCompletions()
	require.NoError(t, err)
	return &waiter{q, t, s}
}

func (w *waiter) submit(op wire.Op, body any) uint64 {
	w.t.Helper()
	req := &client.Request{Op: op}
	if body != nil {
		var err error
		req.Body, err = wire.Marshal(body)
		require.NoError(w.t, err)
	}
	ticket, fd, err := w.Submit(w.s.Client, req)
	require.NoError(w.t, err)
	require.Equal(w.t, w.FD(), fd)
	return ticket
}

// announced waits until the eventfd is readable and takes its count; 0 when it is not within a moment.
func (w *waiter) announced(within time.Duration) uint64 {
	w.t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(w.FD()), Events: unix.POLLIN}}, int(within.Milliseconds()))
	require.NoError(w.t, err)
	if n == 0 {
		return 0
	}
	var count [8]byte
	_, err = unix.Read(w.FD(), count[:])
	require.NoError(w.t, err)
	return binary.NativeEndian.Uint64(count[:])
}

func fetch(partition string) *wire.MetaRequest {
	return &wire.MetaRequest{Partition: partition, Mode: "fetch", BatchSize: 1, Task: "t"}
}

// Every result arrives once, under its ticket, and what one Take leaves behind is announced again.
func TestCompletionsArriveOnce(t *testing.T) {
	leaktest.Check(t)
	w := newWaiter(t, open(t, config(t)))
	defer func() { require.NoError(t, w.Close()) }()
	want := map[uint64]bool{}
	for range 5 {
		want[w.submit(wire.OpPartitions, nil)] = true
	}
	got := map[uint64]bool{}
	for len(got) < 5 {
		require.NotZero(t, w.announced(10*time.Second))
		for _, done := range w.Take(2) {
			require.NoError(t, done.Result.Err)
			require.False(t, got[done.Ticket])
			got[done.Ticket] = true
		}
	}
	require.Equal(t, want, got)
	require.Empty(t, w.Take(1))
}

func TestCancelEndsOneRequest(t *testing.T) {
	leaktest.Check(t)
	w := newWaiter(t, open(t, config(t)))
	defer func() { require.NoError(t, w.Close()) }()
	first, second := w.submit(wire.OpMeta, fetch("a")), w.submit(wire.OpMeta, fetch("b"))
	w.Cancel(1 << 60)
	w.Cancel(second)
	require.EqualValues(t, 1, w.announced(10*time.Second))
	done := w.Take(8)
	require.Len(t, done, 1)
	require.Equal(t, second, done[0].Ticket)
	require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(done[0].Result.Err))
	w.Cancel(first)
	require.EqualValues(t, 1, w.announced(10*time.Second))
	require.Len(t, w.Take(8), 1)
}

// A request that cannot be sent leaves nothing behind.
func TestSubmitToAClosedSessionFails(t *testing.T) {
	leaktest.Check(t)
	s := open(t, config(t))
	w := newWaiter(t, s)
	defer func() { require.NoError(t, w.Close()) }()
	require.NoError(t, s.Close(time.Second))
	_, _, err := w.Submit(s.Client, &client.Request{Op: wire.OpPartitions})
	require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err))
	require.Empty(t, w.Take(1))
}

// Closing cancels what waits and releases results that nobody has taken.
func TestCloseGivesBackWhatNobodyTakes(t *testing.T) {
	leaktest.Check(t)
	s := open(t, config(t))
	mem := foreigntest.New(t, 1<<20)
	put(t, s, wire.Strings{"a"}, mem.Ints([]int64{16 << 10}, make([]int64, 16<<10)...))
	before := client.Held()
	w := newWaiter(t, s)
	w.submit(wire.OpGet, &wire.GetRequest{Partition: "p", Keys: wire.Strings{"a"}})
	require.NotZero(t, w.announced(10*time.Second))
	require.Greater(t, client.Held(), before)
	w.submit(wire.OpMeta, fetch("nobody writes here"))
	require.NoError(t, w.Close())
	require.Equal(t, before, client.Held())
	w.Wake() // after the end it does nothing
}

func TestWakeIsSeenWithoutAResult(t *testing.T) {
	w := newWaiter(t, open(t, config(t)))
	require.Zero(t, w.announced(0))
	w.Wake()
	require.EqualValues(t, 1, w.announced(10*time.Second))
	require.Empty(t, w.Take(1))
	require.NoError(t, w.Close())
}
