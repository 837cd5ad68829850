package schema

import "slices"

// Builder concatenates rows of columns that agree in kind and dtype, keeping the simplest form that fits.
type Builder struct {
	out   Column
	first bool
	rows  int // expected
}

// NewBuilder starts an empty column of the given field.
func NewBuilder(field string) *Builder { return &Builder{out: Column{Field: field}, first: true} }

// Grow says how many rows the column will have, so that its arrays are allocated once.
func (b *Builder) Grow(rows int) { b.rows = rows }

// AppendRows adds rows [from, to) of c. It is Append of a Slice, but cheap for few rows.
func (b *Builder) AppendRows(c *Column, from, to int) {
	o := &b.out
	switch {
	case b.first || from == to:
		b.Append(c.Slice(from, to))
		return
	case o.Form == Objects && c.Form == Objects:
		o.Codecs, o.Sizes = append(o.Codecs, c.Codecs[from:to]...), append(o.Sizes, c.Sizes[from:to]...)
	case o.Form == Uniform && c.Form == Uniform && slices.Equal(o.Shape, c.Shape):
	case o.Form == Varying && c.Form != Free && o.vary(c):
		if c.Form == Varying {
			o.Lengths = append(o.Lengths, c.Lengths[from:to]...)
			break
		}
		for range to - from {
			o.Lengths = append(o.Lengths, c.Shape[o.Vary])
		}
	default:
		b.Append(c.Slice(from, to))
		return
	}
	if o.Ragged != c.Ragged {
		o.Ragged = 1
	}
	o.Rows += to - from
}

// cloneFor copies a slice into one with room for n elements. An empty one stays nil.
func cloneFor[T any](from []T, n int) []T {
	if len(from) == 0 {
		return nil
	}
	return append(make([]T, 0, max(n, len(from))), from...)
}

// Append adds all rows of c. Rows that disagree on the ragged dimension fall back to 1, as torch would build them.
func (b *Builder) Append(c Column) {
	if c.Rows == 0 {
		return
	}
	if b.first {
		field := b.out.Field
		b.out, b.first = c, false
		b.out.Field = field
		b.out.Lengths, b.out.NDims, b.out.Dims = cloneFor(c.Lengths, b.rows), cloneFor(c.NDims, b.rows), slices.Clone(c.Dims)
		b.out.Codecs, b.out.Sizes = cloneFor(c.Codecs, b.rows), cloneFor(c.Sizes, b.rows)
		return
	}
	o := &b.out
	if o.Ragged != c.Ragged {
		o.Ragged = 1
	}
	switch {
	case o.Form == Objects:
		o.Codecs, o.Sizes = append(o.Codecs, c.Codecs...), append(o.Sizes, c.Sizes...)
	case o.Form == Uniform && c.Form == Uniform && slices.Equal(o.Shape, c.Shape):
	case o.vary(&c):
		if o.Form == Uniform {
			o.Lengths = make([]int64, 0, max(b.rows, o.Rows+c.Rows))
		}
		o.toVarying(o.varyDim(&c))
		if c.Form == Uniform {
			for range c.Rows {
				o.Lengths = append(o.Lengths, c.Shape[o.Vary])
			}
		} else {
			o.Lengths = append(o.Lengths, c.Lengths...)
		}
	default:
		o.toFree()
		for _, shape := range c.Shapes() {
			o.NDims, o.Dims = append(o.NDims, uint8(len(shape))), append(o.Dims, shape...)
		}
	}
	o.Rows += c.Rows
}

// Column returns what was built. The builder must not be used afterwards.
func (b *Builder) Column() Column { return b.out }

// vary reports whether o and c together fit the Varying form.
func (o *Column) vary(c *Column) bool {
	if o.Form == Free || c.Form == Free || len(o.Shape) != len(c.Shape) || len(o.Shape) == 0 {
		return false
	}
	if o.Form == Varying && c.Form == Varying && o.Vary != c.Vary {
		return false
	}
	d := o.varyDim(c)
	for i := range o.Shape {
		if i != d && o.Shape[i] != c.Shape[i] {
			return false
		}
	}
	return true
}

// varyDim returns the dimension in which the two may differ.
func (o *Column) varyDim(c *Column) int {
	switch {
	case o.Form == Varying:
		return int(o.Vary)
	case c.Form == Varying:
		return int(c.Vary)
	}
	for i := range o.Shape {
		if o.Shape[i] != c.Shape[i] {
			return i
		}
	}
	return 0
}

func (o *Column) toVarying(dim int) {
	if o.Form == Varying {
		return
	}
	o.Form, o.Vary = Varying, uint8(dim)
	for range o.Rows {
		o.Lengths = append(o.Lengths, o.Shape[dim])
	}
}

func (o *Column) toFree() {
	if o.Form == Free {
		return
	}
	var ndims []uint8
	var dims []int64
	for _, shape := range o.Shapes() {
		ndims, dims = append(ndims, uint8(len(shape))), append(dims, shape...)
	}
	o.NDims, o.Dims = ndims, dims
	o.Form, o.Shape, o.Lengths, o.Vary = Free, nil, nil, 0
}

// Normalize rewrites the column in the simplest form that fits: Free to Varying to Uniform.
func (c *Column) Normalize() {
	if c.Kind != Tensor || c.Rows == 0 {
		return
	}
	if c.Form == Free {
		b := NewBuilder(c.Field)
		at := 0
		for _, n := range c.NDims {
			shape := c.Dims[at : at+int(n)]
			at += int(n)
			b.Append(Column{Kind: c.Kind, DType: c.DType, Ragged: c.Ragged, Rows: 1, Form: Uniform, Shape: shape})
			if b.out.Form == Free {
				return
			}
		}
		*c = b.Column()
	}
	if c.Form == Varying && !slices.ContainsFunc(c.Lengths, func(n int64) bool { return n != c.Lengths[0] }) {
		c.Shape = c.RowShape(0)
		c.Form, c.Lengths, c.Vary = Uniform, nil, 0
	}
}
