package schema

import (
	"iter"
	"math"
	"slices"

	"transferqueue/core/tqerr"
)

// Kind separates tensors from opaque Python objects. A column holds one kind as long as any sample holds it.
type Kind uint8

// The kinds of a column.
const (
	Tensor Kind = iota + 1
	Object
)

// String names the kind as error messages do.
func (k Kind) String() string {
	switch k {
	case Tensor:
		return "tensor"
	case Object:
		return "non-tensor"
	default:
		return "invalid"
	}
}

// Codec says how the bytes of one object are read back. Only Python gives the numbers a meaning (see _values.py); the
// core stores them.
type Codec uint8

// Sample names a row of a partition: an index that is unique while the sample lives, and a generation that changes when the
// index is given to another sample.
type Sample struct {
	Index      int64
	Generation uint32
}

// Form says how the shapes of a column's rows are written down.
type Form uint8

// The forms. A column that fits an earlier form is normalised to it (see Normalize).
const (
	// Uniform: every row has Shape.
	Uniform Form = iota + 1
	// Varying: row i has Shape with Shape[Vary] replaced by Lengths[i].
	Varying
	// Free: row i has the next NDims[i] numbers of Dims as its shape.
	Free
	// Objects: row i is Sizes[i] opaque bytes, to be read with Codecs[i].
	Objects
)

// MaxDims bounds the rank of a row.
const MaxDims = 64

// Column describes the rows of one field in a batch, without their bytes. Rows lie tightly one after another: the bytes
// of row i start where those of row i-1 end. A Column is a value to read; its slices are shared, never modified.
type Column struct {
	Field string
	Kind  Kind
	DType DType // NoDType for objects
	// Ragged is the dimension along which rows of different length form a jagged tensor, counted as torch counts it
	// (the batch dimension is 0): 1 unless the writer said otherwise, 0 for rows of rank 0 and for objects.
	Ragged  uint8
	Rows    int
	Form    Form
	Shape   []int64
	Vary    uint8
	Lengths []int64
	NDims   []uint8
	Dims    []int64
	Codecs  []Codec
	Sizes   []int64

	// Share, of a column that is to be stored, lets samples share rows: sample i has row Share[i]. nil: it has row i.
	Share []uint32
}

// elements multiplies dimensions, refusing negative ones and overflow. A zero dimension gives zero only when no partial
// product overflows, so that a shape is never accepted by accident.
func elements(dims []int64) (int64, bool) {
	n := int64(1)
	zero := false
	for _, d := range dims {
		switch {
		case d < 0:
			return 0, false
		case d == 0:
			zero = true
		case n > math.MaxInt64/d:
			return 0, false
		default:
			n *= d
		}
	}
	if zero {
		return 0, true
	}
	return n, true
}

// Validate checks a column that came from outside: kind, dtype, form, lengths of the arrays, and that no size overflows.
func (c *Column) Validate() error {
	bad := func(format string, args ...any) error {
		args = append([]any{c.Field}, args...)
		return tqerr.New(tqerr.InvalidArgument, "field %q: "+format, args...)
	}
	if c.Rows < 0 {
		return bad("negative row count %d", c.Rows)
	}
	if c.Kind != Tensor && c.Kind != Object {
		return bad("unknown kind number %d", uint8(c.Kind))
	}
	if (c.Kind == Object) != (c.Form == Objects) {
		return bad("a %s column cannot have form %d", c.Kind, c.Form)
	}
	if c.Kind == Object && c.DType != NoDType {
		return bad("a non-tensor column cannot have dtype %s", c.DType)
	}
	if c.Kind == Tensor && !c.DType.Valid() {
		return bad("unknown dtype number %d", c.DType)
	}
	if len(c.Shape) > MaxDims {
		return bad("rank %d, want at most %d", len(c.Shape), MaxDims)
	}
	switch c.Form {
	case Uniform:
	case Varying:
		if len(c.Lengths) != c.Rows {
			return bad("%d lengths for %d rows", len(c.Lengths), c.Rows)
		}
		if int(c.Vary) >= len(c.Shape) {
			return bad("varying dimension %d of rank %d", c.Vary, len(c.Shape))
		}
	case Free:
		total := 0
		for _, n := range c.NDims {
			if n > MaxDims {
				return bad("rank %d, want at most %d", n, MaxDims)
			}
			total += int(n)
		}
		if len(c.NDims) != c.Rows || total != len(c.Dims) {
			return bad("%d ranks and %d dimensions for %d rows", len(c.NDims), len(c.Dims), c.Rows)
		}
	case Objects:
		if len(c.Sizes) != c.Rows || len(c.Codecs) != c.Rows {
			return bad("%d sizes and %d codecs for %d rows", len(c.Sizes), len(c.Codecs), c.Rows)
		}
	default:
		return bad("unknown form %d", c.Form)
	}
	if err := c.checkShare(); err != nil {
		return err
	}
	if _, ok := c.sizes(nil); !ok {
		return bad("a size is negative or beyond 64 bit")
	}
	return nil
}

// sizes appends nothing and returns the total bytes when offsets is nil; otherwise it fills offsets[0..Rows] with the
// byte offset of every row and the end of the last.
func (c *Column) sizes(offsets []int64) (int64, bool) {
	total := int64(0)
	put := func(i int, n int64) bool {
		if offsets != nil {
			offsets[i] = total
		}
		if n < 0 || total > math.MaxInt64-n {
			return false
		}
		total += n
		return true
	}
	item := c.DType.Size()
	ok := true
	switch c.Form {
	case Uniform:
		n, fine := elements(c.Shape)
		if !fine || n > math.MaxInt64/max(item, 1) {
			return 0, false
		}
		n *= item
		if c.Rows > 0 && n > math.MaxInt64/int64(c.Rows) {
			return 0, false
		}
		if offsets == nil {
			return n * int64(c.Rows), true
		}
		for i := range c.Rows {
			ok = ok && put(i, n)
		}
	case Varying:
		outer, fine1 := elements(c.Shape[:c.Vary])
		inner, fine2 := elements(c.Shape[c.Vary+1:])
		if !fine1 || !fine2 {
			return 0, false
		}
		if inner != 0 && outer > math.MaxInt64/inner {
			return 0, false
		}
		rest := outer * inner
		if rest > math.MaxInt64/max(item, 1) {
			return 0, false
		}
		rest *= item
		for i, n := range c.Lengths {
			if n < 0 || (rest != 0 && n > math.MaxInt64/rest) {
				return 0, false
			}
			ok = ok && put(i, n*rest)
		}
	case Free:
		at := 0
		for i, nd := range c.NDims {
			n, fine := elements(c.Dims[at : at+int(nd)])
			if !fine || n > math.MaxInt64/max(item, 1) {
				return 0, false
			}
			at += int(nd)
			ok = ok && put(i, n*item)
		}
	case Objects:
		for i, n := range c.Sizes {
			ok = ok && put(i, n)
		}
	}
	if offsets != nil {
		offsets[c.Rows] = total
	}
	return total, ok
}

// Bytes returns the payload bytes of all rows. The column is valid.
func (c *Column) Bytes() int64 {
	n, _ := c.sizes(nil)
	return n
}

// Offsets returns Rows+1 byte offsets of the rows in the column. The column is valid.
func (c *Column) Offsets() []int64 {
	out := make([]int64, c.Rows+1)
	c.sizes(out)
	return out
}

// RowBytes returns the bytes of each row of a Uniform column.
func (c *Column) RowBytes() int64 {
	n, _ := elements(c.Shape)
	return n * c.DType.Size()
}

// RowShape returns the shape of row i. For objects it is nil. The caller must not modify it.
func (c *Column) RowShape(i int) []int64 {
	switch c.Form {
	case Uniform:
		return c.Shape
	case Varying:
		out := slices.Clone(c.Shape)
		out[c.Vary] = c.Lengths[i]
		return out
	case Free:
		at := 0
		for _, n := range c.NDims[:i] {
			at += int(n)
		}
		return c.Dims[at : at+int(c.NDims[i])]
	default:
		return nil
	}
}

// Shapes yields the shape of every row in order. A shape is valid until the next one is asked for.
func (c *Column) Shapes() iter.Seq2[int, []int64] {
	return func(yield func(int, []int64) bool) {
		at := 0
		varying := slices.Clone(c.Shape)
		for i := range c.Rows {
			shape := varying
			switch c.Form {
			case Varying:
				varying[c.Vary] = c.Lengths[i]
			case Free:
				shape = c.Dims[at : at+int(c.NDims[i])]
				at += int(c.NDims[i])
			}
			if !yield(i, shape) {
				return
			}
		}
	}
}

// Slice returns rows [from, to) as a column that shares the arrays.
func (c *Column) Slice(from, to int) Column {
	out := *c
	out.Rows, out.Share = to-from, nil
	switch c.Form {
	case Varying:
		out.Lengths = c.Lengths[from:to]
	case Free:
		at, end := 0, 0
		for i, n := range c.NDims[:to] {
			if i < from {
				at += int(n)
			}
			end += int(n)
		}
		out.NDims, out.Dims = c.NDims[from:to], c.Dims[at:end]
	case Objects:
		out.Codecs, out.Sizes = c.Codecs[from:to], c.Sizes[from:to]
	}
	return out
}
