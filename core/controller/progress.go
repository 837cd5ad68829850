package controller

import "transferqueue/core/wire"

// progress says how far a task is, in a few bytes however large the partition.
func (c *call) progress() (any, error) {
	var r wire.TaskRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	samples, consumed, known := c.s.mu.cat.Progress(r.Partition, r.Task)
	return &wire.ProgressReply{Known: known, Samples: samples, Consumed: consumed}, nil
}
