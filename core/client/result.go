package client

import (
	"slices"
	"unsafe"

	"transferqueue/core/schema"
)

// Form says how a result column is built; the numbers are those of enum tq_result_form.
type Form uint8

// Forms of a result column.
const (
	Dense Form = iota + 1
	Jagged
	Nested
	ObjectRows
)

// ResultColumn is one column of a get, in memory that its tokens keep alive.
type ResultColumn struct {
	Column       schema.Column
	Form         Form
	Ragged       uint8
	Data         []byte
	Token        uint64 // 0 when there is no data
	Dims         []int64
	Offsets      []int64 // Jagged: in result memory, kept alive by OffsetsToken; ObjectRows: byte offsets
	OffsetsToken uint64
	OffsetsID    uint64
	MinLength    int64
	MaxLength    int64
	view         bool // Data is unit memory
}

// shape decides the container of a column (contract K3) and fills everything but memory: rows of rank 0 are one dense
// tensor, rows that differ in one dimension at most are jagged, also when they do not differ at all, others are nested.
func (r *ResultColumn) shape(dense bool) {
	c := &r.Column
	r.Ragged = c.Ragged
	switch {
	case c.Kind == schema.Object:
		r.Form, r.Offsets = ObjectRows, c.Offsets()
		return
	case c.Form == schema.Uniform && (dense || len(c.Shape) == 0):
		r.Form, r.Dims, r.Ragged = Dense, c.Shape, 0
		return
	case c.Form == schema.Free:
		r.Form = Nested
		return
	}
	r.Ragged = max(r.Ragged, 1)
	dim := int(r.Ragged) - 1
	if c.Form == schema.Varying && int(c.Vary) != dim {
		dim, r.Ragged = 0, 1
		if c.Vary != 0 {
			r.Form = Nested
			return
		}
	}
	if dim >= len(c.Shape) {
		dim, r.Ragged = 0, 1
	}
	r.Form, r.Dims = Jagged, slices.Clone(c.Shape)
	r.Dims[dim], r.MinLength, r.MaxLength = r.lengths(dim)
}

// lengths returns total, least and greatest length of the rows along a dimension.
func (r *ResultColumn) lengths(dim int) (total, least, most int64) {
	c := &r.Column
	if c.Form == schema.Uniform {
		n := c.Shape[dim]
		return n * int64(c.Rows), n, n
	}
	for i, n := range c.Lengths {
		total += n
		if i == 0 {
			least = n
		}
		least, most = min(least, n), max(most, n)
	}
	return total, least, most
}

// fillOffsets writes the jagged offsets of the column.
func (r *ResultColumn) fillOffsets(out []int64) {
	c, at := &r.Column, int64(0)
	for i := range c.Rows {
		out[i] = at
		if c.Form == schema.Uniform {
			at += c.Shape[r.Ragged-1]
		} else {
			at += c.Lengths[i]
		}
	}
	out[c.Rows] = at
}

// sameLengths reports whether two jagged columns have the same offsets.
func (r *ResultColumn) sameLengths(o *ResultColumn) bool {
	if r.MinLength != o.MinLength || r.MaxLength != o.MaxLength || r.Column.Rows != o.Column.Rows {
		return false
	}
	if r.MinLength == r.MaxLength {
		return true
	}
	return slices.Equal(r.Column.Lengths, o.Column.Lengths)
}

// ints views result memory as int64.
func ints(data []byte) []int64 {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*int64)(unsafe.Pointer(&data[0])), len(data)/8)
}

// Shapes lists the ranks and dimensions of the rows of a Nested column.
func (r *ResultColumn) Shapes() (ndims []uint8, dims []int64) {
	for _, shape := range r.Column.Shapes() {
		ndims, dims = append(ndims, uint8(len(shape))), append(dims, shape...)
	}
	return ndims, dims
}

// RowsResult describes packed rows as a column whose rows can be taken one by one: dense when all have one shape, else
// nested, or objects.
func RowsResult(c schema.Column, data []byte) ResultColumn {
	r := ResultColumn{Column: c, Data: data}
	switch {
	case c.Kind == schema.Object:
		r.Form, r.Offsets = ObjectRows, c.Offsets()
	case c.Form == schema.Uniform:
		r.Form, r.Dims = Dense, c.Shape
	default:
		r.Form = Nested
	}
	return r
}
