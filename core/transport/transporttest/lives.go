package transporttest

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/wire"
)

const pageSize = 4096

func mapShared(t *testing.T, fd int) []byte {
	memory, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Munmap(memory)) })
	return memory
}

func testSegment(t *testing.T, f *fixture) {
	own, err := unix.MemfdCreate("transporttest", unix.MFD_CLOEXEC)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, unix.Close(own)) })
	require.NoError(t, unix.Ftruncate(own, pageSize))
	f.segment = func(unit, segment uint32) (int, int64, error) {
		if unit != 3 || segment != 9 {
			return -1, 0, tqerr.New(tqerr.NotFound, "unit %d segment %d", unit, segment)
		}
		fd, err := unix.FcntlInt(uintptr(own), unix.F_DUPFD_CLOEXEC, 0)
		return fd, pageSize, err
	}
	c := f.dial(1)
	fd, size, err := c.Segment(t.Context(), 3, 9)
	require.NoError(t, err)
	require.Equal(t, int64(pageSize), size)
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	require.NoError(t, err)
	require.NotZero(t, flags&unix.FD_CLOEXEC, "a program that is started must not inherit it")
	theirs, ours := mapShared(t, own), mapShared(t, fd)
	require.NoError(t, unix.Close(fd))
	theirs[10], ours[11] = 42, 43
	require.Equal(t, []byte{42, 43}, ours[10:12])
	require.Equal(t, []byte{42, 43}, theirs[10:12])
	requireEcho(t, c, "the connection goes on")
	require.Empty(t, f.gone, "asking for a segment does not end the peer")
}

func testNoSegment(t *testing.T, f *fixture) {
	f.segment = func(unit, segment uint32) (int, int64, error) {
		return -1, 0, tqerr.New(tqerr.NotFound, "unit %d has no segment %d", unit, segment)
	}
	c := f.dial(1)
	_, _, err := c.Segment(t.Context(), 1, 5)
	require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit 1 has no segment 5")
	require.NoError(t, c.Close())
	_, _, err = c.Segment(t.Context(), 1, 5)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
}

// requireGone checks that exactly these peers were reported, once each.
func requireGone(t *testing.T, f *fixture, ids ...uint64) {
	t.Helper()
	var got []uint64
	for range ids {
		got = append(got, (<-f.gone).ID)
	}
	require.ElementsMatch(t, ids, got)
	require.Empty(t, f.gone)
}

func testClose(t *testing.T, f *fixture) {
	waiting := f.park()
	c := f.dial(5)
	got := begin(t.Context(), c, &wire.Request{})
	p := <-waiting
	select {
	case <-c.Done():
		t.Fatal("done before it was closed")
	default:
	}
	require.NoError(t, c.Close())
	<-c.Done()
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf((<-got).err))
	requireGone(t, f, 5)
	require.ErrorIs(t, p.ctx.Err(), context.Canceled, "a request ends before its peer")
	_, err := c.Call(t.Context(), &wire.Request{})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "the connection to ")
	require.NoError(t, c.Close(), "twice")
	require.NoError(t, f.net.Close())
	require.Empty(t, f.gone, "and never again")
}

func testServerClose(t *testing.T, f *fixture) {
	waiting := f.park()
	a, b := f.dial(1), f.dial(2)
	got := begin(t.Context(), a, &wire.Request{})
	p := <-waiting
	require.NoError(t, f.net.Close())
	requireGone(t, f, 1, 2)
	require.Error(t, p.ctx.Err())
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf((<-got).err))
	<-a.Done()
	<-b.Done()
	_, err := b.Call(t.Context(), &wire.Request{})
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	_, err = f.net.Dial(3)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.NoError(t, f.net.Close(), "twice")
}

func testTwoConnections(t *testing.T, f *fixture) {
	waiting := f.park()
	first, second := f.dial(8), f.dial(8)
	got := begin(t.Context(), second, &wire.Request{})
	p := <-waiting
	require.NoError(t, first.Close())
	p.reply(&wire.Reply{})
	require.NoError(t, (<-got).err)
	require.Empty(t, f.gone)
	require.NoError(t, second.Close())
	requireGone(t, f, 8)
}

func testComesBack(t *testing.T, f *fixture) {
	for range 20 {
		c := f.dial(8)
		requireEcho(t, c, "hello")
		require.NoError(t, c.Close())
		requireGone(t, f, 8)
	}
}

func testPanic(t *testing.T, f *fixture) {
	t.Cleanup(guard.ResetForTest)
	calls := 0
	f.serve = func(context.Context, transport.Peer, *wire.Request, func(*wire.Reply)) {
		calls++
		panic("on purpose")
	}
	c := f.dial(1)
	for range 2 {
		_, err := c.Call(t.Context(), &wire.Request{})
		require.Equal(t, tqerr.Internal, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "on purpose")
	}
	require.Error(t, guard.Poisoned())
	require.NoError(t, c.Close())
	require.NoError(t, f.net.Close())
	require.Equal(t, 1, calls, "a poisoned library serves nothing")
}
