package sampler

import "transferqueue/core/tqerr"

const rankAwareName = "RankAwareSampler"

// RankAware hands out the samples with the smallest indexes, and to the same rank the same ones again for the same batch.
type RankAware struct{ *answers }

// NewRankAware makes one that remembers nothing.
func NewRankAware() *RankAware { return &RankAware{newAnswers(rankAwareName)} }

// Check refuses a request without rank and batch number.
func (s *RankAware) Check(r Request) error {
	c, err := configOf(s.name, r)
	if err == nil && (!c.ranked || !c.batched) {
		err = tqerr.New(tqerr.InvalidArgument, "%s: sampling_config needs dp_rank and batch_index", s.name)
	}
	return err
}

// Cached reports whether the rank was answered before.
func (s *RankAware) Cached(r Request) bool {
	c, err := configOf(s.name, r)
	return err == nil && s.find(r, c.batch, c.rank) != nil
}

// Sample returns the first N ready samples, or what the rank got before.
func (s *RankAware) Sample(ready Ready, r Request) (Pick, error) {
	c, err := configOf(s.name, r)
	if err != nil {
		return Pick{}, err
	}
	if s.find(r, c.batch, c.rank) == nil {
		first := s.free(ready, r).First(r.N)
		if len(first) < r.N {
			return Pick{}, nil
		}
		s.keep(r, c.batch, c.rank, first, false)
	}
	return s.take(r, c.batch, c.rank), nil
}
