//go:build go1.25

package controller_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// quiet checks that nothing of a client that has left is still there.
func (s *system) quiet() {
	s.t.Helper()
	synctest.Wait()
	st := s.stats()
	require.Zero(s.t, st.Staged, "staged")
	require.Zero(s.t, st.Leases, "leases")
	waiters, writes, watches := s.server.Parked()
	require.Zero(s.t, waiters, "waiters")
	require.Zero(s.t, writes, "writers in line")
	require.Zero(s.t, watches, "watches")
	s.check()
}

// A client vanishes in every state in which it can be; nothing of it stays, and nobody is held up.
func TestAClientVanishes(t *testing.T) {
	waits := map[string]func(s *system, u *user) *pending{
		"a fetch waits": func(_ *system, u *user) *pending { return u.fetch("task", 100, 0).pending },
		"a wait for keys": func(_ *system, u *user) *pending {
			return u.begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Keys: []string{"nobody"}}, 0)
		},
		"a watch waits": func(_ *system, u *user) *pending {
			return u.begin(wire.OpWatchNext, &wire.WatchRequest{Watch: u.watch().number}, 0)
		},
		"a put waits for room":        func(s *system, u *user) *pending { return u.beginPut(s.rows(narrow, keysOf(4000), fill(4000, 1)...)) },
		"a staged put waits for room": func(s *system, u *user) *pending { return u.beginPut(s.rows(wide, keysOf(5), fill(5, 1)...)) },
		"an update runs": func(s *system, u *user) *pending {
			b := s.add(narrow, []string{"a"}, 1)
			b.Merge, b.Callable = "", []byte("f")
			return u.beginPut(b)
		},
		"a staged update runs": func(s *system, u *user) *pending {
			b := s.add(wide/2, []string{"a"}, 1)
			b.Merge, b.Callable = "", []byte("f")
			return u.beginPut(b)
		},
		"a parser runs": func(s *system, u *user) *pending {
			b := s.rows(narrow, []string{"new"}, 1)
			b.Callable = []byte("f")
			return u.beginPut(b)
		},
	}
	for name, begin := range waits {
		t.Run(name, func(t *testing.T) {
			with(t, setup{limit: 8 * wideBytes, putWait: time.Hour}, func(t *testing.T, s *system) {
				other, u := s.user(), s.user()
				other.put(s.rows(wide, []string{"a", "b", "c", "d"}, 1, 2, 3, 4))
				other.put(s.rows(wide, []string{"filler"}, 1))
				other.put(s.rows(wide, []string{"filler2", "f3"}, 1, 2))
				before := s.dump()
				p := begin(s, u)
				synctest.Wait()
				require.False(t, p.done())
				s.net.Cut(u.id, 0)
				require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(p.wait().Err))
				s.quiet()
				require.Equal(t, before, s.dump())
				b := s.add(narrow, []string{"a"}, 9)
				b.Merge = "replace"
				other.put(b)
				require.Equal(t, []int64{9}, other.values("a"))
			})
		})
	}
}

func TestAClientVanishesBetweenStageAndCommit(t *testing.T) {
	for _, do := range []memnet.Action{memnet.CutBefore, memnet.CutAfter} {
		for _, op := range []wire.Op{wire.OpPut, wire.OpCommit} {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				u := s.user()
				s.net.Inject(memnet.Fault{Do: do, Op: op, Times: 1})
				_, err := u.tryPut(s.rows(wide, []string{"a", "b"}, 1, 2))
				require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
				s.quiet()
				committed := do == memnet.CutAfter && op == wire.OpCommit
				require.Equal(t, committed, len(s.user().keys()) == 2)
				require.Equal(t, committed, s.stats().MemoryUsed > 0)
			})
		}
	}
}

func TestAClientVanishesWithLeases(t *testing.T) {
	for name, flags := range map[string]client.Flags{"copies": 0, "views": client.Views} {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				other, u := s.user(), s.user()
				other.put(s.rows(wide, keysOf(4), 1, 2, 3, 4))
				s.net.Inject(memnet.Fault{Do: memnet.DropReply, Op: wire.OpGet, Times: 1})
				get := &wire.GetRequest{Partition: "p", Keys: keysOf(4), Views: flags&client.Views != 0}
				body, err := wire.Marshal(get)
				require.NoError(t, err)
				lost := u.start(&client.Request{Op: wire.OpGet, Flags: flags, Body: body})
				synctest.Wait()
				kept := u.start(&client.Request{Op: wire.OpGet, Flags: flags, Body: body}).wait()
				require.NoError(t, kept.Err)
				synctest.Wait()
				require.Positive(t, s.stats().Leases)
				s.net.Cut(u.id, 0)
				require.Error(t, lost.wait().Err)
				s.quiet()
				_, err = u.decoded(kept)
				require.NoError(t, err)
			})
		})
	}
}

// What a view shows stays when its client closes and the unit uses the memory again.
func TestAViewOutlivesItsClient(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		other, u := s.user(), s.user()
		const rows = 64
		other.put(s.rows(wide, keysOf(rows), fill(rows, 7)...))
		body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: keysOf(rows), Views: true})
		require.NoError(t, err)
		view := u.start(&client.Request{Op: wire.OpGet, Flags: client.Views | client.DenseLayout, Body: body}).wait()
		require.NoError(t, view.Err)
		require.EqualValues(t, 1, s.stats().Leases, "it is a view")
		view.Columns[0].Data[8] = 1 // the reader's own copy of a page
		require.NoError(t, u.Close())
		require.Zero(t, s.stats().Leases)
		other.clear(keysOf(rows)...)
		other.put(s.rows(wide, keysOf(rows), fill(rows, 8)...))
		got, err := u.decoded(view)
		require.NoError(t, err)
		got.ints["x"][0][1] = 7
		checkAll(t, got.ints["x"], 7)
		synctest.Wait()
		require.Equal(t, fill(rows, 8), other.values(keysOf(rows)...))
	})
}

func checkAll(t *testing.T, rows [][]int64, want int64) {
	t.Helper()
	for _, row := range rows {
		for _, v := range row {
			if v != want {
				t.Fatalf("%d, want %d", v, want)
			}
		}
	}
}

// A request that arrives when its peer was reported as gone does not bring the peer back.
func TestALateRequestOfAGoneClient(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		s.net.Inject(memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute, Op: wire.OpPut, Times: 1})
		p := u.beginPut(s.rows(wide, []string{"a"}, 1))
		synctest.Wait()
		s.net.Cut(u.id, 0)
		require.Error(t, p.wait().Err)
		time.Sleep(2 * time.Minute)
		s.quiet()
		clients, _ := s.server.Clients()
		require.Zero(t, clients)
	})
}

// A transport may still be on its way into Serve when it reports the peer as gone.
func TestARequestBehindGoneDoesNotBringThePeerBack(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		body, err := wire.Marshal(bodies()[wire.OpPut])
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		replies := make(chan *wire.Reply, 1)
		s.server.Serve(ctx, transport.Peer{ID: 9}, &wire.Request{Op: wire.OpPut, Sequence: 1, Body: body}, func(r *wire.Reply) { replies <- r })
		require.Equal(t, tqerr.Cancelled, (<-replies).Code)
		clients, _ := s.server.Clients()
		require.Zero(t, clients)
		require.Zero(t, s.stats())
	})
}

// A put that comes in the moment in which a waiting fetch is cancelled gives it nothing.
func TestAPutServesNoFetchThatHasEnded(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		body, err := wire.Marshal(bodies()[wire.OpMeta])
		require.NoError(t, err)
		u := s.user()
		put, err := wire.Marshal(&wire.PutRequest{Partition: "p", Keys: []string{"a"}, Inline: true, Columns: []wire.Column{column(1)}})
		require.NoError(t, err)
		for range 50 {
			ctx, cancel := context.WithCancel(context.Background())
			done, stored := make(chan *wire.Reply, 1), make(chan *wire.Reply, 1)
			s.server.Serve(ctx, transport.Peer{ID: 9}, &wire.Request{Op: wire.OpMeta, Body: body}, func(r *wire.Reply) { done <- r })
			synctest.Wait()
			cancel()
			s.server.Serve(context.Background(), transport.Peer{ID: 8}, &wire.Request{Op: wire.OpPut, Body: put, Payload: make([]byte, 8)}, func(r *wire.Reply) { stored <- r })
			require.Equal(t, tqerr.OK, (<-stored).Code)
			require.Equal(t, tqerr.Cancelled, (<-done).Code)
			require.Equal(t, []byte{0}, u.consumed("t"))
			u.clear("a")
		}
		s.server.Gone(transport.Peer{ID: 8})
		s.server.Gone(transport.Peer{ID: 9})
	})
}

func TestClosingTheServerEndsWhatWaits(t *testing.T) {
	with(t, setup{limit: 3 * wideBytes, putWait: time.Hour}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		b := s.add(narrow, []string{"b"}, 1)
		b.Merge, b.Callable = "", []byte("f")
		waiting := []*pending{
			u.fetch("task", 100, 0).pending,
			u.begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Count: 7}, 0),
			u.begin(wire.OpWatchNext, &wire.WatchRequest{Watch: u.watch().number}, 0),
			u.beginPut(s.rows(wide, []string{"a", "c"}, 1, 2)),
			u.beginPut(b),
		}
		synctest.Wait()
		waiting = append(waiting, u.beginPut(s.add(narrow, []string{"b"}, 1)))
		synctest.Wait()
		s.server.Close()
		for i, p := range waiting {
			require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(p.wait().Err), "request %d", i)
		}
		s.quiet()
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(u.try(wire.OpPartitions, nil, nil)))
		s.closed = true
	})
}

// A client's own end is not the end of what it has asked for and already has.
func TestACancelledRequestLeavesNothing(t *testing.T) {
	for _, op := range []wire.Op{wire.OpPut, wire.OpCommit, wire.OpGet} {
		for _, do := range []memnet.Action{memnet.DelayRequest, memnet.DelayReply, memnet.DropReply} {
			with(t, setup{}, func(t *testing.T, s *system) {
				u := s.user()
				u.put(s.rows(wide, []string{"a"}, 1))
				before := s.stats()
				s.net.Inject(memnet.Fault{Do: do, Delay: time.Minute, Op: op, Times: 1})
				var p *pending
				if op == wire.OpGet {
					body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: []string{"a"}})
					require.NoError(t, err)
					p = u.start(&client.Request{Op: op, Body: body})
				} else {
					p = u.beginPut(s.rows(wide, []string{"b"}, 2))
				}
				synctest.Wait()
				p.cancel()
				err := p.wait().Err
				time.Sleep(2 * time.Minute)
				s.quiet()
				if err == nil { // it had happened
					require.Equal(t, wire.OpCommit, op)
					require.Equal(t, []int64{1, 2}, u.values("a", "b"))
					return
				}
				require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
				require.Equal(t, before, s.stats())
				require.Equal(t, []string{"a"}, u.keys())
			})
		}
	}
}
