package merge

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

// uniform describes rows of one shape.
func uniform(dtype schema.DType, rows int, shape ...int64) schema.Column {
	ragged := uint8(1)
	if len(shape) == 0 {
		ragged = 0
	}
	return schema.Column{
		Field: "x", Kind: schema.Tensor, DType: dtype, Ragged: ragged, Rows: rows, Form: schema.Uniform, Shape: shape,
	}
}

// varying describes rows of rank 1 of the given lengths.
func varying(dtype schema.DType, lengths ...int64) schema.Column {
	c := uniform(dtype, len(lengths), 0)
	c.Form, c.Lengths = schema.Varying, lengths
	return c
}

// free describes rows of any shapes.
func free(dtype schema.DType, shapes ...[]int64) schema.Column {
	c := schema.Column{
		Field: "x", Kind: schema.Tensor, DType: dtype, Ragged: 1, Rows: len(shapes), Form: schema.Free, NDims: []uint8{},
	}
	for _, shape := range shapes {
		c.NDims, c.Dims = append(c.NDims, uint8(len(shape))), append(c.Dims, shape...)
	}
	return c
}

// objects describes pickled values of the given sizes.
func objects(sizes ...int64) schema.Column {
	return schema.Column{
		Field: "x", Kind: schema.Object, Rows: len(sizes), Form: schema.Objects,
		Codecs: slices.Repeat([]schema.Codec{1}, len(sizes)), Sizes: sizes,
	}
}

func key(i int) string { return "key" + strconv.Itoa(i) }

func lookup(t testing.TB, name string) Merge {
	t.Helper()
	m, ok := Lookup(name)
	require.True(t, ok, name)
	return m
}

// pieces is a Rows that copies rows to separate memory, in runs of random numbers of rows, each at an odd address when
// crooked is set. It fails the test when it is asked for a row beyond the last.
func pieces(t testing.TB, random *rand.Rand, c *schema.Column, data []byte, crooked bool) Rows {
	t.Helper()
	offsets := c.Offsets()
	return func(i int) []byte {
		require.Less(t, i, c.Rows)
		end := i + 1 + random.IntN(c.Rows-i)
		size := offsets[end] - offsets[i]
		out := make([]byte, size+1)
		if crooked {
			out = out[1:]
		}
		return out[:copy(out[:size:size], data[offsets[i]:offsets[end]])]
	}
}

// merged runs both phases over tight columns.
func merged(t testing.TB, name string, old *schema.Column, a []byte, added *schema.Column, b []byte) (schema.Column, []byte) {
	t.Helper()
	m := lookup(t, name)
	result, err := m.Plan(old, added, key)
	require.NoError(t, err)
	require.NoError(t, result.Validate())
	out := make([]byte, result.Bytes())
	m.Apply(&result, out, old, rowsOf(old, a), added, rowsOf(added, b))
	return result, out
}

// number is an element as the naive model sees it.
func number(dtype schema.DType, b []byte) float64 {
	switch dtype {
	case schema.Bool:
		if b[0] != 0 {
			return 1
		}
		return 0
	case schema.Uint8:
		return float64(b[0])
	case schema.Int8:
		return float64(int8(b[0]))
	case schema.Uint16:
		return float64(binary.LittleEndian.Uint16(b))
	case schema.Int16:
		return float64(int16(binary.LittleEndian.Uint16(b)))
	case schema.Uint32:
		return float64(binary.LittleEndian.Uint32(b))
	case schema.Int32:
		return float64(int32(binary.LittleEndian.Uint32(b)))
	case schema.Uint64:
		return float64(binary.LittleEndian.Uint64(b))
	case schema.Int64:
		return float64(int64(binary.LittleEndian.Uint64(b)))
	case schema.Float32, schema.Complex64:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
	case schema.Float64, schema.Complex128:
		return math.Float64frombits(binary.LittleEndian.Uint64(b))
	case schema.Float16, schema.Complex32:
		return naiveDecode(smallTypes[schema.Float16], uint32(binary.LittleEndian.Uint16(b)))
	case schema.BFloat16:
		return naiveDecode(smallTypes[schema.BFloat16], uint32(binary.LittleEndian.Uint16(b)))
	default:
		return naiveDecode(smallTypes[dtype], uint32(b[0]))
	}
}

// parts is the number of real numbers in an element.
func parts(dtype schema.DType) int64 {
	switch dtype {
	case schema.Complex32, schema.Complex64, schema.Complex128:
		return 2
	}
	return 1
}

// smallType describes a small floating point type as its definition does, by hand and apart from the code under test.
type smallType struct {
	signed         bool
	exponent, mant int
	bias           int
	nan            func(code uint32) bool
	saturates      bool      // a value beyond the largest becomes the largest, infinity included
	values         []float64 // see finite
}

func ieee(exponent, mant, bias int) *smallType {
	top := uint32(1<<exponent-1) << mant
	return &smallType{signed: true, exponent: exponent, mant: mant, bias: bias, nan: func(code uint32) bool {
		return code&(1<<(exponent+mant)-1) > top
	}}
}

var smallTypes = map[schema.DType]*smallType{
	schema.Float16:    ieee(5, 10, 15),
	schema.BFloat16:   ieee(8, 7, 127),
	schema.Float8E5M2: ieee(5, 2, 15),
	schema.Float8E4M3FN: {signed: true, exponent: 4, mant: 3, bias: 7, saturates: true,
		nan: func(code uint32) bool { return code&0x7f == 0x7f }},
	schema.Float8E4M3FNUZ: {signed: true, exponent: 4, mant: 3, bias: 8, nan: func(code uint32) bool { return code == 0x80 }},
	schema.Float8E5M2FNUZ: {signed: true, exponent: 5, mant: 2, bias: 16, nan: func(code uint32) bool { return code == 0x80 }},
	schema.Float8E8M0FNU:  {exponent: 8, bias: 127, nan: func(code uint32) bool { return code == 0xff }},
}

// hasInfinity: the code of an all-ones exponent without mantissa is followed by NaN codes.
func (s *smallType) hasInfinity() bool {
	return s.mant > 0 && s.nan(s.infinity()+1) && !s.nan(s.infinity()) && !s.saturates
}

func (s *smallType) infinity() uint32 { return uint32(1<<s.exponent-1) << s.mant }

// naiveDecode evaluates the definition sign * fraction * 2^exponent.
func naiveDecode(s *smallType, code uint32) float64 {
	magnitude := code
	sign := 1.0
	if s.signed {
		if code>>(s.exponent+s.mant) != 0 {
			sign = -1
		}
		magnitude &= 1<<(s.exponent+s.mant) - 1
	}
	switch {
	case s.nan(code):
		return math.NaN()
	case s.hasInfinity() && magnitude == s.infinity():
		return sign * math.Inf(1)
	case !s.signed:
		return math.Pow(2, float64(int(code)-s.bias))
	}
	exponent, fraction := int(magnitude>>s.mant), float64(magnitude&(1<<s.mant-1))/float64(int(1)<<s.mant)
	if exponent == 0 {
		return sign * fraction * math.Pow(2, float64(1-s.bias))
	}
	return sign * (1 + fraction) * math.Pow(2, float64(exponent-s.bias))
}

// finite lists the values of the type that are neither negative nor infinite, by code, and behind them the value that the
// next code would stand for if the type went on.
func (s *smallType) finite() []float64 {
	if s.values != nil {
		return s.values
	}
	for code := uint32(0); code < 1<<(s.exponent+s.mant); code++ {
		value := naiveDecode(s, code)
		if math.IsNaN(value) || math.IsInf(value, 0) {
			break
		}
		s.values = append(s.values, value)
	}
	largest, before := s.values[len(s.values)-1], s.values[len(s.values)-2]
	next := largest + (largest - before)
	if s.mant == 0 {
		next = 2 * largest
	}
	s.values = append(s.values, next)
	return s.values
}

// naiveRound returns the value of the type that lies nearest to x. Of two equally near ones it is that with the even code,
// or the larger of two powers of two.
func naiveRound(s *smallType, x float64) float64 {
	if math.IsNaN(x) {
		return x
	}
	values := s.finite()
	best, distance := 0, math.Inf(1)
	for code, value := range values {
		d := math.Abs(math.Abs(x) - value)
		if d < distance || (d == distance && (code%2 == 0 || s.mant == 0)) {
			best, distance = code, d
		}
	}
	if best < len(values)-1 && !math.IsInf(x, 0) {
		return math.Copysign(values[best], x)
	}
	switch {
	case s.saturates:
		return math.Copysign(values[len(values)-2], x)
	case s.hasInfinity():
		return math.Copysign(math.Inf(1), x)
	default:
		return math.NaN()
	}
}
