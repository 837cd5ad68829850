//go:build go1.25

package controller_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/controller"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

func TestAFetchIsWokenByAPut(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		p := u.fetch("task", 3, time.Minute)
		synctest.Wait()
		other.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		y := s.rows(narrow, []string{"c"}, 3)
		y.Fields = []string{"y"}
		other.put(y)
		synctest.Wait()
		require.False(t, p.done(), "c has no x")
		other.put(s.rows(wide, []string{"c"}, 3))
		require.Equal(t, wire.Ints{0, 1, 2}, p.indexes(t))
	})
}

// Two that wait share what comes; each sample goes to one of them, and to the one that came first.
func TestTwoFetchesShareWhatComes(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		other := s.user()
		first := s.user().fetch("task", 2, 0)
		synctest.Wait()
		second := s.user().fetch("task", 2, 0)
		synctest.Wait()
		apart := s.user().fetch("another", 2, 0)
		synctest.Wait()
		other.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		require.Equal(t, wire.Ints{0, 1}, first.indexes(t))
		require.Equal(t, wire.Ints{0, 1}, apart.indexes(t))
		synctest.Wait()
		require.False(t, second.done())
		other.put(s.rows(narrow, []string{"last"}, 4))
		require.Equal(t, wire.Ints{2, 3}, second.indexes(t))
		require.Equal(t, []byte{1, 1, 1, 1}, other.consumed("task"))
		require.Equal(t, []byte{1, 1, 0, 0}, other.consumed("another"))
	})
}

func (u *user) progress(partition, task string) wire.ProgressReply {
	u.t.Helper()
	var reply wire.ProgressReply
	u.ask(wire.OpProgress, &wire.TaskRequest{Partition: partition, Task: task}, &reply)
	return reply
}

func TestProgressOfATask(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		require.Equal(t, wire.ProgressReply{}, u.progress("p", "task"))
		u.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		require.Equal(t, wire.ProgressReply{Known: true, Samples: 3}, u.progress("p", "task"))
		u.fetch("task", 2, 0).indexes(t)
		require.Equal(t, wire.ProgressReply{Known: true, Samples: 3, Consumed: 2}, u.progress("p", "task"))
		require.Equal(t, wire.ProgressReply{Known: true, Samples: 3}, u.progress("p", "other"))
		u.clear("k0")
		require.Equal(t, wire.ProgressReply{Known: true, Samples: 2, Consumed: 1}, u.progress("p", "task"))
	})
}

func (u *user) consumed(task string) []byte {
	u.t.Helper()
	var reply wire.StatusReply
	u.ask(wire.OpConsumption, &wire.TaskRequest{Partition: "p", Task: task}, &reply)
	return reply.Status
}

func TestAFetchWithoutAResultConsumesNothing(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		_, err := u.fetch("task", 1, time.Second).try()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "there is no partition")
		require.ErrorContains(t, err, `partition "p"`)
		other.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		begun := time.Now()
		_, err = u.fetch("task", 4, time.Second).try()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.Equal(t, time.Second, time.Since(begun))
		p := u.fetch("task", 4, 0)
		synctest.Wait()
		p.cancel()
		_, err = p.try()
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
		for _, bad := range []*wire.MetaRequest{
			{Partition: "p", Mode: "fetch", BatchSize: 0, Task: "task"}, {Partition: "p", Mode: "fetch", BatchSize: 1},
			{Partition: "p", Mode: "steal", BatchSize: 1, Task: "task"}, {Partition: "p", Mode: "insert", BatchSize: 1 << 40},
			{Partition: "p", Mode: "insert", BatchSize: -1},
		} {
			err := u.try(wire.OpMeta, bad, nil)
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%+v", bad)
		}
		other.put(s.rows(narrow, []string{"d"}, 4))
		require.Equal(t, wire.Ints{0, 1, 2, 3}, u.fetch("task", 4, 0).indexes(t))
	})
}

func TestAPollingFetchAnswersAtOnce(t *testing.T) {
	with(t, setup{polling: true}, func(t *testing.T, s *system) {
		u := s.user()
		require.Empty(t, u.fetch("task", 1, 0).indexes(t))
		u.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		require.Empty(t, u.fetch("task", 4, 0).indexes(t))
		require.Equal(t, wire.Ints{0, 1, 2}, u.fetch("task", 3, 0).indexes(t))
	})
}

// A reset, tags and production by other means wake who waits as well.
func TestAResetWakesAFetch(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(2), 1, 2))
		require.Equal(t, wire.Ints{0, 1}, u.fetch("task", 2, 0).indexes(t))
		again := u.fetch("task", 2, 0)
		synctest.Wait()
		u.ask(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: "task"}, nil)
		require.Equal(t, wire.Ints{0, 1}, again.indexes(t))
	})
}

func TestWait(t *testing.T) {
	tag := wire.List{[]byte("\x81\xa1t\x01")}
	cases := map[string]struct {
		ask  wire.WaitRequest
		last func(s *system) batch
		want []string
	}{
		"keys": {wire.WaitRequest{Keys: []string{"b", "a"}}, func(s *system) batch { return s.rows(narrow, []string{"b"}, 1) }, []string{"b", "a"}},
		"count": {wire.WaitRequest{Count: 3}, func(s *system) batch { return s.rows(wide, []string{"b", "c"}, 1, 2) },
			[]string{"a", "b", "c"}},
		"fields": {wire.WaitRequest{Keys: []string{"a"}, Fields: []string{"y", "x"}}, func(s *system) batch {
			b := s.rows(narrow, []string{"a"}, 1)
			b.Fields = []string{"y"}
			return b
		}, []string{"a"}},
		"tags": {wire.WaitRequest{Count: 1, Tags: tag[0]}, func(*system) batch {
			return batch{write: write{Partition: "p", Keys: []string{"a"}, Tags: tag}}
		}, []string{"a"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				u := s.user()
				c.ask.Partition = "p"
				p := u.begin(wire.OpWait, &c.ask, time.Minute)
				early := u.begin(wire.OpWait, &c.ask, time.Second)
				synctest.Wait()
				u.put(s.rows(narrow, []string{"a"}, 1))
				require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(early.wait().Err))
				require.False(t, p.done())
				u.put(c.last(s))
				var reply wire.WaitReply
				require.NoError(t, decode(p.wait(), &reply))
				require.Equal(t, c.want, []string(reply.Keys))
				require.Subset(t, []string(reply.Fields), []string(c.ask.Fields))
				require.Len(t, reply.Tags, len(c.want))
				u.ask(wire.OpWait, &c.ask, nil)
			})
		})
	}
}

func TestWaitRefusesWhatNeverComes(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		err := u.try(wire.OpWait, &wire.WaitRequest{Partition: "p"}, nil)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		err = u.try(wire.OpWait, &wire.WaitRequest{Partition: "p", Count: 1, Tags: []byte("\x01")}, nil)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	})
}

// A watch shows every change in order, in however many reads, and with what it changed.
func TestAWatchShowsEveryChangeInOrder(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		s.python(sums)
		u, other := s.user(), s.user()
		w := u.watch()
		other.put(s.rows(narrow, []string{"b", "a"}, 1, 2))
		require.Equal(t, []string{"put b", "put a"}, w.take(2))
		reading := u.begin(wire.OpWatchNext, &wire.WatchRequest{Watch: w.number}, 0)
		synctest.Wait()
		other.put(batch{write: write{Partition: "p", Keys: []string{"a"}, Tags: wire.List{[]byte("\x81\xa1t\x01")}}})
		var reply wire.EventsReply
		require.NoError(t, decode(reading.wait(), &reply))
		require.Equal(t, []wire.Event{{Kind: "put", Key: "a", Fields: wire.Strings{}, Tags: []byte("\x81\xa1t\x01")}}, reply.Events)

		other.put(s.add(wide/9*9, []string{"a"}, 1).with("replace"))
		b := s.add(narrow, []string{"b"}, 1)
		b.Merge, b.Callable = "", []byte("f")
		other.put(b)
		other.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a", "b"}, Fields: []string{"x"}}, nil)
		q := s.rows(narrow, []string{"other"}, 1)
		q.Partition = "q"
		other.put(q)
		other.clear("b")
		other.ask(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, nil)
		require.Equal(t, []string{"update a", "update b", "clear b", "clear a", "clear b", "clear a"}, w.take(6))
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(w.next(time.Second)))

		u.ask(wire.OpWatchClose, &wire.WatchRequest{Watch: w.number}, nil)
		u.ask(wire.OpWatchClose, &wire.WatchRequest{Watch: w.number}, nil)
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(w.next(time.Second)))
	})
}

func (b batch) with(merge string) batch {
	b.Merge = merge
	return b
}

// A read that was cancelled after its events had been taken loses none.
func TestACancelledReadOfAWatchLosesNothing(t *testing.T) {
	for _, do := range []memnet.Action{memnet.DelayReply, memnet.DropReply, memnet.DelayRequest} {
		with(t, setup{}, func(t *testing.T, s *system) {
			u, other := s.user(), s.user()
			w := u.watch()
			s.net.Inject(memnet.Fault{Do: do, Delay: time.Minute, Op: wire.OpWatchNext, Times: 1})
			p := u.begin(wire.OpWatchNext, &wire.WatchRequest{Watch: w.number}, 0)
			other.put(s.rows(narrow, []string{"a"}, 1))
			synctest.Wait()
			p.cancel()
			require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(p.wait().Err))
			other.put(s.rows(narrow, []string{"b"}, 1))
			time.Sleep(2 * time.Minute)
			require.Equal(t, []string{"put a", "put b"}, w.take(2))
		})
	}
}

// A reader that comes late gets everything in pieces; one that does not come gets an error, again and again.
func TestAWatchThatIsNotRead(t *testing.T) {
	const kept = 3 * controller.MaxReplyEvents
	t.Cleanup(controller.SetMaxWatchEvents(kept))
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		late, never := u.watch(), u.watch()
		keys := keysOf(controller.MaxReplyEvents + 10)
		tags := make(wire.List, len(keys))
		for i := range tags {
			tags[i] = []byte("\x80")
		}
		tagging := batch{write: write{Partition: "p", Keys: keys, Tags: tags}}
		other.put(tagging)
		require.NoError(t, late.next(time.Second))
		require.Len(t, late.events, controller.MaxReplyEvents)
		require.NoError(t, late.next(time.Second))
		got := make([]string, len(late.events))
		for i, e := range late.events {
			got[i] = e.Key
		}
		require.Equal(t, keys, got)
		u.ask(wire.OpWatchClose, &wire.WatchRequest{Watch: late.number}, nil)

		for range kept / len(keys) {
			other.put(tagging)
		}
		for range 2 {
			err := never.next(time.Second)
			require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
			require.ErrorContains(t, err, `partition "p"`)
		}
		again := u.watch()
		other.clear("k0")
		require.Equal(t, []string{"clear k0"}, again.take(1))
	})
}

func TestListFilters(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"b1", "a1", "a2"}, 1, 2, 3))
		u.put(batch{write: write{Partition: "p", Keys: []string{"a2", "t"}, Tags: wire.List{[]byte("\x81\xa1t\x01"), []byte("\x81\xa1t\x01")}}})
		p, q := "p", "q"
		for want, ask := range map[string]wire.ListRequest{
			"[b1 a1 a2 t]": {Partition: &p}, "[b1 t]": {Keys: []string{"t", "b1", "x"}}, "[a1 a2]": {Prefix: "a"},
			"[a2 t]": {Tags: []byte("\x81\xa1t\x01")}, "[b1 a1 a2]": {Fields: []string{"x"}}, "[]": {Fields: []string{"z"}},
		} {
			var reply wire.ListReply
			u.ask(wire.OpList, &ask, &reply)
			require.Equal(t, want, fmt.Sprint(reply.Partitions[0].Keys))
		}
		var reply wire.ListReply
		u.ask(wire.OpList, &wire.ListRequest{Partition: &q}, &reply)
		require.Empty(t, reply.Partitions)
	})
}
