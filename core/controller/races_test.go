//go:build go1.25

package controller_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/jobs"
	"transferqueue/core/tqerr"
	"transferqueue/core/transport/memnet"
	"transferqueue/core/wire"
)

// slow is an update of field "x" of a key whose callable a test ends by hand.
type slow struct {
	s   *system
	p   *pending
	job *jobs.Job
}

func (u *user) slow(key string) *slow {
	u.t.Helper()
	b := u.s.add(narrow, []string{key}, 100)
	b.Merge, b.Callable = "", []byte("sum")
	p := u.beginPut(b)
	job, err := u.s.jobs.Next(time.Minute)
	require.NoError(u.t, err)
	return &slow{u.s, p, job}
}

// finish lets the callable end and waits for the update.
func (w *slow) finish() {
	w.s.t.Helper()
	columns, err := sums(w.job, w.s.mem)
	require.NoError(w.s.t, err)
	w.s.giveBack(w.job, columns, w.job.Rows)
	require.NoError(w.s.t, w.p.wait().Err)
}

// What arrives while a callable runs on its cells waits for it; readers and others do not.
func TestWritersOfACellWaitForASlowUpdate(t *testing.T) {
	cases := map[string]struct {
		do   func(s *system, u *user) *pending
		want map[string][]int64 // keys with the first element of x; nil for none
	}{
		"put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(narrow, []string{"a"}, 5)) },
			map[string][]int64{"a": {5}, "b": {2}}},
		"staged put": {func(s *system, u *user) *pending { return u.beginPut(s.rows(wide, []string{"a"}, 5)) },
			map[string][]int64{"a": {5}, "b": {2}}},
		"put of a new key beside": {func(s *system, u *user) *pending { return u.beginPut(s.rows(narrow, []string{"c", "a"}, 6, 5)) },
			map[string][]int64{"a": {5}, "b": {2}, "c": {6}}},
		"native update": {func(s *system, u *user) *pending { return u.beginPut(s.add(narrow, []string{"a"}, 5)) },
			map[string][]int64{"a": {106}, "b": {2}}},
		"clear": {func(_ *system, u *user) *pending {
			return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a"}}, 0)
		}, map[string][]int64{"b": {2}}},
		"clear of the sample": {func(_ *system, u *user) *pending {
			samples := &wire.Samples{Indexes: wire.Ints{0}, Generations: wire.Ints{1}}
			return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Samples: samples}, 0)
		}, map[string][]int64{"b": {2}}},
		"clear of the field": {func(_ *system, u *user) *pending {
			return u.begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a"}, Fields: []string{"x"}}, 0)
		}, map[string][]int64{"a": nil, "b": {2}}},
		"clear of the partition": {func(_ *system, u *user) *pending {
			return u.begin(wire.OpClearPartition, &wire.PartitionRequest{Partition: "p"}, 0)
		}, map[string][]int64{}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				u, other := s.user(), s.user()
				u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
				update := u.slow("a")
				waiting := c.do(s, other)
				synctest.Wait()
				require.False(t, waiting.done())
				require.Equal(t, []int64{1, 2}, other.values("a", "b"), "readers see the old value")
				if name != "clear of the partition" {
					other.put(s.rows(narrow, []string{"d"}, 9))
					other.clear("d")
				}

				update.finish()
				require.NoError(t, waiting.wait().Err)
				require.Len(t, other.keys(), len(c.want))
				for key, want := range c.want {
					if want == nil {
						require.Equal(t, []string{"b"}, other.holders("x"))
						continue
					}
					require.Equal(t, want, other.values(key))
				}
			})
		})
	}
}

// holders lists the keys that have a field.
func (u *user) holders(field string) []string {
	u.t.Helper()
	var reply wire.ListReply
	p := "p"
	u.ask(wire.OpList, &wire.ListRequest{Partition: &p, Fields: []string{field}}, &reply)
	return reply.Partitions[0].Keys
}

// Writes of other fields, of other keys, and of tags do not wait.
func TestASlowUpdateHoldsOnlyItsCells(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 2))
		update := u.slow("a")
		second := other.slow("b")
		y := s.rows(narrow, []string{"a"}, 3)
		y.Fields = []string{"y"}
		other.put(y)
		other.put(batch{write: write{Partition: "p", Keys: []string{"a"}, Tags: wire.List{[]byte("\x81\xa1t\x01")}}})
		q := s.rows(narrow, []string{"a"}, 4)
		q.Partition = "q"
		other.put(q)
		other.clear("unknown")
		second.finish()
		require.Equal(t, []int64{102}, other.values("b"))
		update.finish()
		require.Equal(t, []int64{101}, other.values("a"))
	})
}

// Updates wait in line, and what waits behind one that gave up goes on.
func TestWritersThatGiveUpLeaveTheLine(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"a"}, 1))
		update := u.slow("a")
		timed := s.add(narrow, []string{"a"}, 1000)
		timed.timeout = time.Second
		late, staged := s.user().beginPut(timed), s.rows(wide, []string{"a"}, 7)
		staged.timeout = time.Second
		lateToo := s.user().beginPut(staged)
		cancelled := s.user().beginPut(s.add(narrow, []string{"a"}, 1000))
		leaving := s.user()
		gone := leaving.beginPut(s.rows(wide, []string{"a"}, 8))
		last := s.user().beginPut(s.add(narrow, []string{"a"}, 1))
		synctest.Wait()
		cancelled.cancel()
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(cancelled.wait().Err))
		require.NoError(t, leaving.Close())
		require.Error(t, gone.wait().Err)
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(late.wait().Err))
		require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(lateToo.wait().Err))
		synctest.Wait()
		require.False(t, last.done())
		require.Zero(t, s.stats().Staged)
		update.finish()
		require.NoError(t, last.wait().Err)
		require.Equal(t, []int64{102}, u.values("a"))
	})
}

// Two clients create the same key at once, on different units: the second one's bytes move to where the first one's are.
func TestTwoClientsCreateAKeyAtOnce(t *testing.T) {
	for _, how := range []string{"put", "parsed put"} {
		t.Run(how, func(t *testing.T) {
			with(t, setup{units: 2}, func(t *testing.T, s *system) {
				s.python(parses)
				first, second := s.user(), s.user()
				first.put(s.rows(narrow, []string{"a"}, 0))
				b := s.rows(wide, []string{"k"}, 1)
				if how == "parsed put" {
					b.Callable = []byte("parse")
				}
				s.net.Inject(memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute, Op: wire.OpCommit, Times: 1})
				slower := second.beginPut(b) // staged on unit 1, where less is used
				synctest.Wait()
				require.EqualValues(t, 1, s.units[1].Stats().Staged)
				first.put(s.rows(narrow, []string{"k"}, 2))
				require.EqualValues(t, 2, s.units[0].Stats().Cells)
				require.NoError(t, slower.wait().Err)
				require.EqualValues(t, 2, s.units[0].Stats().Cells)
				require.Zero(t, s.units[1].Stats().MemoryUsed)
				require.Equal(t, []int64{1, 0}, first.values("k", "a"))
				require.Equal(t, []string{"a", "k"}, first.keys())
			})
		})
	}
}

// The same, and the second one waits for an update meanwhile.
func TestAPutThatWaitedMeetsAConflict(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		first, second := s.user(), s.user()
		first.put(s.rows(narrow, []string{"a"}, 0))
		update := first.slow("a")
		slower := second.beginPut(s.rows(wide, []string{"k", "a"}, 1, 1))
		first.put(s.rows(wide, []string{"filler"}, 3)) // on unit 1, so that the next one is on unit 0
		synctest.Wait()
		require.EqualValues(t, 1, s.units[1].Stats().Staged)
		first.put(s.rows(narrow, []string{"k"}, 2))
		require.EqualValues(t, 2, s.units[0].Stats().Cells)
		update.finish()
		require.NoError(t, slower.wait().Err)
		require.Equal(t, []int64{1, 1, 3}, first.values("k", "a", "filler"))
		require.EqualValues(t, 2, s.units[0].Stats().Cells)
		require.EqualValues(t, wideBytes, s.units[1].Stats().MemoryUsed)
	})
}

// A put waits for an update of one key, while its other key is made by somebody else and updated: both updates come first.
func TestAWaitingPutFindsAnotherSampleBehindItsKey(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"a"}, 1))
		first := u.slow("a")
		put := s.user().beginPut(s.rows(narrow, []string{"a", "k"}, 5, 6))
		synctest.Wait()
		u.put(s.rows(narrow, []string{"k"}, 2))
		second := u.slow("k")
		first.finish()
		synctest.Wait()
		require.False(t, put.done(), "the second update holds the key by now")
		second.finish()
		require.NoError(t, put.wait().Err)
		require.Equal(t, []int64{5, 6}, u.values("a", "k"), "neither update has overwritten the put")
	})
}

// An update waits; meanwhile its key is cleared and made anew.
func TestAWaitingUpdateFindsAnotherSampleBehindItsKey(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		u.put(s.rows(narrow, []string{"a", "b"}, 1, 1))
		first := u.slow("a")
		clear := s.user().begin(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a"}}, 0)
		synctest.Wait()
		update := s.user().beginPut(s.add(narrow, []string{"a", "b"}, 1, 1))
		synctest.Wait()
		first.finish()
		require.NoError(t, clear.wait().Err)
		require.Equal(t, tqerr.NotFound, tqerr.CodeOf(update.wait().Err), "it came behind the clear")
		require.Equal(t, []int64{1}, u.values("b"))
	})
}

// parses returns the columns of a put as they are.
func parses(job *jobs.Job, mem *foreigntest.Memory) ([]foreign.Raw, error) {
	out := make([]foreign.Raw, len(job.Columns))
	for k := range out {
		out[k] = mem.Ints(job.Columns[k].Column.Shape, elements(job.Columns[k].Bytes)...)
	}
	return out, nil
}

// A reader never sees a mixture of two writes, within a row or within a batch.
func TestReadersSeeWholeWrites(t *testing.T) {
	for _, width := range []int{narrow, wide / 4} {
		with(t, setup{units: 2}, func(t *testing.T, s *system) {
			keys := keysOf(8)
			made := make([]batch, 20)
			for v := range made {
				column := s.same(width, fill(len(keys), int64(v))...)
				made[v] = batch{write: write{Partition: "p", Keys: keys, Fields: []string{"x", "y"}}, columns: []foreign.Raw{column, column}}
			}
			s.user().put(made[0])
			var done atomic.Bool
			var all, readers sync.WaitGroup
			for w := range 2 {
				u := s.user()
				all.Go(func() {
					for v := range made {
						b := made[(v+w*7)%len(made)]
						b.Update = v%3 == 1
						if b.Update {
							b.Merge = "replace"
						}
						if _, err := u.tryPut(b); err != nil {
							t.Error(err)
						}
					}
				})
			}
			for r := range 2 {
				u, flags := s.user(), client.Flags(0)
				if r == 1 {
					flags = client.Views
				}
				readers.Go(func() {
					for !done.Load() {
						got, err := u.tryGet(&wire.GetRequest{Partition: "p", Keys: keys, Strict: true}, flags)
						if err != nil {
							t.Error(err)
							return
						}
						checkWhole(t, got, len(keys))
					}
				})
			}
			all.Wait()
			done.Store(true)
			readers.Wait()
		})
	}
}

func fill(n int, v int64) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = v
	}
	return out
}

// checkWhole checks that all elements of a read are equal.
func checkWhole(t *testing.T, got *read, rows int) {
	want := got.ints["x"][0][0]
	for _, field := range []string{"x", "y"} {
		if len(got.ints[field]) != rows {
			t.Errorf("%d rows of %q", len(got.ints[field]), field)
		}
		for _, row := range got.ints[field] {
			for _, v := range row {
				if v != want {
					t.Errorf("%d and %d in one read", want, v)
					return
				}
			}
		}
	}
}

// Everybody writes, updates and clears the same few keys.
func TestPutsUpdatesAndClearsOfTheSameKeys(t *testing.T) {
	for _, width := range []int{narrow, wide / 2} {
		with(t, setup{units: 2, limit: 64 * wideBytes, putWait: time.Minute}, func(t *testing.T, s *system) {
			s.python(sums)
			keys := keysOf(4)
			var all sync.WaitGroup
			for w := range 6 {
				u := s.user()
				column := s.rows(width, keys, 1, 2, 3, 4)
				update := column
				update.Update, update.Merge = true, "add"
				if w%2 == 0 {
					update.Merge, update.Callable = "", []byte("sum")
				}
				all.Go(func() {
					for i := range 15 {
						switch (i + w) % 4 {
						case 0, 1:
							_, err := u.tryPut(column)
							if err != nil {
								t.Error(err)
							}
						case 2:
							_, err := u.tryPut(update)
							if code := tqerr.CodeOf(err); code != tqerr.OK && code != tqerr.NotFound {
								t.Error(err)
							}
						case 3:
							if err := u.try(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: keys[w%3 : w%3+2]}, nil); err != nil {
								t.Error(err)
							}
						}
					}
				})
			}
			all.Wait()
			u := s.user()
			for _, key := range u.keys() {
				u.values(key)
			}
		})
	}
}

// An index that is used again leads to its new sample only.
func TestAnOldGenerationIsGone(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u := s.user()
		old := u.put(s.rows(narrow, []string{"a"}, 1))
		u.clear("a")
		fresh := u.put(s.rows(narrow, []string{"b"}, 2))
		require.Equal(t, old.Indexes, fresh.Indexes)
		require.NotEqual(t, old.Generations, fresh.Generations)
		samples := &wire.Samples{Indexes: old.Indexes, Generations: old.Generations}

		_, err := u.tryGet(&wire.GetRequest{Partition: "p", Samples: samples}, 0)
		require.Equal(t, tqerr.SampleGone, tqerr.CodeOf(err))
		for _, width := range []int{narrow, wide} {
			late := s.rows(width, nil, 3)
			late.Samples = samples
			_, err = u.tryPut(late)
			require.Equal(t, tqerr.SampleGone, tqerr.CodeOf(err))
			late.Update, late.Merge = true, "replace"
			_, err = u.tryPut(late)
			require.Equal(t, tqerr.SampleGone, tqerr.CodeOf(err))
		}
		u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Samples: samples}, nil)
		u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Samples: samples, Fields: []string{"x"}}, nil)
		u.ask(wire.OpSetTags, &wire.SetTagsRequest{Partition: "p", Samples: *samples, Tags: wire.List{[]byte("\x81\xa1t\x01")}}, nil)
		require.Equal(t, []int64{2}, u.values("b"))
	})
}

// A write that was staged for a sample arrives when its index belongs to another one.
func TestALateCommitDoesNotHitTheNewSample(t *testing.T) {
	with(t, setup{}, func(t *testing.T, s *system) {
		u, other := s.user(), s.user()
		old := u.put(s.rows(narrow, []string{"a"}, 1))
		s.net.Inject(memnet.Fault{Do: memnet.DelayRequest, Delay: time.Minute, Op: wire.OpCommit, Times: 1})
		late := s.rows(wide, nil, 3)
		late.Samples = &wire.Samples{Indexes: old.Indexes, Generations: old.Generations}
		waiting := u.beginPut(late)
		synctest.Wait()
		other.clear("a")
		other.put(s.rows(narrow, []string{"b"}, 2))
		require.Equal(t, tqerr.SampleGone, tqerr.CodeOf(waiting.wait().Err))
		require.Equal(t, []int64{2}, other.values("b"))
	})
}

// Clearing is per cell: contract F11.
func TestAClearAcrossUnevenFieldsLeavesNothing(t *testing.T) {
	with(t, setup{units: 2}, func(t *testing.T, s *system) {
		u := s.user()
		xy := s.rows(narrow, []string{"a"}, 1)
		xy.Fields, xy.columns = []string{"x", "x2"}, append(xy.columns, s.same(narrow, 2))
		u.put(xy)
		u.put(s.rows(narrow, []string{"b"}, 3))
		u.put(batch{write: write{Partition: "p", Keys: []string{"tags"}, Tags: wire.List{[]byte("\x81\xa1t\x01")}}})
		u.ask(wire.OpClear, &wire.ClearRequest{Partition: "p", Keys: []string{"a"}, Fields: []string{"x"}}, nil)
		require.Equal(t, []string{"x2"}, u.get("a").names)
		u.clear("tags", "a", "b", "unknown")
		u.clear("a")
		require.Empty(t, u.keys())
		require.Zero(t, s.stats())
		for i := range 12 {
			u.put(s.rows(narrow, []string{fmt.Sprintf("n%d", i)}, int64(i)))
		}
		u.clear("n1")
		require.Equal(t, []int64{11, 10}, u.values("n11", "n10"))
	})
}
