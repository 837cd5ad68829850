package drain

import (
	"context"
	"errors"
	"sync"
	"time"

	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// result is what has come of a batch.
type result struct {
	moved Moved
	err   error
}

// round moves batches side by side, and learns from what came of them. It keeps to the rate.
func (j *Job) round(ctx context.Context, batches []Batch) error {
	if err := sleep(ctx, time.Until(j.ready)); err != nil {
		return err
	}
	results := make([]result, len(batches))
	var all sync.WaitGroup
	for i := range batches {
		if batches[i].Wait > 0 {
			j.block(Writing, 1)
		}
		all.Add(1)
		guard.Go("drain", func() {
			defer all.Done()
			r := &results[i]
			defer guard.Recover(&r.err)
			r.moved, r.err = j.s.Move(ctx, &batches[i], j.opts.limit(), max(j.opts.share(), batches[i].Bytes))
			j.mu.Lock()
			j.mu.Attempts++
			j.movedLocked(&r.moved)
			j.mu.Unlock()
		})
	}
	all.Wait()
	bytes := int64(0)
	for i := range results {
		if batches[i].Wait > 0 {
			j.block(Writing, -1) // nobody is waited for any more
		}
		bytes += results[i].moved.bytes()
		if err := j.learn(ctx, &batches[i], &results[i]); err != nil {
			return err
		}
	}
	if j.opts.Rate > 0 {
		j.ready = time.Now().Add(time.Duration(float64(bytes) / float64(j.opts.Rate) * float64(time.Second)))
	}
	return nil
}

// learn decides what becomes of a batch. It fails when the job cannot go on.
func (j *Job) learn(ctx context.Context, b *Batch, r *result) error {
	m := &r.moved
	j.walk.progress = j.walk.progress || m.Samples > 0
	if m.Busy > 0 {
		j.walk.left, j.walk.busy = true, true
		j.block(Writing, m.Busy)
	}
	var cell *CellError
	var stream *StreamError
	switch {
	case r.err == nil && m.Large > 0:
		j.queue = append(j.queue, Batch{Partition: b.Partition, Samples: m.Left[:1], Wait: b.Wait, Bytes: m.Large})
		j.requeue(b, m.Left[1:])
	case r.err == nil:
		j.requeue(b, m.Left)
	case ctx.Err() != nil:
		return ctx.Err()
	case lost(r.err):
		return r.err
	case noRoom(r.err):
		j.walk.left = true
		j.block(NoCapacity, len(m.Left))
	case errors.As(r.err, &stream): // which is no fault of the cell
		j.walk.left = true
		j.block(StreamBroken, len(m.Left))
	case tqerr.CodeOf(r.err) == tqerr.Unavailable: // another unit is gone, or is being reached anew: that is no try of a cell
		j.walk.left = true
		j.block(Retrying, len(m.Left))
	case errors.As(r.err, &cell):
		j.failed(b, m.Left, cell)
	default:
		j.broken(b, m.Left, r.err)
	}
	return nil
}

func noRoom(err error) bool {
	code := tqerr.CodeOf(err)
	return code == tqerr.ResourceExhausted || code == tqerr.CapacityExceeded
}

// requeue lets samples be tried next.
func (j *Job) requeue(b *Batch, left []schema.Sample) {
	if len(left) > 0 {
		j.queue = append(j.queue, Batch{Partition: b.Partition, Samples: left})
	}
}

// failed counts a try of the sample with the cell, and tries the others next.
func (j *Job) failed(b *Batch, left []schema.Sample, cell *CellError) {
	others := make([]schema.Sample, 0, len(left))
	for _, s := range left {
		if s != cell.Sample {
			others = append(others, s)
		}
	}
	j.requeue(b, others)
	v := victim{b.Partition, cell.Sample}
	j.tried[v]++
	if j.tried[v] < j.opts.Attempts {
		j.walk.left = true
		j.block(Retrying, 1)
		return
	}
	j.stay[v], j.walk.progress = &stayed{int64(len(cell.Fields)), j.walks}, true
	j.mu.Lock()
	defer j.mu.Unlock()
	j.failLocked(cell, j.tried[v])
}

// forgive takes samples that are not there any more out of those that have failed. Call it at the end of a walk.
func (j *Job) forgive() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for v, s := range j.stay {
		if s.walk != j.walks {
			delete(j.stay, v)
			j.forgiveLocked(v, s.cells)
		}
	}
}

// broken counts a try of a batch that failed as a whole. Its samples are tried one by one from then on.
func (j *Job) broken(b *Batch, left []schema.Sample, err error) {
	if len(left) != 1 {
		for _, s := range left {
			j.requeue(b, []schema.Sample{s})
		}
		return
	}
	j.failed(b, left, &CellError{Partition: b.Partition, Sample: left[0], Fields: []string{""}, Cause: err})
}
