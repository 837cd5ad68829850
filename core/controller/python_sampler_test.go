//go:build go1.25

package controller_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// samplerCall and samplerAnswer are what crosses between package sampler and Python.
type samplerCall struct {
	Sampler   uint64
	Method    string
	Partition string
	Task      string
	Size      int
	Sampling  []byte
	Ready     wire.Ints
	Births    wire.Ints
	Final     bool
	State     []byte
	LimitMS   int64
	News      []samplerNews
}

type samplerNews struct {
	Number    uint64
	Partition string
	Gone      bool
	Cleared   wire.Ints
	Reset     wire.Strings
}

type samplerAnswer struct {
	Remembered bool
	Sampled    wire.Ints
	Consumed   wire.Ints
	End        bool
	State      []byte
}

func both(indexes ...int64) *samplerAnswer {
	return &samplerAnswer{Sampled: indexes, Consumed: indexes}
}

// object is a sampler as Python has it, whose calls are recorded.
type object struct {
	sync.Mutex
	calls []samplerCall
}

// runs lets a number of threads make the calls of an object.
func (s *system) runs(threads int, answer func(c *samplerCall) (*samplerAnswer, error)) *object {
	o := &object{}
	for range threads {
		s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			var c samplerCall
			if err := wire.Unmarshal(job.Request, &c); err != nil {
				return nil, err
			}
			o.Lock()
			o.calls = append(o.calls, c)
			o.Unlock()
			a, err := answer(&c)
			if err != nil {
				return nil, err
			}
			body, err := wire.Marshal(a)
			return []foreign.Raw{mem.Objects(1, body)}, err
		})
	}
	return o
}

func (o *object) made() int {
	o.Lock()
	defer o.Unlock()
	return len(o.calls)
}

// last is the sampler that takes the largest indexes.
func last(c *samplerCall) (*samplerAnswer, error) {
	if len(c.Ready) < c.Size {
		return &samplerAnswer{}, nil
	}
	return both(c.Ready[len(c.Ready)-c.Size:]...), nil
}

func TestASamplerOfPythonPicks(t *testing.T) {
	with(t, setup{python: "Last"}, func(t *testing.T, s *system) {
		o := s.runs(1, last)
		u := s.user()
		first := u.fetch("t", 2, 0)
		for i, key := range keysOf(5) {
			u.put(s.rows(narrow, []string{key}, int64(i)))
			synctest.Wait()
		}
		require.Equal(t, wire.Ints{0, 1}, first.indexes(t), "as soon as there are two")
		require.Equal(t, 1, o.made(), "not asked while there are too few")
		require.Equal(t, wire.Ints{3, 4}, u.fetch("t", 2, 0).indexes(t))
		require.Equal(t, []byte{1, 1, 0, 1, 1}, u.consumed("t"))
		require.Equal(t, "Last", s.server.Sampler().Name())
	})
}

func TestWhatASamplerOfPythonMayNotPick(t *testing.T) {
	with(t, setup{python: "Odd", polling: true}, func(t *testing.T, s *system) {
		var answer *samplerAnswer
		var raised error
		s.runs(1, func(*samplerCall) (*samplerAnswer, error) { return answer, raised })
		u := s.user()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		for text, wrong := range map[string]*samplerAnswer{
			"Odd returned sample 1 twice":     both(1, 0, 1),
			"Odd returned sample 9, which":    both(0, 9),
			"Odd consumed sample 7, which":    {Sampled: wire.Ints{0}, Consumed: wire.Ints{0, 7}},
			"Odd returned sample -3, which":   both(-3),
			"Odd consumed sample -1, which d": {Sampled: wire.Ints{0}, Consumed: wire.Ints{-1}},
		} {
			answer = wrong
			_, err := u.fetch("t", 2, 0).try()
			require.Equal(t, tqerr.Failed, tqerr.CodeOf(err))
			require.ErrorContains(t, err, text)
		}
		raised = tqerr.New(tqerr.Failed, "ZeroDivisionError: sampler bug")
		_, err := u.fetch("t", 2, 0).try()
		require.Equal(t, tqerr.Failed, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "the sampler Odd failed in sample: ZeroDivisionError: sampler bug")
		require.Equal(t, []byte{0, 0}, u.consumed("t"))
		raised, answer = nil, &samplerAnswer{}
		require.Empty(t, u.fetch("t", 2, 0).indexes(t))
		answer = both(1)
		require.Equal(t, wire.Ints{1}, u.fetch("t", 2, 0).indexes(t), "fewer than asked for are fine")
	})
}

// A call that hangs ends at its limit or with its fetch; requests that need no sampler go on, and so does the next call.
func TestASamplerOfPythonThatHangs(t *testing.T) {
	with(t, setup{python: "Hangs"}, func(t *testing.T, s *system) {
		hang := make(chan struct{})
		defer func() { close(hang); synctest.Wait() }()
		s.runs(3, func(c *samplerCall) (*samplerAnswer, error) {
			if c.Task == "hangs" {
				<-hang
			}
			return last(c)
		})
		u, other := s.user(), s.user()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		began := time.Now()
		stuck := u.fetch("hangs", 2, 0)
		synctest.Wait()
		next := other.fetch("good", 2, 0)
		u.put(s.rows(narrow, []string{"c"}, 3))
		require.Equal(t, []int64{1, 2, 3}, u.values("a", "b", "c"))
		_, err := stuck.try()
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "the sampler Hangs gave no answer within 1m0s")
		require.Equal(t, time.Minute, time.Since(began))
		require.Equal(t, wire.Ints{1, 2}, next.indexes(t), "the next call is made by another thread")

		_, err = u.fetch("hangs", 2, 2*time.Second).try()
		require.ErrorContains(t, err, "the sampler Hangs gave no answer within 2s")
		require.Equal(t, []byte{0, 0, 0}, u.consumed("hangs"))
		require.Equal(t, []byte{0, 1, 1}, u.consumed("good"))
	})
}

// A late rank asks for what was chosen for it when too few samples are ready for another batch.
func TestALateRankIsAnsweredFromMemory(t *testing.T) {
	with(t, setup{python: "Ranks", polling: true}, func(t *testing.T, s *system) {
		remembered := false
		o := s.runs(1, func(*samplerCall) (*samplerAnswer, error) {
			if remembered {
				return &samplerAnswer{Remembered: true, Sampled: wire.Ints{0, 1}, Consumed: wire.Ints{0, 1}}, nil
			}
			return both(0, 1), nil
		})
		u := s.user()
		require.Empty(t, u.fetch("t", 2, 0).indexes(t))
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		require.Equal(t, wire.Ints{0, 1}, u.fetch("t", 2, 0).indexes(t))
		remembered = true
		require.Equal(t, wire.Ints{0, 1}, u.fetch("t", 2, 0).indexes(t))
		u.clear("a")
		require.Equal(t, wire.Ints{1}, u.fetch("t", 2, 0).indexes(t))
		require.Equal(t, 3, o.made())
	})
}

// What happens to samples reaches the object with its next call, once, also when a call is given up.
func TestASamplerOfPythonIsToldWhatHappened(t *testing.T) {
	with(t, setup{python: "Told", polling: true}, func(t *testing.T, s *system) {
		hang := make(chan struct{})
		defer func() { close(hang); synctest.Wait() }()
		o := s.runs(2, func(c *samplerCall) (*samplerAnswer, error) {
			if c.Task == "hangs" {
				<-hang
			}
			return last(c)
		})
		u := s.user()
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.clear("a")
		u.put(s.rows(narrow, []string{"a", "b", "c"}, 1, 2, 3))
		u.fetch("t", 1, 0).indexes(t)
		u.clear("a", "b")
		u.ask(wire.OpResetConsumption, &wire.TaskRequest{Partition: "p", Task: "t"}, nil)
		_, err := u.fetch("hangs", 1, time.Second).try()
		require.Error(t, err)
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		u.clear("b")
		u.fetch("t", 1, 0).indexes(t)
		u.ask(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, nil)
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.fetch("t", 1, 0).indexes(t)
		u.fetch("t", 1, 0).indexes(t)
		var news [][]samplerNews
		for _, c := range o.calls {
			news = append(news, c.News)
		}
		one := samplerNews{Number: 1, Partition: "p", Cleared: wire.Ints{0, 1}, Reset: wire.Strings{"t"}}
		two := samplerNews{Number: 2, Partition: "p", Cleared: wire.Ints{1}}
		require.Equal(t, [][]samplerNews{nil, {one}, {one, two}, {{Number: 3, Partition: "p", Gone: true}}}, news[:4])
	})
}

func TestTheStateOfASamplerOfPython(t *testing.T) {
	with(t, setup{python: "Kept"}, func(t *testing.T, s *system) {
		s.runs(1, func(c *samplerCall) (*samplerAnswer, error) {
			switch {
			case c.Method == "save":
				return &samplerAnswer{State: []byte("state")}, nil
			case string(c.State) != "state":
				return nil, errors.New("not mine")
			}
			return &samplerAnswer{}, nil
		})
		kept := s.server.Sampler()
		state, err := kept.Save()
		require.NoError(t, err)
		require.NoError(t, kept.Load(state))
		var cut []byte
		require.NoError(t, s.server.CutWithSampler(t.Context(), func(name string, state []byte) error {
			cut = state
			require.Equal(t, "Kept", name)
			return nil
		}))
		require.Equal(t, state, cut)
		mine, err := wire.Marshal(&struct {
			Sampler string
			State   []byte
		}{"Kept", []byte("old")})
		require.NoError(t, err)
		require.ErrorContains(t, kept.Load(mine), "not mine")
		groups, err := sampler.NewGroups(1).Save()
		require.NoError(t, err)
		require.ErrorContains(t, kept.Load(groups), `"GRPOGroupNSampler", want "Kept"`)
		require.Error(t, kept.Load(nil))
		require.NoError(t, kept.Load(state))
	})
}

// Fetches that wait go over to a sampler that is registered at run time, from Go to Python and back.
func TestASamplerIsReplacedAtRunTime(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		s.runs(1, last)
		u := s.user()
		register := func(r *wire.RegisterSamplerRequest) { u.ask(wire.OpRegisterSampler, r, nil) }
		waiting := u.fetch("t", 2, 0)
		synctest.Wait()
		register(&wire.RegisterSamplerRequest{Name: "Last", Pickled: []byte("Last")})
		synctest.Wait()
		u.put(s.rows(narrow, []string{"a", "b", "c"}, 1, 2, 3))
		require.Equal(t, wire.Ints{1, 2}, waiting.indexes(t))
		waiting = u.fetch("t", 3, 0)
		synctest.Wait()
		register(&wire.RegisterSamplerRequest{Name: "SequentialSampler"})
		u.put(s.rows(narrow, []string{"d", "e", "f"}, 4, 5, 6))
		require.Equal(t, wire.Ints{0, 3, 4}, waiting.indexes(t))
		err := u.try(wire.OpRegisterSampler, &wire.RegisterSamplerRequest{Name: "Nobody", Group: 1}, nil)
		require.ErrorContains(t, err, "could not find sampler \"Nobody\"")
		require.Equal(t, "SequentialSampler", s.server.Sampler().Name())
	})
}

// Many fetches of several tasks at once: every sample once per task.
func TestASamplerOfPythonUnderLoad(t *testing.T) {
	for _, polling := range []bool{false, true} {
		with(t, setup{python: "Last", polling: polling}, func(t *testing.T, s *system) {
			s.runs(3, last)
			u := s.user()
			u.put(s.rows(narrow, keysOf(24), make([]int64, 24)...))
			var fetches []*fetching
			for range 8 {
				fetches = append(fetches, s.user().fetch("t", 3, 0))
			}
			var all []int64
			for _, f := range fetches {
				all = append(all, f.indexes(t)...)
			}
			slices.Sort(all)
			require.Len(t, slices.Compact(all), 24)
		})
	}
}

func TestGroupsOfASessionAreRefusedAtOnce(t *testing.T) {
	with(t, setup{sampler: sampler.NewGroups(4)}, func(t *testing.T, s *system) {
		_, err := s.user().fetch("t", 6, 0).try()
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "must be a multiple of n_samples_per_prompt")
	})
}

func TestStreamsOfASession(t *testing.T) {
	with(t, setup{sampler: sampler.NewStream(1)}, func(t *testing.T, s *system) {
		u := s.user()
		meta := func(timeout time.Duration) *pending {
			config := []byte("\x83\xa7dp_rank\x00\xabbatch_index\x00\xactoken_budget\x03")
			if timeout == 0 {
				config = []byte("\x83\xa7dp_rank\x00\xabbatch_index\x01\xactoken_budget\x03")
			}
			return u.begin(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x"}, BatchSize: 1, Task: "t", Sampling: config}, timeout)
		}
		u.put(s.rows(narrow, []string{"a"}, 1))
		waiting := meta(time.Hour)
		synctest.Wait()
		require.False(t, waiting.done())
		b := s.rows(narrow, []string{"b"}, 2)
		b.Last = true
		u.put(b)
		var reply wire.MetaReply
		require.NoError(t, decode(waiting.wait(), &reply))
		require.Equal(t, wire.Ints{0, 1}, reply.Indexes)
		require.False(t, reply.End)
		var stream wire.StreamReply
		u.ask(wire.OpStream, &wire.StreamRequest{Partition: "p", Task: "t"}, &stream)
		require.Equal(t, wire.StreamReply{Completed: true, Drained: true}, stream)
		require.NoError(t, decode(meta(0).wait(), &reply))
		require.True(t, reply.End)
		u.ask(wire.OpStream, &wire.StreamRequest{Partition: "nowhere", Task: "t"}, &stream)
		require.Zero(t, stream)
	})
}
