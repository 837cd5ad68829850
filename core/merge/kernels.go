package merge

import (
	"unsafe"

	"transferqueue/core/schema"
)

// kernel writes op(a, b) to out, element by element. The three have the same length, a multiple of the element size.
type kernel func(out, a, b []byte)

type unsigned interface {
	uint8 | uint16 | uint32 | uint64
}

type ordered interface {
	unsigned | int8 | int16 | int32 | int64 | float32 | float64
}

// Signed and unsigned integers add alike; complex numbers add as pairs.
var addKernels = map[schema.DType]kernel{
	schema.Bool:           over(either),
	schema.Uint8:          over(add[uint8]),
	schema.Int8:           over(add[uint8]),
	schema.Uint16:         over(add[uint16]),
	schema.Int16:          over(add[uint16]),
	schema.Uint32:         over(add[uint32]),
	schema.Int32:          over(add[uint32]),
	schema.Uint64:         over(add[uint64]),
	schema.Int64:          over(add[uint64]),
	schema.Float16:        over(addHalf),
	schema.BFloat16:       over(addBrain),
	schema.Float32:        over(add[float32]),
	schema.Float64:        over(add[float64]),
	schema.Complex32:      over(addHalf),
	schema.Complex64:      over(add[float32]),
	schema.Complex128:     over(add[float64]),
	schema.Float8E4M3FN:   byTable(e4m3fn, sum),
	schema.Float8E5M2:     byTable(e5m2, sum),
	schema.Float8E4M3FNUZ: byTable(e4m3fnuz, sum),
	schema.Float8E5M2FNUZ: byTable(e5m2fnuz, sum),
	schema.Float8E8M0FNU:  byTable(e8m0fnu, sum),
}

var maxKernels = map[schema.DType]kernel{
	schema.Bool:           over(either),
	schema.Uint8:          over(larger[uint8]),
	schema.Int8:           over(larger[int8]),
	schema.Uint16:         over(larger[uint16]),
	schema.Int16:          over(larger[int16]),
	schema.Uint32:         over(larger[uint32]),
	schema.Int32:          over(larger[int32]),
	schema.Uint64:         over(larger[uint64]),
	schema.Int64:          over(larger[int64]),
	schema.Float16:        over(largerHalf),
	schema.BFloat16:       over(largerBrain),
	schema.Float32:        over(larger[float32]),
	schema.Float64:        over(larger[float64]),
	schema.Float8E4M3FN:   byTable(e4m3fn, maximum),
	schema.Float8E5M2:     byTable(e5m2, maximum),
	schema.Float8E4M3FNUZ: byTable(e4m3fnuz, maximum),
	schema.Float8E5M2FNUZ: byTable(e5m2fnuz, maximum),
	schema.Float8E8M0FNU:  byTable(e8m0fnu, maximum),
}

var minKernels = map[schema.DType]kernel{
	schema.Bool:           over(both),
	schema.Uint8:          over(smaller[uint8]),
	schema.Int8:           over(smaller[int8]),
	schema.Uint16:         over(smaller[uint16]),
	schema.Int16:          over(smaller[int16]),
	schema.Uint32:         over(smaller[uint32]),
	schema.Int32:          over(smaller[int32]),
	schema.Uint64:         over(smaller[uint64]),
	schema.Int64:          over(smaller[int64]),
	schema.Float16:        over(smallerHalf),
	schema.BFloat16:       over(smallerBrain),
	schema.Float32:        over(smaller[float32]),
	schema.Float64:        over(smaller[float64]),
	schema.Float8E4M3FN:   byTable(e4m3fn, minimum),
	schema.Float8E5M2:     byTable(e5m2, minimum),
	schema.Float8E4M3FNUZ: byTable(e4m3fnuz, minimum),
	schema.Float8E5M2FNUZ: byTable(e5m2fnuz, minimum),
	schema.Float8E8M0FNU:  byTable(e8m0fnu, minimum),
}

func sum(a, b float32) float32     { return a + b }
func maximum(a, b float32) float32 { return max(a, b) }
func minimum(a, b float32) float32 { return min(a, b) }

// over makes a kernel of a loop over elements.
func over[T ordered](loop func(out, a, b []T)) kernel {
	return func(out, a, b []byte) {
		x, y := elements[T](a), elements[T](b)
		if dst, ok := view[T](out); ok {
			loop(dst, x, y)
			return
		}
		dst := make([]T, len(x))
		loop(dst, x, y)
		copy(out, bytesOf(dst))
	}
}

// view reads bytes as elements. It refuses an address that is not a multiple of the element size, which rows inside a
// message may have: Go does not promise to load through such a pointer.
func view[T ordered](b []byte) ([]T, bool) {
	var zero T
	p := unsafe.Pointer(unsafe.SliceData(b))
	if uintptr(p)%unsafe.Sizeof(zero) != 0 {
		return nil, false
	}
	return unsafe.Slice((*T)(p), len(b)/int(unsafe.Sizeof(zero))), true
}

func elements[T ordered](b []byte) []T {
	if out, ok := view[T](b); ok {
		return out
	}
	var zero T
	out := make([]T, len(b)/int(unsafe.Sizeof(zero)))
	copy(bytesOf(out), b)
	return out
}

func bytesOf[T ordered](s []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s)*int(unsafe.Sizeof(zero)))
}

// add is unrolled because the compiler neither vectorises nor unrolls: four elements per round keep up with memory.
func add[T unsigned | float32 | float64](out, a, b []T) {
	a, b = a[:len(out)], b[:len(out)]
	for len(out) >= 4 && len(a) >= 4 && len(b) >= 4 {
		out[0] = a[0] + b[0]
		out[1] = a[1] + b[1]
		out[2] = a[2] + b[2]
		out[3] = a[3] + b[3]
		out, a, b = out[4:], a[4:], b[4:]
	}
	for i := range out {
		out[i] = a[i] + b[i]
	}
}

// larger keeps the larger element. The built-in max returns NaN when either is NaN, and orders -0 before +0.
func larger[T ordered](out, a, b []T) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = max(a[i], b[i])
	}
}

func smaller[T ordered](out, a, b []T) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = min(a[i], b[i])
	}
}

// truth returns 1 for any byte but 0: a bool tensor that was viewed from bytes may hold other values than 0 and 1.
func truth(b uint8) uint8 { return uint8((uint16(b) + 0xff) >> 8) }

func either(out, a, b []uint8) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = truth(a[i] | b[i])
	}
}

func both(out, a, b []uint8) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = truth(a[i]) & truth(b[i])
	}
}
