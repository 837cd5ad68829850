package controller

import (
	"transferqueue/core/catalog"
	"transferqueue/core/schema"
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
		samples = samplesOf(r.Samples)
	}
	cells := func() *writeSet {
		if samples != nil {
			return newWriteSet(r.Partition, r.Fields, samples, false)
		}
		return newWriteSet(r.Partition, r.Fields, s.mu.cat.Existing(&catalog.Write{Partition: r.Partition, Keys: r.Keys}), false)
	}
	return c.writing(instant{cells: cells, do: func() (any, error) {
		var cl *catalog.Clearing
		switch {
		case r.Fields != nil:
			cl = s.mu.cat.ClearFields(r.Partition, r.Keys, samples, r.Fields)
		case samples != nil:
			cl = s.mu.cat.StartClearSamples(r.Partition, samples)
		default:
			cl = s.mu.cat.StartClearKeys(r.Partition, r.Keys)
		}
		c.samples = len(cl.Samples)
		s.deleteLocked(cl)
		if r.Fields == nil {
			s.mu.sampler.Cleared(r.Partition, indexesOf(cl.Samples))
		}
		s.mu.cat.FinishClear(cl)
		s.changed(cl.Partition, cl.Events)
		return nil, nil
	}})
}

func indexesOf(samples []schema.Sample) []int64 {
	out := make([]int64, len(samples))
	for i, s := range samples {
		out[i] = s.Index
	}
	return out
}

// deleteLocked deletes on the units what the catalog has hidden already.
func (s *Server) deleteLocked(cl *catalog.Clearing) {
	if len(cl.Samples) == 0 {
		return
	}
	for _, sh := range (&txn{s: s}).split(cl.Units) {
		sh.unit.Delete(cl.Partition, cl.Fields, pickRuns(cl.Samples, sh.runs))
	}
}

func (c *call) clearPartition() (any, error) {
	var r wire.PartitionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	s := c.s
	cells := func() *writeSet { return newWriteSet(r.Partition, nil, nil, true) }
	return c.writing(instant{cells: cells, do: func() (any, error) {
		cl := s.mu.cat.StartClearPartition(r.Partition)
		c.samples = len(cl.Samples)
		s.deleteLocked(cl)
		s.mu.cat.FinishClear(cl)
		s.mu.sampler.ClearPartition(r.Partition)
		s.changed(cl.Partition, cl.Events)
		return nil, nil
	}})
}
