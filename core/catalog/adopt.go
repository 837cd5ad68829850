package catalog

import (
	"slices"
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// maxIndex bounds the indexes of a state that comes from outside: arrays over all indexes are made for them.
const maxIndex = 1 << 30

// Restored is a catalog in the making: a state whose samples are being placed on units, seen by nobody until Adopt.
type Restored struct {
	c       *Catalog
	lineage uint64
	epoch   uint64
	placed  bitset.Set
	stored  map[*field]*bitset.Set
}

// Blank begins a catalog for the units of c, which does not change. Read-only, and quick.
func (c *Catalog) Blank() *Restored {
	n := New(Options{PreAllocate: c.preAllocate, SampleLimitPerUnit: c.sampleLimit})
	for _, u := range c.units {
		n.AddUnit(u.id, u.host)
		n.unit(u.id).limit, n.unit(u.id).duty = u.limit, u.duty
	}
	return &Restored{c: n, epoch: c.epoch, stored: map[*field]*bitset.Set{}}
}

// Fill makes a blank catalog that of a state. A state that contradicts itself gives Corruption; then r is of no use.
func (r *Restored) Fill(s *State) error {
	r.lineage = s.Lineage
	if err := r.fillPartitions(s); err != nil {
		return err
	}
	return r.fillUsed(s)
}

func (r *Restored) fillPartitions(s *State) error {
	for k := range s.Partitions {
		if err := r.partition(&s.Partitions[k]); err != nil {
			return err
		}
	}
	return nil
}

// fillUsed sets the generations of indexes that are not in use; those that are must be known by then.
func (r *Restored) fillUsed(s *State) error {
	n, end := r.c, int64(0)
	for _, run := range s.Used {
		if run.From < end || run.Count < 1 || run.Count > maxIndex || run.From > maxIndex-run.Count {
			return tqerr.New(tqerr.Corruption, "generations of %d indexes from %d", run.Count, run.From)
		}
		end = run.From + run.Count
		for i := run.From; i < end; i++ {
			if !n.indexes.Has(i) {
				*n.generations.at(i) = run.Generation
			} else if run.Generation > n.generations.get(i)+1 {
				*n.ceilings.at(i) = run.Generation
			}
		}
	}
	return nil
}

func (r *Restored) partition(s *PartitionState) error {
	c := r.c
	if c.partitions[s.Name] != nil {
		return badPartition(s.Name, "occurs twice")
	}
	p := &partition{name: s.Name, fields: map[string]*field{}, consumed: map[string]*bitset.Set{}}
	c.partitions[p.name], c.order = p, append(c.order, p)
	for _, step := range []func(*partition, *PartitionState) error{r.samples, r.keysAndTags, r.fields, r.births, r.tasks} {
		if err := step(p, s); err != nil {
			return err
		}
	}
	return nil
}

func badPartition(name, format string, args ...any) error {
	return tqerr.New(tqerr.Corruption, "partition %q: "+format, append([]any{name}, args...)...)
}

func (r *Restored) samples(p *partition, s *PartitionState) error {
	c := r.c
	for k, x := range slices.Concat(s.Reserved, s.Samples) {
		if x.Index < 0 || x.Index >= maxIndex || x.Generation == 0 || !c.indexes.Use(x.Index) {
			return badPartition(p.name, "sample %d of generation %d cannot be, or occurs twice", x.Index, x.Generation)
		}
		*c.generations.at(x.Index) = x.Generation - 1
		p.owned.Add(x.Index)
		if k >= len(s.Reserved) {
			p.active.Add(x.Index)
		}
	}
	return nil
}

func (r *Restored) keysAndTags(p *partition, s *PartitionState) error {
	c := r.c
	if len(s.Keys) != len(s.Keyed) || len(s.Tags) != len(s.Tagged) {
		return badPartition(p.name, "%d keys of %d samples, %d tags of %d", len(s.Keys), len(s.Keyed), len(s.Tags), len(s.Tagged))
	}
	for k, i := range s.Keyed {
		if _, twice := c.find(p, s.Keys[k]); twice || !p.hasActive(i) || p.keyed.Has(i) {
			return badPartition(p.name, "key %q of sample %d occurs twice or has no sample", s.Keys[k], i)
		}
		c.register(p, strings.Clone(s.Keys[k]), hashOf(s.Keys[k]), i)
	}
	for k, i := range s.Tagged {
		if !p.hasActive(i) || !validTags(s.Tags[k]) {
			return badPartition(p.name, "tags of sample %d are no map or have no sample", i)
		}
		*c.tags.at(i) = mergeTags(nil, s.Tags[k])
	}
	return nil
}

func (r *Restored) fields(p *partition, s *PartitionState) error {
	for k := range s.Fields {
		if err := r.field(p, &s.Fields[k]); err != nil {
			return err
		}
	}
	return nil
}

func (r *Restored) births(p *partition, s *PartitionState) error {
	return r.c.RestoreBirths(p.name, s.Births, s.Complete)
}

func (r *Restored) tasks(p *partition, s *PartitionState) error {
	for _, task := range s.Tasks {
		done := &bitset.Set{}
		for _, i := range task.Consumed {
			if !p.hasActive(i) {
				return badPartition(p.name, "task %q has consumed sample %d, which does not exist", task.Name, i)
			}
			done.Add(i)
		}
		p.consumed[strings.Clone(task.Name)] = done
	}
	return nil
}

func (p *partition) hasActive(i int64) bool { return i >= 0 && p.active.Has(i) }

func (r *Restored) field(p *partition, s *FieldState) error {
	bad := func(what string) error {
		return tqerr.New(tqerr.Corruption, "partition %q: field %q: %s", p.name, s.Name, what)
	}
	if p.fields[s.Name] != nil {
		return bad("occurs twice")
	}
	f := p.fieldNamed(s.Name)
	r.stored[f] = &bitset.Set{}
	for _, i := range s.Lost {
		if !p.hasActive(i) || !f.lost.Add(i) {
			return bad("lost samples occur twice or do not exist")
		}
	}
	if len(s.Holders) == 0 {
		return nil
	}
	column := schema.Column{Field: s.Name, Kind: s.Kind, Rows: len(s.Holders), Form: schema.Objects}
	if s.Kind == schema.Tensor {
		column = s.Shapes
		if err := column.Validate(); err != nil || column.Rows != len(s.Holders) || column.DType != s.DType {
			return bad("its shapes are not those of its samples")
		}
		column.Ragged = s.Ragged
	} else if s.Kind != schema.Object {
		return bad("is of no known kind")
	}
	for k, i := range s.Holders {
		if !p.hasActive(i) || k > 0 && i <= s.Holders[k-1] || f.lost.Has(i) {
			return bad("holders are not in order, do not exist or were lost")
		}
	}
	f.write(&column, s.Holders, bitset.NewMask(s.Holders))
	return nil
}

// Place decides where samples go whose cells are the columns, as Catalog.Place does for a write, and remembers that they
// are there. Each sample is placed once, with all its cells.
func (r *Restored) Place(partition string, samples []schema.Sample, columns []schema.Column, rooms []Room, rowBytes func(int) int64) ([]uint32, error) {
	c := r.c
	p := c.partitions[partition]
	if p == nil {
		return nil, badPartition(partition, "has values but no samples")
	}
	indexes := make([]int64, len(samples))
	for k, s := range samples {
		if !c.owns(p, s) || !p.active.Has(s.Index) || !r.placed.Add(s.Index) {
			return nil, badPartition(partition, "values of sample %d, which does not exist or occurs twice", s.Index)
		}
		indexes[k] = s.Index
	}
	mask := bitset.NewMask(indexes)
	for k := range columns {
		col := &columns[k]
		f := p.fields[col.Field]
		if f == nil || f.kind != col.Kind || f.dtype != col.DType || col.Rows != len(samples) || !f.has.HasAll(mask) {
			return nil, badPartition(partition, "values of field %q, which the samples do not hold so", col.Field)
		}
		if r.stored[f].AddAll(mask) != len(samples) {
			return nil, badPartition(partition, "values of field %q occur twice", col.Field)
		}
	}
	units := make([]uint32, len(samples))
	for k := range units {
		units[k] = NoUnit
	}
	if err := c.Place(units, "", rowBytes, rooms); err != nil {
		return nil, err
	}
	r.settle(indexes, units)
	return units, nil
}

// settle puts samples in slots of their units.
func (r *Restored) settle(indexes []int64, units []uint32) {
	c := r.c
	slots := map[uint32]uint16{}
	for k, i := range indexes {
		u := c.unit(units[k])
		slot, known := slots[u.id]
		if !known {
			slot = u.nextSlot()
			slots[u.id] = slot
		}
		*c.slots.at(i) = slot
		c.slotSamples[slot]++
		u.samples++
	}
}

// Complete checks that every sample is placed with every cell that it has.
func (r *Restored) Complete() error {
	for _, p := range r.c.order {
		query := bitset.Query{All: []*bitset.Set{&p.active}, Not: []*bitset.Set{&r.placed}}
		if n := query.Count(-1); n > 0 {
			return tqerr.New(tqerr.Corruption, "partition %q: %d samples have no values", p.name, n)
		}
		for _, f := range p.ordered {
			if n := f.has.Count() - r.stored[f].Count(); n > 0 {
				return tqerr.New(tqerr.Corruption, "partition %q: field %q: %d values are missing", p.name, f.name, n)
			}
		}
	}
	return nil
}

// Fits fails with Unavailable when units came or went since Blank, so that r cannot be adopted. Read-only.
func (c *Catalog) Fits(r *Restored) error {
	if c.epoch != r.epoch {
		return tqerr.New(tqerr.Unavailable, "units have come or gone meanwhile, try again")
	}
	return nil
}

// Adopt makes c what was restored and fits. r is of no use afterwards.
func (c *Catalog) Adopt(r *Restored) { *c = *c.Adopted(r) }

// Adopted returns what Adopt makes of c, which does not change. r is of no use afterwards.
//
// Index and generation stay as they were saved, so that whoever kept them reaches the same sample again, unless they name
// another sample here already, or one that was only reserved then and may have been written since: then the restored one
// gets a generation that nobody has seen. No generation that was ever used here or where the state comes from is given to a
// sample that comes later.
func (c *Catalog) Adopted(r *Restored) *Catalog {
	n, same := r.c, c.unchanged(r)
	settle := func(i int64) {
		here, there := c.usedUpTo(i), n.usedUpTo(i)
		used := max(here, there)
		if used == 0 {
			return
		}
		if !n.indexes.Has(i) {
			*n.generations.at(i) = used
			return
		}
		generation := n.generations.get(i) + 1
		if here >= generation && !same.Has(i) {
			generation = used + 1
			*n.generations.at(i) = generation - 1
		}
		if used > generation {
			*n.ceilings.at(i) = used
		} else {
			n.ceilings.clear(i)
		}
	}
	for from := range n.generations.spans() {
		for i := from; i < from+pageSize; i++ {
			settle(i)
		}
	}
	for from := range c.generations.spans() {
		if n.generations.has(from) {
			continue
		}
		for i := from; i < from+pageSize; i++ {
			settle(i)
		}
	}
	n.lineage, n.epoch = c.lineage, c.epoch+1
	return n
}

// unchanged returns the indexes whose saved generation can name only the saved sample: the active ones of the same lineage,
// and those that are reserved still.
func (c *Catalog) unchanged(r *Restored) (same bitset.Set) {
	if c.lineage != r.lineage {
		return same
	}
	for _, p := range r.c.order {
		old := c.partitions[p.name]
		for _, i := range p.owned.Members(nil) {
			if p.active.Has(i) || old != nil && old.owned.Has(i) && !old.active.Has(i) && c.generations.get(i) == r.c.generations.get(i) {
				same.Add(i)
			}
		}
	}
	return same
}

// PutEvents returns an event for every key of a partition, as if all had just been written. Read-only.
func (c *Catalog) PutEvents(partition string) (events []Event) {
	p := c.partitions[partition]
	if p == nil {
		return nil
	}
	for _, i := range p.registered {
		if i == newRow {
			continue
		}
		fields := []string{}
		for _, f := range p.sorted {
			if f.has.Has(i) {
				fields = append(fields, f.name)
			}
		}
		events = append(events, Event{EventPut, c.keys.get(i), fields, c.tagsOf(i)})
	}
	return events
}

// CheckAll validates several writes of different rows that are to be applied one after another, none of which may fail
// once the first is done. Read-only. Errors are those of Apply.
func (c *Catalog) CheckAll(writes []*Write, units [][]uint32) error {
	more := map[uint32]int64{}
	for k, w := range writes {
		pl, err := c.plan(w)
		if err == nil {
			err = pl.admit(w)
		}
		if err == nil {
			_, err = c.settle(pl, w, units[k])
		}
		if err != nil {
			return err
		}
		for i, index := range pl.rows {
			if c.unitID(pl.p, index) == NoUnit {
				more[units[k][i]]++
			}
		}
	}
	for id, n := range more {
		if n > c.room(c.unit(id)) {
			return tqerr.New(tqerr.Conflict, "unit %d has no room for %d samples any more", id, n)
		}
	}
	return nil
}
