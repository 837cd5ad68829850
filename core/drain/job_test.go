//go:build go1.25

package drain

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

const each = 1000 // bytes of a cell of a table

// table is samples of one cell each on a unit, and what becomes of them.
type table struct {
	mu      sync.Mutex
	there   []int64 // ascending
	lists   int
	moves   map[int64]int
	most    int           // samples of one batch
	takes   time.Duration // of a batch
	leases  int64
	silent  bool // the unit does not say what it holds
	moving  bool // somebody else moves samples off it
	full    bool
	away    bool // no other unit can be reached
	busy    map[int64]bool
	bad     map[int64]bool
	lost    error
	freed   chan struct{}
	ends    []Status
	running int
	side    int             // most batches at a time
	sizes   map[int64]int64 // of samples that have other bytes than each
	flying  int64           // bytes that move now
	crowd   int64           // most bytes at a time
}

func (t *table) size(i int64) int64 {
	if n := t.sizes[i]; n > 0 {
		return n
	}
	return each
}

// fly is how many bytes of a batch move, as long as nothing fails.
func (t *table) fly(b *Batch, limit int64) (sum int64) {
	for i, s := range b.Samples {
		if i > 0 && limit-sum < t.size(s.Index) {
			break
		}
		sum += t.size(s.Index)
	}
	return sum
}

func newTable(n int) *table {
	t := &table{moves: map[int64]int{}, busy: map[int64]bool{}, bad: map[int64]bool{}, freed: make(chan struct{})}
	for i := range n {
		t.there = append(t.there, int64(i))
	}
	return t
}

// cursors are those of a walk over a catalog, by how many samples lie before.
var cursors = func() (list []catalog.Cursor) {
	c := catalog.New(catalog.Options{})
	c.AddUnit(0, "")
	units := make([]uint32, 4096)
	if _, err := c.Apply(&catalog.Write{Partition: "p", Insert: len(units)}, units); err != nil {
		panic(err)
	}
	for at, end := (catalog.Cursor{}), false; !end; {
		list = append(list, at)
		_, _, at, end = c.Residents(0, at, 1)
	}
	return list
}()

func (t *table) List(from catalog.Cursor, most int) (b Batch, next catalog.Cursor, end bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lists++
	b.Partition = "p"
	at, _ := slices.BinarySearch(t.there, int64(slices.Index(cursors, from)))
	for ; at < len(t.there) && len(b.Samples) < most; at++ {
		b.Samples = append(b.Samples, schema.Sample{Index: t.there[at], Generation: 1})
	}
	if at == len(t.there) {
		return b, from, true
	}
	return b, cursors[t.there[at]], false
}

func (t *table) Move(ctx context.Context, b *Batch, limit, most int64) (m Moved, err error) {
	t.mu.Lock()
	if n := t.size(b.Samples[0].Index); n > most {
		t.mu.Unlock()
		return Moved{Left: b.Samples, Large: n}, nil
	}
	flying := t.fly(b, limit)
	t.running++
	t.flying += flying
	t.side, t.crowd = max(t.side, t.running), max(t.crowd, t.flying)
	takes := t.takes
	t.mu.Unlock()
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.running--
		t.flying -= flying
	}()
	if sleep(ctx, takes) != nil {
		return Moved{Left: b.Samples}, ctx.Err()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.most = max(t.most, len(b.Samples))
	if t.lost != nil {
		return Moved{Left: b.Samples}, &LostError{t.lost}
	}
	if t.away {
		return Moved{Left: b.Samples}, tqerr.New(tqerr.Unavailable, "the connection is being made anew")
	}
	for i, s := range b.Samples {
		switch {
		case i > 0 && limit < t.size(s.Index):
			m.Left = append(m.Left, b.Samples[i:]...)
			return m, nil
		case t.busy[s.Index] && b.Wait == 0:
			m.Busy++
			continue
		case t.full:
			m.Left = append(m.Left, b.Samples[i:]...)
			return m, tqerr.New(tqerr.ResourceExhausted, "full")
		case t.bad[s.Index]:
			t.moves[s.Index]++
			m.Left = append(m.Left, b.Samples[i:]...)
			return m, &CellError{Partition: "p", Field: "x", Sample: s, Fields: []string{"x"}, Cause: errors.New("bad")}
		}
		at, has := slices.BinarySearch(t.there, s.Index)
		if !has {
			m.Samples++
			continue
		}
		t.there = slices.Delete(t.there, at, at+1)
		t.moves[s.Index]++
		m.Samples++
		m.Cells[Memory]++
		m.Bytes[Memory] += t.size(s.Index)
		limit -= t.size(s.Index)
	}
	return m, nil
}

func (t *table) Held(ctx context.Context, _ bool) (Held, error) {
	t.mu.Lock()
	if t.silent {
		t.mu.Unlock()
		<-ctx.Done()
		return Held{}, tqerr.New(tqerr.CodeOf(ctx.Err()), "over while it is asked")
	}
	defer t.mu.Unlock()
	n := int64(len(t.there))
	h := Held{Samples: n, Leases: t.leases, Moving: t.moving}
	h.Cells[Memory] = n
	for _, i := range t.there {
		h.Bytes[Memory] += t.size(i)
	}
	return h, nil
}

func (t *table) Freed() <-chan struct{} { return t.freed }

func (t *table) End(s Status) error {
	t.ends = append(t.ends, s)
	return nil
}

var usual = Options{Slots: 4, Inflight: 1 << 20, Attempts: 3}

// run lets a job run to its end, while the counts add up at every look.
func run(t *testing.T, s *table, o Options, meanwhile func(j *Job)) Status {
	t.Helper()
	held, err := s.Held(t.Context(), false)
	require.NoError(t, err)
	j := New(s, o, &held)
	require.Equal(t, Pending, j.Status().State)
	j.Start(t.Context())
	if meanwhile != nil {
		meanwhile(j)
	}
	for ended := false; !ended; {
		select {
		case <-j.Done():
			ended = true
		case <-time.After(10 * time.Millisecond):
		}
		st := j.Status()
		require.Equal(t, st.Total.cells(), st.Moved.cells()+st.Dropped+st.Failed+st.Remain, "%+v", st)
	}
	require.Len(t, s.ends, 1)
	require.True(t, j.Status().State.Final())
	return j.Status()
}

func within(t *testing.T, test func(t *testing.T)) {
	leaktest.Check(t)
	synctest.Test(t, test)
}

func TestEverythingMovesOnce(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(2000)
		end := run(t, s, usual, nil)
		require.Equal(t, Succeeded, end.State)
		require.EqualValues(t, 2000, end.Moved.cells())
		require.EqualValues(t, 2000*each, end.Moved.bytes())
		for i, n := range s.moves {
			require.Equal(t, 1, n, "sample %d", i)
		}
		require.LessOrEqual(t, s.most, batchSamples)
		require.LessOrEqual(t, s.side, usual.Slots)
		require.Less(t, s.lists, 2000/batchSamples+4, "it looks at no sample twice")
	})
}

func TestTheRateHolds(t *testing.T) {
	within(t, func(t *testing.T) {
		o := usual
		o.Rate = 100 * each
		end := run(t, newTable(1000), o, nil)
		require.Equal(t, Succeeded, end.State)
		require.InDelta(t, 10, end.Elapsed.Seconds(), 1)
	})
}

// No more bytes move at a time than may, but for a sample that has more by itself: it moves alone.
func TestTheBytesOnTheirWayAreBounded(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(2000)
		s.takes = time.Second
		s.sizes = map[int64]int64{}
		for i := range int64(2000) {
			if i%3 > 0 {
				s.sizes[i] = []int64{20 * each, 30 * each, 60 * each}[i%3]
			}
		}
		o := usual
		o.Inflight = 100 * each
		require.Equal(t, Succeeded, run(t, s, o, nil).State)
		require.LessOrEqual(t, s.crowd, o.Inflight)
		require.GreaterOrEqual(t, s.crowd, 90*int64(each), "it does not waste what it may use")
		for i, n := range s.moves {
			require.Equal(t, 1, n, "sample %d", i)
		}
		s = newTable(600)
		s.takes = time.Second
		s.sizes = map[int64]int64{7: 150 * each, 300: 101 * each, 599: 200 * each}
		require.Equal(t, Succeeded, run(t, s, o, nil).State)
		require.Equal(t, 200*int64(each), s.crowd)
		for i, n := range s.moves {
			require.Equal(t, 1, n, "sample %d", i)
		}
	})
}

func TestTimeIsOver(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(1000)
		o := usual
		o.Rate, o.Deadline = 100*each, 3*time.Second
		end := run(t, s, o, nil)
		require.Equal(t, Partial, end.State)
		require.Equal(t, 3*time.Second, end.Elapsed)
		require.InDelta(t, 300, end.Moved.cells(), 30)
		require.EqualValues(t, len(s.there), end.Remain)
		require.Contains(t, end.Err, "3s")
	})
}

func TestTimeIsOverWhileTheUnitIsAsked(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(3)
		s.takes = time.Second
		o := usual
		o.Deadline = 3 * time.Second
		end := run(t, s, o, func(*Job) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.silent = true
		})
		require.Equal(t, Partial, end.State, end.Err)
		require.EqualValues(t, 3, end.Moved.cells())
		require.Contains(t, end.Err, "3s")
	})
}

func TestCancelEndsABatchThatIsUnderWay(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(10)
		s.takes = time.Hour
		end := run(t, s, usual, func(j *Job) {
			time.Sleep(time.Second)
			require.Equal(t, Running, j.Status().State)
			s.mu.Lock() // the batch cannot end yet, nor the job
			j.Cancel()
			cancelling := j.Status().State
			s.mu.Unlock()
			require.Equal(t, Cancelling, cancelling)
		})
		require.Equal(t, Cancelled, end.State)
		require.Equal(t, time.Second, end.Elapsed)
		require.EqualValues(t, 10, end.Remain)
	})
}

func TestWhatIsBadIsTriedSoOften(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		s.bad[7], s.bad[270] = true, true
		end := run(t, s, usual, nil)
		require.Equal(t, Partial, end.State)
		require.Equal(t, []int64{7, 270}, s.there)
		require.Equal(t, []int{3, 3}, []int{s.moves[7], s.moves[270]})
		require.Len(t, end.Cells, 2)
		require.Equal(t, FailedCell{Partition: "p", Field: "x", Sample: schema.Sample{Index: 7, Generation: 1}, Attempts: 3, Reason: "bad"}, end.Cells[0])
		require.EqualValues(t, 2, end.Failed)
		require.Zero(t, end.Remain)
	})
}

// What has failed and is cleared before the job ends is no failure.
func TestWhatIsBadIsCleared(t *testing.T) {
	within(t, func(t *testing.T) {
		for _, cleared := range [][]int64{{7}, {7, 20}} {
			s := newTable(300)
			s.bad[7], s.bad[20] = true, true
			o := usual
			o.Rate, o.Attempts = 20*each, 1
			end := run(t, s, o, func(j *Job) {
				time.Sleep(5 * time.Second)
				st := j.Status()
				require.Equal(t, []any{Running, int64(2), 2}, []any{st.State, st.Failed, len(st.Cells)})
				s.mu.Lock()
				defer s.mu.Unlock()
				s.there = slices.DeleteFunc(s.there, func(i int64) bool { return slices.Contains(cleared, i) })
			})
			left := int64(2 - len(cleared))
			require.Equal(t, left == 0, end.State == Succeeded, end.Err)
			require.Len(t, end.Cells, int(left))
			require.EqualValues(t, []int64{left, 2 - left, 298}, []int64{end.Failed, end.Dropped, end.Moved.cells()})
		}
	})
}

// Samples that somebody else moves off the unit have moved, and were not dropped, whenever it is asked what it holds.
func TestOthersMoveSamplesToo(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		o := usual
		o.Rate = 100 * each
		end := run(t, s, o, func(j *Job) {
			time.Sleep(time.Second)
			s.mu.Lock()
			moved := int64(100)
			s.there, s.moving = s.there[:len(s.there)-100], true
			s.mu.Unlock()
			time.Sleep(10 * time.Second)
			require.Equal(t, Running, j.Status().State)
			s.mu.Lock()
			defer s.mu.Unlock()
			s.moving = false
			j.Count(&Counted{Cells: [NumTiers]int64{moved}, Bytes: [NumTiers]int64{moved * each}})
		})
		require.Equal(t, Succeeded, end.State, end.Err)
		require.EqualValues(t, []int64{300, 300, 0}, []int64{end.Total.cells(), end.Moved.cells(), end.Dropped})
	})
}

func TestAFullSessionIsAskedSeldom(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		s.full = true
		end := run(t, s, usual, func(j *Job) {
			time.Sleep(time.Minute)
			st := j.Status()
			require.Equal(t, map[string]int64{NoCapacity: 300}, st.Blocked)
			require.Less(t, st.Attempts, int64(200))
			s.mu.Lock()
			s.full = false
			close(s.freed)
			s.mu.Unlock()
		})
		require.Equal(t, Succeeded, end.State)
		require.Less(t, end.Elapsed, 62*time.Second)
	})
}

// That no other unit can be reached for a while is no fault of the samples.
func TestOtherUnitsAreAwayForAWhile(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		s.away = true
		end := run(t, s, usual, func(j *Job) {
			time.Sleep(10 * time.Second)
			st := j.Status()
			require.Equal(t, Running, st.State)
			require.Equal(t, map[string]int64{Retrying: 300}, st.Blocked)
			require.Less(t, st.Attempts, int64(60))
			s.mu.Lock()
			defer s.mu.Unlock()
			s.away = false
		})
		require.Equal(t, Succeeded, end.State, end.Err)
		require.Zero(t, end.Failed)
	})
}

func TestSlowWritersAreWaitedForLast(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		s.busy[3], s.busy[4] = true, true
		end := run(t, s, usual, nil)
		require.Equal(t, Succeeded, end.State)
		require.Equal(t, []int{1, 1}, []int{s.moves[3], s.moves[4]})
	})
}

// Each sample that does not move is counted once, also by a walk that waits for writers.
func TestWhatIsBlockedIsCountedOnce(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(300)
		s.full, s.busy[0] = true, true
		run(t, s, usual, func(j *Job) {
			for range 9 {
				time.Sleep(time.Second)
				blocked := j.Status().Blocked
				require.EqualValues(t, 300, blocked[NoCapacity]+blocked[Writing], "%v", blocked)
			}
			j.Cancel()
		})
	})
}

func TestReadersAreWaitedFor(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(3)
		s.leases = 2
		end := run(t, s, usual, func(j *Job) {
			time.Sleep(time.Minute)
			st := j.Status()
			require.Equal(t, Waiting, st.Phase)
			require.Equal(t, map[string]int64{Pinned: 2}, st.Blocked)
			s.mu.Lock()
			s.leases = 0
			s.mu.Unlock()
		})
		require.Equal(t, Succeeded, end.State)
	})
}

func TestTheUnitIsLost(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(3)
		s.lost = errors.New("gone")
		end := run(t, s, usual, nil)
		require.Equal(t, Failed, end.State)
		require.Equal(t, "SOURCE_LOST: gone", end.Err)
		require.EqualValues(t, 3, end.Remain)
	})
}

// Samples that come and go meanwhile are counted as if they had always been there.
func TestTheWorldChanges(t *testing.T) {
	within(t, func(t *testing.T) {
		s := newTable(1000)
		o := usual
		o.Rate = 100 * each
		end := run(t, s, o, func(*Job) {
			time.Sleep(2 * time.Second)
			s.mu.Lock()
			s.there = slices.DeleteFunc(s.there, func(i int64) bool { return i%2 == 0 })
			s.there = append(s.there, 2000, 2001, 2002)
			s.mu.Unlock()
		})
		require.Equal(t, Succeeded, end.State)
		require.Zero(t, end.Remain)
		require.Positive(t, end.Dropped)
		require.EqualValues(t, len(s.moves), end.Moved.cells())
	})
}
