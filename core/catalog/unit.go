package catalog

import (
	"cmp"
	"math"
	"slices"

	"transferqueue/core/tqerr"
)

// NoUnit stands for the unit of a row that has none yet.
const NoUnit = ^uint32(0)

// numSlots is the number of placement buckets that are dealt out. A slot lives on one unit, and a sample stays in its slot. A
// unit that joins while every slot has samples gets one more.
const numSlots = 1024

// unit is a storage server as placement sees it.
type unit struct {
	id      uint32
	host    string
	slots   []uint16
	turn    int   // which of slots is next
	samples int64 // active and clearing ones
	limit   int64 // of samples
	duty    Duty
}

// AddUnit makes a unit known and deals it its share of the slots, as far as slots without samples can be had, at least one. A unit that is
// known already only changes its host.
func (c *Catalog) AddUnit(id uint32, host string) {
	if u := c.unit(id); u != nil {
		u.host = host
		return
	}
	u := &unit{id: id, host: host, limit: c.sampleLimit}
	c.units = append(c.units, u)
	c.epoch++
	if len(c.units) == 1 {
		for slot := range c.unitOf {
			c.deal(u, uint16(slot))
		}
		return
	}
	for len(u.slots) < numSlots/len(c.units) {
		slot, ok := c.spareSlot(u)
		if !ok && len(u.slots) == 0 {
			c.unitOf, c.slotSamples = append(c.unitOf, nil), append(c.slotSamples, 0)
			c.deal(u, uint16(len(c.unitOf)-1))
		}
		if !ok {
			return
		}
		from := c.unitOf[slot]
		from.slots = slices.DeleteFunc(from.slots, func(s uint16) bool { return s == slot })
		from.turn = 0
		c.deal(u, slot)
	}
}

// ReplaceUnit gives the place of a unit, its slots and samples, to one of another number.
func (c *Catalog) ReplaceUnit(old, id uint32, host string) {
	u := c.unit(old)
	u.id, u.host = id, host
	c.epoch++
}

// LimitUnit bounds the samples of a unit; 0: no limit.
func (c *Catalog) LimitUnit(id uint32, samples int64) {
	if samples <= 0 {
		samples = math.MaxInt64
	}
	c.unit(id).limit = samples
}

func (c *Catalog) deal(u *unit, slot uint16) {
	u.slots = append(u.slots, slot)
	c.unitOf[slot] = u
}

// spareSlot finds an empty slot of the unit that has most slots and any empty one, leaving each unit at least one.
func (c *Catalog) spareSlot(taker *unit) (uint16, bool) {
	givers := slices.Clone(c.units)
	slices.SortStableFunc(givers, func(a, b *unit) int { return cmp.Compare(len(b.slots), len(a.slots)) })
	for _, u := range givers {
		if u == taker || len(u.slots) < 2 {
			continue
		}
		for _, slot := range slices.Backward(u.slots) {
			if c.slotSamples[slot] == 0 {
				return slot, true
			}
		}
	}
	return 0, false
}

// Epoch returns the version of the slot map. Read-only.
func (c *Catalog) Epoch() uint64 { return c.epoch }

// SamplesOn returns how many samples count for a unit's limit, those that are being cleared included. Read-only.
func (c *Catalog) SamplesOn(id uint32) int64 {
	if u := c.unit(id); u != nil {
		return u.samples
	}
	return 0
}

func (c *Catalog) unit(id uint32) *unit {
	for _, u := range c.units {
		if u.id == id {
			return u
		}
	}
	return nil
}

// home returns the unit of an index that is active or clearing.
func (c *Catalog) home(i int64) *unit { return c.unitOf[c.slots.get(i)] }

// MoreSamples returns how many more samples a unit may have. Read-only.
func (c *Catalog) MoreSamples(id uint32) int64 {
	if u := c.unit(id); u != nil {
		return c.room(u)
	}
	return 0
}

// room returns how many more samples a unit may have.
func (c *Catalog) room(u *unit) int64 { return max(u.limit-u.samples, 0) }

// nextSlot returns the slot for the new rows of one write.
func (u *unit) nextSlot() uint16 {
	slot := u.slots[u.turn%len(u.slots)]
	u.turn = (u.turn + 1) % len(u.slots)
	return slot
}

// Room is what a unit has to offer.
type Room struct {
	Unit uint32
	Free int64 // bytes; math.MaxInt64: no limit
	Used int64 // bytes
}

// candidate is a unit in the course of placing one batch.
type candidate struct {
	unit  uint32
	local bool
	rows  int64
	free  int64
	used  int64
}

// Place chooses a unit for every row whose entry in units is NoUnit, in as few runs of rows as possible: a unit of host
// with room first, else the one with most room. rowBytes gives the bytes of a row. Rows that fit nowhere go to the unit
// with most free bytes, which will say so or wait. Read-only.
//
// It fails with CapacityExceeded when the units may not have that many samples more, and with Unavailable without units.
func (c *Catalog) Place(units []uint32, host string, rowBytes func(row int) int64, rooms []Room) error {
	return c.PlaceBeside(units, host, rowBytes, rooms, nil)
}

// PlaceBeside is Place beside samples that are about to come to units, so many to each, and are not in the catalog yet.
func (c *Catalog) PlaceBeside(units []uint32, host string, rowBytes func(row int) int64, rooms []Room, coming map[uint32]int64) error {
	var todo []int
	for row, u := range units {
		if u == NoUnit {
			todo = append(todo, row)
		}
	}
	if len(todo) == 0 {
		return nil
	}
	candidates, total := c.candidates(host, rooms, coming)
	if len(candidates) == 0 {
		return tqerr.New(tqerr.Unavailable, "no storage unit takes samples")
	}
	if total < int64(len(todo)) {
		return c.exceeded(candidates, len(todo))
	}
	locals := slices.IndexFunc(candidates, func(x candidate) bool { return !x.local })
	if locals < 0 {
		locals = len(candidates)
	}
	todo = fill(units, todo, rowBytes, candidates[:locals])
	todo = fill(units, todo, rowBytes, candidates[locals:])
	slices.SortStableFunc(candidates, func(a, b candidate) int { return cmp.Compare(b.free, a.free) })
	for i := range candidates {
		n := min(int64(len(todo)), candidates[i].rows)
		for _, row := range todo[:n] {
			units[row] = candidates[i].unit
		}
		todo = todo[n:]
	}
	return nil
}

// candidates returns the units that may have more samples, those of the host first, then by room, and how many samples
// they may have together.
func (c *Catalog) candidates(host string, rooms []Room, coming map[uint32]int64) (list []candidate, total int64) {
	for _, r := range rooms {
		u := c.unit(r.Unit)
		if u == nil || !u.takesSamples() {
			continue
		}
		rows := max(c.room(u)-coming[r.Unit], 0)
		total += min(rows, math.MaxInt64-total)
		list = append(list, candidate{r.Unit, u.host == host, rows, r.Free, r.Used})
	}
	slices.SortFunc(list, func(a, b candidate) int {
		if a.local != b.local {
			if a.local {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(b.free, a.free), cmp.Compare(a.used, b.used), cmp.Compare(a.unit, b.unit))
	})
	return list, total
}

func (c *Catalog) exceeded(candidates []candidate, rows int) error {
	existing, limit := int64(0), int64(0)
	each := c.unit(candidates[0].unit).limit
	for _, x := range candidates {
		u := c.unit(x.unit)
		existing, limit, each = existing+u.samples, limit+u.limit, min(each, u.limit)
	}
	if n := int64(len(candidates)); each*n != limit {
		return tqerr.New(tqerr.CapacityExceeded, "Storage capacity exceeded: %d existing + %d new samples > limit %d (of %d units)",
			existing, rows, limit, n)
	}
	return tqerr.New(tqerr.CapacityExceeded, "Storage capacity exceeded: %d existing + %d new samples > limit %d (%d on each of %d units)",
		existing, rows, limit, each, len(candidates))
}

// fill gives the longest possible run of rows to one unit after the other and returns the rows that fit on none.
func fill(units []uint32, todo []int, rowBytes func(int) int64, candidates []candidate) []int {
	for len(todo) > 0 {
		best, run, bytes := -1, 0, int64(0)
		for i := range candidates {
			n, sum := candidates[i].takes(todo, rowBytes)
			if n > run {
				best, run, bytes = i, n, sum
			}
			if run == len(todo) {
				break
			}
		}
		if best < 0 {
			return todo
		}
		for _, row := range todo[:run] {
			units[row] = candidates[best].unit
		}
		candidates[best].rows -= int64(run)
		if candidates[best].free != math.MaxInt64 {
			candidates[best].free -= bytes
		}
		todo = todo[run:]
	}
	return nil
}

// takes returns how many of the first rows the unit has room for, and their bytes.
func (x *candidate) takes(todo []int, rowBytes func(int) int64) (n int, sum int64) {
	if x.free == math.MaxInt64 {
		return int(min(int64(len(todo)), x.rows)), 0
	}
	for _, row := range todo {
		size := rowBytes(row)
		if int64(n) == x.rows || size > x.free-sum {
			break
		}
		sum += size
		n++
	}
	return n, sum
}
