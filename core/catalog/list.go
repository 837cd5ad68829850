package catalog

import (
	"cmp"
	"slices"
	"strings"

	"transferqueue/core/internal/bitset"
)

// ListFilter narrows a listing. The zero value lists everything.
type ListFilter struct {
	Partition *string
	Keys      []string // nil: any
	Prefix    string
	Tags      []byte   // msgpack map; a key must have all its entries, by Python's idea of equal
	Fields    []string // a key must have all of them
}

// Listed is a partition with those of its keys that passed.
type Listed struct {
	Name string
	Keys []string
	Tags [][]byte
}

// List returns partitions in the order of their creation and keys in the order of their registration. Read-only. A tag
// filter that is no map gives InvalidArgument.
func (c *Catalog) List(f ListFilter) ([]Listed, error) {
	tags, err := newTagFilter(f.Tags)
	if err != nil {
		return nil, err
	}
	out := []Listed{}
	for _, p := range c.order {
		if f.Partition != nil && p.name != *f.Partition {
			continue
		}
		out = append(out, c.listPartition(p, &f, tags))
	}
	return out, nil
}

func (c *Catalog) listPartition(p *partition, f *ListFilter, tags *tagFilter) Listed {
	out := Listed{Name: p.name, Keys: []string{}, Tags: [][]byte{}}
	fields, ok := p.all(f.Fields)
	if !ok {
		return out
	}
	candidates := p.registered
	if f.Keys != nil {
		candidates = c.findAll(p, f.Keys)
	} else {
		n := p.keyed.Count()
		out.Keys, out.Tags = make([]string, 0, n), make([][]byte, 0, n)
	}
	for _, i := range candidates {
		if i == newRow || !strings.HasPrefix(c.keys.get(i), f.Prefix) || !hasAll(fields, i) || !tags.match(c.tagsOf(i)) {
			continue
		}
		out.Keys = append(out.Keys, c.keys.get(i))
		out.Tags = append(out.Tags, c.tagsOf(i))
	}
	return out
}

// findAll returns the indexes of the keys that exist, each once, in the order of registration.
func (c *Catalog) findAll(p *partition, keys []string) []int64 {
	var found []int64
	for _, key := range keys {
		if i, ok := c.find(p, key); ok {
			found = append(found, i)
		}
	}
	slices.SortFunc(found, func(a, b int64) int { return cmp.Compare(p.position.get(a), p.position.get(b)) })
	return slices.Compact(found)
}

// all returns the sets of the holders of fields; false when some field has no holder.
func (p *partition) all(fields []string) ([]*bitset.Set, bool) {
	var sets []*bitset.Set
	for _, name := range fields {
		f := p.fields[name]
		if f == nil || f.has.Count() == 0 {
			return nil, false
		}
		sets = append(sets, &f.has)
	}
	return sets, true
}

func hasAll(sets []*bitset.Set, i int64) bool {
	for _, s := range sets {
		if !s.Has(i) {
			return false
		}
	}
	return true
}

// WaitSpec says what to wait for: that all Keys, or with nil at least Count keys, have all Fields and match Tags.
type WaitSpec struct {
	Partition string
	Keys      []string
	Count     int
	Fields    []string
	Tags      []byte
}

// Matched is what was waited for. With Keys it has them in their order, else every key that matches.
type Matched struct {
	Keys   []string
	Tags   [][]byte
	Fields []string // sorted, those that all of the keys have
}

// Match returns nil when what the spec asks for has not happened yet. Read-only. A tag filter that is no map gives
// InvalidArgument.
func (c *Catalog) Match(w WaitSpec) (*Matched, error) {
	tags, err := newTagFilter(w.Tags)
	if err != nil {
		return nil, err
	}
	p := c.partitions[w.Partition]
	if p == nil {
		return nil, nil
	}
	fields, ok := p.all(w.Fields)
	if !ok {
		return nil, nil
	}
	var indexes []int64
	if w.Keys != nil {
		for _, key := range w.Keys {
			i, ok := c.find(p, key)
			if !ok || !hasAll(fields, i) || !tags.match(c.tagsOf(i)) {
				return nil, nil
			}
			indexes = append(indexes, i)
		}
	} else {
		// Counting bits first spares a waiter for many keys the look at each.
		held := bitset.Query{All: append([]*bitset.Set{&p.keyed}, fields...)}
		if held.Count(max(w.Count, 0)) < w.Count {
			return nil, nil
		}
		for _, i := range p.registered {
			if i != newRow && hasAll(fields, i) && tags.match(c.tagsOf(i)) {
				indexes = append(indexes, i)
			}
		}
		if len(indexes) < w.Count {
			return nil, nil
		}
	}
	return c.matched(p, indexes), nil
}

func (c *Catalog) matched(p *partition, indexes []int64) *Matched {
	out := &Matched{Keys: make([]string, len(indexes)), Tags: make([][]byte, len(indexes)), Fields: p.common(bitset.NewMask(indexes))}
	for k, i := range indexes {
		out.Keys[k], out.Tags[k] = c.keys.get(i), c.tagsOf(i)
	}
	return out
}
