package controller

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// drains are the jobs of a session that move everything off a unit, by number. Guarded by Server.mu.
type drains struct {
	byID   map[uint64]*draining
	last   uint64
	moves  int                // that are no drains
	beside map[string]*beside // by the unit that gives
}

// beside counts batches that move off a unit by no drain of it.
type beside struct{ begun, ended uint64 }

// besideOf is that count of a unit.
func (d *drains) besideOf(unit string) *beside {
	if d.beside == nil {
		d.beside = map[string]*beside{}
	}
	if d.beside[unit] == nil {
		d.beside[unit] = &beside{}
	}
	return d.beside[unit]
}

// keptDrains is how many jobs that have ended are remembered.
const keptDrains = 64

// draining is one such job. What it needs of the server has its methods here.
type draining struct {
	mover
	id      uint64
	request wire.DrainRequest
	began   time.Time      // or later by how long no controller has lived
	ended   *wire.JobReply // how it has ended, in an earlier life too
	job     *drain.Job     // nil: it has ended in an earlier life
}

var _ drain.Session = (*draining)(nil)

// open reports that something is being moved. Called with mu held.
func (d *drains) open() bool {
	if d.moves > 0 {
		return true
	}
	for _, x := range d.byID {
		if x.ended == nil {
			return true
		}
	}
	return false
}

// of is the job that drains a unit now, nil: none.
func (d *drains) of(unit string) *draining {
	for _, x := range d.byID {
		if x.ended == nil && x.request.Unit == unit {
			return x
		}
	}
	return nil
}

func (d *drains) add(x *draining) {
	if d.byID == nil {
		d.byID = map[uint64]*draining{}
	}
	d.byID[x.id] = x
	d.last = max(d.last, x.id)
	ids := slices.Sorted(maps.Keys(d.byID))
	for _, id := range ids {
		if len(d.byID) > keptDrains && d.byID[id].ended != nil {
			delete(d.byID, id)
		}
	}
}

// records describes all jobs for a state of the journal.
func (d *drains) records() []*drainRecord {
	var out []*drainRecord
	for _, id := range slices.Sorted(maps.Keys(d.byID)) {
		out = append(out, d.byID[id].record(origin{}))
	}
	return out
}

func (d *draining) record(o origin) *drainRecord {
	r := &drainRecord{Origin: o, Request: d.request, Status: wire.JobReply{Job: d.id}, SpentMS: time.Since(d.began).Milliseconds()}
	if d.ended != nil {
		r.Status = *d.ended
	}
	return r
}

// unitNamed is the unit of a name, nil: there is none.
func (s *Server) unitNamed(name string) node {
	for _, n := range s.nodes.Load().order {
		if n.Name() == name {
			return n
		}
	}
	return nil
}

func (s *Server) newDraining(r *wire.DrainRequest) *draining {
	d := &draining{request: *r, began: time.Now(), mover: mover{s: s, from: s.unitNamed(r.Unit), tiers: r.Tiers}}
	if len(r.Targets) > 0 {
		d.targets = r.Targets
	}
	return d
}

// startDraining begins a job, unless the world has changed.
func (s *Server) startDraining(d *draining, held drain.Held, o origin) (*wire.JobReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.drainableLocked(&d.request); err != nil {
		return nil, err
	}
	if s.ctx.Err() != nil {
		return nil, errClosed
	}
	if s.unitNamed(d.request.Unit) != d.from {
		return nil, tqerr.New(tqerr.Unavailable, "unit %q was started anew just now, try again", d.request.Unit)
	}
	d.id = s.mu.drains.last + 1
	if _, err := s.noteLocked(true, recordDrain, d.record(o)); err != nil {
		return nil, err
	}
	s.setDutyLocked(d.from.ID(), catalog.Draining)
	s.mu.drains.add(d)
	d.job = drain.New(d, d.options(), &held)
	reply := d.reply(d.job.Status())
	s.doneLocked(o, reply)
	d.runLocked()
	return reply, nil
}

// underway counts what copies samples, so that Close can wait for its end. It has a lock of its own, because mu may never become
// free when a handler has panicked.
type underway struct {
	mu     sync.Mutex
	all    sync.WaitGroup
	closed bool
}

// begin counts something until end is called; false: nothing begins any more.
func (u *underway) begin() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.all.Add(1)
	}
	return !u.closed
}

func (u *underway) end() { u.all.Done() }

// close returns when nothing is copied any more.
func (u *underway) close() {
	u.mu.Lock()
	u.closed = true
	u.mu.Unlock()
	u.all.Wait()
}

// runLocked starts a job when the journal has it for good, so that copies are looked for that a crash leaves. It does not when the
// server closes.
func (d *draining) runLocked() {
	if !d.s.moving.begin() {
		return
	}
	guard.Go("drain", func() {
		defer d.s.moving.end()
		d.s.settle(d.s.ctx)
		d.job.Start(d.s.ctx)
		d.keepTime()
	})
}

// keepTime writes down from time to time how much of the deadline has been spent, until the job has ended.
func (d *draining) keepTime() {
	var again <-chan time.Time
	if deadline := d.options().Deadline; deadline > 0 && d.s.journal != nil {
		ticker := time.NewTicker(min(max(deadline/20, time.Second), time.Minute))
		defer ticker.Stop()
		again = ticker.C
	}
	for {
		select {
		case <-d.job.Done():
			return
		case <-again:
			d.s.mu.Lock()
			if d.ended == nil {
				_, _ = d.s.noteLocked(false, recordDrain, d.record(origin{})) // at worst the next life takes longer
			}
			d.s.mu.Unlock()
		}
	}
}

// List implements drain.Session.
func (d *draining) List(from catalog.Cursor, most int) (b drain.Batch, next catalog.Cursor, end bool) {
	d.s.mu.RLock()
	defer d.s.mu.RUnlock()
	var samples []schema.Sample
	b.Partition, samples, next, end = d.s.mu.cat.Residents(d.from.ID(), from, most)
	b.Samples = samples
	return b, next, end
}

// Move implements drain.Session.
func (d *draining) Move(ctx context.Context, b *drain.Batch, limit, most int64) (drain.Moved, error) {
	return d.move(ctx, b, limit, most)
}

// Freed implements drain.Session.
func (d *draining) Freed() <-chan struct{} { return d.s.room.Wait() }

// Held implements drain.Session.
func (d *draining) Held(ctx context.Context, recount bool) (held drain.Held, err error) {
	d.s.mu.Lock()
	moves := d.s.mu.drains.besideOf(d.from.Name())
	ended := moves.ended
	d.s.mu.Unlock()
	if err := d.from.sync(ctx); err != nil {
		return held, d.sourceError(err)
	}
	if err := d.from.Lost(); err != nil {
		return held, &drain.LostError{Cause: err}
	}
	n, st := d.from.Counters(), d.from.Stats()
	held.Cells = [drain.NumTiers]int64{n.MemoryCells, n.DiskCells}
	held.Bytes = [drain.NumTiers]int64{n.MemoryLogical, n.DiskLogical}
	held.Leases, held.Staged, held.Other = st.Leases, st.Staged, st.MemoryUsed+st.DiskUsed+st.Staging
	d.s.mu.RLock()
	held.Samples, held.Moving = d.s.mu.cat.SamplesOn(d.from.ID()), moves.begun != ended
	d.s.mu.RUnlock()
	if recount && held.Samples == 0 && st.Cells > 0 && held.Staged == 0 && d.s.barrier() == nil {
		return held, d.sweep(ctx)
	}
	return held, nil
}

// sweep deletes copies of cells that have moved, or were cleared, which the unit has kept against expectation: no sample lives on it.
func (d *draining) sweep(ctx context.Context) error {
	stock, err := d.from.Inventory(ctx)
	if err != nil {
		return d.sourceError(err)
	}
	for i := range stock {
		d.from.Delete(stock[i].Partition, []string{stock[i].Column.Field}, stock[i].Samples, 0)
	}
	return nil
}

// End implements drain.Session.
func (d *draining) End(st drain.Status) error {
	s := d.s
	s.mu.Lock()
	defer s.mu.Unlock()
	duty := catalog.Cordoned
	id := d.from.ID()
	if now := s.unitNamed(d.request.Unit); now != nil {
		id = now.ID() // it may have come back
	}
	d.ended = d.reply(st)
	err := func() error {
		if st.State != drain.Succeeded {
			return nil
		}
		if n := s.mu.cat.SamplesOn(id); n > 0 || id != d.from.ID() {
			return tqerr.New(tqerr.Internal, "unit %q holds nothing, but %d samples live on it", d.request.Unit, n)
		}
		duty = catalog.Drained
		return nil
	}()
	if err == nil {
		_, err = s.noteLocked(true, recordDrain, d.record(origin{}))
	}
	if err != nil {
		d.ended.State, d.ended.Err, duty = string(drain.Failed), err.Error(), catalog.Cordoned
	}
	s.setDutyLocked(id, duty)
	return err
}

// setDutyLocked changes what a unit does. Called with mu held.
func (s *Server) setDutyLocked(id uint32, d catalog.Duty) {
	s.mu.cat.SetDuty(id, d)
	s.cordonedLocked()
}

// cordonedLocked notes whether every unit takes samples.
func (s *Server) cordonedLocked() {
	s.cordoned.Store(slices.ContainsFunc(s.nodes.Load().order, func(n node) bool { return s.mu.cat.Duty(n.ID()) != catalog.Active }))
}
