package controller

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// drains are the jobs of a session that move everything off a unit, by number. Guarded by Server.mu.
type drains struct {
	byID  map[uint64]*draining
	last  uint64
	moves int // that are no drains
	under sync.WaitGroup
}

// keptDrains is how many jobs that have ended are remembered.
const keptDrains = 64

// draining is one such job. What it needs of the server has its methods here.
type draining struct {
	mover
	id      uint64
	request wire.DrainRequest
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
	r := &drainRecord{Origin: o, Request: d.request, Status: wire.JobReply{Job: d.id}}
	if d.ended != nil {
		r.Status = *d.ended
	}
	return r
}

// named is the unit of a name, nil: there is none.
func (s *Server) unitNamed(name string) node {
	for _, n := range s.nodes.Load().order {
		if n.Name() == name {
			return n
		}
	}
	return nil
}

func (c *call) drain() (any, error) {
	r := wire.DrainRequest{}
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if err := c.s.checkDrain(&r); err != nil {
		return nil, err
	}
	return c.later(func(ctx context.Context) (any, error) {
		d := c.s.newDraining(&r)
		held, err := d.Held(ctx, false)
		if err != nil {
			return nil, err
		}
		if r.DryRun {
			return d.dryRun(&held)
		}
		return c.s.startDraining(d, held, c.origin())
	})
}

// checkDrain refuses what makes no sense.
func (s *Server) checkDrain(r *wire.DrainRequest) error {
	bad := func(what string, got, want any) error {
		return tqerr.New(tqerr.InvalidArgument, "%s: got %v, want %v", what, got, want)
	}
	switch {
	case r.MaxSlots < 1 || r.MaxSlots > mostSlots:
		return bad("max_slots", r.MaxSlots, "1 to 64")
	case r.MaxBytes < 1:
		return bad("max_inflight_bytes", r.MaxBytes, "more than 0")
	case r.Rate < 0:
		return bad("rate_bytes_per_s", r.Rate, "more than 0")
	case r.DeadlineMS < 0:
		return bad("deadline_s", r.DeadlineMS, "more than 0")
	case r.Attempts < 1:
		return bad("max_attempts", r.Attempts, "1 or more")
	case !slices.Contains(tierPolicies, r.Tiers):
		return bad("tier_policy", r.Tiers, tierPolicies)
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.drainableLocked(r)
}

// mostSlots bounds how many batches move at a time.
const mostSlots = 64

// drainableLocked fails when a unit cannot be drained. Called with mu held.
func (s *Server) drainableLocked(r *wire.DrainRequest) error {
	n := s.unitNamed(r.Unit)
	if n == nil {
		return tqerr.New(tqerr.NotFound, "unit %q does not exist", r.Unit)
	}
	if d := s.mu.drains.of(r.Unit); d != nil {
		return tqerr.New(tqerr.InvalidState, "unit %q is being drained already, by job %d", r.Unit, d.id)
	}
	if s.mu.cat.Duty(n.ID()) == catalog.Drained {
		return tqerr.New(tqerr.InvalidState, "unit %q is drained already", r.Unit)
	}
	if err := n.Lost(); err != nil {
		return err
	}
	for _, name := range r.Targets {
		switch to := s.unitNamed(name); {
		case to == nil:
			return tqerr.New(tqerr.NotFound, "targets: unit %q does not exist", name)
		case name == r.Unit:
			return tqerr.New(tqerr.InvalidArgument, "targets: unit %q is the one to be drained", name)
		case s.mu.cat.Duty(to.ID()) != catalog.Active:
			return tqerr.New(tqerr.InvalidState, "targets: unit %q is %s and takes no samples", name, s.mu.cat.Duty(to.ID()))
		}
	}
	for _, to := range s.nodes.Load().order {
		if to != n && to.Lost() == nil && s.mu.cat.Duty(to.ID()) == catalog.Active {
			return nil
		}
	}
	return tqerr.New(tqerr.InvalidState, "unit %q is the last one that takes samples, nothing could be moved off it", r.Unit)
}

func (s *Server) newDraining(r *wire.DrainRequest) *draining {
	d := &draining{request: *r, mover: mover{s: s, from: s.unitNamed(r.Unit), tiers: r.Tiers}}
	if len(r.Targets) > 0 {
		d.targets = r.Targets
	}
	return d
}

func (d *draining) options() drain.Options {
	r := &d.request
	return drain.Options{
		Slots: r.MaxSlots, Inflight: r.MaxBytes, Rate: r.Rate, Deadline: time.Duration(r.DeadlineMS) * time.Millisecond, Attempts: r.Attempts,
	}
}

// dryRun says what would be moved, and whether there is room for it.
func (d *draining) dryRun(held *drain.Held) (any, error) {
	reply := d.reply(drain.New(d, d.options(), held).Status())
	room, need := int64(0), held.Bytes[drain.Memory]+held.Bytes[drain.LocalDisk]
	d.s.mu.RLock()
	defer d.s.mu.RUnlock()
	for _, n := range d.s.nodes.Load().order {
		if n.ID() != d.from.ID() && n.Lost() == nil && d.s.mu.cat.Duty(n.ID()) == catalog.Active && (d.targets == nil || slices.Contains(d.targets, n.Name())) {
			room += min(max(n.Stats().Room(), 0), need)
		}
	}
	if room < need {
		reply.Blocked = []wire.JobBlocked{{Reason: drain.NoCapacity, Count: held.Samples}}
	}
	return reply, nil
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
	s.mu.cat.SetDuty(d.from.ID(), catalog.Draining)
	s.mu.drains.add(d)
	d.job = drain.New(d, d.options(), &held)
	reply := d.reply(d.job.Status())
	s.doneLocked(o, reply)
	d.job.Start(s.ctx)
	return reply, nil
}

// waitForMoves returns when nothing is copied any more, after the server was told to close.
func (s *Server) waitForMoves() {
	s.mu.RLock()
	jobs := slices.Collect(maps.Values(s.mu.drains.byID))
	s.mu.RUnlock()
	for _, d := range jobs {
		if d.job != nil {
			<-d.job.Done()
		}
	}
	s.mu.drains.under.Wait()
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
func (d *draining) Move(ctx context.Context, b *drain.Batch, limit int64) (drain.Moved, error) {
	return d.move(ctx, b, limit)
}

// Freed implements drain.Session.
func (d *draining) Freed() <-chan struct{} { return d.s.room.Wait() }

// Held implements drain.Session.
func (d *draining) Held(ctx context.Context, recount bool) (held drain.Held, err error) {
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
	held.Samples = d.s.mu.cat.SamplesOn(d.from.ID())
	d.s.mu.RUnlock()
	if recount && held.Samples == 0 && st.Cells > 0 && held.Staged == 0 {
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
	s.mu.cat.SetDuty(id, duty)
	return err
}

// reply is the status as it is told.
func (d *draining) reply(st drain.Status) *wire.JobReply {
	tier := func(t int) wire.JobTier {
		return wire.JobTier{CellsTotal: st.Total.Cells[t], CellsMoved: st.Moved.Cells[t], BytesTotal: st.Total.Bytes[t], BytesMoved: st.Moved.Bytes[t]}
	}
	out := &wire.JobReply{
		Job: d.id, Unit: d.request.Unit, State: string(st.State), Phase: st.Phase, Memory: tier(drain.Memory), Disk: tier(drain.LocalDisk),
		Dropped: st.Dropped, Failed: st.Failed, Remain: st.Remain, Attempts: st.Attempts, ElapsedMS: st.Elapsed.Milliseconds(), ETAMS: -1, Err: st.Err,
	}
	if st.ETA >= 0 {
		out.ETAMS = st.ETA.Milliseconds()
	}
	for _, reason := range slices.Sorted(maps.Keys(st.Blocked)) {
		out.Blocked = append(out.Blocked, wire.JobBlocked{Reason: reason, Count: st.Blocked[reason]})
	}
	for _, f := range st.Cells {
		out.Cells = append(out.Cells, wire.JobCell{
			Partition: f.Partition, Key: f.Key, Keyed: f.Keyed, Index: f.Sample.Index, Field: f.Field, Attempts: f.Attempts, Reason: f.Reason,
		})
	}
	return out
}

func (d *draining) status() *wire.JobReply {
	if d.job == nil {
		return d.ended
	}
	return d.reply(d.job.Status())
}

func (c *call) job() (any, error) {
	var r wire.JobRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	d := c.s.mu.drains.byID[r.Job]
	c.s.mu.RUnlock()
	if d == nil {
		return nil, tqerr.New(tqerr.NotFound, "job %d does not exist, or has ended long ago", r.Job)
	}
	if d.job == nil {
		return d.ended, nil
	}
	if r.Cancel {
		d.job.Cancel()
	}
	if !r.Wait {
		return d.status(), nil
	}
	return c.later(func(ctx context.Context) (any, error) {
		select {
		case <-d.job.Done():
			if st := d.status(); drain.State(st.State).Final() {
				return st, nil
			}
			return nil, errClosed
		case <-ctx.Done():
			return nil, ctxError(ctx, "unit \""+d.request.Unit+"\" is drained")
		}
	})
}

// onDrained reports whether something was staged on a unit which has become empty since it was chosen. One that is told to be
// drained gets nothing any more: what is staged before that keeps it from being so.
func (t *txn) onDrained() bool {
	t.s.mu.RLock()
	defer t.s.mu.RUnlock()
	return slices.ContainsFunc(t.shares, func(sh share) bool {
		return sh.staged != nil && t.s.mu.cat.Duty(sh.unit.ID()) == catalog.Drained
	})
}

func (c *call) uncordon() (any, error) {
	var r wire.UncordonRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	s := c.s
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.unitNamed(r.Unit)
	if n == nil {
		return nil, tqerr.New(tqerr.NotFound, "unit %q does not exist", r.Unit)
	}
	if d := s.mu.drains.of(r.Unit); d != nil {
		return nil, tqerr.New(tqerr.InvalidState, "unit %q is being drained by job %d; cancel that first", r.Unit, d.id)
	}
	if _, err := s.noteLocked(false, recordDuty, &dutyRecord{Unit: n.ID(), Duty: uint8(catalog.Active)}); err != nil {
		return nil, err
	}
	s.mu.cat.SetDuty(n.ID(), catalog.Active)
	s.doneLocked(c.origin(), nil)
	s.room.Signal()
	return nil, nil
}

func (r *recovering) move(_ uint64, record []byte) error {
	var x moveRecord
	err := decodeRecord(record, &x)
	if err == nil {
		err = r.s.mu.cat.Relocate(x.Partition, samplesOf(&x.Samples), x.From, x.To)
	}
	if err != nil {
		return tqerr.Wrap(tqerr.Corruption, err, "samples that have moved cannot be moved again")
	}
	return nil
}

func (r *recovering) duty(_ uint64, record []byte) error {
	var x dutyRecord
	err := decodeRecord(record, &x)
	if err == nil && x.Duty > uint8(catalog.Drained) {
		err = tqerr.New(tqerr.Corruption, "unit %d: duty %d", x.Unit, x.Duty)
	}
	if err == nil {
		r.s.mu.cat.SetDuty(x.Unit, catalog.Duty(x.Duty))
	}
	return err
}

// drain takes a job: one that has not ended goes on when everything is in its place.
func (r *recovering) drain(number uint64, record []byte) error {
	var x drainRecord
	if err := decodeRecord(record, &x); err != nil {
		return err
	}
	s := r.s
	d := &draining{id: x.Status.Job, request: x.Request}
	duty := catalog.Draining
	if x.Status.State != "" {
		status := x.Status
		d.ended = &status
		duty = catalog.Cordoned
		if status.State == string(drain.Succeeded) {
			duty = catalog.Drained
		}
	}
	s.mu.drains.add(d)
	if x.Origin.Sequence != 0 {
		s.doneLocked(x.Origin, &wire.JobReply{Job: d.id, Unit: x.Request.Unit, State: string(drain.Pending), ETAMS: -1})
	}
	for _, u := range r.units {
		if number > 0 && u.Name == x.Request.Unit { // else the state has it
			s.mu.cat.SetDuty(u.ID, duty)
		}
	}
	return nil
}

// drainAgain lets the jobs go on that an earlier life has begun.
func (s *Server) drainAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.mu.drains.byID {
		if d.ended != nil {
			continue
		}
		again := s.newDraining(&d.request)
		d.mover = again.mover
		d.job = drain.New(d, d.options(), nil)
		d.job.Start(s.ctx)
	}
}
