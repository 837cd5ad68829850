// Package schema describes what a cell holds: element types, shapes, and the columns of a batch. Sizes are computed
// with overflow checks, because every number here may come from a wire.
package schema

// DType is the element type of a tensor. Numbers are wire format: new ones are only appended.
type DType uint8

// Element types, named as torch names them.
const (
	NoDType DType = iota
	Bool
	Uint8
	Int8
	Uint16
	Int16
	Uint32
	Int32
	Uint64
	Int64
	Float16
	BFloat16
	Float32
	Float64
	Complex32
	Complex64
	Complex128
	Float8E4M3FN
	Float8E5M2
	Float8E4M3FNUZ
	Float8E5M2FNUZ
	Float8E8M0FNU
	numDTypes
)

var dtypes = [numDTypes]struct {
	name string
	size int64
}{
	{"none", 0}, {"bool", 1}, {"uint8", 1}, {"int8", 1}, {"uint16", 2}, {"int16", 2}, {"uint32", 4}, {"int32", 4},
	{"uint64", 8}, {"int64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}, {"complex32", 4},
	{"complex64", 8}, {"complex128", 16}, {"float8_e4m3fn", 1}, {"float8_e5m2", 1}, {"float8_e4m3fnuz", 1},
	{"float8_e5m2fnuz", 1}, {"float8_e8m0fnu", 1},
}

// Valid reports whether the number names an element type.
func (d DType) Valid() bool { return d > NoDType && d < numDTypes }

// Size returns the bytes of one element, 0 for an invalid type.
func (d DType) Size() int64 {
	if d >= numDTypes {
		return 0
	}
	return dtypes[d].size
}

// String returns torch's name of the type.
func (d DType) String() string {
	if d >= numDTypes {
		return "invalid"
	}
	return dtypes[d].name
}

// Names lists the names of all element types; the index of a name is its number.
func Names() []string {
	out := make([]string, numDTypes)
	for i := range out {
		out[i] = dtypes[i].name
	}
	return out
}
