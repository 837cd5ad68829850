package catalog

import (
	"fmt"
	"slices"

	"transferqueue/core/internal/bitset"
)

// Verify checks everything that must hold between two calls and names what does not. It is for tests and takes time in
// proportion to what is stored. Read-only.
func (c *Catalog) Verify() error {
	if len(c.order) != len(c.partitions) {
		return fmt.Errorf("%d partitions in order, %d by name", len(c.order), len(c.partitions))
	}
	owners, slots := map[int64]string{}, make([]int64, len(c.slotSamples))
	for _, p := range c.order {
		if c.partitions[p.name] != p {
			return fmt.Errorf("partition %q is not found by its name", p.name)
		}
		if err := c.verifyIndexes(p, owners, slots); err != nil {
			return fmt.Errorf("partition %q: %w", p.name, err)
		}
		if err := c.verifyKeys(p); err != nil {
			return fmt.Errorf("partition %q: %w", p.name, err)
		}
		if err := p.verifyFields(); err != nil {
			return fmt.Errorf("partition %q: %w", p.name, err)
		}
		if err := p.births.verify(&p.active); err != nil {
			return fmt.Errorf("partition %q: %w", p.name, err)
		}
	}
	if len(owners) != c.indexes.Used() {
		return fmt.Errorf("%d indexes in use, %d belong to partitions", c.indexes.Used(), len(owners))
	}
	if !slices.Equal(slots, c.slotSamples) {
		return fmt.Errorf("the samples of a slot are miscounted")
	}
	return c.verifyUnits()
}

// verifyIndexes checks the states of a partition's indexes, and counts them by owner and slot.
func (c *Catalog) verifyIndexes(p *partition, owners map[int64]string, slots []int64) error {
	for _, i := range append(p.owned.Members(nil), p.clearing.Members(nil)...) {
		if other, taken := owners[i]; taken {
			return fmt.Errorf("index %d belongs to partition %q too, or is in two states", i, other)
		}
		owners[i] = p.name
		if !c.indexes.Has(i) {
			return fmt.Errorf("index %d is owned and free", i)
		}
		if p.active.Has(i) || p.clearing.Has(i) {
			slots[c.slots.get(i)]++
		}
		if !p.active.Has(i) && c.tags.get(i) != nil {
			return fmt.Errorf("index %d has tags and is not active", i)
		}
	}
	subsets := map[string]*bitset.Set{"active": &p.active, "keyed": &p.keyed}
	for _, f := range p.ordered {
		subsets["field "+f.name], subsets["lost of field "+f.name] = &f.has, &f.lost
		if both := (bitset.Query{All: []*bitset.Set{&f.has, &f.lost}}).Append(nil, 3); both != nil {
			return fmt.Errorf("field %q of indexes %v is there and lost", f.name, both)
		}
	}
	for task, done := range p.consumed {
		subsets["task "+task] = done
	}
	for name, s := range subsets {
		within := &p.active
		if name == "active" {
			within = &p.owned
		}
		if extra := (bitset.Query{All: []*bitset.Set{s}, Not: []*bitset.Set{within}}).Append(nil, 3); extra != nil {
			return fmt.Errorf("%s has indexes %v of another state", name, extra)
		}
		if n := len(s.Members(nil)); n != s.Count() {
			return fmt.Errorf("%s has %d members, counted %d", name, n, s.Count())
		}
	}
	return nil
}

// verify checks that every active sample lies in one stretch, and that births ascend.
func (b *births) verify(active *bitset.Set) error {
	var inside bitset.Set
	next := int64(0)
	for _, s := range b.list {
		if s.from >= s.to || s.to > b.high || s.birth < next {
			return fmt.Errorf("stretch %v below index %d and from birth %d", s, b.high, next)
		}
		next = s.birth + s.to - s.from
		for i := s.from; i < s.to; i++ {
			if !inside.Add(i) {
				return fmt.Errorf("index %d lies in two stretches", i)
			}
		}
	}
	if next > b.next {
		return fmt.Errorf("birth %d is above the next one, %d", next, b.next)
	}
	if extra := (bitset.Query{All: []*bitset.Set{active}, Not: []*bitset.Set{&inside}}).Append(nil, 3); extra != nil {
		return fmt.Errorf("indexes %v were never born", extra)
	}
	return nil
}

func (c *Catalog) verifyKeys(p *partition) error {
	if p.byKey.count != p.keyed.Count() {
		return fmt.Errorf("%d keys, %d samples with a key", p.byKey.count, p.keyed.Count())
	}
	for _, s := range p.byKey.slots {
		if s.place == 0 {
			continue
		}
		i, key := s.place-1, c.keys.get(s.place-1)
		found, ok := c.find(p, key)
		at := int(p.position.get(i)) - 1
		if at < 0 || at >= len(p.registered) || p.registered[at] != i || !ok || found != i || !p.keyed.Has(i) {
			return fmt.Errorf("key %q and index %d do not lead to each other", key, i)
		}
	}
	live := 0
	for _, i := range p.registered {
		if i != newRow {
			live++
		}
	}
	if live != p.byKey.count {
		return fmt.Errorf("%d keys are registered, %d known", live, p.byKey.count)
	}
	for key, list := range p.clearingKeys {
		for _, i := range list {
			if !p.clearing.Has(i) || c.keys.get(i) != key {
				return fmt.Errorf("key %q leads to index %d, which is not clearing or has another key", key, i)
			}
		}
	}
	return nil
}

func (p *partition) verifyFields() error {
	if len(p.fields) != len(p.ordered) || len(p.fields) != len(p.sorted) {
		return fmt.Errorf("%d fields by name, %d ordered, %d sorted", len(p.fields), len(p.ordered), len(p.sorted))
	}
	if !slices.IsSortedFunc(p.sorted, func(a, b *field) int { return slices.Compare([]byte(a.name), []byte(b.name)) }) {
		return fmt.Errorf("the fields are not sorted")
	}
	for k, f := range p.ordered {
		if f.number != k || p.fields[f.name] != f {
			return fmt.Errorf("field %q is not in its place", f.name)
		}
		if (f.has.Count() == 0) != (f.kind == 0) {
			return fmt.Errorf("field %q has %d holders and is a %s", f.name, f.has.Count(), f.kind)
		}
		if err := f.shapes.verify(&f.has); err != nil {
			return fmt.Errorf("field %q: %w", f.name, err)
		}
	}
	return nil
}

func (s *shapes) verify(has *bitset.Set) error {
	counts, deviating := make([]int, len(s.others)), 0
	for _, i := range has.Members(nil) {
		if id := s.ids.get(i); id != 0 {
			counts[id-1]++
			deviating++
		}
	}
	if deviating != s.deviating || deviating > 0 && deviating == has.Count() && s.known.n == 1 {
		return fmt.Errorf("%d rows deviate from the base shape, counted %d", deviating, s.deviating)
	}
	for k, n := range counts {
		if n != s.others[k].rows {
			return fmt.Errorf("%d rows have shape %v, counted %d", n, s.others[k].dims, s.others[k].rows)
		}
	}
	if used := len(s.others) - len(s.unused); used != s.known.n {
		return fmt.Errorf("%d shapes in use, %d known", used, s.known.n)
	}
	for k, other := range s.others {
		if other.rows > 0 && s.known.find(s.others, other.dims) != uint32(k+1) {
			return fmt.Errorf("shape %v is not found by its dimensions", other.dims)
		}
	}
	return nil
}

// verifyUnits checks the slot map.
func (c *Catalog) verifyUnits() error {
	dealt := 0
	for _, u := range c.units {
		samples := int64(0)
		for _, slot := range u.slots {
			if c.unitOf[slot] != u {
				return fmt.Errorf("slot %d of unit %d is on another unit", slot, u.id)
			}
			samples += c.slotSamples[slot]
		}
		if samples != u.samples {
			return fmt.Errorf("unit %d has %d samples, counted %d", u.id, samples, u.samples)
		}
		dealt += len(u.slots)
	}
	if len(c.units) > 0 && dealt != len(c.unitOf) {
		return fmt.Errorf("%d slots dealt, want %d", dealt, len(c.unitOf))
	}
	return nil
}
