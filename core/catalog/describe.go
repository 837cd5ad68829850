package catalog

import (
	"slices"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Described is metadata of rows.
type Described struct {
	Samples []schema.Sample
	// Columns have one row per sample. A field that is registered but held by no sample has no form and no type. A row
	// that lacks a field which others hold is described by their shape if they share one, else by rank 0; objects have
	// neither sizes nor codecs here, all are zero.
	Columns []schema.Column
	Status  []byte // 1 for a row that has all Columns, of which there is at least one
	Tags    [][]byte
	End     bool // of a fetch: there is nothing, and never will be
	Taken   Taken
}

// Taken is what a fetch has marked as consumed and was not before.
type Taken struct {
	Partition string
	Task      string
	Samples   []schema.Sample
	resets    uint64 // Catalog.resets
}

// Describe returns the metadata of samples for those of the fields that are registered; nil means the fields that all rows
// have. Read-only. It fails with SampleGone.
func (c *Catalog) Describe(partition string, samples []schema.Sample, fields []string) (*Described, error) {
	p := c.partitions[partition]
	indexes, err := c.indexesOf(p, samples, partition)
	if err != nil || len(samples) == 0 {
		return &Described{}, err
	}
	if fields == nil {
		fields = p.common(bitset.NewMask(indexes))
	}
	return c.describe(indexes, p.registeredOf(fields)), nil
}

// Lookup returns the metadata of those keys that exist, in their order, with the fields that all of them have. Read-only.
func (c *Catalog) Lookup(partition string, keys []string) *Described {
	p := c.partitions[partition]
	if p == nil {
		return &Described{}
	}
	indexes := make([]int64, 0, len(keys))
	for _, key := range keys {
		if i, ok := c.find(p, key); ok {
			indexes = append(indexes, i)
		}
	}
	return c.describe(indexes, p.registeredOf(p.common(bitset.NewMask(indexes))))
}

// ForceFetch returns the metadata of every index of a partition, ascending, those included that are only reserved. It
// consumes nothing. Read-only. An unknown partition gives NotFound.
func (c *Catalog) ForceFetch(partition string, fields []string) (*Described, error) {
	p, err := c.lookup(partition)
	if err != nil {
		return nil, err
	}
	return c.describe(p.owned.Members(nil), p.registeredOf(fields)), nil
}

// KeysOf returns the key of each index, and which indexes have one. Read-only. An unknown partition gives InvalidState.
func (c *Catalog) KeysOf(partition string, indexes []int64) (keys []string, known []bool, err error) {
	p := c.partitions[partition]
	if p == nil {
		return nil, nil, tqerr.New(tqerr.InvalidState, "partition %q was not found", partition)
	}
	keys, known = make([]string, len(indexes)), make([]bool, len(indexes))
	for k, i := range indexes {
		if i >= 0 {
			keys[k], known[k] = c.keyOf(p, i)
		}
	}
	return keys, known, nil
}

// registeredOf returns the fields of these names, each once, without those that were never written.
func (p *partition) registeredOf(names []string) []*field {
	out := make([]*field, 0, len(names))
	for _, name := range names {
		if f := p.fields[name]; f != nil && !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

func (c *Catalog) describe(indexes []int64, fields []*field) *Described {
	out := &Described{
		Samples: make([]schema.Sample, len(indexes)),
		Columns: make([]schema.Column, len(fields)),
		Status:  make([]byte, len(indexes)),
		Tags:    make([][]byte, len(indexes)),
	}
	for k, i := range indexes {
		out.Samples[k] = c.sample(i)
		out.Tags[k] = c.tagsOf(i)
	}
	for k, f := range fields {
		out.Columns[k] = f.describe(indexes)
	}
	if len(fields) == 0 {
		return out
	}
	for k, i := range indexes {
		out.Status[k] = 1
		for _, f := range fields {
			if !f.has.Has(i) {
				out.Status[k] = 0
				break
			}
		}
	}
	return out
}

// describe returns the column of a field for some rows.
func (f *field) describe(indexes []int64) schema.Column {
	n := len(indexes)
	col := schema.Column{Field: f.name, Rows: n}
	switch {
	case f.has.Count() == 0:
		return col
	case f.kind == schema.Object:
		col.Kind, col.Form = schema.Object, schema.Objects
		col.Sizes, col.Codecs = make([]int64, n), make([]schema.Codec, n)
		return col
	}
	uniform := schema.Column{Kind: f.kind, DType: f.dtype, Ragged: f.ragged, Form: schema.Uniform}
	if f.shapes.deviating == 0 || n == 0 {
		uniform.Field, uniform.Rows, uniform.Shape = f.name, n, f.shapes.base
		return uniform
	}
	b := schema.NewBuilder(f.name)
	for from := 0; from < n; from += uniform.Rows {
		uniform.Shape = f.rowShape(indexes[from])
		uniform.Rows = 1
		for from+uniform.Rows < n && slices.Equal(f.rowShape(indexes[from+uniform.Rows]), uniform.Shape) {
			uniform.Rows++
		}
		b.Append(uniform)
	}
	return b.Column()
}

// rowShape returns the shape of a row, rank 0 for one that lacks the field.
func (f *field) rowShape(i int64) []int64 {
	if !f.has.Has(i) {
		return nil
	}
	return f.shapes.of(i)
}
