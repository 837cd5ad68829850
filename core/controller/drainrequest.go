package controller

import (
	"context"
	"maps"
	"slices"
	"time"

	"transferqueue/core/catalog"
	"transferqueue/core/drain"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

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
			return d.dryRun(ctx, &held)
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
		case to.Lost() != nil:
			return tqerr.Wrap(tqerr.Unavailable, to.Lost(), "targets")
		}
	}
	for _, to := range s.nodes.Load().order {
		if to != n && to.Lost() == nil && s.mu.cat.Duty(to.ID()) == catalog.Active {
			return nil
		}
	}
	return tqerr.New(tqerr.InvalidState, "unit %q is the last one that takes samples, nothing could be moved off it", r.Unit)
}

func (d *draining) options() drain.Options {
	r := &d.request
	return drain.Options{
		Slots: r.MaxSlots, Inflight: r.MaxBytes, Rate: r.Rate, Deadline: time.Duration(r.DeadlineMS) * time.Millisecond, Attempts: r.Attempts,
		Began: d.began,
	}
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
	if _, err := s.noteLocked(false, recordDuty, &dutyRecord{Origin: c.origin(), Unit: n.ID(), Duty: uint8(catalog.Active)}); err != nil {
		return nil, err
	}
	s.setDutyLocked(n.ID(), catalog.Active)
	s.doneLocked(c.origin(), nil)
	s.room.Signal()
	return nil, nil
}
