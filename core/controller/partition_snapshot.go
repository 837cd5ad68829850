package controller

import (
	"transferqueue/core/wire"
)

// snapshot answers OpSnapshot: one partition as it is at one moment.
func (c *call) snapshot() (any, error) {
	var r wire.PartitionRequest
	if err := c.decode(&r); err != nil {
		return nil, err
	}
	c.s.mu.RLock()
	defer c.s.mu.RUnlock()
	p := c.s.mu.cat.PartitionSnapshot(r.Partition)
	if p == nil {
		return &wire.SnapshotReply{}, nil
	}
	reply := &wire.SnapshotReply{Known: true, Tags: p.Tags, Reserved: p.Reserved, Keys: p.Keys, KeyIndexes: p.KeyIndexes}
	reply.Samples.Indexes, reply.Samples.Generations = indexLists(p.Samples)
	for i := range p.Fields {
		f := &p.Fields[i]
		reply.Fields = append(reply.Fields, wire.SnapshotField{Holders: f.Holders, Column: wire.Column(f.Column)})
	}
	for _, t := range p.Tasks {
		reply.Tasks = append(reply.Tasks, wire.SnapshotTask{Task: t.Task, Consumed: t.Consumed})
	}
	return reply, nil
}
