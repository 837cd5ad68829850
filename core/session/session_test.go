package session_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func TestOneOwnerOfManyGoroutines(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	sessions := make([]*session.Session, 16)
	var all sync.WaitGroup
	for i := range sessions {
		all.Add(1)
		go func() {
			defer all.Done()
			s, err := session.Open(context.Background(), cfg)
			if err != nil {
				t.Error(err)
			}
			sessions[i] = s
		}()
	}
	all.Wait()
	require.False(t, t.Failed())
	var owner *session.Session
	for _, s := range sessions {
		require.Equal(t, sessions[0].Info.Session, s.Info.Session)
		require.Equal(t, []byte("settings"), s.Info.Blob)
		alive(t, s)
		if s.Info.Owner {
			require.Nil(t, owner)
			owner = s
		}
	}
	require.NotNil(t, owner)
	for _, s := range sessions {
		if s != owner {
			require.NoError(t, s.Close(time.Second))
		}
	}
	alive(t, owner)
	require.NoError(t, owner.Close(time.Second))
	require.Equal(t, []string{"default.lock"}, files(t, cfg.Dir))
}

func TestOneOwnerOfManyProcesses(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	require.NoError(t, os.WriteFile(filepath.Join(cfg.Dir, "default.json"), []byte("garbage of a dead owner"), 0o600))
	var results []func() *process
	for range 8 {
		results = append(results, spawn(t, cfg))
	}
	var owner *process
	var attached []*process
	for _, result := range results {
		p := result()
		require.Empty(t, p.Err)
		if p.Info.Owner {
			require.Nil(t, owner, "two owners")
			owner = p
		} else {
			attached = append(attached, p)
		}
	}
	require.NotNil(t, owner)
	for _, p := range attached {
		require.Equal(t, owner.Info.Session, p.Info.Session)
		require.Equal(t, owner.cmd.Process.Pid, p.Info.PID)
		p.close(t)
	}
	alive(t, open(t, mode(cfg, "attach")))
	owner.close(t)
}

// An owner that is killed is noticed at once, and replaced by the next who opens.
func TestTheOwnerIsKilled(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	owner := spawn(t, cfg)()
	require.True(t, owner.Info.Owner)
	s := open(t, cfg)
	require.False(t, s.Info.Owner)
	waiting := make(chan error, 1)
	go func() {
		waiting <- ask(s, wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", BatchSize: 1, Task: "t"}, nil)
	}()
	alive(t, s)
	require.NoError(t, owner.cmd.Process.Kill())
	begun := time.Now()
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-waiting))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(ask(s, wire.OpPartitions, nil, nil)))
	require.Less(t, time.Since(begun), 2*time.Second)
	require.FileExists(t, owner.Info.Socket)

	next := open(t, cfg)
	require.True(t, next.Info.Owner)
	require.NotEqual(t, owner.Info.Session, next.Info.Session)
	require.NoFileExists(t, owner.Info.Socket, "what the dead owner has left is swept")
	alive(t, open(t, mode(cfg, "attach")))
}

func TestOnlyTheOwnersCloseEnds(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	owner, err := session.Open(context.Background(), cfg)
	require.NoError(t, err)
	first, second := open(t, cfg), open(t, mode(cfg, "attach"))
	require.NoError(t, first.Close(time.Second))
	require.NoError(t, first.Close(time.Second), "twice is once")
	require.Error(t, ask(first, wire.OpPartitions, nil, nil))
	alive(t, second)
	alive(t, owner)

	waiting := make(chan error, 1)
	go func() { waiting <- ask(second, wire.OpWait, &wire.WaitRequest{Partition: "p", Count: 1}, nil) }()
	alive(t, second)
	require.NoError(t, owner.Close(time.Second))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-waiting))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(ask(second, wire.OpPartitions, nil, nil)))
	_, err = session.Open(context.Background(), mode(cfg, "attach"))
	require.Equal(t, tqerr.NotInitialized, tqerr.CodeOf(err))
	require.True(t, open(t, cfg).Info.Owner)
}

func TestARemovedDirectoryDoesNotCostTheNextSessionItsFile(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	first, err := session.Open(context.Background(), cfg)
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(cfg.Dir))
	second, err := session.Open(context.Background(), cfg)
	require.NoError(t, err)
	require.True(t, second.Info.Owner)
	require.NoError(t, first.Close(time.Second))
	alive(t, open(t, mode(cfg, "attach")))
	require.NoError(t, second.Close(time.Second))
}

func TestModes(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	begun := time.Now()
	_, err := session.Open(context.Background(), mode(cfg, "attach"))
	require.Equal(t, tqerr.NotInitialized, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "call init() first")
	require.Less(t, time.Since(begun), time.Second)
	owner := open(t, mode(cfg, "own"))
	require.True(t, owner.Info.Owner)
	_, err = session.Open(context.Background(), mode(cfg, "own"))
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(err))
	require.ErrorContains(t, err, `namespace "default"`)
	alive(t, owner)
	require.False(t, open(t, cfg).Info.Owner)
}

// Who only wants to attach looks at the lock for a moment; that must not look like an owner to who wants to own.
func TestOwningWhileOthersLook(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for range 4 {
		all.Add(1)
		go func() {
			defer all.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				if s, err := session.Open(context.Background(), mode(cfg, "attach")); err == nil {
					_ = s.Close(0)
				} else if tqerr.CodeOf(err) != tqerr.NotInitialized {
					t.Error(err)
					return
				}
			}
		}()
	}
	for range 20 {
		s, err := session.Open(context.Background(), mode(cfg, "own"))
		require.NoError(t, err)
		require.NoError(t, s.Close(time.Second))
	}
	close(stop)
	all.Wait()
}

// held holds the lock of a session as its owner does.
func held(t *testing.T, cfg *session.Config) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(cfg.Dir, cfg.Namespace+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	t.Cleanup(func() { _ = f.Close() })
}

func good(cfg *session.Config) string {
	return fmt.Sprintf(`{"format":1,"protocol":%d,"session":"x","pid":1,"socket":%q,"secret":"eA=="}`, wire.Version, filepath.Join(cfg.Dir, "none.sock"))
}

// Rendezvous files of no use: they are an error while their owner lives, and replaced when it does not.
func TestRendezvousFilesOfNoUse(t *testing.T) {
	cases := map[string]struct {
		text func(cfg *session.Config) string
		code tqerr.Code
		says string
	}{
		"empty":            {func(*session.Config) string { return "" }, tqerr.Corruption, "rendezvous file"},
		"garbage":          {func(*session.Config) string { return "\x00\xff{{" }, tqerr.Corruption, "remove it if no session runs"},
		"another document": {func(*session.Config) string { return `{"socket": 5}` }, tqerr.Corruption, "rendezvous file"},
		"truncated":        {func(cfg *session.Config) string { return good(cfg)[:40] }, tqerr.Corruption, "rendezvous file"},
		"newer format":     {func(cfg *session.Config) string { return strings.Replace(good(cfg), `"format":1`, `"format":2`, 1) }, tqerr.VersionMismatch, "format 2"},
		"newer protocol": {func(cfg *session.Config) string { return strings.Replace(good(cfg), `"protocol":2`, `"protocol":9`, 1) },
			tqerr.VersionMismatch, "protocol 9"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			cfg := config(t)
			path := filepath.Join(cfg.Dir, "default.json")
			require.NoError(t, os.WriteFile(path, []byte(c.text(cfg)), 0o600))
			_, err := session.Open(context.Background(), mode(cfg, "attach"))
			require.Equal(t, tqerr.NotInitialized, tqerr.CodeOf(err))
			s, err := session.Open(context.Background(), cfg)
			require.NoError(t, err)
			require.True(t, s.Info.Owner)
			require.NoError(t, s.Close(time.Second))

			require.NoError(t, os.WriteFile(path, []byte(c.text(cfg)), 0o600))
			held(t, cfg)
			begun := time.Now()
			_, err = session.Open(context.Background(), cfg)
			require.Equal(t, c.code, tqerr.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.ErrorContains(t, err, path)
			require.Less(t, time.Since(begun), 2*time.Second)
		})
	}
}

func TestARendezvousFileOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give files away")
	}
	leaktest.Check(t)
	cfg := config(t)
	path := filepath.Join(cfg.Dir, "default.json")
	require.NoError(t, os.WriteFile(path, []byte(good(cfg)), 0o600))
	require.NoError(t, os.Chown(path, 12345, -1))
	held(t, cfg)
	_, err := session.Open(context.Background(), cfg)
	require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "belongs to user 12345")
}

// An owner that hangs, or is only opening, is waited for until the deadline, and the error says for what.
func TestAnOwnerThatDoesNotAnswer(t *testing.T) {
	for name, prepare := range map[string]func(cfg *session.Config){
		"no rendezvous file": func(*session.Config) {},
		"nobody at the socket": func(cfg *session.Config) {
			must(os.WriteFile(filepath.Join(cfg.Dir, "default.json"), []byte(good(cfg)), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			cfg := in(config(t), func(c *session.Config) { c.TimeoutMS = 300 })
			prepare(cfg)
			held(t, cfg)
			begun := time.Now()
			_, err := session.Open(context.Background(), cfg)
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
			require.ErrorContains(t, err, filepath.Join(cfg.Dir, "default.json"))
			require.ErrorContains(t, err, "within 0.3 s")
			require.Less(t, time.Since(begun), 2*time.Second)
		})
	}
	t.Run("a server that says nothing", func(t *testing.T) {
		leaktest.Check(t)
		cfg := in(config(t), func(c *session.Config) { c.TimeoutMS = 300 })
		socket := filepath.Join(cfg.Dir, "none.sock")
		l, err := net.Listen("unix", socket)
		require.NoError(t, err)
		defer l.Close()
		require.NoError(t, os.WriteFile(filepath.Join(cfg.Dir, "default.json"), []byte(good(cfg)), 0o600))
		held(t, cfg)
		begun := time.Now()
		_, err = session.Open(context.Background(), cfg)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%v", err)
		require.Less(t, time.Since(begun), 2*time.Second)
	})
}

func TestNamespaces(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	for _, bad := range []string{"", ".", "..", ".x", "a/b", "a b", "a\x00", "ä", strings.Repeat("x", 65), "*"} {
		_, err := session.Open(context.Background(), in(cfg, func(c *session.Config) { c.Namespace = bad }))
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%q", bad)
		require.ErrorContains(t, err, "namespace")
	}
	require.Empty(t, files(t, cfg.Dir))
	var sessions []*session.Session
	for _, name := range []string{"a", "a.b", "a.b.c", "a.sock", "a-b_C9", "a.12345678"} {
		s := open(t, in(cfg, func(c *session.Config) { c.Namespace = name }))
		require.True(t, s.Info.Owner)
		sessions = append(sessions, s)
	}
	// The first one again: what it sweeps is its own.
	left := filepath.Join(cfg.Dir, "a.deadbeef.sock")
	require.NoError(t, os.WriteFile(left, nil, 0o600))
	require.NoError(t, sessions[0].Close(time.Second))
	sessions[0] = open(t, in(cfg, func(c *session.Config) { c.Namespace = "a" }))
	require.NoFileExists(t, left)
	for i, name := range []string{"a", "a.b", "a.b.c", "a.sock", "a-b_C9", "a.12345678"} {
		require.FileExists(t, sessions[i].Info.Socket)
		s := open(t, in(cfg, func(c *session.Config) { c.Namespace, c.Mode = name, "attach" }))
		require.Equal(t, sessions[i].Info.Session, s.Info.Session)
	}
}

func TestFilesArePrivate(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	cfg.Dir = filepath.Join(cfg.Dir, "new", "er")
	s := open(t, cfg)
	for _, path := range []string{filepath.Join(cfg.Dir, "default.json"), s.Info.Socket, filepath.Join(cfg.Dir, "default.lock"), cfg.Dir} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Zero(t, info.Mode().Perm()&0o077, path)
	}
	data, err := os.ReadFile(filepath.Join(cfg.Dir, "default.json"))
	require.NoError(t, err)
	require.True(t, json.Valid(data))
}

// The directory of a user lies where everybody may make one; somebody else's is not trusted.
func TestTheDefaultDirectoryMustBeOurs(t *testing.T) {
	cases := map[string]func(dir string) error{
		"a link":               func(dir string) error { return os.Symlink(os.TempDir(), dir) },
		"writable by others":   func(dir string) error { return makeDir(dir, 0o777) },
		"a file":               func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
		"ours":                 func(dir string) error { return makeDir(dir, 0o700) },
		"of another user":      func(dir string) error { return giveAway(dir) },
		"ours, only readable ": func(dir string) error { return makeDir(dir, 0o755) },
	}
	for name, prepare := range cases {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			run := config(t).Dir
			t.Setenv("XDG_RUNTIME_DIR", run)
			dir := filepath.Join(run, "transferqueue")
			require.NoError(t, prepare(dir))
			s, err := session.Open(context.Background(), &session.Config{Mode: "auto", Namespace: "n", TimeoutMS: 1000})
			if strings.HasPrefix(name, "ours") {
				require.NoError(t, err)
				require.Equal(t, dir, filepath.Dir(s.Info.Socket))
				require.NoError(t, s.Close(time.Second))
				return
			}
			require.Error(t, err)
			require.ErrorContains(t, err, dir)
		})
	}
}

func makeDir(dir string, mode os.FileMode) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}

func giveAway(dir string) error {
	if err := makeDir(dir, 0o700); err != nil || os.Getuid() != 0 {
		return os.Chmod(dir, 0o777)
	}
	return os.Chown(dir, 12345, -1)
}

// What one process puts, through memory of the owner, another gets; with and without copies.
func TestDataCrossesProcesses(t *testing.T) {
	leaktest.Check(t)
	cfg := in(config(t), func(c *session.Config) { c.MemoryLimit = 64 << 20 })
	owner, attached := open(t, cfg), open(t, cfg)
	mem := foreigntest.New(t, 16<<20)
	values := make([]int64, 4*(32<<10))
	for i := range values {
		values[i] = int64(i)
	}
	keys := wire.Strings{"a", "b", "c", "d"}
	for _, writer := range []*session.Session{attached, owner} {
		for _, width := range []int64{2, 32 << 10} {
			n := 4 * width
			put(t, writer, keys, mem.Ints([]int64{width}, values[:n]...))
			for _, reader := range []*session.Session{owner, attached} {
				for _, flags := range []client.Flags{0, client.Views, client.DenseLayout} {
					data := get(t, reader, keys, flags)
					require.Equal(t, foreign.Bytes(uintptr(foreigntest.Lend(mem, values[:n]...)), 8*n), data)
				}
			}
			mem.Reset()
		}
	}
	var units wire.UnitsReply
	require.NoError(t, ask(attached, wire.OpUnits, nil, &units))
	require.Len(t, units.Units, 2)
	require.EqualValues(t, 64<<20, units.Units[0].MemoryLimit)
	require.NotEmpty(t, owner.Descriptors())
	require.NotEmpty(t, attached.Descriptors())
}

// Owners without a rendezvous file live beside the published one, and others attach by socket and secret.
func TestUnpublishedOwners(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	private := in(cfg, func(c *session.Config) { c.Unpublished = true })
	first, second, published := open(t, private), open(t, private), open(t, cfg)
	require.True(t, first.Info.Owner && second.Info.Owner && published.Info.Owner)
	require.NotEqual(t, first.Info.Session, second.Info.Session)
	by := func(info session.Info) *session.Config {
		return in(cfg, func(c *session.Config) { c.Mode, c.Socket, c.Secret = "attach", info.Socket, info.Secret })
	}
	for _, owner := range []*session.Session{first, second, published} {
		attached := open(t, by(owner.Info))
		require.False(t, attached.Info.Owner)
		require.Equal(t, owner.Info.Session, attached.Info.Session)
		require.Equal(t, owner.Info.PID, attached.Info.PID)
		require.Equal(t, owner.Info.Secret, attached.Info.Secret)
		alive(t, attached)
	}
	wrong := by(first.Info)
	wrong.Secret = []byte("guessed")
	_, err := session.Open(context.Background(), wrong)
	require.Error(t, err)
	_, err = session.Open(context.Background(), in(by(first.Info), func(c *session.Config) { c.Socket += "x" }))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, first.Info.Socket+"x")
}

// The socket that a killed unpublished owner leaves is removed by the next owner in its directory, when it starts and when
// it ends.
func TestSocketsOfDeadUnpublishedOwnersAreSwept(t *testing.T) {
	leaktest.Check(t)
	cfg := in(config(t), func(c *session.Config) { c.Unpublished = true })
	killed := func() string {
		owner := spawn(t, cfg)()
		require.Empty(t, owner.Err)
		require.NoError(t, owner.cmd.Process.Kill())
		_, _ = owner.cmd.Process.Wait()
		require.FileExists(t, owner.Info.Socket)
		return owner.Info.Socket
	}
	before := killed()
	next := open(t, cfg)
	alive(t, next)
	require.NoFileExists(t, before)
	during := killed()
	require.NoError(t, next.Close(time.Second))
	require.NoFileExists(t, during)
}
