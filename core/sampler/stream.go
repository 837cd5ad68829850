package sampler

import "transferqueue/core/tqerr"

const streamName = "StreamingTokenBudgetSampler"

// Stream hands out the ready samples in the order in which they came to be, cut into batches whose lengths add up to a token
// budget at most; a sample that alone is beyond it comes alone. A batch is complete when the next sample would not fit, or
// when nothing more will come; a request with the number of a batch beyond the last one is answered with the end. Requests
// without a budget are served as by Groups.
type Stream struct{ Groups }

// NewStream makes one that remembers nothing; n is the size of the groups for requests without a budget.
func NewStream(n int) *Stream { return &Stream{Groups{newAnswers(streamName), n}} }

// Check refuses a budget without rank and batch number.
func (s *Stream) Check(r Request) error {
	c, err := configOf(s.name, r)
	switch {
	case err != nil:
		return err
	case !c.stream:
		return s.Groups.Check(r)
	case !c.ranked || !c.batched:
		return tqerr.New(tqerr.InvalidArgument, "%s: sampling_config needs dp_rank and batch_index beside token_budget", s.name)
	}
	return nil
}

// Cached reports whether the request is to be answered however few samples are ready.
func (s *Stream) Cached(r Request) bool {
	c, err := configOf(s.name, r)
	return err == nil && (c.stream || s.Groups.Cached(r))
}

// Sample returns the next batch of the stream, or what the rank got before.
func (s *Stream) Sample(ready Ready, r Request) (Pick, error) {
	c, err := configOf(s.name, r)
	if err != nil || !c.stream {
		return s.sampleGroups(ready, r, err)
	}
	if s.find(r, c.batch, c.rank) == nil {
		chosen, full, err := fill(s.free(ready, r), c.budget)
		switch {
		case err != nil:
			return Pick{}, err
		case !full && !ready.Final():
			return Pick{}, nil
		}
		s.keep(r, c.batch, c.rank, chosen, len(chosen) == 0)
	}
	return s.take(r, c.batch, c.rank), nil
}

func (s *Stream) sampleGroups(ready Ready, r Request, err error) (Pick, error) {
	if err != nil {
		return Pick{}, err
	}
	return s.Groups.Sample(ready, r)
}

// fill takes samples while they fit; full reports that none would fit any more.
func fill(ready Ready, budget float64) (chosen []int64, full bool, err error) {
	total := 0.0
	for index := range ready.Born() {
		n, err := ready.Number(index, lengthTag, 1)
		if err != nil {
			return nil, false, err
		}
		if len(chosen) > 0 && total+n > budget {
			return chosen, true, nil
		}
		chosen, total = append(chosen, index), total+n
		if total >= budget {
			return chosen, true, nil
		}
	}
	return chosen, false, nil
}
