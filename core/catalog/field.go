package catalog

import (
	"slices"
	"strings"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// field is one column of a partition. Its place stays when no sample holds it any more; its type and shapes do not.
type field struct {
	name   string
	number int // in order of registration
	has    bitset.Set
	lost   bitset.Set // whose cell a unit has lost; none of them is in has
	kind   schema.Kind
	dtype  schema.DType
	ragged uint8
	shapes shapes
}

// fieldNamed returns the field of that name, registering it.
func (p *partition) fieldNamed(name string) *field {
	if f := p.fields[name]; f != nil {
		return f
	}
	name = strings.Clone(name)
	f := &field{name: name, number: len(p.ordered)}
	p.fields[name] = f
	p.ordered = append(p.ordered, f)
	at, _ := slices.BinarySearchFunc(p.sorted, name, func(f *field, name string) int { return strings.Compare(f.name, name) })
	p.sorted = slices.Insert(p.sorted, at, f)
	return f
}

// common returns the sorted names of the fields that every row of a mask has; none for no rows.
func (p *partition) common(rows bitset.Mask) []string {
	names := []string{}
	if len(rows) == 0 {
		return names
	}
	for _, f := range p.sorted {
		if f.has.HasAll(rows) {
			names = append(names, f.name)
		}
	}
	return names
}

// admits checks that a column may be written to rows: other holders pin its type.
func (f *field) admits(partition string, col *schema.Column, rows bitset.Mask) error {
	if f.has.Count() == 0 || f.kind == col.Kind && f.dtype == col.DType {
		return nil
	}
	written := 0
	for i := range rows.All() {
		if f.has.Has(i) {
			written++
		}
	}
	if written == f.has.Count() {
		return nil
	}
	return tqerr.New(tqerr.SchemaMismatch, "partition %q: field %q: %s, want %s", partition, f.name,
		typeName(col.Kind, col.DType, f.kind), typeName(f.kind, f.dtype, col.Kind))
}

// write makes rows hold the column; row k of it belongs to indexes[k], and rows is the mask of indexes.
func (f *field) write(col *schema.Column, indexes []int64, rows bitset.Mask) {
	f.has.AddAll(rows)
	f.lost.RemoveAll(rows)
	switch {
	case f.has.Count() == col.Rows: // nobody else holds it
		f.kind, f.dtype, f.ragged = col.Kind, col.DType, col.Ragged
		f.shapes = shapes{}
	case f.ragged != col.Ragged:
		f.ragged = 1
	}
	if col.Kind == schema.Tensor {
		f.shapes.write(col, indexes, f.has.Count())
	}
}

// erase takes the field from rows, all of which hold it.
func (f *field) erase(rows bitset.Mask) {
	f.has.RemoveAll(rows)
	if f.has.Count() == 0 {
		f.kind, f.dtype, f.ragged = 0, schema.NoDType, 0
		f.shapes = shapes{}
		return
	}
	f.shapes.erase(rows, f.has.Count())
}
