//go:build go1.25

package controller_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/journal"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// unheard is what makes a client give a fetch up before the server has it, as when the server's process is stopped, or
// after the server has answered.
var unheard = map[string]memnet.Fault{
	"request late": {Do: memnet.DelayRequest, Delay: 10 * time.Second, Op: wire.OpMeta, Times: 1},
	"reply late":   {Do: memnet.DelayReply, Delay: 10 * time.Second, Op: wire.OpMeta, Times: 1},
}

func TestWhatNobodyGetsIsNotConsumed(t *testing.T) {
	for name, fault := range unheard {
		t.Run(name, func(t *testing.T) {
			with(t, setup{}, func(t *testing.T, s *system) {
				u := s.user()
				u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
				s.net.Inject(fault)
				_, err := u.fetch("task", 3, time.Second).try()
				require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "%v", err)
				time.Sleep(time.Minute)
				require.Equal(t, wire.Ints{0, 1, 2}, s.user().fetch("task", 3, time.Second).indexes(t))
			})
		})
	}
}

func TestWhatIsGivenBackMeetsWhoWaits(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
		s.net.Inject(unheard["reply late"])
		lost := u.fetch("task", 3, time.Second)
		synctest.Wait() // the fault is of its reply
		waiting := s.user().fetch("task", 4, time.Minute)
		_, err := lost.try()
		require.Error(t, err)
		require.Equal(t, wire.Ints{0, 1, 2, 3}, waiting.indexes(t))
	})
}

// What was cleared, or given to somebody else after the task has started over, is not touched by a late return.
func TestOnlyWhatWasTakenIsGivenBack(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		u.put(s.rows(narrow, keysOf(3), 1, 2, 3))
		late := unheard["reply late"]
		s.net.Inject(late)
		lost := u.fetch("task", 2, time.Second)
		time.Sleep(100 * time.Millisecond)
		other.clear("k0")
		other.put(s.rows(narrow, []string{"new"}, 9)) // has the index of the cleared one
		require.Equal(t, wire.Ints{0, 2}, other.fetch("task", 2, time.Second).indexes(t))
		_, err := lost.try()
		require.Error(t, err)
		require.Equal(t, wire.Ints{1}, other.fetch("task", 1, time.Second).indexes(t))

		other.ask(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: "task"}, nil)
		s.net.Inject(late)
		lost = u.fetch("task", 3, time.Second)
		time.Sleep(100 * time.Millisecond)
		other.ask(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: "task"}, nil)
		require.Equal(t, wire.Ints{0, 1, 2}, other.fetch("task", 3, time.Second).indexes(t))
		_, err = lost.try()
		require.Error(t, err)
		_, err = other.fetch("task", 1, time.Second).try()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "they have been given out")
	})
}

// A controller that goes on from its journal has what was given back, and does not answer with it.
func TestWhatWasGivenBackIsNotConsumedAfterARestart(t *testing.T) {
	for name, fault := range unheard {
		t.Run(name, func(t *testing.T) {
			within(t, setup{units: 1, remote: true, journal: journal.Strict}, func(t *testing.T, s *system) {
				u := s.user(following)
				u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
				s.net.Inject(fault)
				_, err := u.fetch("task", 3, time.Second).try()
				require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "%v", err)
				time.Sleep(time.Minute)
				s.restart()
				require.Equal(t, wire.Ints{0, 1, 2}, u.fetch("task", 3, time.Second).indexes(t))
				s.restart()
				require.Equal(t, wire.Ints{3}, s.user(following).fetch("task", 1, time.Second).indexes(t))
			})
		})
	}
}

// A sampler that remembers whom it has answered gives the same again, so its answer stays consumed.
func TestAnAnswerThatIsRememberedIsKept(t *testing.T) {
	with(t, setup{sampler: sampler.NewRankAware(), polling: true}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, keysOf(4), 1, 2, 3, 4))
		ask := func(batch string) (wire.Ints, error) {
			sampling, err := msgpack.Marshal(map[string]any{"dp_rank": 0, "batch_index": batch})
			require.NoError(t, err)
			request := &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x"}, BatchSize: 2, Task: "task", Sampling: sampling}
			return (&fetching{u.begin(wire.OpMeta, request, time.Second)}).try()
		}
		s.net.Inject(unheard["request late"])
		_, err := ask("first")
		require.Error(t, err)
		time.Sleep(time.Minute)
		second, err := ask("second")
		require.NoError(t, err)
		first, err := ask("first")
		require.NoError(t, err)
		require.ElementsMatch(t, []int64{0, 1, 2, 3}, append(first, second...))
	})
}
