package sampler

const groupName = "GRPOGroupNSampler"

// Groups hands out whole groups of n samples that came to be one right after another, the oldest first. A request with a rank
// gets the same samples again for the same batch.
type Groups struct {
	*answers
	n int
}

// NewGroups makes one for groups of n, at least 1, that remembers nothing.
func NewGroups(n int) *Groups { return &Groups{newAnswers(groupName), n} }

// Check refuses a batch that is not made of whole groups.
func (s *Groups) Check(r Request) error {
	if _, err := configOf(s.name, r); err != nil {
		return err
	}
	return checkGroups(s.name, r.N, s.n)
}

// Cached reports whether the rank was answered before.
func (s *Groups) Cached(r Request) bool {
	c, err := configOf(s.name, r)
	return err == nil && c.ranked && s.find(r, c.batch, c.rank) != nil
}

// Sample returns the oldest groups, or what the rank got before.
func (s *Groups) Sample(ready Ready, r Request) (Pick, error) {
	c, err := configOf(s.name, r)
	if err != nil {
		return Pick{}, err
	}
	if c.ranked && s.find(r, c.batch, c.rank) != nil {
		return s.take(r, c.batch, c.rank), nil
	}
	chosen := s.free(ready, r).Groups(s.n, r.N/s.n)
	if len(chosen) == 0 {
		return Pick{}, nil
	}
	if !c.ranked {
		return Pick{Sampled: chosen, Consumed: chosen}, nil
	}
	s.keep(r, c.batch, c.rank, chosen, false)
	return s.take(r, c.batch, c.rank), nil
}
