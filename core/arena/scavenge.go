package arena

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// quiet is how long nothing large must have been freed before pages go back to the system: a training loop that clears
	// one batch and puts the next must find warm pages.
	quiet = 180 * time.Millisecond
	// period bounds the wait when frees never pause; then only what was not needed at any time of a period goes back.
	period = time.Second
	// idle is when the reserve goes back too.
	idle = 10 * time.Second

	largeFree   = 64 << 10
	reserve     = 8 << 20
	punchStep   = 8 << 20
	punchRanges = 256 // free ranges looked at in one step
	populateMin = 1 << 20
	// populateStep is short because fallocate holds the inode's lock, for which a writer's pwrite waits.
	populateStep = 1 << 20
)

// sweeper says when to return pages and how far the current sweep has come. A sweep goes from high addresses to low, so
// that the warm pages that remain are the ones Alloc takes first.
type sweeper struct {
	armed     bool // freed since the last sweep
	lastLarge time.Time
	periodEnd time.Time
	low       uint64 // least warm bytes since the period began
	idleAt    time.Time

	active  bool
	surplus bool // began at the end of a period: not stopped by frees
	cursor  uint64
	floor   uint64 // stop when this much warm memory is left
}

// freedLocked notes a free.
func (a *Arena) freedLocked(s span) {
	w := &a.mu.sweeper
	if w.armed && s.size < largeFree {
		return
	}
	now := time.Now()
	w.lastLarge = now
	if w.active && !w.surplus {
		w.active = false
	}
	if !w.armed {
		w.armed = true
		w.periodEnd, w.low = now.Add(period), a.mu.warm.total
		a.wakeRun()
	}
}

// dropPopulateLocked forgets to populate blocks of which a part was freed: a hole must stay one.
func (a *Arena) dropPopulateLocked(s span) {
	kept := a.mu.populate[:0]
	for _, job := range a.mu.populate {
		if job.end() <= s.start || s.end() <= job.start {
			kept = append(kept, job)
		}
	}
	a.mu.populate = kept
}

// Run returns unused pages to the system and populates blocks ahead of their writers, until ctx ends or the arena is closed.
// One goroutine runs it; without it an arena works but keeps every page that was ever touched.
func (a *Arena) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		populated, open := a.populateOnce()
		if !open {
			return
		}
		swept, wait := a.sweepOnce(time.Now())
		if populated || swept {
			continue
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
		case <-a.wake:
		case <-timer.C:
		}
	}
}

// populateOnce allocates the pages of the next step of the oldest job.
func (a *Arena) populateOnce() (did, open bool) {
	a.io.Lock()
	defer a.io.Unlock()
	a.mu.Lock()
	if a.mu.closed || len(a.mu.populate) == 0 {
		defer a.mu.Unlock()
		return false, !a.mu.closed
	}
	job := &a.mu.populate[0]
	step := blockOf(span{job.start, min(job.size, populateStep)})
	job.start, job.size = job.start+uint64(step.Size), job.size-uint64(step.Size)
	if job.size == 0 {
		a.mu.populate = append(a.mu.populate[:0], a.mu.populate[1:]...)
	}
	a.mu.Unlock()
	fd := (*a.segments.Load())[step.Segment].fd
	// A failure leaves the pages to the writer, who reports it.
	_ = retry(func() error { return unix.Fallocate(fd, 0, step.Offset, step.Size) })
	return true, true
}

// sweepOnce punches the next step of a sweep when one is due, else returns how long to wait.
func (a *Arena) sweepOnce(now time.Time) (did bool, wait time.Duration) {
	a.io.Lock()
	defer a.io.Unlock()
	a.mu.Lock()
	if !a.mu.sweeper.active {
		if wait = a.beginLocked(now); wait > 0 {
			a.mu.Unlock()
			return false, wait
		}
	}
	spans := a.collectLocked(now)
	a.mu.Unlock()

	segments := *a.segments.Load()
	failed := len(spans)
	for i, s := range spans {
		b := blockOf(s)
		err := retry(func() error {
			return unix.Fallocate(segments[b.Segment].fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, b.Offset, b.Size)
		})
		if err != nil {
			failed = i
			break
		}
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	for i, s := range spans {
		if i < failed {
			a.mu.cold.merge(s)
		} else {
			a.mu.warm.merge(s)
			a.mu.sweeper.active = false
		}
	}
	return true, 0
}

// beginLocked starts a sweep when one is due and returns 0, else how long until one may be.
func (a *Arena) beginLocked(now time.Time) time.Duration {
	const never = time.Hour
	w := &a.mu.sweeper
	switch {
	case a.mu.closed:
		return never
	case w.armed && now.Sub(w.lastLarge) >= quiet:
		w.armed = false
		w.surplus, w.floor = false, reserve
	case w.armed && !now.Before(w.periodEnd):
		unneeded := max(w.low, reserve) - reserve
		w.surplus, w.floor = true, a.mu.warm.total-min(unneeded, a.mu.warm.total)
		w.periodEnd, w.low = now.Add(period), a.mu.warm.total
	case w.armed:
		return min(quiet-now.Sub(w.lastLarge), w.periodEnd.Sub(now))
	case w.idleAt.IsZero():
		return never
	case now.Before(w.idleAt):
		return w.idleAt.Sub(now)
	default:
		w.surplus, w.floor, w.idleAt = false, 0, time.Time{}
	}
	w.active, w.cursor = true, ^uint64(0)
	return 0
}

// collectLocked takes the whole pages of the next step out of the warm ranges. It ends the sweep when there are no more.
func (a *Arena) collectLocked(now time.Time) (spans []span) {
	w, warm := &a.mu.sweeper, &a.mu.warm
	left := uint64(punchStep)
	for range punchRanges {
		if left == 0 {
			return spans
		}
		s, ok := warm.below(w.cursor, pageSize)
		if !ok || warm.total < w.floor+pageSize {
			w.active = false
			if w.floor > 0 && !w.armed {
				w.idleAt = now.Add(idle)
			}
			return spans
		}
		first, last := roundUp(s.start, pageSize), s.end()&^pageMask
		w.cursor = s.start
		if last <= first {
			continue
		}
		size := min(last-first, left, (warm.total-w.floor)&^pageMask)
		if size < last-first {
			w.cursor = s.start + 1
		}
		pages := span{last - size, size}
		warm.cut(pages)
		spans = append(spans, pages)
		left -= size
	}
	return spans
}

func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}
