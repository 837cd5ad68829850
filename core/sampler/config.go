package sampler

import (
	"bytes"
	"math"

	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/tqerr"
)

// config is what the samplers here read of a request's sampling_config. Other entries are for other samplers. A rank and a
// batch number of None count as not given.
type config struct {
	ranked  bool
	rank    int64
	batched bool
	batch   string // raw msgpack: whatever tells batches apart may number them
	budget  float64
	stream  bool // a budget is given
}

// configOf reads the config of a request to the sampler of that name.
func configOf(name string, r Request) (c config, err error) {
	if len(r.Sampling) == 0 {
		return c, nil
	}
	dec := msgpack.NewDecoder(bytes.NewReader(r.Sampling))
	n, err := dec.DecodeMapLen()
	if err != nil {
		return c, tqerr.Wrap(tqerr.InvalidArgument, err, "%s: sampling_config is no map", name)
	}
	for range n {
		key, err := dec.DecodeInterface()
		if err != nil {
			return c, tqerr.Wrap(tqerr.InvalidArgument, err, "%s: sampling_config", name)
		}
		raw, err := dec.DecodeRaw()
		if err != nil {
			return c, tqerr.Wrap(tqerr.InvalidArgument, err, "%s: sampling_config[%q]", name, key)
		}
		if text, ok := key.(string); ok {
			if err := c.set(name, text, raw); err != nil {
				return c, err
			}
		}
	}
	if c.stream && name != streamName {
		return c, tqerr.New(tqerr.InvalidArgument, "token_budget is for a %s, the session has a %s", streamName, name)
	}
	return c, nil
}

var rawNil = string([]byte{0xc0})

func (c *config) set(name, key string, raw msgpack.RawMessage) error {
	if string(raw) == rawNil || name == sequentialName && key != "token_budget" {
		return nil
	}
	switch key {
	case "dp_rank":
		if err := msgpack.Unmarshal(raw, &c.rank); err != nil {
			return tqerr.New(tqerr.InvalidArgument, "%s: dp_rank is no whole number", name)
		}
		if c.rank < 0 {
			return tqerr.New(tqerr.InvalidArgument, "%s: dp_rank %d must be greater than or equal to 0", name, c.rank)
		}
		c.ranked = true
	case "batch_index":
		c.batch, c.batched = string(raw), true
	case "token_budget":
		if err := msgpack.Unmarshal(raw, &c.budget); err != nil || !(c.budget > 0) || math.IsInf(c.budget, 0) {
			return tqerr.New(tqerr.InvalidArgument, "%s: token_budget must be a number above 0", name)
		}
		c.stream = true
	}
	return nil
}

// checkGroups refuses a batch that is not made of whole groups.
func checkGroups(name string, size, n int) error {
	if size%n != 0 {
		return tqerr.New(tqerr.InvalidArgument, "%s: batch_size %d must be a multiple of n_samples_per_prompt %d", name, size, n)
	}
	return nil
}
