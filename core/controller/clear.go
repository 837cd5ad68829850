package controller

import (
	"context"

	"transferqueue/core/catalog"
	"transferqueue/core/guard"
	"transferqueue/core/schema"
	"transferqueue/core/unit"
	"transferqueue/core/wire"
)

func (c *call) clear() (any, error) {
	var r wire.ClearRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	if r.Fields != nil {
		c.kind = kindClearFields
	}
	s := c.s
	var samples []schema.Sample
	if r.Samples != nil {
		s.identify(r.Partition, r.Samples)
		samples = samplesOf(r.Samples)
	}
	cells := func() *writeSet {
		if samples != nil {
			return newWriteSet(r.Partition, r.Fields, samples, false)
		}
		return newWriteSet(r.Partition, r.Fields, s.mu.cat.Existing(&catalog.Write{Partition: r.Partition, Keys: r.Keys}), false)
	}
	record := &clearRecord{Origin: c.origin(), Partition: r.Partition, Keys: r.Keys, Samples: r.Samples, Fields: r.Fields}
	return c.clearing(record, cells)
}

// hide begins a clear, or does one of fields.
func hide(cat *catalog.Catalog, r *clearRecord) *catalog.Clearing {
	var samples []schema.Sample
	if r.Samples != nil {
		samples = samplesOf(r.Samples)
	}
	switch {
	case r.Whole:
		return cat.StartClearPartition(r.Partition)
	case r.Fields != nil:
		return cat.ClearFields(r.Partition, r.Keys, samples, r.Fields)
	case samples != nil:
		return cat.StartClearSamples(r.Partition, samples)
	default:
		return cat.StartClearKeys(r.Partition, r.Keys)
	}
}

// forgetCleared tells the sampler what is gone.
func (s *Server) forgetCleared(cl *catalog.Clearing, whole bool) {
	if whole {
		s.mu.sampler.ClearPartition(cl.Partition)
	}
	s.mu.sampler.Cleared(cl.Partition, indexesOf(cl.Samples))
}

// clearing hides samples or fields, deletes their cells on the units, and releases the indexes when the units have answered.
// That happens even when the client does not wait so long.
func (c *call) clearing(record *clearRecord, cells func() *writeSet) (any, error) {
	s := c.s
	w := &instant{cells: cells}
	w.do = func() (any, error) {
		change, err := s.noteLocked(true, recordClear, record)
		if err != nil {
			return nil, err
		}
		cl := hide(s.mu.cat, record)
		c.samples = len(cl.Samples)
		if cl.Fields == nil {
			s.forgetCleared(cl, record.Whole)
		}
		s.doneLocked(record.Origin, nil)
		d := s.deleteLocked(cl, change)
		if len(d.waiting) == 0 && d.err == nil {
			s.finishLocked(cl)
			s.changed(cl.Partition, cl.Events)
			return nil, nil
		}
		s.changed(cl.Partition, cl.Events)
		finished := make(chan struct{})
		guard.Go("controller clear", func() {
			defer close(finished)
			s.finish(d)
		})
		w.rest = func(ctx context.Context) (any, error) {
			select {
			case <-finished:
				return nil, d.err
			case <-ctx.Done():
				return nil, ctxError(ctx, "units delete what was cleared")
			}
		}
		return nil, nil
	}
	return c.writing(w)
}

func indexesOf(samples []schema.Sample) []int64 {
	out := make([]int64, len(samples))
	for i, s := range samples {
		out[i] = s.Index
	}
	return out
}

// deletion is a clear whose units have not all answered.
type deletion struct {
	cl      *catalog.Clearing
	waiting map[uint32]unit.Deleting
	failed  map[uint32]bool // units
	err     error           // of one of them
}

// deleteLocked deletes on the units what the catalog has hidden already. A unit that is gone has nothing to delete any more;
// who clears samples that were on it is told once, and finishes the clear by a second one.
func (s *Server) deleteLocked(cl *catalog.Clearing, change uint64) *deletion {
	d := &deletion{cl: cl}
	if len(cl.Samples) == 0 {
		return d
	}
	for _, sh := range (&txn{s: s}).split(cl.Units) {
		if err := sh.unit.Lost(); err != nil {
			if int(sh.runs[0]) < cl.Fresh {
				d.fail(sh.unit.ID(), err)
			}
			continue
		}
		if waiting := sh.unit.Delete(cl.Partition, cl.Fields, pickRuns(cl.Samples, sh.runs), change); waiting != nil {
			if d.waiting == nil {
				d.waiting = map[uint32]unit.Deleting{}
			}
			d.waiting[sh.unit.ID()] = waiting
		}
	}
	return d
}

func (d *deletion) fail(id uint32, err error) {
	if d.failed == nil {
		d.failed = map[uint32]bool{}
	}
	d.failed[id], d.err = true, err
}

// wait returns when all units have deleted or failed.
func (d *deletion) wait() {
	for id, waiting := range d.waiting {
		<-waiting.Done()
		if err := waiting.Err(); err != nil {
			d.fail(id, err)
		}
	}
}

// finish waits for the units and releases the indexes of those that have deleted.
func (s *Server) finish(d *deletion) {
	d.wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.err != nil {
		d.cl = d.cl.Without(d.failed)
	}
	s.finishLocked(d.cl)
}

// finishLocked releases indexes. When that cannot be written down they stay as they are: a later clear finds them again, or
// the next start.
func (s *Server) finishLocked(cl *catalog.Clearing) {
	if cl.Fields != nil || !s.mu.cat.Current(cl) {
		return
	}
	record := &finishRecord{Partition: cl.Partition, Samples: *wireSamples(cl.Samples), Whole: cl.Whole()}
	if _, err := s.noteLocked(true, recordFinish, record); err == nil {
		s.mu.cat.FinishClear(cl)
	}
}

func (c *call) clearPartition() (any, error) {
	var r wire.PartitionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	cells := func() *writeSet { return newWriteSet(r.Partition, nil, nil, true) }
	return c.clearing(&clearRecord{Origin: c.origin(), Partition: r.Partition, Whole: true}, cells)
}
