//go:build go1.25

package controller_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/jobs"
	"transferqueue/core/snapshot"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// number is that of every save here: clients have no two at a time.
const number = 1

func beginSave(dir string) *wire.SaveRequest {
	return &wire.SaveRequest{Step: "begin", Path: dir, Save: number, Metadata: "{}"}
}

// trySave saves in the four steps that a client takes.
func (u *user) trySave(dir string) error {
	var save wire.SaveReply
	err := u.try(wire.OpSaveCheckpoint, beginSave(dir), &save)
	if err != nil {
		return err
	}
	for _, r := range []wire.SaveRequest{
		{Step: "state", Path: save.State}, {Step: "values", Path: save.Values}, {Step: "commit", Save: number},
	} {
		if err := u.try(wire.OpSaveCheckpoint, &r, nil); err != nil {
			u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "abort", Save: number}, nil)
			return err
		}
	}
	return nil
}

func (u *user) save(dir string) {
	u.t.Helper()
	require.NoError(u.t, u.trySave(dir))
}

func (u *user) tryLoad(dir string) error {
	return u.try(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "all", Path: dir}, nil)
}

func (u *user) load(dir string) {
	u.t.Helper()
	require.NoError(u.t, u.tryLoad(dir))
}

// example fills partition "p": keys on both units if there are two, narrow and wide rows, objects, tags, tag-only and
// keyless samples, and one that "train" has consumed.
func (s *system) example(u *user) {
	u.put(s.rows(narrow, []string{"a"}, 1))
	u.put(s.rows(wide, []string{"b", "c"}, 2, 3))
	b := s.rows(narrow, []string{"d"}, 4)
	b.Fields, b.columns = append(b.Fields, "o"), append(b.columns, s.mem.Objects(1, []byte("bytes")))
	b.Tags = wire.List{[]byte{0x81, 0xa1, 'n', 7}}
	u.put(b)
	u.put(batch{write: write{Partition: "p", Keys: []string{"tagged"}, Tags: wire.List{[]byte{0x81, 0xa1, 't', 1}}}})
	u.put(batch{write: write{Partition: "q", Insert: 2, Fields: []string{"y"}}, columns: []foreign.Raw{s.same(narrow, 8, 9)}})
	u.ask(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x"}, BatchSize: 1, Task: "train"}, nil)
}

// seen is everything a client can see of partitions "p" and "q".
type seen struct {
	Listed   wire.ListReply
	Metas    []wire.MetaReply
	Consumed wire.StatusReply
	Values   []int64
	Object   []byte
}

func (u *user) look() (out seen) {
	u.t.Helper()
	u.ask(wire.OpList, &wire.ListRequest{}, &out.Listed)
	for _, name := range []string{"p", "q"} {
		var meta wire.MetaReply
		u.ask(wire.OpMeta, &wire.MetaRequest{Partition: name, Mode: "force_fetch", Fields: []string{"x", "y", "o"}}, &meta)
		out.Metas = append(out.Metas, meta)
	}
	u.ask(wire.OpConsumption, &wire.TaskRequest{Partition: "p", Task: "train"}, &out.Consumed)
	out.Values = u.values("a", "b", "c", "d")
	out.Object = u.get("d").bytes["o"][0]
	return out
}

func TestACheckpointBringsEverythingBack(t *testing.T) {
	for _, units := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(units, " units"), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "c")
			var want seen
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				u := s.user()
				s.example(u)
				want = u.look()
				u.save(dir)
				require.Zero(t, s.stats().Leases)
				u.clear("a", "b", "c", "d", "tagged")
				u.put(s.rows(wide, []string{"later"}, 9))
				u.load(dir)
				require.Equal(t, want, u.look(), "in the same session")
			})
			with(t, setup{units: units}, func(t *testing.T, s *system) {
				u := s.user()
				u.load(dir)
				require.Equal(t, want, u.look(), "in another one")
				u.put(s.rows(narrow, []string{"more"}, 5))
				require.Equal(t, []int64{5, 1}, u.values("more", "a"))
			})
		})
	}
}

// Every file is spoiled at every byte and cut off before every byte; the session stays as it is and keeps nothing.
func TestALoadOfASpoiledCheckpointChangesNothing(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		u.save(dir)
		u.clear("a")
		u.put(s.rows(narrow, []string{"later"}, 9))
		before := s.stats()
		files, err := filepath.Glob(filepath.Join(dir, "**", "*"))
		require.NoError(t, err)
		files = append(files, filepath.Join(dir, snapshot.StateName), filepath.Join(dir, snapshot.StorageName, "index.tq"))
		for _, path := range files {
			content, err := os.ReadFile(path)
			require.NoError(t, err)
			try := func(b []byte) {
				require.NoError(t, os.WriteFile(path, b, 0o600))
				require.Error(t, u.tryLoad(dir))
				require.Equal(t, before, s.stats())
			}
			for at := 0; at < len(content); at += stride() {
				spoiled := slices.Clone(content)
				spoiled[at] ^= 1 << (at % 8)
				try(spoiled)
				try(content[:at])
			}
			require.NoError(t, os.Remove(path))
			require.Equal(t, tqerr.FileNotFound, tqerr.CodeOf(u.tryLoad(dir)), path)
			require.NoError(t, os.WriteFile(path, content, 0o600))
		}
		require.Equal(t, []string{"b", "later"}, u.keys())
		require.Equal(t, []int64{2, 9}, u.values("b", "later"))
		u.load(dir)
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

// failing runs work with the i-th file call failing, for every i until none fails.
func (s *system) failing(work func(at int) error) {
	defer s.server.SetFS(vfs.OS{})
	for at := 0; ; at++ {
		f := &vfs.Failing{FS: vfs.OS{}, At: at, Err: errors.New("the disk is on fire")}
		s.server.SetFS(f)
		err := work(at)
		synctest.Wait()
		require.Zero(s.t, s.stats().Leases, "call %d", at)
		require.Zero(s.t, s.stats().Staged, "call %d", at)
		if !f.Failed() {
			require.NoError(s.t, err)
			require.Greater(s.t, at, 10, "calls were counted")
			return
		}
	}
}

func TestWhateverCallFailsASaveLeavesTheOldOrTheNewCheckpoint(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.save(dir)
		value := int64(1)
		s.failing(func(at int) error {
			was := value
			value = int64(at + 2)
			u.put(s.rows(narrow, []string{"a"}, value))
			err := u.trySave(dir)
			s.server.SetFS(vfs.OS{})
			u.load(dir)
			got := u.values("a")[0]
			require.Contains(t, []int64{was, value}, got, "call %d", at)
			if err == nil {
				require.Equal(t, value, got, "call %d", at)
			}
			value = got
			return err
		})
		u.save(dir)
		entries, err := os.ReadDir(filepath.Dir(dir))
		require.NoError(t, err)
		require.Len(t, entries, 1, "nothing is left beside it")
	})
}

func TestWhateverCallFailsALoadChangesNothing(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		u.save(dir)
		s.failing(func(at int) error {
			u.put(s.rows(wide, []string{"a", "later"}, 7, 8)) // again, since a file that was read need not close well
			err := u.tryLoad(dir)
			if err != nil {
				require.Equal(t, []int64{7, 2, 8}, u.values("a", "b", "later"))
			}
			return err
		})
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
		require.Equal(t, []string{"a", "b"}, u.keys())
	})
}

func TestALoadWithoutRoomChangesNothing(t *testing.T) {
	with(t, setup{limit: 3 * wide * 8}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		u.save(dir)
		before := s.stats()
		err := u.tryLoad(dir)
		require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err), "%v", err)
		require.Equal(t, before, s.stats())
		u.clear("a")
		u.load(dir)
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

// An update that computes when a load comes is waited for, and its result goes with the rest; one that comes while the load
// waits is computed from what was loaded.
func TestUpdatesThatRunWhileALoadComes(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.save(dir)
		u.put(s.rows(narrow, []string{"a"}, 100))
		entered, leave := make(chan bool, 2), make(chan bool)
		s.python(func(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
			entered <- true
			<-leave
			return sums(job, mem)
		})
		slow := s.rows(narrow, []string{"a"}, 10)
		slow.Update, slow.Callable = true, []byte("sums")
		first := u.beginPut(slow)
		<-entered
		load := s.user().begin(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "all", Path: dir}, 0)
		for s.server.Waiting() < 2 {
			time.Sleep(time.Millisecond) // the files are read for real, so the bubble is never idle before
		}
		require.False(t, load.done())
		second := u.beginPut(s.add(narrow, []string{"a"}, 5))
		leave <- true
		require.NoError(t, first.wait().Err)
		require.NoError(t, load.wait().Err)
		require.NoError(t, second.wait().Err)
		require.Equal(t, []int64{6}, u.values("a"))
	})
}

// A put whose bytes are on their way when a load comes belongs to what is there afterwards.
func TestAPutInTwoStepsOverALoad(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		saved := u.put(s.rows(narrow, []string{"a"}, 1))
		u.save(dir)
		u.clear("a")
		later := u.put(s.rows(narrow, []string{"later"}, 2))
		require.Equal(t, saved.Indexes, later.Indexes)
		u.load(dir)
		u.put(s.rows(wide, []string{"a"}, 3))
		require.Equal(t, []int64{3}, u.values("a"))
		late := batch{write: write{Partition: "p", Fields: []string{"x"}}, columns: []foreign.Raw{s.same(narrow, 4)}}
		late.Samples = &wire.Samples{Indexes: later.Indexes, Generations: later.Generations}
		_, err := u.tryPut(late)
		require.Equal(t, tqerr.SampleGone, tqerr.CodeOf(err), "the sample that was cleared by the load")
		late.Samples.Generations = saved.Generations
		_, err = u.tryPut(late)
		require.NoError(t, err, "the sample that came back")
	})
}

func TestWaitersAndWatchesLearnOfALoad(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		u.save(dir)
		u.clear("a", "b")
		u.put(s.rows(narrow, []string{"c"}, 3))
		var opened wire.WatchReply
		u.ask(wire.OpWatchOpen, &wire.PartitionRequest{Partition: "p"}, &opened)
		wait := u.begin(wire.OpWait, &wire.WaitRequest{Partition: "p", Keys: []string{"a"}, Fields: []string{"x"}}, time.Hour)
		fetch := u.begin(wire.OpMeta, &wire.MetaRequest{Partition: "p", Mode: "fetch", Fields: []string{"x"}, BatchSize: 2, Task: "t"}, time.Hour)
		synctest.Wait()
		s.user().load(dir)
		require.NoError(t, wait.wait().Err)
		require.NoError(t, fetch.wait().Err)
		var events wire.EventsReply
		u.ask(wire.OpWatchNext, &wire.WatchRequest{Watch: opened.Watch}, &events)
		var got []string
		for _, e := range events.Events {
			got = append(got, e.Kind+" "+e.Key)
		}
		require.Equal(t, []string{"clear c", "put a", "put b"}, got)
		u.ask(wire.OpWatchClose, &wire.WatchRequest{Watch: opened.Watch}, nil)
	})
}

func TestOneSaveToAPlaceAtATime(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other, dir := s.user(), s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a"}, 1))
		var save wire.SaveReply
		u.ask(wire.OpSaveCheckpoint, beginSave(dir), &save)
		again := beginSave(dir)
		err := other.begin(wire.OpSaveCheckpoint, again, time.Minute).wait().Err
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err))
		require.ErrorContains(t, err, dir)
		require.NoError(t, other.trySave(dir+"2"))

		foreignCommit := &wire.SaveRequest{Step: "commit", Save: number}
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(other.try(wire.OpSaveCheckpoint, foreignCommit, nil)))
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(u.try(wire.OpSaveCheckpoint, foreignCommit, nil)), "parts are missing")
		require.NoDirExists(t, dir, "a commit that fails ends the save")
		u.save(dir)

		u.ask(wire.OpSaveCheckpoint, beginSave(dir), &save)
		second := other.begin(wire.OpSaveCheckpoint, again, time.Minute)
		synctest.Wait()
		require.False(t, second.done())
		u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "abort", Save: number}, nil)
		require.NoError(t, second.wait().Err)
	})
}

// A client that dies in a save takes everything with it: the leases, the folder beside the target, and the claim on it.
func TestASaveEndsWithItsClient(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other, dir := s.user(), s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(narrow, []string{"a"}, 1))
		u.ask(wire.OpSaveCheckpoint, beginSave(dir), &wire.SaveReply{})
		require.NotZero(t, s.stats().Leases)
		require.NoError(t, u.Close())
		for s.server.Saves() > 0 {
			time.Sleep(time.Millisecond) // the folder is removed for real
		}
		require.Zero(t, s.stats().Leases)
		entries, err := os.ReadDir(filepath.Dir(dir))
		require.NoError(t, err)
		require.Empty(t, entries)
		other.save(dir)
	})
}

func TestTheCutIsTheMomentOfTheBegin(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		var save wire.SaveReply
		u.ask(wire.OpSaveCheckpoint, beginSave(dir), &save)
		u.put(s.rows(wide, []string{"a"}, 50))
		u.clear("b")
		u.put(s.rows(wide, []string{"c"}, 60))
		u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "state", Path: save.State}, nil)
		u.put(s.rows(wide, []string{"a"}, 70))
		u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "values", Path: save.Values}, nil)
		u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "commit", Save: number}, nil)
		u.load(dir)
		require.Equal(t, []string{"a", "b"}, u.keys())
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

func TestThePartsOfACheckpointAlone(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u, dir := s.user(), t.TempDir()
		state, values := filepath.Join(dir, "state"), filepath.Join(dir, "values")
		u.put(s.rows(wide, []string{"a", "b"}, 1, 2))
		u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "state", Path: state}, nil)
		for range 2 {
			u.ask(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: "values", Path: values}, nil)
		}
		u.put(s.rows(wide, []string{"a", "c"}, 7, 8))
		err := u.try(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "state", Path: state}, nil)
		require.Equal(t, tqerr.InvalidState, tqerr.CodeOf(err), "%v", err)
		require.Equal(t, []int64{7, 2, 8}, u.values("a", "b", "c"))
		u.ask(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "values", Path: values}, nil)
		require.Equal(t, []int64{7, 2, 8}, u.values("a", "b", "c"), "only checked")
		u.ask(wire.OpLoadCheckpoint, &wire.LoadRequest{Step: "state", Path: state}, nil)
		require.Equal(t, []string{"a", "b"}, u.keys())
		require.Equal(t, []int64{1, 2}, u.values("a", "b"))
	})
}

func TestBadRequestsOfCheckpoints(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		for op, body := range map[wire.Op]any{
			wire.OpSaveCheckpoint: &wire.SaveRequest{Step: "explode"}, wire.OpLoadCheckpoint: &wire.LoadRequest{Step: "explode"},
			wire.OpDumpRows: &wire.DumpRequest{Path: "relative"}, wire.OpLoadRows: &wire.LoadRowsRequest{Path: "relative"},
		} {
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(u.try(op, body, nil)), op)
		}
		for step, path := range map[string]string{"begin": "relative", "state": "x"} {
			err := u.try(wire.OpSaveCheckpoint, &wire.SaveRequest{Step: step, Path: path}, nil)
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		}
		require.Equal(t, tqerr.FileNotFound, tqerr.CodeOf(u.tryLoad(filepath.Join(t.TempDir(), "none"))))
	})
}

// A load by another client waits for nothing but slow writers, also when somebody reads what is about to go.
func TestAReaderKeepsWhatItReadsOverALoad(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, dir := s.user(), filepath.Join(t.TempDir(), "c")
		u.put(s.rows(wide, []string{"a"}, 1))
		u.save(dir)
		u.put(s.rows(wide, []string{"a"}, 2))
		body, err := wire.Marshal(&wire.GetRequest{Partition: "p", Keys: []string{"a"}, Views: true})
		require.NoError(t, err)
		view := u.start(&client.Request{Op: wire.OpGet, Flags: client.Views, Body: body}).wait()
		require.NoError(t, view.Err)
		u.load(dir)
		require.Equal(t, int64(2), elements(view.Columns[0].Data[:8])[0])
		require.Equal(t, []int64{1}, u.values("a"))
		_, err = u.decoded(view)
		require.NoError(t, err)
	})
}
