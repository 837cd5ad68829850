package catalog

import (
	"maps"
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
)

// State is everything a catalog knows but where samples live: what a checkpoint keeps of it. It shares memory with the
// catalog that exported it, which never changes that memory.
type State struct {
	// Lineage names the catalog that made it. Within one lineage, index and generation name the same sample for ever.
	Lineage    uint64
	Used       []UsedRun // ascending
	Partitions []PartitionState
}

// UsedRun says that Count neighbouring indexes from From on have been used up to a generation.
type UsedRun struct {
	From, Count int64
	Generation  uint32
}

// PartitionState is one partition of a State. All lists of indexes but Keyed ascend.
type PartitionState struct {
	Name     string
	Reserved []schema.Sample
	Samples  []schema.Sample // active ones
	Keyed    []int64         // in the order of registration
	Keys     []string
	Tagged   []int64
	Tags     [][]byte
	Fields   []FieldState // in the order of registration
	Tasks    []TaskState  // by name
	Births   []int64      // see BirthOrder
	Complete bool
}

// FieldState is one field: its type, and who holds it with which shapes. A field without holders has no type.
type FieldState struct {
	Name    string
	Kind    schema.Kind
	DType   schema.DType
	Ragged  uint8
	Holders []int64
	Shapes  schema.Column // of the holders, when they are tensors
	Lost    []int64       // whose cell was lost, see Reconcile
}

// TaskState is what a task has consumed.
type TaskState struct {
	Name     string
	Consumed []int64
}

// Export returns the state. Samples that are being cleared are left out, their generations are not. Read-only.
func (c *Catalog) Export() *State {
	s := &State{Lineage: c.lineage}
	for from := range c.generations.spans() {
		for i := from; i < from+pageSize; i++ {
			s.addUsed(i, c.usedUpTo(i))
		}
	}
	for _, p := range c.order {
		s.Partitions = append(s.Partitions, c.exportPartition(p))
	}
	return s
}

// usedUpTo returns the highest generation that an index has ever had.
func (c *Catalog) usedUpTo(i int64) uint32 {
	used := c.generations.get(i)
	if c.indexes.Has(i) {
		used++
	}
	return max(used, c.ceilings.get(i))
}

func (s *State) addUsed(i int64, generation uint32) {
	if generation == 0 {
		return
	}
	if n := len(s.Used); n > 0 {
		if last := &s.Used[n-1]; last.Generation == generation && last.From+last.Count == i {
			last.Count++
			return
		}
	}
	s.Used = append(s.Used, UsedRun{i, 1, generation})
}

func (c *Catalog) exportPartition(p *partition) PartitionState {
	reserved := bitset.Query{All: []*bitset.Set{&p.owned}, Not: []*bitset.Set{&p.active}}
	out := PartitionState{Name: p.name, Reserved: c.Samples(reserved.Append(nil, -1)), Samples: c.Samples(p.active.Members(nil))}
	out.Births, out.Complete = c.BirthOrder(p.name)
	for _, i := range p.registered {
		if i != newRow {
			out.Keyed, out.Keys = append(out.Keyed, i), append(out.Keys, c.keys.get(i))
		}
	}
	for _, s := range out.Samples {
		if t := c.tags.get(s.Index); t != nil {
			out.Tagged, out.Tags = append(out.Tagged, s.Index), append(out.Tags, t)
		}
	}
	for _, f := range p.ordered {
		state := FieldState{Name: f.name, Kind: f.kind, DType: f.dtype, Ragged: f.ragged, Holders: f.has.Members(nil), Lost: f.lost.Members(nil)}
		if f.kind == schema.Tensor {
			state.Shapes = f.describe(state.Holders)
		}
		out.Fields = append(out.Fields, state)
	}
	for _, name := range slices.Sorted(maps.Keys(p.consumed)) {
		out.Tasks = append(out.Tasks, TaskState{name, p.consumed[name].Members(nil)})
	}
	return out
}

// Samples returns the samples that indexes in use have at present. Read-only.
func (c *Catalog) Samples(indexes []int64) []schema.Sample {
	out := make([]schema.Sample, len(indexes))
	for k, i := range indexes {
		out[k] = c.sample(i)
	}
	return out
}

// Group is samples of one partition on one unit that have the same fields.
type Group struct {
	Partition string
	Unit      uint32
	Fields    []string // sorted
	Samples   []schema.Sample
}

// groupWindow is how many neighbouring samples are grouped at a time, and so the most samples of a group.
const groupWindow = 4096

// Groups puts every active sample in a group. Read-only.
func (c *Catalog) Groups() (out []Group) {
	for _, p := range c.order {
		out = c.group(out, p, p.active.Members(nil))
	}
	return out
}

// GroupsOf puts the samples of keys in groups and returns the keys that do not exist. Read-only.
func (c *Catalog) GroupsOf(partition string, keys []string) (groups []Group, missing []string) {
	p := c.partitions[partition]
	if p == nil {
		return nil, keys
	}
	var indexes []int64
	for _, key := range keys {
		if i, ok := c.find(p, key); ok {
			indexes = append(indexes, i)
		} else {
			missing = append(missing, key)
		}
	}
	return c.group(nil, p, indexes), missing
}

func (c *Catalog) group(out []Group, p *partition, indexes []int64) []Group {
	for window := range slices.Chunk(indexes, groupWindow) {
		if fields, alike := p.alike(window); alike {
			out = c.byUnit(out, p, fields, window)
			continue
		}
		places := map[string]int{}
		var rows [][]int64
		signature := make([]byte, len(p.sorted))
		for _, i := range window {
			for k, f := range p.sorted {
				signature[k] = 0
				if f.has.Has(i) {
					signature[k] = 1
				}
			}
			at, known := places[string(signature)]
			if !known {
				at = len(rows)
				places[string(signature)], rows = at, append(rows, nil)
			}
			rows[at] = append(rows[at], i)
		}
		for _, same := range rows {
			fields, _ := p.alike(same)
			out = c.byUnit(out, p, fields, same)
		}
	}
	return out
}

// alike reports whether every row has the same fields, and which.
func (p *partition) alike(rows []int64) (fields []string, yes bool) {
	mask := bitset.NewMask(rows)
	for _, f := range p.sorted {
		switch {
		case f.has.HasAll(mask):
			fields = append(fields, f.name)
		case f.has.HasAny(mask):
			return nil, false
		}
	}
	return fields, true
}

func (c *Catalog) byUnit(out []Group, p *partition, fields []string, rows []int64) []Group {
	places := map[uint32]int{}
	for _, i := range rows {
		id := c.home(i).id
		at, known := places[id]
		if !known {
			at = len(out)
			places[id] = at
			out = append(out, Group{Partition: p.name, Unit: id, Fields: fields})
		}
		out[at].Samples = append(out[at].Samples, c.sample(i))
	}
	return out
}
