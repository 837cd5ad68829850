package controller

import (
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
	c.s.useSampler(fresh)
	return nil, nil
}

func (s *Server) useSampler(fresh sampler.Sampler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.sampler = fresh
	partitions := make([]string, 0, len(s.mu.waiters))
	for name := range s.mu.waiters {
		partitions = append(partitions, name)
	}
	for _, name := range partitions {
		s.changed(name, nil)
	}
}

// Sampler returns the sampler of the session. Save and Load of one that Python runs wait for its calls, which may read from
// the session: they must not be called with the catalog locked.
func (s *Server) Sampler() sampler.Sampler {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.mu.sampler
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
