package catalog

import (
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/tqerr"
)

// LostCells are cells of one field that were lost, see Reconcile.
type LostCells struct {
	Partition, Field string
	Indexes          []int64
	Keys             []string // of each index, "" when it has none
	Known            []bool   // whether it has one
}

// Lost lists what was lost and neither written nor cleared since; of one partition, or with nil of all. Read-only.
func (c *Catalog) Lost(partition *string) (out []LostCells) {
	for _, p := range c.order {
		if partition != nil && p.name != *partition {
			continue
		}
		for _, f := range p.ordered {
			if f.lost.Count() == 0 {
				continue
			}
			l := LostCells{Partition: p.name, Field: f.name, Indexes: f.lost.Members(nil)}
			for _, i := range l.Indexes {
				key, known := c.keyOf(p, i)
				l.Keys, l.Known = append(l.Keys, key), append(l.Known, known)
			}
			out = append(out, l)
		}
	}
	return out
}

// LostOn counts the lost cells of each unit. Read-only.
func (c *Catalog) LostOn() map[uint32]int64 {
	counts := map[uint32]int64{}
	for _, p := range c.order {
		for _, f := range p.ordered {
			for _, i := range f.lost.Members(nil) {
				counts[c.home(i).id]++
			}
		}
	}
	return counts
}

// lostIn fails when rows have lost cells of the fields, nil for all, and names them by key. Read-only.
func (c *Catalog) lostIn(p *partition, indexes []int64, fields []string) error {
	if p == nil {
		return nil
	}
	asked := p.sorted
	if fields != nil {
		asked = nil
		for _, name := range distinct(fields) {
			if f := p.fields[name]; f != nil {
				asked = append(asked, f)
			}
		}
	}
	var text []string
	for _, f := range asked {
		if f.lost.Count() == 0 {
			continue
		}
		if of := c.namesOf(p, f.lost.Intersect(bitset.NewMask(indexes))); of != "" {
			text = append(text, quoted([]string{f.name}, 1)+" of "+of)
		}
	}
	if text == nil {
		return nil
	}
	return tqerr.New(tqerr.DataLost, "partition %q: lost with a storage unit that has ended: field %s; write or clear them", p.name, strings.Join(text, ", field "))
}

// namesOf names samples by key where they have one.
func (c *Catalog) namesOf(p *partition, rows bitset.Mask) string {
	var keys []string
	var bare []int64
	for i := range rows.All() {
		if key, ok := c.keyOf(p, i); ok {
			keys = append(keys, key)
		} else {
			bare = append(bare, i)
		}
	}
	var parts []string
	if keys != nil {
		parts = append(parts, "keys "+quoted(keys, fewNames))
	}
	if bare != nil {
		parts = append(parts, "samples "+indexList(c.Samples(bare)))
	}
	return strings.Join(parts, ", ")
}
