// Package jobs hands work that needs a Python interpreter to threads that pull it: merge functions of updates and parsers
// of puts. The core never calls Python; a Python thread blocks in Next, runs the callable, and gives the result back with
// Done or Fail.
//
// A job's state goes waiting -> taken -> ended. It ends once: by Done, Fail, the end of its context, or Close.
package jobs

import (
	"context"
	"sync"
	"time"

	"transferqueue/core/internal/bufpool"
	"transferqueue/core/foreign"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Kind says what the callable is.
type Kind uint32

// Kinds of jobs; the numbers are those of tq_job.kind.
const (
	Merge Kind = iota + 1 // columns are the stored ones, then the new ones
	Parse                 // columns are those of a put
)

// Data is one column with its bytes, rows tightly packed. The bytes belong to whoever holds the Data.
type Data struct {
	Column schema.Column
	Bytes  []byte
}

// Job is work for a Python thread.
type Job struct {
	ID        uint64
	Kind      Kind
	Callable  []byte
	Partition string
	Keys      []string // nil when the rows have no keys
	Rows      int
	Columns   []Data
	done      chan outcome
	abandoned bool // guarded by Queue.mu: nobody waits any more
}

type outcome struct {
	columns []Data
	err     error
}

// Queue is the meeting place. The zero value is not usable; see New.
type Queue struct {
	pool    *bufpool.Pool
	waiting chan *Job
	closed  chan struct{}
	mu      struct {
		sync.Mutex
		taken  map[uint64]*Job
		next   uint64
		closed bool
	}
}

// capacity bounds the jobs that wait for a thread; more make Run wait.
const capacity = 1024

// New makes a queue whose results live in buffers of the pool.
func New(pool *bufpool.Pool) *Queue {
	q := &Queue{pool: pool, waiting: make(chan *Job, capacity), closed: make(chan struct{})}
	q.mu.taken = map[uint64]*Job{}
	q.mu.next = 1
	return q
}

// Run waits for a Python thread to do the job. The result's buffers come from the pool and belong to the caller, who gives
// them back with Recycle.
func (q *Queue) Run(ctx context.Context, job *Job) ([]Data, error) {
	job.done = make(chan outcome, 1)
	q.mu.Lock()
	job.ID = q.mu.next
	q.mu.next++
	q.mu.taken[job.ID] = job
	q.mu.Unlock()
	defer q.forget(job)
	select {
	case q.waiting <- job:
	case <-ctx.Done():
		return nil, ended(ctx, job)
	case <-q.closed:
		return nil, tqerr.New(tqerr.Unavailable, "the session was closed before the %s ran", job.Kind)
	}
	select {
	case out := <-job.done:
		return out.columns, out.err
	case <-ctx.Done():
		return nil, ended(ctx, job)
	case <-q.closed:
		return nil, tqerr.New(tqerr.Unavailable, "the session was closed while the %s ran", job.Kind)
	}
}

func ended(ctx context.Context, job *Job) error {
	return tqerr.New(tqerr.CodeOf(ctx.Err()), "the %s did not finish in time", job.Kind)
}

// String names the callable as users know it.
func (k Kind) String() string {
	if k == Merge {
		return "merge_fn"
	}
	return "data_parser"
}

// forget drops a job; results that come later are recycled, and so is one that has come and was not wanted.
func (q *Queue) forget(job *Job) {
	q.mu.Lock()
	delete(q.mu.taken, job.ID)
	job.abandoned = true
	q.mu.Unlock()
	select {
	case out := <-job.done:
		q.Recycle(out.columns)
	default:
	}
}

// Next waits for a job. DeadlineExceeded when there is none in time, InvalidState when the queue was closed.
func (q *Queue) Next(timeout time.Duration) (*Job, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		select {
		case job := <-q.waiting:
			q.mu.Lock()
			_, wanted := q.mu.taken[job.ID]
			q.mu.Unlock()
			if wanted {
				return job, nil
			}
		case <-q.closed:
			return nil, tqerr.New(tqerr.InvalidState, "the session has ended")
		case <-timer.C:
			return nil, tqerr.New(tqerr.DeadlineExceeded, "no job")
		}
	}
}

// Done gives the result of a job. The inputs are borrowed for the call: their bytes are copied.
func (q *Queue) Done(id uint64, inputs []*foreign.Input) error {
	job := q.take(id)
	if job == nil {
		return nil // nobody waits for it any more
	}
	columns := make([]Data, 0, len(inputs))
	for _, in := range inputs {
		data := Data{Column: in.Column}
		if n := in.Column.Bytes(); n > 0 {
			buffer, err := q.pool.Get(n)
			if err != nil {
				q.Recycle(columns)
				q.end(job, outcome{err: err})
				return err
			}
			in.CopyRows(buffer, 0, in.Column.Rows)
			data.Bytes = buffer
		}
		columns = append(columns, data)
	}
	q.end(job, outcome{columns: columns})
	return nil
}

// end delivers an outcome, or recycles it when nobody waits any more.
func (q *Queue) end(job *Job, out outcome) {
	q.mu.Lock()
	abandoned := job.abandoned
	if !abandoned {
		job.done <- out
	}
	q.mu.Unlock()
	if abandoned {
		q.Recycle(out.columns)
	}
}

// Fail ends a job with an error of the callable.
func (q *Queue) Fail(id uint64, err error) {
	if job := q.take(id); job != nil {
		q.end(job, outcome{err: err})
	}
}

func (q *Queue) take(id uint64) *Job {
	q.mu.Lock()
	defer q.mu.Unlock()
	job := q.mu.taken[id]
	delete(q.mu.taken, id)
	return job
}

// Recycle gives the buffers of columns back to the pool.
func (q *Queue) Recycle(columns []Data) {
	for _, c := range columns {
		if len(c.Bytes) > 0 {
			q.pool.Put(c.Bytes)
		}
	}
}

// Gather returns a buffer of the pool for n bytes, nil for none.
func (q *Queue) Gather(n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	return q.pool.Get(n)
}

// Close ends all jobs with Unavailable and all Next calls with InvalidState.
func (q *Queue) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.mu.closed {
		q.mu.closed = true
		close(q.closed)
	}
}
