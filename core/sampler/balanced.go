package sampler

import "slices"

const balancedName = "SeqlenBalancedSampler"

// lengthTag is the tag that says how much a sample weighs; one without it weighs 1.
const lengthTag = "total_lengths"

// Balanced chooses whole groups for all ranks at once and deals them out so that every rank has as many groups and about the
// same total length. The first rank that asks for a batch decides it for all; the shares of the others are promised to them.
type Balanced struct {
	*answers
	n, ranks int
}

// NewBalanced makes one for groups of n and a number of ranks, both at least 1, that remembers nothing.
func NewBalanced(n, ranks int) *Balanced { return &Balanced{newAnswers(balancedName), n, ranks} }

// firstBatch is the number of a batch that has none: 0 in msgpack.
var firstBatch = string([]byte{0})

// Check refuses a batch that is not made of whole groups.
func (s *Balanced) Check(r Request) error {
	if _, err := s.config(r); err != nil {
		return err
	}
	return checkGroups(s.name, r.N, s.n)
}

func (s *Balanced) config(r Request) (config, error) {
	c, err := configOf(s.name, r)
	if !c.batched {
		c.batch = firstBatch
	}
	return c, err
}

// Cached reports whether the batch was decided before.
func (s *Balanced) Cached(r Request) bool {
	c, err := s.config(r)
	return err == nil && s.has(r, c.batch)
}

// Sample returns the rank's share of a batch. A rank beyond their number has none.
func (s *Balanced) Sample(ready Ready, r Request) (Pick, error) {
	c, err := s.config(r)
	if err != nil {
		return Pick{}, err
	}
	if !s.has(r, c.batch) {
		chosen := s.free(ready, r).Groups(s.n, r.N/s.n*s.ranks)
		if len(chosen) == 0 {
			return Pick{}, nil
		}
		shares, err := s.deal(ready, chosen)
		if err != nil {
			return Pick{}, err
		}
		for rank, share := range shares {
			s.keep(r, c.batch, int64(rank), share, false)
		}
	}
	return s.take(r, c.batch, c.rank), nil
}

// deal splits whole groups among the ranks.
func (s *Balanced) deal(ready Ready, chosen []int64) ([][]int64, error) {
	groups := slices.Collect(slices.Chunk(chosen, s.n))
	lengths := make([]float64, len(groups))
	for k, group := range groups {
		for _, index := range group {
			n, err := ready.Number(index, lengthTag, 1)
			if err != nil {
				return nil, err
			}
			lengths[k] += n
		}
	}
	shares := make([][]int64, s.ranks)
	for rank, part := range Partition(lengths, s.ranks, true) {
		for _, k := range part {
			shares[rank] = append(shares[rank], groups[k]...)
		}
	}
	return shares, nil
}
