package catalog

import "transferqueue/core/schema"

// Use says what a sample is needed for.
type Use uint8

// The uses.
const (
	// Wanted samples may be fetched by a task.
	Wanted Use = iota
	// Consumed samples were fetched by every task that has ever fetched from the partition.
	Consumed
	// Unready samples lack a field that others of the partition have.
	Unready
)

// Uses says what samples are needed for, as far as anybody can tell. A sample that does not exist any more is Consumed.
// Read-only.
func (c *Catalog) Uses(partition string, samples []schema.Sample, yield func(i int, u Use)) {
	p := c.partitions[partition]
	for i, s := range samples {
		switch {
		case p == nil || !p.active.Has(s.Index) || p.consumedByAll(s.Index):
			yield(i, Consumed)
		case !p.hasAllFields(s.Index):
			yield(i, Unready)
		default:
			yield(i, Wanted)
		}
	}
}

func (p *partition) consumedByAll(index int64) bool {
	for _, done := range p.consumed {
		if !done.Has(index) {
			return false
		}
	}
	return len(p.consumed) > 0
}

// hasAllFields reports whether a sample has every field that some sample has.
func (p *partition) hasAllFields(index int64) bool {
	for _, f := range p.ordered {
		if !f.has.Has(index) && f.has.Count() > 0 {
			return false
		}
	}
	return true
}
