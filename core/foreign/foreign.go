// Package foreign reads rows out of memory that belongs to the caller of the library: torch tensors and buffers of Python
// objects, given by address. Nothing here keeps an address beyond the call that lent it.
package foreign

import (
	"iter"
	"unsafe"

	"transferqueue/core/internal/memcopy"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// Form says how the rows of an input lie in memory; the numbers are those of enum tq_form.
type Form uint8

// The forms of an input.
const (
	Strided  Form = iota + 1 // row i at Base + i*Stride, all of shape Dims
	Offsets                  // packed from Base; lengths of dimension 0 are differences of Offsets
	Pointers                 // row i at Pointers[i], shapes from NDims and Dims
	Objects                  // Sizes[i] bytes each, packed from Base or at Pointers[i]
)

// Input is one column in the caller's memory.
type Input struct {
	Form     Form
	Column   schema.Column
	Base     uintptr
	Stride   int64
	Pointers []uint64
	offsets  []int64 // byte offsets of the rows in the column
}

// maxRows bounds the rows of a batch, as the messages do that describe one.
const maxRows = 32 << 20

// Raw is a column as it crosses the C boundary: addresses and sizes only.
type Raw struct {
	Kind, DType, Ragged, Form uint8
	Rank                      uint32
	Base                      uint64
	Stride                    int64
	Dims, Offsets, Pointers   uint64
	NDims, Sizes, Codecs      uint64
}

// slice views n elements at an address. The address comes from C, so the garbage collector has no say in it.
func slice[T any](address uint64, n int) []T {
	if n == 0 || address == 0 {
		return nil
	}
	return unsafe.Slice((*T)(unsafe.Add(unsafe.Pointer(nil), uintptr(address))), n)
}

// Bytes views n bytes at an address.
func Bytes(address uintptr, n int64) []byte { return slice[byte](uint64(address), int(n)) }

// New reads the description of a column, copies its arrays, and checks it.
func New(field string, rows int, raw *Raw) (*Input, error) {
	in := &Input{Form: Form(raw.Form), Base: uintptr(raw.Base), Stride: raw.Stride}
	c := &in.Column
	c.Field, c.Kind, c.DType, c.Ragged, c.Rows = field, schema.Kind(raw.Kind), schema.DType(raw.DType), raw.Ragged, rows
	if raw.Rank > schema.MaxDims {
		return nil, tqerr.New(tqerr.InvalidArgument, "field %q: rank %d, want at most %d", field, raw.Rank, schema.MaxDims)
	}
	if rows < 0 || rows > maxRows {
		return nil, tqerr.New(tqerr.InvalidArgument, "field %q: %d rows, want 0 to %d", field, rows, maxRows)
	}
	switch in.Form {
	case Strided:
		c.Form, c.Shape = schema.Uniform, clone(slice[int64](raw.Dims, int(raw.Rank)))
	case Offsets:
		in.readOffsets(slice[int64](raw.Offsets, rows+1), clone(slice[int64](raw.Dims, int(raw.Rank))))
	case Pointers:
		in.Pointers = clone(slice[uint64](raw.Pointers, rows))
		c.Form, c.NDims = schema.Free, clone(slice[uint8](raw.NDims, rows))
		total := 0
		for _, n := range c.NDims {
			total += int(n)
		}
		c.Dims = clone(slice[int64](raw.Dims, total))
	case Objects:
		c.Form = schema.Objects
		in.Pointers = clone(slice[uint64](raw.Pointers, rows))
		c.Sizes = clone(slice[int64](raw.Sizes, rows))
		for _, codec := range slice[uint8](raw.Codecs, rows) {
			c.Codecs = append(c.Codecs, schema.Codec(codec))
		}
	default:
		return nil, tqerr.New(tqerr.InvalidArgument, "field %q: unknown input form %d", field, raw.Form)
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	c.Normalize()
	if c.Form != schema.Uniform {
		in.offsets = c.Offsets()
	}
	return in, in.checkAddresses()
}

// checkAddresses refuses rows with bytes and without an address.
func (in *Input) checkAddresses() error {
	rows := in.Column.Rows
	if in.packed() {
		if in.Base == 0 && in.Size(0, rows) > 0 {
			return tqerr.New(tqerr.InvalidArgument, "field %q: no address", in.Column.Field)
		}
		return nil
	}
	for i := range rows {
		if in.Size(i, i+1) == 0 {
			continue
		}
		if in.Form == Strided && in.Base != 0 {
			return nil
		}
		if i >= len(in.Pointers) || in.Pointers[i] == 0 {
			return tqerr.New(tqerr.InvalidArgument, "field %q: no address for row %d", in.Column.Field, i)
		}
	}
	return nil
}

func (in *Input) readOffsets(offsets, dims []int64) {
	c := &in.Column
	c.Form, c.Shape = schema.Varying, dims
	if len(dims) == 0 || len(offsets) == 0 || offsets[0] < 0 {
		c.Form = 0 // refused by Validate
		return
	}
	unit := c.DType.Size()
	for _, d := range dims[1:] {
		unit *= d
	}
	in.Base += uintptr(offsets[0] * unit)
	c.Lengths = make([]int64, c.Rows)
	for i := range c.Rows {
		c.Lengths[i] = offsets[i+1] - offsets[i]
	}
	dims[0] = 0
}

func clone[T any](s []T) []T { return append([]T(nil), s...) }

// packed reports whether all rows lie tightly from Base.
func (in *Input) packed() bool {
	switch in.Form {
	case Strided:
		return in.Stride == in.Column.RowBytes() || in.Column.Rows <= 1
	case Offsets:
		return true
	case Objects:
		return in.Pointers == nil
	default:
		return false
	}
}

// span returns the byte range of rows [from, to) in the tightly packed column.
func (in *Input) span(from, to int) (int64, int64) {
	if in.offsets == nil {
		n := in.Column.RowBytes()
		return int64(from) * n, int64(to) * n
	}
	return in.offsets[from], in.offsets[to]
}

// Size returns the bytes of rows [from, to).
func (in *Input) Size(from, to int) int64 {
	begin, end := in.span(from, to)
	return end - begin
}

// Pieces yields the bytes of rows [from, to) in order, in pieces as large as the caller's memory has them.
func (in *Input) Pieces(from, to int) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		begin, end := in.span(from, to)
		if begin == end {
			return
		}
		if in.packed() {
			yield(Bytes(in.Base+uintptr(begin), end-begin))
			return
		}
		for i := from; i < to; i++ {
			n := in.Size(i, i+1)
			if n == 0 {
				continue
			}
			at := in.Base + uintptr(int64(i)*in.Stride)
			if in.Form != Strided {
				at = uintptr(in.Pointers[i])
			}
			if !yield(Bytes(at, n)) {
				return
			}
		}
	}
}

// Row is the bytes of row i.
func (in *Input) Row(i int) []byte {
	for piece := range in.Pieces(i, i+1) {
		return piece
	}
	return nil
}

// StoredBytes sums the rows that are the first of their kind: first names that for every row.
func (in *Input) StoredBytes(first []int64) (total int64) {
	for i, k := range first {
		if int(k) == i {
			total += in.Size(i, i+1)
		}
	}
	return total
}

// Once copies the rows that are the first of their kind into buffer, and returns an input whose rows lie there.
func (in *Input) Once(first []int64, buffer []byte) *Input {
	out := &Input{Form: Pointers, Column: in.Column, Pointers: make([]uint64, in.Column.Rows), offsets: in.offsets}
	for i, k := range first {
		if n := in.Size(i, i+1); int(k) != i {
			out.Pointers[i] = out.Pointers[k]
		} else if n > 0 {
			out.Pointers[i] = uint64(uintptr(unsafe.Pointer(&buffer[0])))
			in.CopyRows(buffer, i, i+1)
			buffer = buffer[n:]
		}
	}
	return out
}

// CopyRows copies rows [from, to) tightly into dst and returns what of dst is left.
func (in *Input) CopyRows(dst []byte, from, to int) []byte {
	for piece := range in.Pieces(from, to) {
		dst = dst[memcopy.Put(dst, piece):]
	}
	return dst
}

// TotalBytes sums the payload of all inputs.
func TotalBytes(inputs []*Input) int64 {
	total := int64(0)
	for _, in := range inputs {
		total += in.Column.Bytes()
	}
	return total
}

// Packed is an input over memory of our own that holds all rows tightly.
func Packed(c schema.Column, data []byte) *Input {
	in := &Input{Form: Offsets, Column: c}
	if len(data) > 0 {
		in.Base = uintptr(unsafe.Pointer(&data[0]))
	}
	if c.Form != schema.Uniform {
		in.offsets = c.Offsets()
	}
	return in
}
