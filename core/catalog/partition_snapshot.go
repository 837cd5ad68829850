package catalog

import (
	"maps"
	"slices"

	"transferqueue/core/schema"
)

// PartitionSnapshot is all that the catalog knows of one partition at one moment.
type PartitionSnapshot struct {
	Samples    []schema.Sample // active ones, by index
	Tags       [][]byte        // of each sample
	Reserved   []int64         // indexes that are not written yet, ascending
	Keys       []string        // in order of registration
	KeyIndexes []int64         // index of each key
	Fields     []FieldSnapshot // in order of registration
	Tasks      []TaskSnapshot  // by name
}

// FieldSnapshot is a field and who has it. Column has one row per holder; without holders it has neither form nor type.
type FieldSnapshot struct {
	Holders []int64
	Column  schema.Column
}

// TaskSnapshot is a task and what it has consumed.
type TaskSnapshot struct {
	Task     string
	Consumed []int64
}

// PartitionSnapshot describes a partition. Read-only. Nil means that there is no such partition.
func (c *Catalog) PartitionSnapshot(partition string) *PartitionSnapshot {
	p := c.partitions[partition]
	if p == nil {
		return nil
	}
	active := p.active.Members(nil)
	out := &PartitionSnapshot{
		Samples:    make([]schema.Sample, len(active)),
		Tags:       make([][]byte, len(active)),
		Reserved:   slices.DeleteFunc(p.owned.Members(nil), p.active.Has),
		Keys:       make([]string, 0, p.keyed.Count()),
		KeyIndexes: make([]int64, 0, p.keyed.Count()),
		Fields:     make([]FieldSnapshot, len(p.ordered)),
	}
	for k, i := range active {
		out.Samples[k], out.Tags[k] = c.sample(i), c.tagsOf(i)
	}
	for _, i := range p.registered {
		if i != newRow {
			out.Keys, out.KeyIndexes = append(out.Keys, c.keys.get(i)), append(out.KeyIndexes, i)
		}
	}
	for k, f := range p.ordered {
		holders := f.has.Members(nil)
		out.Fields[k] = FieldSnapshot{Holders: holders, Column: f.describe(holders)}
	}
	for _, task := range slices.Sorted(maps.Keys(p.consumed)) {
		out.Tasks = append(out.Tasks, TaskSnapshot{Task: task, Consumed: p.consumed[task].Members(nil)})
	}
	return out
}
