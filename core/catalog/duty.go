package catalog

import (
	"math/bits"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Duty says whether a unit takes new samples. It outlives the unit's process. Samples that a unit has may be read, written and
// cleared whatever its duty is.
//
//	Active -> Cordoned -> Active
//	Active | Cordoned -> Draining -> Drained | Cordoned
//	Drained -> Active
type Duty uint8

// The duties. Only an Active unit takes samples.
const (
	Active   Duty = iota
	Cordoned      // a drain has ended before the unit was empty
	Draining      // its samples are moved to other units
	Drained       // it holds nothing
	numDuties
)

var dutyNames = [numDuties]string{"ACTIVE", "CORDONED", "DRAINING", "DRAINED"}

func (d Duty) String() string { return dutyNames[d] }

// Duty returns what a unit does; Active when it is unknown. Read-only.
func (c *Catalog) Duty(id uint32) Duty {
	if u := c.unit(id); u != nil {
		return u.duty
	}
	return Active
}

// SetDuty changes what a unit does.
func (c *Catalog) SetDuty(id uint32, d Duty) {
	if u := c.unit(id); u != nil && u.duty != d {
		u.duty = d
		c.epoch++
	}
}

// takesSamples reports whether new samples may be placed on a unit.
func (u *unit) takesSamples() bool { return u.duty == Active && len(u.slots) > 0 }

// Cursor is a place in a walk over the samples of a unit. The zero value is its beginning.
type Cursor struct {
	partition int
	index     int64
}

// residentWords bounds how many words of a bitset one step of a walk looks at.
const residentWords = 1024

// Residents returns some active samples that live on a unit, from a cursor on, all of one partition, and where to go on; end
// when nothing follows. One step takes the same time however many samples there are, so it may find none before the end.
// Partitions that are made or removed meanwhile may be passed over: a walk is over when one has found none. Read-only.
func (c *Catalog) Residents(id uint32, at Cursor, most int) (partition string, found []schema.Sample, next Cursor, end bool) {
	for words := residentWords; words > 0 && at.partition < len(c.order); {
		p := c.order[at.partition]
		for ; at.index < c.everUsed && words > 0; words-- {
			word := p.active.Word(at.index>>6) &^ (1<<uint64(at.index&63) - 1)
			for ; word != 0; word &= word - 1 {
				i := at.index&^63 + int64(bits.TrailingZeros64(word))
				if c.home(i).id != id {
					continue
				}
				if len(found) == most {
					at.index = i
					return p.name, found, at, false
				}
				found = append(found, c.sample(i))
			}
			at.index = at.index&^63 + 64
		}
		if at.index >= c.everUsed {
			at = Cursor{partition: at.partition + 1}
		}
		if len(found) > 0 {
			return p.name, found, at, at.partition >= len(c.order)
		}
	}
	return "", nil, at, at.partition >= len(c.order)
}

// GroupsOn puts those of the samples in groups that are active and live on a unit. Read-only.
func (c *Catalog) GroupsOn(id uint32, partition string, samples []schema.Sample) []Group {
	p := c.partitions[partition]
	var indexes []int64
	for _, s := range samples {
		if c.owns(p, s) && p.active.Has(s.Index) && c.home(s.Index).id == id {
			indexes = append(indexes, s.Index)
		}
	}
	if indexes == nil {
		return nil
	}
	return c.group(nil, p, indexes)
}

// Settled fails with Conflict when rows cannot be any more where their cells are staged, as Apply would. Read-only.
func (c *Catalog) Settled(w *Write, units []uint32) error {
	pl, err := c.plan(w)
	if err == nil {
		_, err = c.settle(pl, w, units)
	}
	return err
}

// CheckRelocate fails as Relocate would. Read-only.
func (c *Catalog) CheckRelocate(partition string, samples []schema.Sample, from, to uint32) error {
	p, target := c.partitions[partition], c.unit(to)
	if target == nil || !target.takesSamples() {
		return tqerr.New(tqerr.Conflict, "unit %d takes no samples", to)
	}
	if int64(len(samples)) > c.room(target) {
		return tqerr.New(tqerr.CapacityExceeded, "unit %d has no room for %d samples more", to, len(samples))
	}
	for _, s := range samples {
		if !c.owns(p, s) || !p.active.Has(s.Index) || c.home(s.Index).id != from {
			return tqerr.New(tqerr.Conflict, "partition %q: sample %d does not live on unit %d any more", partition, s.Index, from)
		}
	}
	return nil
}

// Relocate lets samples live on another unit, which has their cells. They get a slot of it. It is fully done or not at all;
// Conflict means that the world has changed, CapacityExceeded that the unit may not have so many samples more.
func (c *Catalog) Relocate(partition string, samples []schema.Sample, from, to uint32) error {
	if err := c.CheckRelocate(partition, samples, from, to); err != nil || len(samples) == 0 {
		return err
	}
	source, target := c.unit(from), c.unit(to)
	slot := target.nextSlot()
	for _, s := range samples {
		at := c.slots.at(s.Index)
		c.slotSamples[*at]--
		*at = slot
		c.slotSamples[slot]++
	}
	source.samples -= int64(len(samples))
	target.samples += int64(len(samples))
	return nil
}

// Chosen returns the samples of keys, nil: all active ones of the partition. Read-only. NotFound names the keys that do not exist.
func (c *Catalog) Chosen(partition string, keys []string) ([]schema.Sample, error) {
	p, err := c.lookup(partition)
	if err != nil {
		return nil, err
	}
	if keys == nil {
		return c.Samples(p.active.Members(nil)), nil
	}
	out := make([]schema.Sample, 0, len(keys))
	var missing []string
	for _, key := range keys {
		if i, ok := c.find(p, key); ok {
			out = append(out, c.sample(i))
		} else {
			missing = append(missing, key)
		}
	}
	if missing != nil {
		return nil, keysNotFound(partition, p, missing, fewNames)
	}
	return out, nil
}
