//go:build zmq

package session_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/guard"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/zmq"
	"transferqueue/core/wire"
)

var token = []byte("token-of-the-tests-0123456789")

// checkRemote is leaktest.Check for tests with connections to other hosts: ZeroMQ keeps threads and descriptors for the
// next one, which are made here.
func checkRemote(t *testing.T) {
	_, err := zmq.Dial(t.Context(), "tcp://127.0.0.1:1", zmq.Credentials{Token: token}, 1, 0)
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err), "%v", err)
	leaktest.Check(t)
}

func freePort(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func listening(cfg *session.Config) *session.Config {
	return in(cfg, func(c *session.Config) { c.Mode, c.Listen, c.Token, c.Units = "own", "tcp://127.0.0.1:0", token, 2 })
}

func reaching(cfg *session.Config, address string) *session.Config {
	return in(cfg, func(c *session.Config) { c.Mode, c.Address, c.Token = "attach", address, token })
}

// owner opens a session that listens, and checks at its end that nobody has left anything.
func owner(t *testing.T, cfg *session.Config) *session.Session {
	s := open(t, cfg)
	t.Cleanup(func() {
		if !t.Failed() {
			requireClean(t, s)
		}
	})
	return s
}

// requireClean waits until everybody but the owner has gone, clears everything, and looks for what is left.
func requireClean(t *testing.T, s *session.Session) {
	t.Helper()
	var status wire.StatusSummary
	require.Eventually(t, func() bool {
		require.NoError(t, ask(s, wire.OpStatus, nil, &status))
		return status.Clients == 1
	}, 20*time.Second, 10*time.Millisecond, "others are gone")
	for _, p := range status.Partitions {
		require.NoError(t, ask(s, wire.OpClearPartition, &wire.PartitionRequest{Partition: p.Name}, nil))
	}
	require.NoError(t, ask(s, wire.OpStatus, nil, &status))
	for _, u := range status.Units {
		require.Zero(t, u.MemoryUsed+u.Cells+u.Leases+u.Staged+u.Samples, "%+v", u)
	}
}

// writer is a client with memory of its own.
type writer struct {
	s   *session.Session
	mem *foreigntest.Memory
}

func (w *writer) do(req *client.Request) (*client.Result, error) {
	done := make(chan *client.Result, 1)
	req.Timeout = time.Minute
	if _, err := w.s.Client.Start(req, func(r *client.Result) { done <- r }); err != nil {
		return nil, err
	}
	r := <-done
	return r, r.Err
}

// put writes rows of equal elements to field "x".
func (w *writer) put(body putBody, width int, values ...int64) error {
	w.mem.Reset()
	all := make([]int64, 0, width*len(values))
	for _, v := range values {
		for range width {
			all = append(all, v)
		}
	}
	body.Partition, body.Fields = "p", wire.Strings{"x"}
	raw, err := wire.Marshal(&body)
	if err == nil {
		_, err = w.do(&client.Request{Op: wire.OpPut, Body: raw, Columns: []foreign.Raw{w.mem.Ints([]int64{int64(width)}, all...)}, Rows: len(values)})
	}
	return err
}

// values reads field "x" of keys, whose rows must have equal elements.
func (w *writer) values(keys ...string) ([]int64, error) {
	raw, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keys, Strict: true, Inline: client.InlineLimit, Views: true})
	if err != nil {
		return nil, err
	}
	r, err := w.do(&client.Request{Op: wire.OpGet, Body: raw, Flags: client.Views})
	if err != nil {
		return nil, err
	}
	c := &r.Columns[0]
	defer client.Release(c.Token)
	defer client.Release(c.OffsetsToken)
	out, offsets := make([]int64, len(keys)), c.Column.Offsets()
	for i := range keys {
		row := c.Data[offsets[i]:offsets[i+1]]
		out[i] = int64(binary.NativeEndian.Uint64(row))
		for at := 0; at < len(row); at += 8 {
			if got := int64(binary.NativeEndian.Uint64(row[at:])); got != out[i] {
				return nil, fmt.Errorf("key %q: %d and %d are of different writes", keys[i], out[i], got)
			}
		}
	}
	return out, nil
}

func (w *writer) clear(keys ...string) error {
	raw, err := wire.Marshal(&wire.ClearRequest{Partition: "p", Keys: keys})
	if err == nil {
		_, err = w.do(&client.Request{Op: wire.OpClear, Body: raw})
	}
	return err
}

const (
	narrow = 4        // elements of a row that travels in the message
	medium = 1 << 10  // that travels in the message unless it is encrypted
	wide   = 40 << 10 // elements of a row that travels on a stream
)

func TestDataCrossesTCP(t *testing.T) {
	for name, elsewhere := range map[string]bool{"units here": false, "units elsewhere": true, "encrypted": false} {
		t.Run(name, func(t *testing.T) {
			checkRemote(t)
			cfg := config(t)
			at := listening(cfg)
			if name == "encrypted" {
				at.Security, at.KeyFile = "curve", filepath.Join(t.TempDir(), "key")
			}
			here := ownerOver(t, at, elsewhere)
			given := zmq.Credentials{Token: token, Key: here.Info.Key}
			there := open(t, in(reaching(cfg, here.Info.Address), func(c *session.Config) { c.Token = given.Text() }))
			require.Equal(t, here.Info.Session, there.Info.Session)
			require.Equal(t, here.Info.PID, there.Info.PID)
			require.Equal(t, []byte("settings"), there.Info.Blob)
			a := &writer{there, foreigntest.New(t, 300<<20)}
			b := &writer{here, foreigntest.New(t, 8<<20)}
			for _, width := range []int{narrow, medium, wide, 5 << 20} {
				require.NoError(t, a.put(putBody{Keys: wire.Strings{"a", "b", "c"}}, width, 1, 2, 3))
				require.NoError(t, a.put(putBody{Keys: wire.Strings{"b"}, Update: true, Merge: "add"}, width, 40))
				for _, w := range []*writer{a, b} {
					got, err := w.values("c", "b", "a")
					require.NoError(t, err)
					require.Equal(t, []int64{3, 42, 1}, got)
				}
				require.NoError(t, a.clear("a", "b", "c"))
			}
			_, err := a.values("a")
			require.Error(t, err)
			require.NoError(t, there.Close(time.Second))
		})
	}
}

// ownerOver is owner over units in its own process, or over two in processes of their own.
func ownerOver(t *testing.T, cfg *session.Config, elsewhere bool) *session.Session {
	if !elsewhere {
		return owner(t, cfg)
	}
	first, second := spawn(t, asUnit(cfg, "unit-a")), spawn(t, asUnit(cfg, "unit-b"))
	s := owner(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	require.NoError(t, join(s, first(), second()))
	return s
}

// A unit that dies while a client of another host uses it: requests that need it say so, and the others go on.
func TestAUnitDiesUnderARemoteClient(t *testing.T) {
	checkRemote(t)
	cfg := listening(config(t))
	units := []func() *process{spawn(t, asUnit(cfg, "unit-a")), spawn(t, asUnit(cfg, "unit-b"))}
	here := open(t, in(cfg, func(c *session.Config) { c.Units = -1 }))
	doomed := units[0]()
	require.NoError(t, join(here, doomed))
	there := open(t, reaching(cfg, here.Info.Address))
	w := &writer{there, foreigntest.New(t, 64<<20)}
	require.NoError(t, w.put(putBody{Keys: wire.Strings{"lost"}}, wide, 1))
	require.NoError(t, join(here, units[1]()))

	results := make(chan error, 1)
	guard.Go("test: writer", func() {
		for {
			if err := w.put(putBody{Keys: wire.Strings{"lost"}}, 2<<20, 2); err != nil {
				results <- err
				return
			}
		}
	})
	time.AfterFunc(50*time.Millisecond, func() { _ = doomed.cmd.Process.Kill() })
	err := <-results
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit-a")
	_, err = w.values("lost")
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
	require.ErrorContains(t, err, "unit-a")
	for _, width := range []int{narrow, wide} {
		require.NoError(t, w.put(putBody{Keys: wire.Strings{"fresh"}}, width, 3))
		got, err := w.values("fresh")
		require.NoError(t, err)
		require.Equal(t, []int64{3}, got)
	}
	require.NoError(t, there.Close(time.Second))
}

// A network that delays, cuts and repeats at random: every request succeeds and has happened once.
func TestExactlyOnceOverTCP(t *testing.T) {
	for name, elsewhere := range map[string]bool{"units here": false, "units elsewhere": true} {
		t.Run(name, func(t *testing.T) { exactlyOnceThrough(t, elsewhere, false) })
	}
	t.Run("encrypted", func(t *testing.T) { exactlyOnceThrough(t, false, true) })
}

func portOf(t *testing.T, address string) int {
	_, port, err := zmq.ParseAddress(address)
	require.NoError(t, err)
	return port
}

func exactlyOnceThrough(t *testing.T, elsewhere, encrypted bool) {
	checkRemote(t)
	cfg := listening(config(t))
	if encrypted {
		cfg.Security, cfg.KeyFile = "curve", filepath.Join(t.TempDir(), "key")
	}
	cfg.PayloadPort = freePort(t)
	here := ownerOver(t, cfg, elsewhere)
	p := &proxy{cut: 0.02, twice: 0.1, delay: 3 * time.Millisecond, blind: encrypted}
	if encrypted {
		p.cut = 0.007  // TLS makes more and smaller pieces
		p.twice = 0.01 // which CURVE takes for an attack, and ends the connection
	}
	startProxy(t, p, portOf(t, here.Info.Address), cfg.PayloadPort)
	exactlyOnce(t, cfg, here, p)
}

// exactlyOnce has writers of another host do what can go wrong, through a proxy.
func exactlyOnce(t *testing.T, cfg *session.Config, here *session.Session, p *proxy) {

	const writers, rounds = 4, 60
	first := &writer{here, foreigntest.New(t, 8<<20)}
	require.NoError(t, first.put(putBody{Keys: wire.Strings{"narrow"}}, narrow, 0))
	require.NoError(t, first.put(putBody{Keys: wire.Strings{"wide"}}, wide, 0))
	errs := make(chan error, writers)
	address := strings.Replace(here.Info.Address, "127.0.0.1", proxyHost, 1)
	for n := range writers {
		w := &writer{mem: foreigntest.New(t, 16<<20)}
		given := zmq.Credentials{Token: token, Key: here.Info.Key}
		there := in(reaching(cfg, address), func(c *session.Config) { c.Token = given.Text() })
		guard.Go("test: writer", func() { errs <- w.rounds(there, fmt.Sprintf("w%d", n), rounds) })
	}
	for range writers { // all of them: their memory ends with the test
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	require.False(t, t.Failed())
	p.calm.Store(true)
	t.Logf("%d connections, %d cuts, %d doubled messages, %d tickets shown twice", p.runs.Load(), p.cuts.Load(), p.doubles.Load(), p.stale.Load())
	require.Greater(t, p.cuts.Load(), int64(20))
	require.Greater(t, p.doubles.Load(), int64(map[bool]int{false: 20, true: 5}[p.blind]))
	got, err := first.values("narrow")
	require.NoError(t, err)
	require.Equal(t, []int64{writers * rounds}, got)
	got, err = first.values("wide")
	require.NoError(t, err)
	require.Equal(t, []int64{writers * rounds}, got)
	var status wire.StatusSummary
	require.NoError(t, ask(here, wire.OpStatus, nil, &status))
	require.Equal(t, writers*rounds*3+2, status.Partitions[0].Samples, "two and one new samples in every round")
	require.Equal(t, 2, status.Partitions[0].Keys)
}

// rounds does what can go wrong when it happens twice or not at all.
func (w *writer) rounds(cfg *session.Config, name string, n int) (err error) {
	if w.s, err = session.Open(context.Background(), cfg); err != nil {
		return err
	}
	defer func() {
		if e := w.s.Close(time.Second); err == nil {
			err = e
		}
	}()
	for i := range n {
		width := []int{narrow, wide}[i%2]
		steps := []func() error{
			func() error { return w.put(putBody{Insert: 2}, narrow, 7, 8) },
			func() error { return w.put(putBody{Insert: 1}, wide, 9) },
			func() error {
				return w.put(putBody{Keys: wire.Strings{"narrow"}, Update: true, Merge: "add"}, narrow, 1)
			},
			func() error { return w.put(putBody{Keys: wire.Strings{"wide"}, Update: true, Merge: "add"}, wide, 1) },
			func() error { return w.put(putBody{Keys: wire.Strings{name, name + "'"}}, width, int64(i), int64(-i)) },
			func() error {
				got, err := w.values(name+"'", name)
				if err == nil && (got[0] != int64(-i) || got[1] != int64(i)) {
					err = fmt.Errorf("round %d read %d", i, got)
				}
				return err
			},
			func() error { return w.clear(name, name+"'") },
		}
		for k, step := range steps {
			if err := step(); err != nil {
				return fmt.Errorf("%s, round %d, step %d: %w", name, i, k, err)
			}
		}
	}
	return nil
}
