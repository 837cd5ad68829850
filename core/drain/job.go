package drain

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
)

// Job is one drain. Its methods may be called from any goroutine.
type Job struct {
	s      Session
	opts   Options
	began  time.Time
	ctx    context.Context
	cancel context.CancelFunc
	done   chan struct{}

	mu struct {
		sync.Mutex
		Status
		cancelled bool
	}

	// Of the goroutine that runs the job:
	counted bool           // Total is known
	tried   map[victim]int // failed tries of a sample, those that stay included
	stay    map[victim]*stayed
	walks   int // that have begun
	cursor  catalog.Cursor
	queue   []Batch // to be tried before the walk goes on
	walk    walk
	pause   time.Duration
	ready   time.Time // when the rate lets the next batches go
}

// victim is a sample that could not be moved.
type victim struct {
	partition string
	schema.Sample
}

// stayed is a sample that is not tried any more.
type stayed struct {
	cells int64
	walk  int // the latest that has found it
}

// walk is what has come of the walk over all samples that is under way.
type walk struct {
	progress bool // something has moved, or been given up
	left     bool // something was there that may move later
	busy     bool // some of it because somebody writes it
	ended    bool
	// patience is how long it waits for each writer, because the walk before has found nothing else; 0: it passes them over.
	patience time.Duration
}

// New makes a job. held is what its unit holds; nil: the job asks when it runs.
func New(s Session, o Options, held *Held) *Job {
	j := &Job{s: s, opts: o, began: time.Now(), done: make(chan struct{}), tried: map[victim]int{}, stay: map[victim]*stayed{}}
	if o.Began.IsZero() {
		j.opts.Began = j.began
	}
	j.ctx, j.cancel = context.WithCancel(context.Background())
	j.mu.State = Pending
	if held != nil {
		j.begin(held)
	}
	return j
}

// Start lets the job run until it has ended, or until ctx has: then it is as if it had never run, and whoever goes on later finds
// what is left.
func (j *Job) Start(ctx context.Context) {
	guard.Go("drain", func() {
		defer close(j.done)
		defer j.cancel()
		stop := context.AfterFunc(ctx, j.cancel)
		defer stop()
		j.set(Running)
		var err error
		func() {
			defer guard.Recover(&err)
			err = j.run()
		}()
		if ctx.Err() == nil {
			j.end(ctx, err)
		}
	})
}

// Cancel ends the job soon; what has moved stays moved. A job that has ended stays as it is.
func (j *Job) Cancel() {
	j.mu.Lock()
	if !j.mu.State.Final() {
		j.mu.State, j.mu.cancelled = Cancelling, true
	}
	j.mu.Unlock()
	j.cancel()
}

// Done is closed when the job has ended.
func (j *Job) Done() <-chan struct{} { return j.done }

func (j *Job) set(s State) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.mu.cancelled {
		j.mu.State, j.mu.Phase = s, Copying
	}
}

// errPartial ends a job that has moved what can be moved.
var errPartial = errors.New("some cells could not be moved")

// lastLook is how long the unit has to say what it still holds.
const lastLook = 5 * time.Second

// end decides what the job is in the end.
func (j *Job) end(ctx context.Context, err error) {
	state := Succeeded
	j.mu.Lock()
	switch {
	case err == nil:
	case j.mu.cancelled:
		state = Cancelled
	case errors.Is(err, errPartial) || errors.Is(err, context.DeadlineExceeded):
		state = Partial
	default:
		state = Failed
	}
	j.mu.Unlock()
	last, cancel := context.WithTimeout(ctx, lastLook)
	defer cancel()
	if held, failed := j.s.Held(last, false); failed == nil {
		j.mu.Lock()
		j.balanceLocked(&held)
		j.mu.Unlock()
	}
	j.mu.Lock()
	ends := j.mu.Status
	j.mu.Unlock()
	ends.State, ends.Phase, ends.Elapsed, ends.Err = state, "", time.Since(j.began), j.why(err)
	if err == nil {
		ends.Blocked = nil
	}
	if failed := j.s.End(ends); failed != nil && state != Failed {
		ends.State, ends.Err = Failed, failed.Error()
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.Status = ends
}

func (j *Job) why(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("time was over after %s", j.opts.Deadline)
	case errors.Is(err, context.Canceled):
		return "cancelled"
	}
	return err.Error()
}

// begin says what there is to be moved.
func (j *Job) begin(held *Held) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.mu.Total, j.mu.Remain, j.counted = held.Counted, held.cells(), true
}

// run moves everything, and returns nil when the unit holds nothing.
func (j *Job) run() error {
	ctx, cancel := j.ctx, context.CancelFunc(func() {})
	if j.opts.Deadline > 0 {
		ctx, cancel = context.WithDeadline(ctx, j.opts.Began.Add(j.opts.Deadline))
	}
	defer cancel()
	if !j.counted {
		held, err := j.held(ctx, false)
		if err != nil {
			return err
		}
		j.begin(&held)
	}
	for {
		freed := j.s.Freed()
		if err := j.walkOnce(ctx); err != nil {
			return err
		}
		if j.walk.progress {
			j.pause = 0
		}
		switch {
		case j.walk.left || len(j.stay) > 0 && j.walk.progress: // those that stay may be cleared meanwhile
		case len(j.stay) > 0:
			return errPartial
		default:
			empty, err := j.settled(ctx)
			if err != nil || empty {
				return err
			}
		}
		next := walk{}
		if j.walk.busy && !j.walk.progress {
			next.patience = min(max(2*j.walk.patience, leastPatience), mostPatience)
		}
		j.walk = next
		if err := j.rest(ctx, freed); err != nil {
			return err
		}
	}
}

// walkOnce tries every sample once that is on the unit.
func (j *Job) walkOnce(ctx context.Context) error {
	j.cursor, j.queue = catalog.Cursor{}, nil
	j.walks++
	j.unblock()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		batches := j.next()
		if len(batches) == 0 && len(j.queue) == 0 && j.walk.ended {
			j.forgive()
			return nil
		}
		if err := j.round(ctx, batches); err != nil {
			return err
		}
	}
}

// next picks the batches that move together, one at least. It takes a bounded number of steps.
func (j *Job) next() (out []Batch) {
	room := j.opts.Inflight
	fits := func(b *Batch) bool {
		return len(out) == 0 || len(out) < j.opts.Slots && max(b.Bytes, j.opts.share()) <= room
	}
	take := func(b *Batch) {
		out = append(out, *b)
		room -= max(b.Bytes, j.opts.share())
	}
	for len(j.queue) > 0 && fits(&j.queue[0]) {
		take(&j.queue[0])
		j.queue = j.queue[1:]
	}
	for len(j.queue) == 0 && fits(&Batch{}) && !j.walk.ended {
		most := batchSamples
		if j.walk.patience > 0 {
			most = 1
		}
		b, next, end := j.s.List(j.cursor, most)
		j.cursor, j.walk.ended = next, end
		if b = j.without(b); len(b.Samples) > 0 {
			b.Wait = j.walk.patience
			take(&b)
		} else if len(out) == 0 && !end {
			return nil // somebody may want to cancel
		}
	}
	return out
}

// without takes out of a batch what stays, and splits what has failed before from the others.
func (j *Job) without(b Batch) Batch {
	if len(j.tried) == 0 {
		return b
	}
	var kept []schema.Sample
	for _, s := range b.Samples {
		v := victim{b.Partition, s}
		switch {
		case j.stay[v] != nil:
			j.stay[v].walk = j.walks
		case j.tried[v] > 0:
			j.queue = append(j.queue, Batch{Partition: b.Partition, Samples: []schema.Sample{s}})
		default:
			kept = append(kept, s)
		}
	}
	b.Samples = kept
	return b
}

// held asks the unit what it holds. When the time of the job is over meanwhile, the error is that of ctx, which is not about the unit.
func (j *Job) held(ctx context.Context, recount bool) (Held, error) {
	held, err := j.s.Held(ctx, recount)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	return held, err
}

// settled reports whether the unit holds nothing any more, and notes why it does.
func (j *Job) settled(ctx context.Context) (bool, error) {
	held, err := j.held(ctx, j.pause >= recountPause)
	if err != nil || held.empty() {
		return err == nil, err
	}
	j.mu.Lock()
	j.mu.Phase = Waiting
	j.balanceLocked(&held)
	j.mu.Unlock()
	for reason, n := range map[string]int64{Pinned: held.Leases, Staged: held.Staged, Clearing: held.Samples} {
		if n > 0 {
			j.block(reason, int(n))
		}
	}
	return false, nil
}

const (
	leastPause   = 2 * time.Millisecond
	mostPause    = time.Second
	recountPause = 250 * time.Millisecond

	// What has room again meanwhile waits as long as the job does for a writer that hangs.
	leastPatience = 100 * time.Millisecond
	mostPatience  = 10 * time.Second
)

// rest waits between two walks: longer and longer while nothing happens. Room that becomes free ends a long rest.
func (j *Job) rest(ctx context.Context, freed <-chan struct{}) error {
	j.pause = min(max(2*j.pause, leastPause), mostPause)
	if err := sleep(ctx, min(j.pause, 64*leastPause)); err != nil || j.pause <= 64*leastPause {
		return err
	}
	timer := time.NewTimer(j.pause - 64*leastPause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-freed:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
