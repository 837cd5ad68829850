package session_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/arena"
	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// A child opens a session with the configuration in its environment, prints what became of it, and closes when its input ends.
const childConfig = "TQ_TEST_SESSION"

func TestMain(m *testing.M) {
	if text := os.Getenv(childConfig); text != "" {
		child(text)
		return
	}
	if text := os.Getenv(crowdConfig); text != "" {
		inCrowd(text)
		return
	}
	openPagemap()
	os.Exit(m.Run())
}

// The first large copy of a process opens /proc/self/pagemap, which stays open: not a leak of the test that does it.
func openPagemap() {
	a, err := arena.New(arena.Options{})
	must(err)
	b, err := a.Alloc(1 << 20)
	must(err)
	fd, size, err := a.Segment(b.Segment)
	must(err)
	m, err := arena.Map(fd, size)
	must(err)
	must(m.Write(b.Offset, make([]byte, 1<<20)))
	must(m.Close())
	must(unix.Close(fd))
	a.Free(b.Segment, b.Offset, b.Size)
	must(a.Close())
}

type report struct {
	Info session.Info
	Err  string
	Code tqerr.Code
}

func child(text string) {
	var cfg session.Config
	must(json.Unmarshal([]byte(text), &cfg))
	s, err := session.Open(context.Background(), &cfg)
	r := report{Code: tqerr.CodeOf(err)}
	if err == nil {
		r.Info = s.Info
	} else {
		r.Err = err.Error()
	}
	must(json.NewEncoder(os.Stdout).Encode(r))
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err == nil {
		must(s.Close(time.Second))
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// process is a child of the test.
type process struct {
	report
	cmd   *exec.Cmd
	input io.Closer
}

// spawn starts a child; result waits for its report.
func spawn(t testing.TB, cfg *session.Config, environment ...string) (result func() *process) {
	text, err := json.Marshal(cfg)
	require.NoError(t, err)
	p := &process{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), childConfig+"="+string(text), "GORACE=atexit_sleep_ms=0")
	p.cmd.Env = append(p.cmd.Env, environment...)
	p.cmd.Stderr = os.Stderr
	p.input, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	output, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	return func() *process {
		line, err := bufio.NewReader(output).ReadBytes('\n')
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(line, &p.report))
		return p
	}
}

func (p *process) close(t *testing.T) {
	require.NoError(t, p.input.Close())
	require.NoError(t, p.cmd.Wait())
}

// config is for a session in a directory of this test, whose name is short because it is part of a socket's path.
func config(t *testing.T) *session.Config {
	dir, err := os.MkdirTemp("", "tq")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &session.Config{Mode: "auto", Dir: dir, Namespace: "default", Units: 2, TimeoutMS: 10_000, Blob: []byte("settings")}
}

func in(cfg *session.Config, change func(*session.Config)) *session.Config {
	other := *cfg
	change(&other)
	return &other
}

func mode(cfg *session.Config, mode string) *session.Config {
	return in(cfg, func(c *session.Config) { c.Mode = mode })
}

func open(t *testing.T, cfg *session.Config) *session.Session {
	t.Helper()
	s, err := session.Open(context.Background(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close(time.Second)) })
	return s
}

// ask sends a request and returns the error of its result.
func ask(s *session.Session, op wire.Op, body, reply any) error {
	req := &client.Request{Op: op}
	if body != nil {
		var err error
		if req.Body, err = wire.Marshal(body); err != nil {
			return err
		}
	}
	done := make(chan *client.Result, 1)
	if _, err := s.Client.Start(req, func(r *client.Result) { done <- r }); err != nil {
		return err
	}
	r := <-done
	if r.Err != nil || reply == nil {
		return r.Err
	}
	return wire.Unmarshal(r.Body, reply)
}

func alive(t *testing.T, s *session.Session) {
	t.Helper()
	require.NoError(t, ask(s, wire.OpPartitions, nil, nil))
}

func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func put(t *testing.T, s *session.Session, keys wire.Strings, column foreign.Raw) {
	t.Helper()
	body, err := wire.Marshal(&putBody{Partition: "p", Keys: keys, Fields: wire.Strings{"x"}})
	require.NoError(t, err)
	done := make(chan *client.Result, 1)
	_, err = s.Client.Start(&client.Request{Op: wire.OpPut, Body: body, Columns: []foreign.Raw{column}, Rows: len(keys)}, func(r *client.Result) { done <- r })
	require.NoError(t, err)
	require.NoError(t, (<-done).Err)
}

func get(t *testing.T, s *session.Session, keys wire.Strings, flags client.Flags) []byte {
	t.Helper()
	body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keys, Views: flags&client.Views != 0, Inline: client.InlineLimit})
	require.NoError(t, err)
	done := make(chan *client.Result, 1)
	_, err = s.Client.Start(&client.Request{Op: wire.OpGet, Flags: flags, Body: body}, func(r *client.Result) { done <- r })
	require.NoError(t, err)
	r := <-done
	require.NoError(t, r.Err)
	data := append([]byte(nil), r.Columns[0].Data...)
	client.Release(r.Columns[0].Token)
	client.Release(r.Columns[0].OffsetsToken)
	return data
}
