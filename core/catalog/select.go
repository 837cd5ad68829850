package catalog

import (
	"slices"
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Selection is what a read will read: cells that exist, and where they live.
type Selection struct {
	Rows    []int // positions in the request of the rows that exist, ascending
	Samples []schema.Sample
	Units   []uint32
	Fields  []string // sorted
}

// SelectKeys finds the rows of keys. A key that is asked for twice gives two rows, a key that does not exist none. Fields
// nil means those that all rows have; others are narrowed to them, which may leave none. With strict, every key and field
// must be there. Read-only.
//
// Errors: NotFound when no key exists, and with strict for each that is missing; DataLost for cells that were lost;
// InvalidArgument when the rows share no field at all.
func (c *Catalog) SelectKeys(partition string, keys []string, fields []string, strict bool) (*Selection, error) {
	p := c.partitions[partition]
	out := &Selection{
		Rows:    make([]int, 0, len(keys)),
		Samples: make([]schema.Sample, 0, len(keys)),
		Units:   make([]uint32, 0, len(keys)),
	}
	indexes := make([]int64, 0, len(keys))
	var missing []string
	for i, key := range keys {
		index, ok := int64(0), false
		if p != nil {
			index, ok = c.find(p, key)
		}
		if !ok {
			missing = append(missing, key)
			continue
		}
		indexes = append(indexes, index)
		out.Rows = append(out.Rows, i)
		out.Samples = append(out.Samples, c.sample(index))
		out.Units = append(out.Units, c.home(index).id)
	}
	switch {
	case len(indexes) == 0 && (p == nil || !strict):
		limit := fewNames
		if strict {
			limit = allNames
		}
		return nil, noKeys(partition, missing, limit)
	case strict && missing != nil:
		err := keysNotFound(partition, p, distinct(missing), allNames)
		if lacking := c.lacking(p, indexes, bitset.NewMask(indexes), fields); lacking != "" && len(indexes) > 0 {
			err = tqerr.New(tqerr.NotFound, "%s; %s", err, lacking)
		}
		return nil, err
	}
	var err error
	out.Fields, err = c.selectFields(p, indexes, fields, strict)
	return out, err
}

// noKeys is the error of a read for which there is nothing at all.
func noKeys(partition string, keys []string, limit int) error {
	return tqerr.New(tqerr.NotFound, "keys or partition were not found! partition %q, keys %s", partition, quoted(distinct(keys), limit))
}

// selectFields narrows the fields of a read by key to those that all rows have.
func (c *Catalog) selectFields(p *partition, indexes []int64, fields []string, strict bool) ([]string, error) {
	if err := c.lostIn(p, indexes, fields); err != nil {
		return nil, err
	}
	rows := bitset.NewMask(indexes)
	if strict && fields != nil {
		if lacking := c.lacking(p, indexes, rows, fields); lacking != "" {
			return nil, tqerr.New(tqerr.NotFound, "partition %q: %s", p.name, lacking)
		}
	}
	common := p.common(rows)
	if len(common) == 0 {
		return nil, c.notReady(p, indexes)
	}
	if fields == nil {
		return common, nil
	}
	return slices.DeleteFunc(distinct(fields), func(name string) bool {
		_, ok := slices.BinarySearch(common, name)
		return !ok
	}), nil
}

// distinct returns the names sorted, each once.
func distinct(names []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(names)))
}

// lacking names every field that some row lacks, with the keys of these rows.
func (c *Catalog) lacking(p *partition, indexes []int64, rows bitset.Mask, fields []string) string {
	var text []string
	for _, name := range distinct(fields) {
		f := p.fields[name]
		if f != nil && f.has.HasAll(rows) {
			continue
		}
		var keys []string
		for _, i := range indexes {
			if f == nil || !f.has.Has(i) {
				keys = append(keys, c.keys.get(i))
			}
		}
		text = append(text, quoted([]string{name}, 1)+" (keys "+quoted(slices.Compact(keys), allNames)+")")
	}
	if text == nil {
		return ""
	}
	return "fields were not found: " + strings.Join(text, "; ")
}

// notReady is the error for rows without a common field. It names those that have nothing, if there are such.
func (c *Catalog) notReady(p *partition, indexes []int64) error {
	var bare, all []string
	for _, i := range indexes {
		all = append(all, c.keys.get(i))
		if !slices.ContainsFunc(p.ordered, func(f *field) bool { return f.has.Has(i) }) {
			bare = append(bare, c.keys.get(i))
		}
	}
	if bare != nil {
		return tqerr.New(tqerr.InvalidArgument, "partition %q: fields are not ready: these keys have none: %s", p.name, quoted(distinct(bare), fewNames))
	}
	return tqerr.New(tqerr.InvalidArgument, "partition %q: fields are not ready: no field is common to keys %s", p.name, quoted(distinct(all), fewNames))
}

// SelectSamples finds the rows of samples, all of which must exist and have all fields; nil means those that all have.
// Read-only.
//
// Errors: SampleGone for a sample that was cleared, also when its index has a new sample; DataLost for cells that were lost;
// InvalidArgument for a field that a row lacks.
func (c *Catalog) SelectSamples(samples []schema.Sample, partition string, fields []string) (*Selection, error) {
	p := c.partitions[partition]
	out := &Selection{Rows: make([]int, len(samples)), Samples: samples, Units: make([]uint32, len(samples))}
	indexes, err := c.indexesOf(p, samples, partition)
	if err != nil {
		return nil, err
	}
	for i, index := range indexes {
		out.Rows[i] = i
		out.Units[i] = c.unitID(p, index)
	}
	if len(samples) == 0 {
		out.Fields = []string{}
		return out, nil
	}
	if err := c.lostIn(p, indexes, fields); err != nil {
		return nil, err
	}
	rows := bitset.NewMask(indexes)
	if fields == nil {
		out.Fields = p.common(rows)
		return out, nil
	}
	out.Fields = distinct(fields)
	for _, name := range out.Fields {
		if f := p.fields[name]; f == nil || !f.has.HasAll(rows) {
			return nil, unproduced(p, name, samples, f, rows)
		}
	}
	return out, nil
}

// indexesOf checks that samples exist.
func (c *Catalog) indexesOf(p *partition, samples []schema.Sample, partition string) ([]int64, error) {
	indexes := make([]int64, len(samples))
	for i, s := range samples {
		if !c.owns(p, s) {
			return nil, c.gone(partition, p, s)
		}
		indexes[i] = s.Index
	}
	return indexes, nil
}

func unproduced(p *partition, name string, samples []schema.Sample, f *field, rows bitset.Mask) error {
	without := samples
	if f != nil {
		without = slices.DeleteFunc(slices.Clone(samples), func(s schema.Sample) bool { return f.has.Has(s.Index) })
	}
	return tqerr.New(tqerr.InvalidArgument, "partition %q: field %q is not produced for samples %s; all have %s",
		p.name, name, indexList(without), orNone(p.common(rows)))
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "no field"
	}
	return quoted(names, allNames)
}
