package jobs_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/internal/leaktest"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// open makes a queue whose pool must be empty again when the test ends.
func open(t *testing.T) (*jobs.Queue, *bufpool.Pool) {
	leaktest.Check(t)
	pool := bufpool.New()
	q := jobs.New(pool)
	t.Cleanup(func() {
		q.Close()
		live, _ := pool.Stats()
		require.Zero(t, live, "bytes that were not given back")
		pool.Close()
	})
	return q, pool
}

// job makes a job with one column of a byte per row.
func job(t *testing.T, q *jobs.Queue, data ...byte) *jobs.Job {
	buffer, err := q.Gather(int64(len(data)))
	require.NoError(t, err)
	copy(buffer, data)
	column := schema.Column{Field: "x", Kind: schema.Tensor, DType: schema.Uint8, Rows: len(data), Form: schema.Uniform}
	return &jobs.Job{Kind: jobs.Merge, Rows: len(data), Columns: []jobs.Data{{Column: column, Bytes: buffer}}}
}

func result(t *testing.T, data ...byte) []*foreign.Input {
	mem := foreigntest.New(t, 1<<16)
	raw := foreign.Raw{Kind: uint8(schema.Tensor), DType: uint8(schema.Uint8), Form: uint8(foreign.Strided), Base: foreigntest.Lend(mem, data...), Stride: 1}
	in, err := foreign.New("", len(data), &raw)
	require.NoError(t, err)
	return []*foreign.Input{in}
}

type ended struct {
	columns []jobs.Data
	err     error
}

// run starts a job and hands it to a thread.
func run(ctx context.Context, t *testing.T, q *jobs.Queue, j *jobs.Job) (taken *jobs.Job, end chan ended) {
	end = make(chan ended, 1)
	go func() {
		columns, err := q.Run(ctx, j)
		end <- ended{columns, err}
	}()
	taken, err := q.Next(time.Minute)
	require.NoError(t, err)
	require.Same(t, j, taken)
	return taken, end
}

func TestDoneDeliversACopy(t *testing.T) {
	q, pool := open(t)
	taken, end := run(context.Background(), t, q, job(t, q, 1, 2, 3))
	require.Equal(t, []byte{1, 2, 3}, taken.Columns[0].Bytes)
	in := result(t, 4, 5, 6)
	require.NoError(t, q.Done(taken.ID, in))
	foreign.Bytes(in[0].Base, 1)[0] = 99
	got := <-end
	require.NoError(t, got.err)
	require.Equal(t, []byte{4, 5, 6}, got.columns[0].Bytes)
	live, _ := pool.Stats()
	require.EqualValues(t, 4096, live, "the result's buffer and no other")
	q.Recycle(got.columns)
	require.NoError(t, q.Done(taken.ID, in), "a second end is ignored")
	q.Fail(taken.ID, errors.New("late"))
}

// A callable may return its argument, so what comes back lies in the memory of the job.
func TestAResultMayLieInTheJob(t *testing.T) {
	q, _ := open(t)
	taken, end := run(context.Background(), t, q, job(t, q, 7, 8))
	require.NoError(t, q.Done(taken.ID, []*foreign.Input{foreign.Packed(taken.Columns[0].Column, taken.Columns[0].Bytes)}))
	got := <-end
	require.Equal(t, []byte{7, 8}, got.columns[0].Bytes)
	q.Recycle(got.columns)
}

func TestFail(t *testing.T) {
	q, _ := open(t)
	taken, end := run(context.Background(), t, q, job(t, q, 1))
	q.Fail(taken.ID, tqerr.New(tqerr.Failed, "ValueError: no"))
	got := <-end
	require.Nil(t, got.columns)
	require.ErrorContains(t, got.err, "ValueError: no")
}

func TestAJobThatNobodyTakes(t *testing.T) {
	q, pool := open(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 3 {
		_, err := q.Run(ctx, job(t, q, 1, 2))
		require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(err))
		require.ErrorContains(t, err, "merge_fn")
		live, _ := pool.Stats()
		require.Zero(t, live)
	}
	_, err := q.Next(0)
	require.Equal(t, tqerr.DeadlineExceeded, tqerr.CodeOf(err), "no thread is bothered with it")
}

// A callable that goes on after its time is over still has its arguments.
func TestTheMemoryOfAnAbandonedJobStays(t *testing.T) {
	for _, how := range []string{"done", "fail"} {
		t.Run(how, func(t *testing.T) {
			q, pool := open(t)
			ctx, cancel := context.WithCancel(context.Background())
			taken, end := run(ctx, t, q, job(t, q, 1, 2))
			cancel()
			got := <-end
			require.Equal(t, tqerr.Cancelled, tqerr.CodeOf(got.err))
			other, err := pool.Get(2)
			require.NoError(t, err)
			copy(taken.Columns[0].Bytes, "xx")
			require.NotEqual(t, "xx", string(other), "the memory was handed to somebody else")
			pool.Put(other)
			if how == "done" {
				require.NoError(t, q.Done(taken.ID, result(t, 3, 4)))
			} else {
				q.Fail(taken.ID, errors.New("late"))
			}
		})
	}
}

func TestCloseEndsEverything(t *testing.T) {
	q, _ := open(t)
	running, end := run(context.Background(), t, q, job(t, q, 1))
	waiting := make(chan error, 1)
	go func() {
		_, err := q.Run(context.Background(), job(t, q, 2))
		waiting <- err
	}()
	q.Close()
	q.Close()
	got := <-end
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(got.err))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(<-waiting))
	for tqerr.CodeOf(nextError(q)) != tqerr.InvalidState { // the one that waited may still be in the queue
	}
	require.NoError(t, q.Done(running.ID, result(t, 1)))
	_, err := q.Run(context.Background(), job(t, q, 3))
	require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
}

func nextError(q *jobs.Queue) error {
	_, err := q.Next(time.Minute)
	return err
}

// More jobs than the queue holds wait for room, and give up when their time is over.
func TestAFullQueue(t *testing.T) {
	q, _ := open(t)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	parallel(1100, func(int) {
		_, err := q.Run(ctx, job(t, q, 1))
		if tqerr.CodeOf(err) != tqerr.Cancelled {
			t.Error(err)
		}
	})
}

// parallel runs do n times at once.
func parallel(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Add(1)
		go func() {
			defer all.Done()
			do(i)
		}()
	}
	all.Wait()
}

// Threads that are slow, fail, or give nothing back in time: every job ends once and every byte comes back.
func TestManyJobsEndOnce(t *testing.T) {
	q, _ := open(t)
	answer := result(t, 9)
	threads := make(chan struct{})
	go func() {
		defer close(threads)
		parallel(4, func(i int) { work(t, q, rand.New(rand.NewPCG(1, uint64(i))), answer) })
	}()
	parallel(8, func(i int) {
		rng := rand.New(rand.NewPCG(2, uint64(i)))
		for range 300 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rng.IntN(50))*time.Microsecond)
			columns, err := q.Run(ctx, job(t, q, 1))
			if err == nil && columns[0].Bytes[0] != 9 {
				t.Error("another result")
			}
			q.Recycle(columns)
			cancel()
		}
	})
	q.Close()
	<-threads
}

// work is a thread that writes to its arguments and fails now and then.
func work(t *testing.T, q *jobs.Queue, rng *rand.Rand, answer []*foreign.Input) {
	for {
		taken, err := q.Next(time.Minute)
		if err != nil {
			return
		}
		taken.Columns[0].Bytes[0]++
		if rng.IntN(3) == 0 {
			q.Fail(taken.ID, tqerr.New(tqerr.Failed, "no"))
		} else if err := q.Done(taken.ID, answer); err != nil {
			t.Error(err)
		}
	}
}
