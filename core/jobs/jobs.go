// Package jobs hands work that needs a Python interpreter to threads that pull it: merge functions of updates, parsers of
// puts, and samplers. The core never calls Python; a Python thread blocks in Next, runs the callable, and gives the result back with
// Done or Fail.
//
// # States of a job
//
//	waiting    Run has queued it
//	taken      a thread has it and uses the memory of its columns
//	abandoned  Run has returned without a result, because time was over or the session ended; the thread still has it
//	ended      nobody has it
//
//	waiting -> taken -> ended      Next; Done or Fail, and Run returns the result
//	waiting -> ended               Run gives up
//	taken -> abandoned -> ended    Run gives up; the late Done or Fail
//
// The memory of the columns goes back to the pool when the job ends, and not before: an abandoned callable may still read
// and write it. Queue.mu is a leaf.
package jobs

import (
	"context"
	"sync"
	"time"

	"transferqueue/core/foreign"
	"transferqueue/core/internal/bufpool"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Kind says what the callable is.
type Kind uint32

// Kinds of jobs; the numbers are those of tq_job.kind.
const (
	Merge  Kind = iota + 1 // columns are the stored ones, then the new ones
	Parse                  // columns are those of a put
	Sample                 // no columns: a call of a sampler, whose answer is one object
)

// String names the callable as users know it.
func (k Kind) String() string {
	switch k {
	case Merge:
		return "merge_fn"
	case Sample:
		return "sampler"
	default:
		return "data_parser"
	}
}

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
	Columns   []Data // in buffers of Gather
	Request   []byte // what a sampler is asked, see package sampler

	done chan outcome // has room for the one outcome
	// Guarded by Queue.mu.
	taken     bool
	abandoned bool
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
		jobs   map[uint64]*Job // that have not ended
		next   uint64
		closed bool
	}
}

// capacity bounds the jobs that wait for a thread; more make Run wait.
const capacity = 1024

// New makes a queue whose results live in buffers of the pool.
func New(pool *bufpool.Pool) *Queue {
	q := &Queue{pool: pool, waiting: make(chan *Job, capacity), closed: make(chan struct{})}
	q.mu.jobs = map[uint64]*Job{}
	q.mu.next = 1
	return q
}

// Gather returns a buffer of the pool for n bytes, nil for none.
func (q *Queue) Gather(n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	return q.pool.Get(n)
}

// Recycle gives the buffers of columns back to the pool.
func (q *Queue) Recycle(columns []Data) {
	for _, c := range columns {
		if len(c.Bytes) > 0 {
			q.pool.Put(c.Bytes)
		}
	}
}

// Run waits for a Python thread to do the job, whose columns it takes over. The result's buffers come from the pool and
// belong to the caller, who gives them back with Recycle.
//
// Errors: what the callable failed with; DeadlineExceeded and Cancelled with ctx; Unavailable when the queue is closed.
func (q *Queue) Run(ctx context.Context, job *Job) ([]Data, error) {
	job.done = make(chan outcome, 1)
	q.mu.Lock()
	job.ID = q.mu.next
	q.mu.next++
	q.mu.jobs[job.ID] = job
	q.mu.Unlock()
	var err error
	select {
	case q.waiting <- job:
		select {
		case out := <-job.done:
			return out.columns, out.err
		case <-ctx.Done():
			err = tqerr.New(tqerr.CodeOf(ctx.Err()), "the %s did not finish in time", job.Kind)
		case <-q.closed:
			err = tqerr.New(tqerr.Unavailable, "the session was closed while the %s ran", job.Kind)
		}
	case <-ctx.Done():
		err = tqerr.New(tqerr.CodeOf(ctx.Err()), "no thread was free for the %s in time", job.Kind)
	case <-q.closed:
		err = tqerr.New(tqerr.Unavailable, "the session was closed before the %s ran", job.Kind)
	}
	q.giveUp(job)
	return nil, err
}

// giveUp ends a job whose result nobody wants any more, or leaves that to the thread that has it.
func (q *Queue) giveUp(job *Job) {
	q.mu.Lock()
	_, live := q.mu.jobs[job.ID]
	job.abandoned = true
	if live && !job.taken {
		delete(q.mu.jobs, job.ID)
	}
	ended := live && !job.taken
	q.mu.Unlock()
	if ended {
		q.Recycle(job.Columns)
	}
	select {
	case out := <-job.done: // it came while we gave up
		q.Recycle(out.columns)
	default:
	}
}

// Waiting is the number of jobs that no thread has taken.
func (q *Queue) Waiting() int { return len(q.waiting) }

// Next waits for a job. DeadlineExceeded when there is none in time, InvalidState when the queue was closed.
func (q *Queue) Next(timeout time.Duration) (*Job, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		select {
		case job := <-q.waiting:
			if q.claim(job) {
				return job, nil
			}
		case <-q.closed:
			return nil, tqerr.New(tqerr.InvalidState, "the session has ended")
		case <-timer.C:
			return nil, tqerr.New(tqerr.DeadlineExceeded, "no job")
		}
	}
}

// claim reports whether a job that was queued is still wanted.
func (q *Queue) claim(job *Job) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	job.taken = !job.abandoned
	return job.taken
}

// Done gives the result of a job. The inputs are borrowed for the call: their bytes are copied. They may lie in the columns
// of the job.
func (q *Queue) Done(id uint64, inputs []*foreign.Input) error {
	job := q.end(id)
	if job == nil {
		return nil // given back before
	}
	defer q.Recycle(job.Columns)
	columns, err := q.copyResult(job, inputs)
	q.deliver(job, outcome{columns, err})
	return err
}

func (q *Queue) copyResult(job *Job, inputs []*foreign.Input) ([]Data, error) {
	if q.unwanted(job) {
		return nil, nil
	}
	columns := make([]Data, 0, len(inputs))
	for _, in := range inputs {
		buffer, err := q.Gather(in.Column.Bytes())
		if err != nil {
			q.Recycle(columns)
			return nil, err
		}
		in.CopyRows(buffer, 0, in.Column.Rows)
		columns = append(columns, Data{Column: in.Column, Bytes: buffer})
	}
	return columns, nil
}

func (q *Queue) unwanted(job *Job) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return job.abandoned
}

// Fail ends a job with an error of the callable.
func (q *Queue) Fail(id uint64, err error) {
	if job := q.end(id); job != nil {
		q.Recycle(job.Columns)
		q.deliver(job, outcome{err: err})
	}
}

// end removes a job that a thread gives back.
func (q *Queue) end(id uint64) *Job {
	q.mu.Lock()
	defer q.mu.Unlock()
	job := q.mu.jobs[id]
	if job == nil || !job.taken {
		return nil
	}
	delete(q.mu.jobs, id)
	return job
}

// deliver hands an outcome to Run, or recycles it when nobody waits any more.
func (q *Queue) deliver(job *Job, out outcome) {
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

// Close ends all jobs with Unavailable and all Next calls with InvalidState.
func (q *Queue) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.mu.closed {
		q.mu.closed = true
		close(q.closed)
	}
}
