//go:build go1.25

package controller_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/client"
	"transferqueue/core/controller"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/journal"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// mortal is the disk of a process that dies: what it finds then is what a later process finds, and nothing succeeds any more.
type mortal struct {
	vfs.Disk
	mu     sync.RWMutex
	mem    *vfs.Mem
	left   *vfs.Mem // what a later process finds; nil: it lives
	buried bool     // what it still does is of no consequence, and succeeds
	power  bool     // dies of a power loss
	rng    *rand.Rand
	writes int           // after so many it dies by itself; 0: never
	steps  int           // it dies before this one of what it does to files or asks of units elsewhere, if not for its writes; 0: never
	synced bool          // it dies at the next fsync, before that is made
	died   chan struct{} // closed then
}

func newMortal(mem *vfs.Mem) *mortal { return &mortal{Disk: mem, mem: mem, died: make(chan struct{})} }

func (m *mortal) dieLocked() {
	if m.left != nil {
		return
	}
	if m.left = m.mem.Killed(); m.power {
		m.left = m.mem.Crash(m.rng)
	}
	close(m.died)
}

// doom says how it dies.
func (m *mortal) doom(power bool, seed uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.power, m.rng = power, rand.New(rand.NewPCG(seed, 0))
}

// dieAfter lets it die by itself after so many writes to files.
func (m *mortal) dieAfter(writes int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.writes = writes
}

func (m *mortal) die() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dieLocked()
}

// dieBefore lets it die by itself before its next steps but so many.
func (m *mortal) dieBefore(step int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.steps = step
}

func (m *mortal) step() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.steps > 0 {
		if m.steps--; m.steps == 0 {
			m.dieLocked()
		}
	}
}

func (m *mortal) do(call func() error) error {
	m.step()
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.left != nil && !m.buried {
		return tqerr.New(tqerr.Unavailable, "the process has died")
	}
	return call()
}

func (m *mortal) Create(name string) (f vfs.DiskFile, err error) {
	err = m.do(func() error { f, err = m.Disk.Create(name); return err })
	return mortalFile{f, m}, err
}

func (m *mortal) Open(name string) (f vfs.DiskFile, err error) {
	err = m.do(func() error { f, err = m.Disk.Open(name); return err })
	return mortalFile{f, m}, err
}

func (m *mortal) Remove(name string) error { return m.do(func() error { return m.Disk.Remove(name) }) }
func (m *mortal) Rename(from, to string) error {
	return m.do(func() error { return m.Disk.Rename(from, to) })
}
func (m *mortal) SyncDir(dir string) error { return m.do(func() error { return m.Disk.SyncDir(dir) }) }

func (m *mortal) LockFile(string) (io.Closer, error) { return io.NopCloser(nil), nil }

type mortalFile struct {
	vfs.DiskFile
	m *mortal
}

// WriteAt may be the last that the process does: it has written, and does not come to know.
func (f mortalFile) WriteAt(p []byte, off int64) (n int, err error) {
	f.m.step()
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.m.left != nil && !f.m.buried {
		return 0, tqerr.New(tqerr.Unavailable, "the process has died")
	}
	if n, err = f.DiskFile.WriteAt(p, off); err == nil && f.m.writes > 0 {
		if f.m.writes--; f.m.writes == 0 {
			f.m.dieLocked()
			return 0, tqerr.New(tqerr.Unavailable, "the process dies")
		}
	}
	return n, err
}

func (f mortalFile) Sync() error {
	f.m.mu.Lock()
	if f.m.synced {
		f.m.dieLocked()
	}
	f.m.mu.Unlock()
	return f.m.do(f.DiskFile.Sync)
}

func (f mortalFile) Allocate(off, size int64) error {
	return f.m.do(func() error { return f.DiskFile.Allocate(off, size) })
}

// dying is a controller whose process may be dead: it answers nobody then.
type dying struct {
	transport.Handler
	m *mortal
}

func (d dying) Serve(ctx context.Context, peer transport.Peer, req *wire.Request, reply func(*wire.Reply)) {
	d.Handler.Serve(ctx, peer, req, func(r *wire.Reply) {
		d.m.mu.RLock()
		defer d.m.mu.RUnlock()
		if d.m.left == nil {
			reply(r)
		}
	})
}

// handler is the controller as its clients reach it.
func (s *system) handler(server *controller.Server) transport.Handler {
	if s.mortal == nil {
		return server
	}
	return dying{server, s.mortal}
}

// openJournal opens a journal that is small, so that states are written often.
func (s *system) openJournal() (*journal.Log, error) {
	if s.mortal == nil {
		return nil, nil
	}
	return journal.Open(journal.Options{Dir: "/j", Durability: s.setup.journal, AllocateBytes: 4 << 10, FS: s.mortal})
}

// open starts a controller. A failing disk may make it refuse once.
func (s *system) open() *controller.Server {
	for {
		log, err := s.openJournal()
		var server *controller.Server
		if err == nil {
			server, err = controller.Open(s.t.Context(), s.options(log))
		}
		if err == nil {
			return server
		}
		require.NotNil(s.t, s.setup.failing, err)
		require.Equal(s.t, tqerr.IO, tqerr.CodeOf(err), err)
		s.setup.failing.Heal()
	}
}

// restart replaces the controller by another process: its connections are gone, and the next one knows what is on the disk.
func (s *system) restart() {
	s.mortal.die()
	for _, h := range s.hosts {
		h.net.Cut(h.peer.Load(), 0)
	}
	old, oldNet := s.server, s.net
	s.mu.Lock()
	for _, u := range s.users {
		oldNet.Cut(u.id, time.Hour)
	}
	s.mu.Unlock()
	dead, units := s.mortal, s.units
	s.mortal = newMortal(dead.left)
	if s.setup.failing != nil {
		s.setup.failing.Disk, s.mortal.Disk = s.mortal.mem, s.setup.failing
	}
	if len(s.hosts) == 0 {
		s.units, s.inside = nil, nil
		for i := range units {
			s.addUnit(i)
		}
	}
	server := s.open()
	require.NoError(s.t, server.Verify())
	net := memnet.New(2, s.handler(server))
	s.mu.Lock()
	s.server, s.net = server, net
	s.mu.Unlock()
	_ = oldNet.Close()
	old.Close()
	dead.mu.Lock()
	dead.buried = true
	dead.mu.Unlock()
	for _, u := range units {
		if len(s.hosts) == 0 {
			s.end(u)
		}
	}
}

// end closes a unit of a process that died. What ran then may still be giving up its write, and an index that was broken in
// the end stays so.
func (s *system) end(u io.Closer) {
	err := u.Close()
	for range 1000 {
		if err == nil {
			return
		}
		time.Sleep(time.Millisecond)
		err = u.Close()
	}
	require.NoError(s.t, err)
}

// following redials until there is a controller.
func following(o *client.Options) {
	o.Redial = func(context.Context) (transport.Conn, error) { return nil, nil }
}

func TestARestart(t *testing.T) {
	for _, d := range []journal.Durability{journal.Relaxed, journal.Strict} {
		within(t, setup{units: 2, remote: true, journal: d}, func(t *testing.T, s *system) {
			u := s.user(following)
			keys := keysOf(6)
			put := s.rows(narrow, keys, 1, 2, 3, 4, 5, 6)
			for i := range keys {
				put.Tags = append(put.Tags, []byte{0x81, 0xa1, 't', byte(i)})
			}
			before := u.put(put)
			u.put(batch{write: write{Partition: "p", Insert: 1, Fields: []string{"x"}}, columns: s.rows(narrow, nil, 9).columns})
			first := u.fetch("task", 2, 0).indexes(t)
			u.put(s.add(narrow, keys[:2], 10, 10))
			u.clear(keys[5])
			s.restart()
			require.Equal(t, keys[:5], u.keys())
			require.Equal(t, []int64{11, 12, 3, 4, 5}, u.values(keys[:5]...))
			require.Len(t, u.production("x"), 6)
			second := u.fetch("task", 2, 0).indexes(t)
			require.Equal(t, wire.Ints{before.Indexes[0], before.Indexes[1]}, first)
			require.Equal(t, wire.Ints{before.Indexes[2], before.Indexes[3]}, second)
			after := u.put(s.rows(narrow, []string{keys[5]}, 7))
			require.Equal(t, before.Indexes[5], after.Indexes[0], "the smallest free index")
			require.Greater(t, after.Generations[0], before.Generations[5])
			s.restart()
			require.Equal(t, []int64{11, 7}, u.values(keys[0], keys[5]))
			require.Equal(t, "ACTIVE", u.state("unit-0"))
		})
	}
}

// A unit that is not found when the controller starts again keeps what it has, and its place, until it joins again.
func TestAUnitThatIsMissedForAWhile(t *testing.T) {
	within(t, setup{units: 2, remote: true, journal: journal.Relaxed}, func(t *testing.T, s *system) {
		u := s.user(following)
		u.put(s.rows(narrow, keysOf(6), 1, 2, 3, 4, 5, 6))
		had := s.hosts[0].server.Unit().Stats().Cells
		require.Positive(t, had)
		s.hosts[0].dead.Store(true)
		s.restart()
		require.Equal(t, "UNAVAILABLE", u.state("unit-0"))
		require.Equal(t, keysOf(6), u.keys())
		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: keysOf(6)}, 0)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "was not found again when the controller was started anew")
		s.hosts[0].dead.Store(false)
		s.joinHosts()
		require.Equal(t, "ACTIVE", u.state("unit-0"))
		require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, u.values(keysOf(6)...))
		s.restart()
		require.Equal(t, []int64{1, 2, 3, 4, 5, 6}, u.values(keysOf(6)...))
		time.Sleep(2 * time.Minute)
	})
}

// A controller dies when it has written down a put and a clear of a field, and has told the unit neither; the next one does not find
// the unit. Whenever that is there again, it has what was written down.
func TestAUnitThatIsMissedAndOwedChanges(t *testing.T) {
	for name, again := range map[string]func(s *system){
		"joins":                     func(s *system) { s.joinHosts() },
		"is found by the next":      func(s *system) { s.restart() },
		"joins after a second life": func(s *system) { s.hosts[0].dead.Store(true); s.restart(); s.hosts[0].dead.Store(false); s.joinHosts() },
	} {
		t.Run(name, func(t *testing.T) {
			within(t, setup{remote: true, journal: journal.Relaxed}, func(t *testing.T, s *system) {
				u := s.user()
				b := s.rows(narrow, []string{"k"}, 1)
				b.Fields, b.columns = append(b.Fields, "y"), append(b.columns, s.same(narrow, 1))
				u.put(b)
				dies := func(begin func(u *user)) {
					s.mortal.dieAfter(1)
					begin(s.user())
					<-s.mortal.died
					s.hosts[0].dead.Store(true)
					s.restart()
				}
				dies(func(u *user) { u.beginPut(s.rows(narrow, []string{"k"}, 2)) })
				require.Equal(t, "UNAVAILABLE", s.user().state("unit-0"))
				dies(func(u *user) {
					u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"k"}, Fields: []string{"y"}}, 0)
				})
				s.hosts[0].dead.Store(false)
				again(s)
				require.Equal(t, "ACTIVE", s.user().state("unit-0"))
				require.Equal(t, []int64{2}, s.user().values("k"))
				require.Equal(t, []string{"x"}, s.user().get("k").names)
				require.EqualValues(t, 1, s.stats().Cells)
				time.Sleep(2 * time.Minute)
				require.Zero(t, s.stats().Staged)
			})
		})
	}
}

// A controller dies when it has written down a put and a clear of a field, and the unit with it before it has done them. What the
// unit has on disk of them is older: it is not taken for what was written, which is lost, and does not come back.
func TestAUnitThatDiesAndIsOwedChanges(t *testing.T) {
	disks := &elsewhere{dir: t.TempDir()}
	within(t, setup{units: 1, remote: true, journal: journal.Relaxed, diskFor: disks.fresh}, func(t *testing.T, s *system) {
		u := s.user()
		b := s.rows(narrow, []string{"k", "other"}, 1, 5)
		b.Fields, b.columns = append(b.Fields, "y"), append(b.columns, s.same(narrow, 1, 5))
		u.put(b)
		for _, begin := range []func(u *user){
			func(u *user) { u.beginPut(s.rows(narrow, []string{"k"}, 2)) },
			func(u *user) {
				u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"k"}, Fields: []string{"y"}}, 0)
			},
		} {
			s.mortal.dieAfter(1)
			begin(s.user())
			<-s.mortal.died
			s.hosts[0].dead.Store(true)
			s.restart()
			require.Equal(t, "UNAVAILABLE", s.user().state("unit-0"))
		}
		s.startAnew(disks.killed)
		u = s.user()
		var lost wire.LostReply
		u.ask(wire.OpLost, &wire.LostRequest{}, &lost)
		require.Len(t, lost.Cells, 1)
		require.Equal(t, wire.Strings{"k"}, lost.Cells[0].Keys)
		require.Equal(t, "x", lost.Cells[0].Field)
		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: []string{"k"}, Fields: []string{"x"}}, 0)
		require.Equal(t, tqerr.DataLost, tqerr.CodeOf(err))
		require.Equal(t, []int64{5}, u.values("other"))
		require.EqualValues(t, 2, s.stats().Cells)
		u.put(s.rows(narrow, []string{"k"}, 3))
		require.Equal(t, []int64{3}, s.user().values("k"))
		time.Sleep(2 * time.Minute)
	})
}

// Several clients work at random over a controller that dies again and again, at any moment; what each has written is what it
// reads, and nothing that it did has happened twice.
func TestRandomOperationsWithRestarts(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rounds := map[string]struct {
		setup
		power bool
	}{
		"units elsewhere, relaxed":    {setup{units: 3, remote: true, journal: journal.Relaxed}, false},
		"units elsewhere, strict":     {setup{units: 3, remote: true, journal: journal.Strict}, false},
		"units elsewhere, power loss": {setup{units: 3, remote: true, journal: journal.Strict}, true},
		"a durable unit, relaxed":     {setup{units: 1, durable: true, journal: journal.Relaxed}, false},
		"a durable unit, strict":      {setup{units: 1, durable: true, journal: journal.Strict}, false},
		"durable units, relaxed":      {setup{units: 2, durable: true, journal: journal.Relaxed}, false},
		"durable units, power loss":   {setup{units: 2, durable: true, journal: journal.Strict}, true},
	}
	for name, o := range rounds {
		if testing.Short() && o.durable && !o.power {
			continue // each of them has much to read after every death
		}
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1<<32))
			within(t, o.setup, func(t *testing.T, s *system) {
				s.mortal.doom(o.power, rng.Uint64())
				s.python(sums)
				s.python(sums)
				steps := 150
				if o.durable {
					steps = 12 + 18/stride()
				}
				users := make([]*modelUser, 4)
				for i := range users {
					users[i] = &modelUser{
						user: s.user(following), rng: rand.New(rand.NewPCG(seed, uint64(i))), name: fmt.Sprintf("u%d", i),
						mem: foreigntest.New(t, 1<<20), keys: map[string]*modelRow{}, bare: map[schema.Sample]*modelRow{},
					}
				}
				var all sync.WaitGroup
				var restarts atomic.Int64
				for _, u := range users {
					all.Go(func() {
						for i := 0; i < steps || restarts.Load() <= 5; i++ {
							u.step()
							u.mem.Reset()
							time.Sleep(time.Millisecond)
						}
					})
				}
				done := make(chan struct{})
				go func() {
					all.Wait()
					close(done)
				}()
				for running := true; running; restarts.Add(1) {
					s.mortal.mu.Lock()
					if rng.IntN(2) == 0 {
						s.mortal.writes = 1 + rng.IntN(30)
					}
					s.mortal.mu.Unlock()
					select {
					case <-done:
						running = false
					case <-s.mortal.died:
					case <-time.After(time.Duration(rng.IntN(20)) * time.Millisecond):
					}
					s.restart()
					s.mortal.doom(o.power, rng.Uint64())
				}
				t.Log("restarts", restarts.Load())
				synctest.Wait()
				for _, u := range users {
					u.compare()
				}
				s.check()
				time.Sleep(2 * time.Minute) // nobody is awaited any more
			})
		})
	}
}

// Whatever call of the journal fails, a request that was answered has happened, one that was refused has not, and the next
// controller knows both.
func TestEveryCallOfTheJournalCanFail(t *testing.T) {
	calls := 0
	for at, more := 0, true; more; at++ {
		calls = at
		failing := &vfs.FailingDisk{At: -1, Err: []error{unix.EIO, unix.ENOSPC}[at%2]}
		within(t, setup{units: 2, remote: true, journal: journal.Relaxed, failing: failing}, func(t *testing.T, s *system) {
			u, model := s.user(following), map[string]int64{}
			failing.FailNext(at)
			did := func(err error) bool {
				if err != nil {
					require.Equal(t, tqerr.IO, tqerr.CodeOf(err), "call %d: %v", at, err)
				}
				return err == nil
			}
			for n := range int64(30) {
				key := fmt.Sprintf("k%d", n%7)
				switch {
				case n%5 == 4:
					if did(u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{key}}, nil)) {
						delete(model, key)
					}
				case n%5 == 3 && model[key] != 0:
					if _, err := u.tryPut(s.add(narrow, []string{key}, 100)); did(err) {
						model[key] += 100
					}
				default: // with tags that make the journal grow
					put := s.rows(narrow, []string{key}, n+1)
					put.Tags = wire.List{append([]byte{0x81, 0xa1, 't', 0xc5, 0x04, 0x00}, make([]byte, 1<<10)...)}
					if _, err := u.tryPut(put); did(err) {
						model[key] = n + 1
					}
				}
				if n == 20 {
					s.restart()
				}
			}
			more = failing.Failed()
			failing.Heal()
			s.setup.failing = nil
			s.restart()
			require.ElementsMatch(t, slices.Collect(maps.Keys(model)), u.keys(), "call %d", at)
			for key, value := range model {
				require.Equal(t, []int64{value}, u.values(key), "call %d", at)
			}
			time.Sleep(2 * time.Minute)
		})
	}
	require.Greater(t, calls, 50)
}

// What is asked of a controller that has just been started, too late and by a client that it does not know, ends as any late request.
func TestALateRequestOfAClientOfBefore(t *testing.T) {
	within(t, setup{units: 1, journal: journal.Relaxed}, func(t *testing.T, s *system) {
		for want, end := range map[tqerr.Code]func() (context.Context, context.CancelFunc){
			tqerr.DeadlineExceeded: func() (context.Context, context.CancelFunc) { return context.WithTimeout(t.Context(), 0) },
			tqerr.Cancelled: func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(t.Context())
				cancel()
				return ctx, cancel
			},
		} {
			ctx, cancel := end()
			answers := make(chan *wire.Reply, 1)
			s.server.Serve(ctx, transport.Peer{ID: 99}, &wire.Request{Op: wire.OpList}, func(r *wire.Reply) { answers <- r })
			cancel()
			require.Equal(t, want, (<-answers).Code)
		}
	})
}
