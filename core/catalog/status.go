package catalog

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"

	"transferqueue/core/internal/bitset"
)

// Status is a table with one line per index that a partition owns, reserved ones included, and Width columns.
type Status struct {
	Indexes []int64 // ascending
	Width   int
	Cells   []byte // 0 or 1, line by line
}

// Consumption says which samples a task has consumed. A task that has fetched nothing yet has consumed none. Read-only. Nil
// means that there is no such partition.
func (c *Catalog) Consumption(partition, task string) *Status {
	p := c.partitions[partition]
	if p == nil {
		return nil
	}
	done := p.consumed[task]
	if done == nil {
		done = &nobody
	}
	return p.status([]*bitset.Set{done})
}

// Production says which samples have which fields, with a column per field in the order in which the fields were
// registered. Read-only. Nil means that there is no such partition, no field, or a field that was never written.
func (c *Catalog) Production(partition string, fields []string) *Status {
	p := c.partitions[partition]
	if p == nil || len(fields) == 0 {
		return nil
	}
	asked := distinct(fields)
	known := p.registeredOf(asked)
	if len(known) < len(asked) {
		return nil
	}
	slices.SortFunc(known, func(a, b *field) int { return cmp.Compare(a.number, b.number) })
	sets := make([]*bitset.Set, len(known))
	for k, f := range known {
		sets[k] = &f.has
	}
	return p.status(sets)
}

func (p *partition) status(sets []*bitset.Set) *Status {
	n := p.owned.Count()
	out := &Status{
		Indexes: p.owned.Members(make([]int64, 0, n)),
		Width:   len(sets),
		Cells:   make([]byte, n*len(sets)),
	}
	line := 0
	for w, owned := range (bitset.Query{All: []*bitset.Set{&p.owned}}).Words() {
		for k, s := range sets {
			at := line*len(sets) + k
			word := s.Word(w)
			for rest := owned; rest != 0; rest &= rest - 1 {
				out.Cells[at] = byte(word >> bits.TrailingZeros64(rest) & 1)
				at += len(sets)
			}
		}
		line += bits.OnesCount64(owned)
	}
	return out
}

// ResetConsumption lets a task, or with an empty name every task, start over. It reports whether the partition exists.
func (c *Catalog) ResetConsumption(partition, task string) bool {
	p := c.partitions[partition]
	if p == nil {
		return false
	}
	c.resets++
	for name, done := range p.consumed {
		if task == "" || name == task {
			done.Reset()
		}
	}
	return true
}

// Partitions returns the names of all partitions in the order of their creation. Read-only.
func (c *Catalog) Partitions() []string {
	names := make([]string, len(c.order))
	for i, p := range c.order {
		names[i] = p.name
	}
	return names
}

// Summary counts one partition.
type Summary struct {
	Name     string
	Samples  int
	Produced int // samples that have a field
	Keys     int
	Fields   []string // sorted, those that some sample has
	Tasks    []string // sorted
	Consumed []int64  // by task
}

// Summary counts all partitions in the order of their creation. Read-only.
func (c *Catalog) Summary() []Summary {
	out := make([]Summary, len(c.order))
	for i, p := range c.order {
		s := Summary{Name: p.name, Samples: p.active.Count(), Keys: p.keyed.Count(), Fields: []string{}}
		bare := bitset.Query{All: []*bitset.Set{&p.active}}
		for _, f := range p.sorted {
			bare.Not = append(bare.Not, &f.has)
			if f.has.Count() > 0 {
				s.Fields = append(s.Fields, f.name)
			}
		}
		s.Produced = s.Samples - bare.Count(-1)
		s.Tasks = slices.Sorted(maps.Keys(p.consumed))
		for _, task := range s.Tasks {
			s.Consumed = append(s.Consumed, int64(p.consumed[task].Count()))
		}
		out[i] = s
	}
	return out
}

// Stream reports whether the production of a partition was declared complete, and whether the task has consumed all its
// samples then. Read-only.
func (c *Catalog) Stream(partition, task string) (completed, drained bool) {
	p := c.partitions[partition]
	if p == nil || !p.complete {
		return false, false
	}
	consumed := 0
	if done := p.consumed[task]; done != nil {
		consumed = done.Count()
	}
	return true, consumed == p.active.Count()
}

// Indexes counts the indexes in use, reserved ones included, and those that were in use and are free. Read-only.
func (c *Catalog) Indexes() (allocated, reusable int64) {
	allocated = int64(c.indexes.Used())
	return allocated, c.everUsed - allocated
}
