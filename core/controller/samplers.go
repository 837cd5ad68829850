package controller

import (
	"context"

	"transferqueue/core/sampler"
	"transferqueue/core/wire"
)

// registerSampler replaces the sampler. Nothing of what the old one remembers is carried over; fetches that wait ask the new
// one.
func (c *call) registerSampler() (any, error) {
	var r wire.RegisterSamplerRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	spec := sampler.Spec{Name: r.Name, Group: r.Group, Ranks: r.Ranks, Pickled: r.Pickled}
	fresh, err := sampler.Make(spec, c.s.opts.Python, c.s.opts.SamplerTime)
	if err != nil {
		return nil, err
	}
	return nil, c.s.useSampler(&samplerRecord{r.Name, r.Group, r.Ranks, r.Pickled}, fresh)
}

func (s *Server) useSampler(record *samplerRecord, fresh sampler.Sampler) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, err := s.noteLocked(false, recordSampler, record); err != nil {
		return err
	}
	s.mu.registered, s.mu.memory = record, nil
	s.record(fresh)
	s.mu.sampler = fresh
	partitions := make([]string, 0, len(s.mu.waiters))
	for name := range s.mu.waiters {
		partitions = append(partitions, name)
	}
	for _, name := range partitions {
		s.changed(name, nil)
	}
	return nil
}

// Sampler returns the sampler of the session.
func (s *Server) Sampler() sampler.Sampler {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.sampler
}

// CutWithSampler calls cut with the state of the sampler, and with the catalog locked for reading: what both say is of the same
// moment. A sampler that Python runs is asked before, while no pick of it is on its way.
func (s *Server) CutWithSampler(ctx context.Context, cut func(name string, state []byte) error) error {
	for {
		p, isPython := s.Sampler().(*sampler.Python)
		if !isPython {
			s.mu.RLock()
			defer s.mu.RUnlock()
			state, err := s.mu.sampler.Save()
			if err != nil {
				return err
			}
			return cut(s.mu.sampler.Name(), state)
		}
		if met, err := s.cutWithPython(ctx, p, cut); met || err != nil {
			return err
		}
	}
}

// cutWithPython reports false when the sampler was replaced meanwhile.
func (s *Server) cutWithPython(ctx context.Context, p *sampler.Python, cut func(string, []byte) error) (met bool, err error) {
	done, err := p.Turn(ctx)
	if err != nil {
		return false, err
	}
	defer done()
	state, err := p.SaveInTurn(ctx)
	if err != nil {
		return false, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.mu.sampler != sampler.Sampler(p) {
		return false, nil
	}
	return true, cut(p.Name(), state)
}

func (c *call) stream() (any, error) {
	var r wire.StreamRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	completed, drained := c.s.mu.cat.Stream(r.Partition, r.Task)
	return &wire.StreamReply{Completed: completed, Drained: drained}, nil
}
