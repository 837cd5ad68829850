package catalog

import (
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Image is everything a catalog knows: its State, where samples live, and what is being cleared. A catalog that was restored
// from it goes on exactly as the one it was taken of would have. It shares memory with that one, which never changes it.
type Image struct {
	*State
	Epoch    uint64
	Units    []UnitState // in the order in which they were added
	Slots    [][]int64   // per partition of the state, of each of its samples
	Leaving  []bool      // per partition of the state: it goes with its last sample
	Clearing []ClearingState
}

// UnitState is a unit as placement sees it.
type UnitState struct {
	ID    uint32
	Host  string
	Slots []int64
	Turn  int
	Limit int64 // of samples
	Duty  Duty
}

// ClearingState is the samples of one partition that are being cleared. Keys are "" where Keyed is 0.
type ClearingState struct {
	Partition string
	Samples   []schema.Sample
	Slots     []int64
	Keys      []string
	Keyed     []byte
}

// Image returns everything. Read-only.
func (c *Catalog) Image() *Image {
	m := &Image{State: c.Export(), Epoch: c.epoch}
	for _, u := range c.units {
		state := UnitState{ID: u.id, Host: u.host, Turn: u.turn, Limit: u.limit, Duty: u.duty, Slots: make([]int64, len(u.slots))}
		for k, slot := range u.slots {
			state.Slots[k] = int64(slot)
		}
		m.Units = append(m.Units, state)
	}
	for k, p := range c.order {
		m.Slots, m.Leaving = append(m.Slots, c.slotsOf(m.State.Partitions[k].Samples)), append(m.Leaving, p.leaving)
		if p.clearing.Count() == 0 {
			continue
		}
		indexes := p.clearing.Members(nil)
		cl := ClearingState{Partition: p.name, Samples: c.Samples(indexes), Keys: make([]string, len(indexes)), Keyed: make([]byte, len(indexes))}
		cl.Slots = c.slotsOf(cl.Samples)
		byIndex := map[int64]string{}
		for key, list := range p.clearingKeys {
			for _, i := range list {
				byIndex[i] = key
			}
		}
		for at, i := range indexes {
			if key, ok := byIndex[i]; ok {
				cl.Keys[at], cl.Keyed[at] = key, 1
			}
		}
		m.Clearing = append(m.Clearing, cl)
	}
	return m
}

func (c *Catalog) slotsOf(samples []schema.Sample) []int64 {
	out := make([]int64, len(samples))
	for k, s := range samples {
		out[k] = int64(c.slots.get(s.Index))
	}
	return out
}

// Restore makes a catalog from an image. One that contradicts itself gives Corruption.
func Restore(o Options, m *Image) (*Catalog, error) {
	n := New(o)
	r := &Restored{c: n, stored: map[*field]*bitset.Set{}}
	if err := n.restoreUnits(m.Units); err != nil {
		return nil, err
	}
	if err := r.fillPartitions(m.State); err != nil {
		return nil, err
	}
	if len(m.Slots) != len(n.order) || len(m.Leaving) != len(n.order) {
		return nil, tqerr.New(tqerr.Corruption, "slots of %d partitions, there are %d", len(m.Slots), len(n.order))
	}
	for k, p := range n.order {
		p.leaving = m.Leaving[k]
		if err := n.putInSlots(p.name, m.State.Partitions[k].Samples, m.Slots[k]); err != nil {
			return nil, err
		}
	}
	for k := range m.Clearing {
		if err := n.restoreClearing(&m.Clearing[k]); err != nil {
			return nil, err
		}
	}
	if err := r.fillUsed(m.State); err != nil {
		return nil, err
	}
	n.lineage, n.epoch = m.Lineage, m.Epoch
	return n, nil
}

func (c *Catalog) restoreUnits(units []UnitState) error {
	for _, s := range units {
		if c.unit(s.ID) != nil {
			return tqerr.New(tqerr.Corruption, "unit %d occurs twice", s.ID)
		}
		u := &unit{id: s.ID, host: strings.Clone(s.Host), limit: s.Limit, duty: s.Duty}
		if s.Duty >= numDuties {
			return tqerr.New(tqerr.Corruption, "unit %d: duty %d", s.ID, s.Duty)
		}
		c.units = append(c.units, u)
		for _, slot := range s.Slots {
			if slot < 0 || slot > int64(numSlots+len(units)) {
				return tqerr.New(tqerr.Corruption, "unit %d: slot %d", s.ID, slot)
			}
			for slot >= int64(len(c.unitOf)) {
				c.unitOf, c.slotSamples = append(c.unitOf, nil), append(c.slotSamples, 0)
			}
			if c.unitOf[slot] != nil {
				return tqerr.New(tqerr.Corruption, "slot %d belongs to units %d and %d", slot, c.unitOf[slot].id, s.ID)
			}
			c.deal(u, uint16(slot))
		}
		if s.Turn < 0 || s.Turn >= max(len(u.slots), 1) {
			return tqerr.New(tqerr.Corruption, "unit %d: turn %d of %d slots", s.ID, s.Turn, len(u.slots))
		}
		u.turn = s.Turn
	}
	return nil
}

// putInSlots says where samples live that are in use.
func (c *Catalog) putInSlots(partition string, samples []schema.Sample, slots []int64) error {
	if len(slots) != len(samples) {
		return badPartition(partition, "slots of %d samples, there are %d", len(slots), len(samples))
	}
	for k, s := range samples {
		if slots[k] < 0 || slots[k] >= int64(len(c.unitOf)) || c.unitOf[slots[k]] == nil {
			return badPartition(partition, "sample %d lives in slot %d, which no unit has", s.Index, slots[k])
		}
		*c.slots.at(s.Index) = uint16(slots[k])
		c.slotSamples[slots[k]]++
		c.unitOf[slots[k]].samples++
	}
	return nil
}

func (c *Catalog) restoreClearing(s *ClearingState) error {
	p := c.partitions[s.Partition]
	if p == nil || len(s.Keys) != len(s.Samples) || len(s.Keyed) != len(s.Samples) {
		return badPartition(s.Partition, "what is being cleared of it makes no sense")
	}
	for k, x := range s.Samples {
		if x.Index < 0 || x.Index >= maxIndex || x.Generation == 0 || !c.indexes.Use(x.Index) {
			return badPartition(s.Partition, "sample %d, which is being cleared, occurs twice", x.Index)
		}
		*c.generations.at(x.Index) = x.Generation - 1
		p.clearing.Add(x.Index)
		if s.Keyed[k] != 0 {
			key := strings.Clone(s.Keys[k])
			*c.keys.at(x.Index) = key
			if p.clearingKeys == nil {
				p.clearingKeys = map[string][]int64{}
			}
			p.clearingKeys[key] = append(p.clearingKeys[key], x.Index)
		}
	}
	return c.putInSlots(s.Partition, s.Samples, s.Slots)
}

// Unfinished returns the clears whose units have not all answered, as work to do again. Read-only.
func (c *Catalog) Unfinished() (out []*Clearing) {
	for _, p := range c.order {
		indexes := p.clearing.Members(nil)
		if len(indexes) == 0 && !p.leaving {
			continue
		}
		cl := &Clearing{Partition: p.name, of: p, whole: p.leaving, Samples: c.Samples(indexes), Units: make([]uint32, len(indexes))}
		for k, i := range indexes {
			cl.Units[k] = c.home(i).id
		}
		out = append(out, cl)
	}
	return out
}
