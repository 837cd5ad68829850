//go:build go1.25

package controller_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// Every fault below hits the named request once; whatever the client does about it, the request is applied once.
var faults = map[string]memnet.Fault{
	"none":                 {},
	"reply dropped":        {Do: memnet.DropReply},
	"request dropped":      {Do: memnet.DropRequest},
	"request duplicated":   {Do: memnet.Duplicate},
	"reply late":           {Do: memnet.DelayReply, Delay: time.Second},
	"request late":         {Do: memnet.DelayRequest, Delay: time.Second},
	"cut before request":   {Do: memnet.CutBefore, Grace: time.Minute},
	"cut before the reply": {Do: memnet.CutAfter, Grace: time.Minute},
	"cut while it runs":    {Do: memnet.CutDuring, Delay: time.Millisecond, Grace: time.Minute},
}

// eachFault runs a test once with every fault on one kind of request, from a client that sends again.
func eachFault(t *testing.T, op wire.Op, o setup, test func(t *testing.T, s *system, u *user)) {
	for name, fault := range faults {
		t.Run(op.String()+"/"+name, func(t *testing.T) {
			with(t, o, func(t *testing.T, s *system) {
				u := s.user(resending, redialing)
				if fault.Do != 0 {
					fault := fault
					fault.Op, fault.Times = op, 1
					fault.When = func(peer uint64, _ *wire.Request) bool { return peer == u.id }
					s.net.Inject(fault)
				}
				test(t, s, u)
				time.Sleep(2 * time.Second) // what was late has arrived
				u.ask(wire.OpConfig, nil, nil)
			})
		})
	}
}

func TestAPutHappensOnce(t *testing.T) {
	for _, width := range []int{narrow, wide} {
		for _, op := range []wire.Op{wire.OpPut, wire.OpCommit} {
			eachFault(t, op, setup{units: 2}, func(t *testing.T, s *system, u *user) {
				w := s.user().watch()
				first := u.put(batch{write: write{Partition: "p", Insert: 2, Fields: []string{"x"}}, columns: s.rows(width, nil, 1, 2).columns})
				second := u.put(s.rows(width, []string{"a", "b"}, 3, 4))
				third := u.put(s.rows(width, []string{"a", "b"}, 5, 6))
				require.Equal(t, second.Indexes, third.Indexes)
				require.Len(t, first.Indexes, 2)
				require.Equal(t, []int64{5, 6}, u.values("a", "b"))
				require.Len(t, u.production("x"), 4, "samples")
				require.Equal(t, []string{"put a", "put b", "put a", "put b"}, w.take(4))
			})
		}
	}
}

func TestANativeUpdateHappensOnce(t *testing.T) {
	for _, width := range []int{narrow, wide} {
		for _, op := range []wire.Op{wire.OpPut, wire.OpCommit} {
			eachFault(t, op, setup{units: 2}, func(t *testing.T, s *system, u *user) {
				s.user().put(s.rows(width, []string{"a", "b"}, 10, 20))
				for range 3 {
					u.put(s.add(width, []string{"b", "a"}, 2, 1))
				}
				require.Equal(t, []int64{13, 26}, u.values("a", "b"))
			})
		}
	}
}

func TestAnUpdateByACallableHappensOnce(t *testing.T) {
	for _, width := range []int{narrow, wide} {
		for _, op := range []wire.Op{wire.OpPut, wire.OpCommit} {
			eachFault(t, op, setup{units: 2}, func(t *testing.T, s *system, u *user) {
				s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
					time.Sleep(2 * time.Millisecond) // so that a cut may come while it runs
					return sums(job, mem)
				})
				s.user().put(s.rows(width, []string{"a", "b"}, 10, 20))
				for range 3 {
					b := s.add(width, []string{"b", "a"}, 2, 1)
					b.Merge, b.Callable = "", []byte("sum")
					u.put(b)
				}
				require.Equal(t, []int64{13, 26}, u.values("a", "b"))
			})
		}
	}
}

func TestAClearHappensOnce(t *testing.T) {
	for _, op := range []wire.Op{wire.OpClear, wire.OpClearPartition} {
		eachFault(t, op, setup{}, func(t *testing.T, s *system, u *user) {
			other := s.user()
			other.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
			w := other.watch()
			if op == wire.OpClear {
				u.clear("a", "b")
			} else {
				u.ask(op, &wire.PartitionRequest{Partition: "p"}, nil)
			}
			other.put(s.rows(narrow, []string{"a"}, 3))
			time.Sleep(2 * time.Second)
			require.Equal(t, []int64{3}, u.values("a"), "a late copy does not hit the new sample")
			require.Equal(t, []string{"clear a", "clear b", "put a"}, w.take(3))
		})
	}
}

func TestAFetchConsumesOnce(t *testing.T) {
	eachFault(t, wire.OpMeta, setup{}, func(t *testing.T, s *system, u *user) {
		s.user().put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
		first := u.fetch("task", 2, time.Minute).indexes(t)
		second := u.fetch("task", 2, time.Minute).indexes(t)
		require.Equal(t, wire.Ints{0, 1}, first)
		require.Equal(t, wire.Ints{2, 3}, second)
	})
}

func TestAGetLeavesNoLease(t *testing.T) {
	for _, op := range []wire.Op{wire.OpGet, wire.OpRelease} {
		eachFault(t, op, setup{units: 2}, func(t *testing.T, s *system, u *user) {
			s.user().put(s.rows(wide, keysOf(3), 1, 2, 3))
			require.Equal(t, []int64{3, 1, 2}, u.values("k2", "k0", "k1"))
			time.Sleep(2 * time.Second)
			require.Zero(t, s.stats().Leases)
		})
	}
}

func TestAWatchMissesNothing(t *testing.T) {
	eachFault(t, wire.OpWatchNext, setup{}, func(t *testing.T, s *system, u *user) {
		w := u.watch()
		other := s.user()
		for i, key := range keysOf(5) {
			other.put(s.rows(narrow, []string{key}, int64(i)))
		}
		require.Equal(t, []string{"put k0", "put k1", "put k2", "put k3", "put k4"}, w.take(5))
	})
}

// A copy of a request that was answered long ago arrives.
func TestALateCopyIsRefused(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user(resending)
		u.put(s.rows(narrow, []string{"a"}, 0))
		s.net.Inject(memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute, Op: wire.OpPut, Times: 1})
		for range 5 {
			u.put(s.add(narrow, []string{"a"}, 1))
		}
		time.Sleep(2 * time.Minute)
		require.Equal(t, []int64{5}, u.values("a"))
	})
}

func TestConcurrentUpdatesAreNotLost(t *testing.T) {
	for _, callable := range []string{"", "sum"} {
		t.Run("callable="+callable, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				s.python(sums)
				s.user().put(s.rows(narrow, []string{"a", "b"}, 0, 0))
				one := s.add(narrow, []string{"a"}, 1)
				if callable != "" {
					one.Merge, one.Callable = "", []byte(callable)
				}
				var all sync.WaitGroup
				for range 50 {
					u := s.user(resending, redialing)
					all.Go(func() {
						for range 20 {
							if _, err := u.tryPut(one); err != nil {
								t.Error(err)
							}
						}
					})
				}
				s.net.Inject(memnet.Fault{Do: memnet.DropReply, Op: wire.OpPut, Chance: 0.05})
				s.net.Inject(memnet.Fault{Do: memnet.DropRequest, Op: wire.OpPut, Chance: 0.05})
				s.net.Inject(memnet.Fault{Do: memnet.Duplicate, Op: wire.OpPut, Chance: 0.05})
				s.net.Inject(memnet.Fault{Do: memnet.CutAfter, Grace: time.Minute, Op: wire.OpPut, Chance: 0.02})
				s.net.Inject(memnet.Fault{Do: memnet.CutBefore, Grace: time.Minute, Op: wire.OpPut, Chance: 0.02})
				all.Wait()
				require.Equal(t, []int64{1000, 0}, s.user().values("a", "b"))
			})
		})
	}
}

// The time of an update is over: the caller learns what has become of it.
func TestATimeoutIsResolved(t *testing.T) {
	t.Run("the callable is too slow", func(t *testing.T) {
		with(t, setup{}, func(t *testing.T, s *system) {
			u := s.user()
			u.put(s.rows(narrow, []string{"a"}, 1))
			b := s.add(narrow, []string{"a"}, 1)
			b.Merge, b.Callable, b.timeout = "", []byte("slow"), time.Second
			_, err := u.tryPut(b)
			require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
			late, err := s.jobs.Next(0)
			require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "no thread is bothered with it any more: %v", late)
			require.Equal(t, []int64{1}, u.values("a"))
		})
	})
	t.Run("the callable ends too late", func(t *testing.T) {
		with(t, setup{}, func(t *testing.T, s *system) {
			u := s.user()
			u.put(s.rows(narrow, []string{"a"}, 1))
			b := s.add(narrow, []string{"a"}, 1)
			b.Merge, b.Callable, b.timeout = "", []byte("slow"), time.Second
			p := u.beginPut(b)
			job, err := s.jobs.Next(time.Minute)
			require.NoError(t, err)
			_, err = putResult(p.wait())
			require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
			columns, _ := sums(job, s.mem)
			s.giveBack(job, columns, 1)
			require.Equal(t, []int64{1}, u.values("a"))
		})
	})
	t.Run("the reply does not come", func(t *testing.T) {
		with(t, setup{}, func(t *testing.T, s *system) {
			u := s.user()
			u.put(s.rows(narrow, []string{"a"}, 1))
			s.net.Inject(memnet.Fault{Do: memnet.DropReply, Op: wire.OpPut, Times: 1})
			b := s.add(narrow, []string{"a"}, 1)
			b.timeout = time.Second
			require.Len(t, u.put(b).Indexes, 1, "it has happened and says so")
			require.Equal(t, []int64{2}, u.values("a"))
		})
	})
	t.Run("the request does not come, or much later", func(t *testing.T) {
		for _, do := range []memnet.Action{memnet.DropRequest, memnet.DelayRequest} {
			with(t, setup{}, func(t *testing.T, s *system) {
				u := s.user()
				u.put(s.rows(narrow, []string{"a"}, 1))
				s.net.Inject(memnet.Fault{Do: do, Delay: time.Minute, Op: wire.OpPut, Times: 1})
				b := s.add(narrow, []string{"a"}, 1)
				b.timeout = time.Second
				_, err := u.tryPut(b)
				require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
				time.Sleep(2 * time.Minute)
				require.Equal(t, []int64{1}, u.values("a"), "it has not happened, and never does")
			})
		}
	})
}

func TestTheTimeoutOfAStagedWriteLeavesNothing(t *testing.T) {
	for _, op := range []wire.Op{wire.OpPut, wire.OpCommit} {
		for _, do := range []memnet.Action{memnet.DropRequest, memnet.DropReply, memnet.DelayRequest, memnet.DelayReply} {
			with(t, setup{}, func(t *testing.T, s *system) {
				t.Log(op, do)
				u := s.user()
				s.net.Inject(memnet.Fault{Do: do, Delay: time.Minute, Op: op, Times: 1})
				b := s.rows(wide, []string{"a"}, 1)
				b.timeout = time.Second
				result, err := u.tryPut(b)
				time.Sleep(2 * time.Minute)
				require.Zero(t, s.stats().Staged)
				if err == nil {
					require.Len(t, result.Indexes, 1)
					require.Equal(t, []int64{1}, u.values("a"))
					return
				}
				require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
				require.Empty(t, u.keys())
				require.Zero(t, s.stats())
			})
		}
	}
}

// What the server remembers is bounded by what was in flight at a time, even while one request waits.
func TestOutcomesDoNotPileUp(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		waiting := u.fetch("task", 1000, time.Hour)
		u.put(s.rows(narrow, []string{"a"}, 1))
		for range 200 {
			u.put(s.add(narrow, []string{"a"}, 1))
		}
		_, outcomes := s.server.Clients()
		require.LessOrEqual(t, outcomes, 2)
		waiting.cancel()
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(waiting.wait().Err))
	})
}
