package local

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/transporttest"
	"transferqueue/core/wire"
)

var secret = []byte("the secret of a test session")

func TestConformance(t *testing.T) {
	transporttest.Run(t, func(t *testing.T, h transport.Handler) transporttest.Net {
		path := filepath.Join(t.TempDir(), "s")
		server, err := Listen(path, secret, h)
		require.NoError(t, err)
		return transporttest.Net{
			Dial: func(peerID uint64) (transport.Conn, error) {
				c, err := Dial(context.Background(), path, secret, peerID)
				if err != nil {
					return nil, err
				}
				return c, nil
			},
			Close: server.Close,
		}
	})
}

// run listens with a handler until the test ends.
func run(t *testing.T, h transport.Handler, l limits) (*Server, string) {
	leaktest.Check(t)
	path := filepath.Join(t.TempDir(), "s")
	s, err := listen(path, secret, h, l)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s, path
}

// raw is a client that speaks frames and does nothing by itself.
func raw(t *testing.T, path string) *net.UnixConn {
	sock, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = sock.Close() })
	return sock
}

// welcomed is a raw client that has been let in.
func welcomed(t *testing.T, path string) *net.UnixConn {
	sock := raw(t, path)
	require.NoError(t, wire.WriteFrame(sock, wire.Hello(99, secret)))
	var welcome wire.Frame
	require.NoError(t, wire.ReadFrame(sock, &welcome))
	require.Equal(t, wire.FrameWelcome, welcome.Type)
	require.Zero(t, welcome.Op)
	return sock
}

// requireEnd reads until the stream ends.
func requireEnd(t *testing.T, sock net.Conn) {
	t.Helper()
	require.NoError(t, sock.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := io.Copy(io.Discard, sock)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "the connection is still open")
}

func dialed(t *testing.T, path string) *Conn {
	c, err := Dial(t.Context(), path, secret, 1)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func requireEcho(t *testing.T, c *Conn) {
	reply, err := c.Call(t.Context(), &wire.Request{Body: []byte("x")})
	require.NoError(t, err)
	require.Equal(t, "x", string(reply.Body))
}

func TestListenRefuses(t *testing.T) {
	leaktest.Check(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("mine"), 0o600))
	taken := filepath.Join(dir, "taken")
	s, err := Listen(taken, secret, serving{})
	require.NoError(t, err)
	defer s.Close()
	long := filepath.Join(dir, strings.Repeat("x", 100))
	cases := map[string]struct {
		path   string
		secret []byte
		code   tqerr.Code
		text   string
	}{
		"long path":   {long, secret, tqerr.InvalidArgument, "limit 107"},
		"empty path":  {"", secret, tqerr.InvalidArgument, "is not a path"},
		"abstract":    {"@x", secret, tqerr.InvalidArgument, "is not a path"},
		"no secret":   {filepath.Join(dir, "a"), nil, tqerr.InvalidArgument, "secret of 0 bytes"},
		"long secret": {filepath.Join(dir, "a"), make([]byte, 513), tqerr.InvalidArgument, "want 1 to 512"},
		"a file":      {file, secret, tqerr.AlreadyExists, "is not a socket"},
		"taken":       {taken, secret, tqerr.AlreadyExists, "belongs to a server that runs"},
		"no folder":   {filepath.Join(dir, "no", "s"), secret, tqerr.IO, "no such file"},
	}
	for name, c := range cases {
		_, err := Listen(c.path, c.secret, serving{})
		require.ErrorContains(t, err, c.text, name)
		require.Equal(t, c.code, tqerr.CodeOf(err), name)
	}
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "mine", string(content))
	requireEcho(t, dialed(t, taken))
	_, err = Dial(t.Context(), long, secret, 1)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, long)
}

func TestAStaleSocketIsReplaced(t *testing.T) {
	leaktest.Check(t)
	path := filepath.Join(t.TempDir(), "s")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	dead.SetUnlinkOnClose(false)
	require.NoError(t, dead.Close())
	_, err = Dial(t.Context(), path, secret, 1)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, path)

	s, err := Listen(path, secret, serving{})
	require.NoError(t, err)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	requireEcho(t, dialed(t, path))
	require.NoError(t, s.Close())
	_, err = os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestWhoIsNotLetIn(t *testing.T) {
	hasty := defaultLimits // for who says nothing that could be answered
	hasty.greeting = 50 * time.Millisecond
	h := serving{serve: func(context.Context, *wire.Request, func(*wire.Reply)) { t.Error("a stranger was served") }}
	_, path := run(t, h, defaultLimits)
	_, soon := run(t, h, hasty)
	request := (&wire.Frame{Type: wire.FrameRequest, ID: 1, Body: secret}).Append(nil)
	newer := wire.Hello(1, secret)
	newer.Op = wire.Version + 1
	cases := map[string]struct {
		sent []byte
		code tqerr.Code
		text string
	}{
		"wrong secret":     {wire.Hello(1, []byte("guess")).Append(nil), tqerr.InvalidArgument, "the secret is not"},
		"no secret":        {wire.Hello(1, nil).Append(nil), tqerr.InvalidArgument, "the secret is not"},
		"secret's start":   {wire.Hello(1, secret[:4]).Append(nil), tqerr.InvalidArgument, "the secret is not"},
		"request first":    {request, tqerr.InvalidArgument, "the secret is not"},
		"newer protocol":   {newer.Append(nil), tqerr.VersionMismatch, "protocol version 3, this side version 2"},
		"another protocol": {[]byte("GET / HTTP/1.1\r\nHost: somewhere-that-is-long-enough\r\n\r\n"), tqerr.OK, ""},
		"silence":          {nil, tqerr.OK, ""},
		"half a hello":     {wire.Hello(1, secret).Append(nil)[:60], tqerr.OK, ""},
		"a large frame":    {(&wire.Frame{Type: wire.FrameRequest, Body: make([]byte, 1000)}).Append(nil), tqerr.OK, ""},
	}
	for name, c := range cases {
		at := path
		if c.code == tqerr.OK {
			at = soon
		}
		sock := raw(t, at)
		_, err := sock.Write(append(c.sent, request...)[:len(c.sent)])
		require.NoError(t, err)
		if c.code != tqerr.OK {
			_, _ = sock.Write(request)
			var welcome wire.Frame
			require.NoError(t, wire.ReadFrame(sock, &welcome), name)
			require.Equal(t, wire.FrameWelcome, welcome.Type, name)
			require.Equal(t, c.code, tqerr.Code(welcome.Op), name)
			require.Contains(t, string(welcome.Body), c.text, name)
		}
		requireEnd(t, sock)
	}
	_, err := Dial(t.Context(), path, []byte("guess"), 1)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, path)
}

func TestOnlyOurUserAndRootMayConnect(t *testing.T) {
	require.True(t, mayConnect(1000, 1000))
	require.True(t, mayConnect(0, 1000))
	require.False(t, mayConnect(1001, 1000))
	require.False(t, mayConnect(1000, 0))
	s, _ := run(t, serving{}, defaultLimits)
	require.ErrorContains(t, s.admit(wire.Hello(1, secret), ownUser()+1), "is not the user of this session")
	require.NoError(t, s.admit(wire.Hello(1, secret), ownUser()))
}

// answer is a server that answers one hello with a frame, and then with what follows.
func answer(t *testing.T, frames ...*wire.Frame) string {
	leaktest.Check(t)
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sock, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		defer sock.Close()
		var f wire.Frame
		_ = wire.ReadFrame(sock, &f)
		for _, f := range frames {
			_ = wire.WriteFrame(sock, f)
		}
		_, _ = io.Copy(io.Discard, sock)
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		<-ended
	})
	return path
}

func TestServersThatAreNone(t *testing.T) {
	welcome := wire.Frame{Type: wire.FrameWelcome, Sequence: wire.Version}
	newer := wire.Frame{Type: wire.FrameWelcome, Sequence: wire.Version + 1, Op: uint16(tqerr.VersionMismatch)}
	t.Run("newer", func(t *testing.T) {
		_, err := Dial(t.Context(), answer(t, &newer), secret, 1)
		require.Equal(t, tqerr.VersionMismatch, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "protocol version 3, this side version 2")
	})
	t.Run("no welcome", func(t *testing.T) {
		_, err := Dial(t.Context(), answer(t, &wire.Frame{Type: wire.FrameReply}), secret, 1)
		require.Equal(t, tqerr.Corruption, tqerr.CodeOf(err))
	})
	t.Run("silent", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := Dial(ctx, answer(t), secret, 1)
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
	})
	t.Run("nonsense later", func(t *testing.T) {
		c := dialed(t, answer(t, &welcome, &wire.Frame{Type: wire.FrameReply, ID: 77}, &wire.Frame{Type: wire.FrameHello}))
		<-c.Done()
		_, err := c.Call(t.Context(), &wire.Request{})
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, c.path+`" is gone: frame of type 5 from a server`)
	})
	t.Run("nobody", func(t *testing.T) {
		_, err := Dial(t.Context(), filepath.Join(t.TempDir(), "none"), secret, 1)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "no server at socket")
	})
}

func TestALongLineOfClientsIsWaitedFor(t *testing.T) {
	leaktest.Check(t)
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	require.NoError(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	require.NoError(t, unix.Listen(fd, 0))
	raw(t, path) // fills the line
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, path, secret, 1)
	require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "%v", err)
}

func TestNoDescriptorLeftForAWhile(t *testing.T) {
	_, path := run(t, serving{}, defaultLimits)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var old syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: old.Max}))
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	var waited [1]byte
	n, _, _ := unix.Recvfrom(fd, waited[:], unix.MSG_DONTWAIT)
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old))
	require.NoError(t, err)
	require.LessOrEqual(t, n, 0)
	file := os.NewFile(uintptr(fd), "client")
	defer file.Close()
	require.NoError(t, wire.WriteFrame(file, wire.Hello(1, secret)))
	var welcome wire.Frame
	require.NoError(t, wire.ReadFrame(file, &welcome))
	require.Equal(t, wire.FrameWelcome, welcome.Type)
}

func TestMistakesOfAClientEndItsConnection(t *testing.T) {
	waiting := make(chan func(*wire.Reply), 8)
	_, path := run(t, serving{serve: func(_ context.Context, _ *wire.Request, reply func(*wire.Reply)) { waiting <- reply }}, defaultLimits)
	request := (&wire.Frame{Type: wire.FrameRequest, ID: 1}).Append(nil)
	cases := map[string][]byte{
		"garbage":            []byte(strings.Repeat("x", wire.HeaderSize)),
		"the same id twice":  append(append([]byte{}, request...), request...),
		"a reply":            (&wire.Frame{Type: wire.FrameReply}).Append(nil),
		"a second hello":     wire.Hello(1, secret).Append(nil),
		"segment among work": append(append([]byte{}, request...), (&wire.Frame{Type: wire.FrameSegment}).Append(nil)...),
	}
	for name, sent := range cases {
		t.Run(name, func(t *testing.T) {
			sock := welcomed(t, path)
			_, err := sock.Write(sent)
			require.NoError(t, err)
			requireEnd(t, sock)
		})
	}
	require.Len(t, waiting, 2)
}

func TestDescriptors(t *testing.T) {
	s, path := run(t, serving{}, defaultLimits)
	require.Len(t, s.Descriptors(), 1)
	c := dialed(t, path)
	requireEcho(t, c)
	require.Equal(t, s.SessionID(), c.SessionID())
	fds := append(s.Descriptors(), c.Descriptors()...)
	require.Len(t, fds, 3)
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join("/proc/self/fd", strconv.Itoa(fd)))
		require.NoError(t, err)
		require.Contains(t, target, "socket:")
	}
	require.NoError(t, c.Close())
	require.Empty(t, c.Descriptors())
	require.NoError(t, s.Close())
	require.Empty(t, s.Descriptors())
}
