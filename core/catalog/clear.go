package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
)

// Clearing is work for the units: cells to delete. The catalog shows none of them any more.
type Clearing struct {
	Partition string
	Samples   []schema.Sample
	Units     []uint32 // of each sample
	Fields    []string // nil: all cells of the samples
	Fresh     int      // so many of the first samples were seen until now; the others only wait for their units
	Events    []Event

	whole bool       // the partition goes too
	of    *partition // nil: whichever has the name
}

// Without returns the part of the work that is not that of some units.
func (cl *Clearing) Without(units map[uint32]bool) *Clearing {
	out := &Clearing{Partition: cl.Partition, Fields: cl.Fields, of: cl.of}
	for i, s := range cl.Samples {
		if !units[cl.Units[i]] {
			out.Samples, out.Units = append(out.Samples, s), append(out.Units, cl.Units[i])
		}
	}
	return out
}

// StartClearKeys makes samples disappear: their keys, tags, cells and consumption. When the units have deleted the cells,
// FinishClear releases the indexes; when a unit failed, the same clear later finds the same samples again. Until then they
// count as samples of their units. What does not exist is ignored.
func (c *Catalog) StartClearKeys(partition string, keys []string) *Clearing {
	p := c.partitions[partition]
	if p == nil {
		return &Clearing{Partition: partition}
	}
	var active, again []int64
	for _, key := range keys {
		if i, ok := c.find(p, key); ok {
			active = append(active, i)
		}
		again = append(again, p.clearingKeys[key]...)
	}
	return c.startClear(p, active, again)
}

// StartClearSamples is StartClearKeys for samples. Those that are only reserved are released at once.
func (c *Catalog) StartClearSamples(partition string, samples []schema.Sample) *Clearing {
	p := c.partitions[partition]
	if p == nil {
		return &Clearing{Partition: partition}
	}
	var active, again []int64
	for _, s := range samples {
		switch {
		case s.Index < 0 || c.generations.get(s.Index)+1 != s.Generation:
		case p.clearing.Has(s.Index):
			again = append(again, s.Index)
		case p.active.Has(s.Index):
			active = append(active, s.Index)
		case p.owned.Remove(s.Index):
			c.release(s.Index)
		}
	}
	return c.startClear(p, active, again)
}

// StartClearPartition makes all samples of a partition disappear, and forgets its fields and tasks. FinishClear then
// removes the partition, unless somebody has written to it since.
func (c *Catalog) StartClearPartition(partition string) *Clearing {
	p := c.partitions[partition]
	if p == nil {
		return &Clearing{Partition: partition}
	}
	cl := c.startClear(p, p.active.Members(nil), p.clearing.Members(nil))
	cl.whole, p.leaving = true, true
	p.fields, p.ordered, p.sorted = map[string]*field{}, nil, nil
	clear(p.consumed)
	p.complete = false
	return cl
}

// startClear hides active samples and returns them with those that are hidden already. Indexes may repeat.
func (c *Catalog) startClear(p *partition, active, again []int64) *Clearing {
	active, again = unique(active), unique(again)
	all := slices.Concat(active, again)
	cl := &Clearing{Partition: p.name, of: p, Samples: make([]schema.Sample, len(all)), Units: make([]uint32, len(all))}
	for k, i := range all {
		cl.Samples[k], cl.Units[k] = c.sample(i), c.home(i).id
	}
	cl.Fresh = len(active)
	rows := bitset.NewMask(active)
	p.owned.RemoveAll(rows)
	p.active.RemoveAll(rows)
	p.clearing.AddAll(rows)
	if p.active.Count() == 0 {
		p.births.reset()
	}
	for _, f := range p.ordered {
		if held := f.has.Intersect(rows); len(held) > 0 {
			f.erase(held)
		}
		f.lost.RemoveAll(rows)
	}
	for _, done := range p.consumed {
		done.RemoveAll(rows)
	}
	if p.keyed.HasAny(rows) {
		cl.Events = make([]Event, 0, len(active))
	}
	for _, i := range active {
		c.tags.clear(i)
		if key, ok := c.keyOf(p, i); ok {
			p.unregister(key, i)
			if p.clearingKeys == nil {
				p.clearingKeys = map[string][]int64{}
			}
			p.clearingKeys[key] = append(p.clearingKeys[key], i)
			cl.Events = append(cl.Events, Event{Kind: EventClear, Key: key})
		}
	}
	return cl
}

// unique drops repeated indexes and keeps the order.
func unique(indexes []int64) []int64 {
	var seen bitset.Set
	return slices.DeleteFunc(indexes, func(i int64) bool { return !seen.Add(i) })
}

// Whole reports that the partition goes too.
func (cl *Clearing) Whole() bool { return cl.whole }

// Finishing makes the work whose end is to be told, from what is left of it.
func Finishing(partition string, samples []schema.Sample, whole bool) *Clearing {
	return &Clearing{Partition: partition, Samples: samples, whole: whole}
}

// Current reports that FinishClear has something to do. Read-only.
func (c *Catalog) Current(cl *Clearing) bool {
	p := c.partitions[cl.Partition]
	return p != nil && cl.Fields == nil && (cl.of == nil || cl.of == p)
}

// FinishClear releases the indexes of a clear whose cells are deleted; those that somebody released already are ignored, and
// those of a partition that has been replaced since.
// It has nothing to do for a clear of fields.
func (c *Catalog) FinishClear(cl *Clearing) {
	p := c.partitions[cl.Partition]
	if !c.Current(cl) {
		return
	}
	for _, s := range cl.Samples {
		if p.clearing.Has(s.Index) && c.generations.get(s.Index)+1 == s.Generation {
			c.finish(p, s.Index)
		}
	}
	if cl.whole && p.active.Count() == 0 && p.clearing.Count() == 0 {
		c.remove(p)
	}
}

// finish releases one index that is clearing.
func (c *Catalog) finish(p *partition, i int64) {
	p.clearing.Remove(i)
	key := c.keys.get(i)
	if left := slices.DeleteFunc(p.clearingKeys[key], func(other int64) bool { return other == i }); len(left) > 0 {
		p.clearingKeys[key] = left
	} else {
		delete(p.clearingKeys, key)
	}
	c.keys.clear(i)
	c.slotSamples[c.slots.get(i)]--
	c.home(i).samples--
	c.release(i)
}

// ClearFields makes cells disappear: those that exist of the given fields of the given keys and samples. Keys, tags,
// consumption and other fields stay. It is complete when it returns; what the units delete afterwards is only memory.
func (c *Catalog) ClearFields(partition string, keys []string, samples []schema.Sample, fields []string) *Clearing {
	cl := &Clearing{Partition: partition, Fields: []string{}}
	p := c.partitions[partition]
	if p == nil {
		return cl
	}
	indexes := c.findAll(p, keys)
	for _, s := range samples {
		if c.owns(p, s) {
			indexes = append(indexes, s.Index)
		}
	}
	indexes = unique(indexes)
	rows := bitset.NewMask(indexes)
	cleared := map[int64][]string{}
	for _, name := range distinct(fields) {
		f := p.fields[name]
		if f == nil {
			continue
		}
		held := f.has.Intersect(rows)
		f.lost.RemoveAll(rows)
		if len(held) == 0 {
			continue
		}
		cl.Fields = append(cl.Fields, f.name)
		for i := range held.All() {
			cleared[i] = append(cleared[i], f.name)
		}
		f.erase(held)
	}
	for _, i := range indexes {
		if cleared[i] == nil {
			continue
		}
		cl.Fresh++
		cl.Samples = append(cl.Samples, c.sample(i))
		cl.Units = append(cl.Units, c.home(i).id)
		if key, ok := c.keyOf(p, i); ok {
			cl.Events = append(cl.Events, Event{Kind: EventClear, Key: key, Fields: cleared[i]})
		}
	}
	return cl
}
