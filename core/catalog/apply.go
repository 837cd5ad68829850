package catalog

import (
	"slices"
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Apply validates a write again, as the world may have changed since Check, and does it: fully or not at all. units[i] is
// the unit on which the cells of row i are staged. New samples get the smallest indexes, ascending in row order: first those
// that the partition reserved, then free ones.
//
// Conflict means that a row lives elsewhere by now, or that another write took the last room for samples: check, place and
// stage again. All other errors are those of Check.
func (c *Catalog) Apply(w *Write, units []uint32) (*Applied, error) {
	pl, err := c.plan(w)
	if err != nil {
		return nil, err
	}
	if err := pl.admit(w); err != nil {
		return nil, err
	}
	fresh, err := c.settle(pl, w, units)
	if err != nil {
		return nil, err
	}
	p := c.ensure(w.Partition)
	rows := pl.places
	if fresh > 0 {
		c.create(p, pl, w, units, fresh)
		rows = bitset.NewMask(pl.rows)
	}
	fields := make([]string, len(w.Columns))
	for i := range w.Columns {
		f := p.fieldNamed(w.Columns[i].Field)
		f.write(&w.Columns[i], pl.rows, rows)
		fields[i] = f.name
	}
	for i := range w.Tags {
		if len(w.Tags[i]) > 1 { // an empty map has one byte
			at := c.tags.at(pl.rows[i])
			*at = mergeTags(*at, w.Tags[i])
		}
	}
	p.complete = p.complete || w.Last
	slices.Sort(fields)
	return c.applied(p, pl.rows, rows, w, fields), nil
}

// settle checks that the rows can be where their cells are staged, and counts those that become active.
func (c *Catalog) settle(pl *plan, w *Write, units []uint32) (fresh int, err error) {
	if len(units) != len(pl.rows) {
		return 0, tqerr.New(tqerr.InvalidArgument, "%d units for %d rows", len(units), len(pl.rows))
	}
	more := map[uint32]int64{}
	last, n := NoUnit, int64(0)
	for i, index := range pl.rows {
		switch lives := c.unitID(pl.p, index); {
		case lives == units[i]:
		case lives != NoUnit:
			return 0, tqerr.New(tqerr.Conflict, "partition %q: sample %d lives on unit %d, staged on unit %d", w.Partition, index, lives, units[i])
		case units[i] == last:
			n++
			fresh++
		default:
			more[last] += n
			last, n = units[i], 1
			fresh++
		}
	}
	more[last] += n
	for id, n := range more {
		if n == 0 {
			continue
		}
		u := c.unit(id)
		if u == nil || !u.takesSamples() {
			return 0, tqerr.New(tqerr.Conflict, "partition %q: unit %d takes no samples", w.Partition, id)
		}
		if n > c.room(u) {
			return 0, tqerr.New(tqerr.Conflict, "partition %q: unit %d has no room for %d samples any more", w.Partition, id, n)
		}
	}
	return fresh, nil
}

// create makes every row of a plan active that is not yet.
func (c *Catalog) create(p *partition, pl *plan, w *Write, units []uint32, fresh int) {
	var indexes []int64
	if w.Samples == nil {
		indexes = c.draw(p, fresh)
	}
	if w.Keys != nil {
		p.byKey.reserve(fresh)
		p.registered = slices.Grow(p.registered, fresh)
	}
	last, home, slot := NoUnit, (*unit)(nil), uint16(0)
	slots := map[uint32]uint16{}
	activated := make([]int64, 0, fresh)
	for i, index := range pl.rows {
		if index != newRow && p.active.Has(index) {
			continue
		}
		if index == newRow {
			index, indexes = indexes[0], indexes[1:]
			pl.rows[i] = index
		}
		if units[i] != last {
			last = units[i]
			home = c.unit(last)
			known := false
			if slot, known = slots[last]; !known {
				slot = home.nextSlot()
				slots[last] = slot
			}
		}
		*c.slots.at(index) = slot
		c.slotSamples[slot]++
		home.samples++
		activated = append(activated, index)
		if w.Keys != nil {
			c.register(p, strings.Clone(w.Keys[i]), pl.hashes[i], index)
		}
	}
	if p.active.Count() == 0 { // the stream that was complete is gone with its samples
		p.complete = false
	}
	p.leaving = false
	mask := bitset.NewMask(activated)
	p.owned.AddAll(mask)
	p.active.AddAll(mask)
	p.births.add(activated, &p.active)
}

// draw returns n indexes for new samples, ascending.
func (c *Catalog) draw(p *partition, n int) []int64 {
	reserved := bitset.Query{All: []*bitset.Set{&p.owned}, Not: []*bitset.Set{&p.active}}
	var out []int64
	if p.owned.Count() > p.active.Count() {
		out = reserved.Append(make([]int64, 0, n), n)
	}
	have := len(out)
	out = c.take(slices.Grow(out, n-have), n-have)
	if have > 0 && have < n && out[have] < out[have-1] {
		slices.Sort(out)
	}
	return out
}

// applied reports on rows that were written.
func (c *Catalog) applied(p *partition, rows []int64, mask bitset.Mask, w *Write, fields []string) *Applied {
	kind := EventPut
	if w.Update {
		kind = EventUpdate
	}
	out := &Applied{
		Samples: make([]schema.Sample, len(rows)),
		Fields:  p.common(mask),
		Tags:    make([][]byte, len(rows)),
	}
	watched := !w.Unwatched && p.keyed.HasAny(mask)
	if watched {
		out.Events = make([]Event, 0, len(rows))
	}
	for i, index := range rows {
		out.Samples[i] = c.sample(index)
		out.Tags[i] = c.tagsOf(index)
		if !watched {
			continue
		}
		if key, ok := c.keyOf(p, index); ok {
			out.Events = append(out.Events, Event{kind, key, fields, out.Tags[i]})
		}
	}
	return out
}

// CheckTags fails as SetTags would. Read-only.
func (c *Catalog) CheckTags(samples []schema.Sample, tags [][]byte) error {
	if tags == nil {
		tags = [][]byte{}
	}
	return checkTags(tags, len(samples))
}

// SetTags replaces the tags of samples; samples that do not exist are ignored. There is one map per sample.
func (c *Catalog) SetTags(partition string, samples []schema.Sample, tags [][]byte) ([]Event, error) {
	if tags == nil {
		tags = [][]byte{}
	}
	if err := checkTags(tags, len(samples)); err != nil {
		return nil, err
	}
	p := c.partitions[partition]
	var events []Event
	for i, s := range samples {
		if !c.owns(p, s) || !p.active.Has(s.Index) {
			continue
		}
		if t := mergeTags(nil, tags[i]); t != nil {
			*c.tags.at(s.Index) = t
		} else {
			c.tags.clear(s.Index)
		}
		if key, ok := c.keyOf(p, s.Index); ok {
			events = append(events, Event{EventPut, key, []string{}, c.tagsOf(s.Index)})
		}
	}
	return events, nil
}
