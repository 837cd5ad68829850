package merge

import (
	"math"
	"sync"
)

// The floating point types of less than 32 bits. Sums are computed in float32, which holds every value of these types
// exactly, and rounded once, to nearest even. A sum beyond the largest finite value becomes what torch makes of it:
//
//	type      sign exponent mantissa bias   beyond the largest value    NaN
//	float16      1        5       10   15   infinity                    exponent all ones, mantissa not 0
//	bfloat16     1        8        7  127   infinity                    exponent all ones, mantissa not 0
//	e5m2         1        5        2   15   infinity                    exponent all ones, mantissa not 0
//	e4m3fn       1        4        3    7   the largest value (448)     0x7f and 0xff
//	e4m3fnuz     1        4        3    8   NaN                         0x80; there is no -0
//	e5m2fnuz     1        5        2   16   NaN                         0x80; there is no -0
//	e8m0fnu      0        8        0  127   NaN                         0xff; all values are powers of two
//
// testdata/small.txt holds checksums of torch's own conversions, which the tests compare with these.

// format describes an 8-bit type with a sign.
type format struct {
	mantissa int    // bits
	bias     int32  // of the exponent
	largest  uint32 // code of the largest finite value
	beyond   uint32 // code of what lies beyond, a sign still to be added unless unsignedZero
	infinity bool   // whether the code of an all-ones exponent and no mantissa is infinity
	// unsignedZero: the code of -0 is the only NaN.
	unsignedZero bool
}

var (
	e4m3fn   = byFormat(format{mantissa: 3, bias: 7, largest: 0x7e, beyond: 0x7e})
	e5m2     = byFormat(format{mantissa: 2, bias: 15, largest: 0x7b, beyond: 0x7c, infinity: true})
	e4m3fnuz = byFormat(format{mantissa: 3, bias: 8, largest: 0x7f, beyond: 0x80, unsignedZero: true})
	e5m2fnuz = byFormat(format{mantissa: 2, bias: 16, largest: 0x7f, beyond: 0x80, unsignedZero: true})
	e8m0fnu  = codec{decode: decodeE8M0, encode: encodeE8M0}
)

// codec converts between an 8-bit type and float32.
type codec struct {
	decode func(uint8) float32
	encode func(float32) uint8
}

func byFormat(f format) codec { return codec{decode: f.decode, encode: f.encode} }

func (f format) decode(code uint8) float32 {
	magnitude, negative := uint32(code&0x7f), code&0x80 != 0
	switch {
	case f.unsignedZero && code == 0x80, !f.unsignedZero && magnitude > f.largest && !f.isInfinity(magnitude):
		return float32(math.NaN())
	case f.isInfinity(magnitude):
		return signed(float32(math.Inf(1)), negative)
	}
	exponent, fraction := int(magnitude>>f.mantissa), magnitude&(1<<f.mantissa-1)
	if exponent == 0 {
		exponent = 1
	} else {
		fraction |= 1 << f.mantissa
	}
	return signed(float32(math.Ldexp(float64(fraction), exponent-int(f.bias)-f.mantissa)), negative)
}

func (f format) isInfinity(magnitude uint32) bool { return f.infinity && magnitude == f.beyond }

func signed(x float32, negative bool) float32 {
	if negative {
		return -x
	}
	return x
}

func (f format) encode(x float32) uint8 {
	bits := math.Float32bits(x)
	sign, code := uint8(bits>>24&0x80), uint32(0)
	switch {
	case x != x && f.unsignedZero:
		return 0x80
	case x != x:
		return sign | 0x7f
	default:
		code = f.magnitude(bits & 0x7fffffff)
	}
	if code > f.largest {
		code = f.beyond
	}
	if f.unsignedZero && (code == 0 || code == 0x80) {
		return uint8(code)
	}
	return sign | uint8(code)
}

// magnitude rounds the bits of a float32 that is neither negative nor NaN. Codes count up with the values they stand for, so
// a carry out of the mantissa needs no care, and anything too large gives a code above f.largest.
func (f format) magnitude(bits uint32) uint32 {
	exponent := int32(bits>>23) - 127
	fraction := bits&0x7fffff | 1<<23 // a subnormal float32 is far below half of the smallest code either way
	smallest := 1 - f.bias
	drop := uint32(23 - f.mantissa)
	base := uint32(0)
	if exponent < smallest {
		drop += uint32(smallest - exponent)
	} else {
		base = uint32(exponent-smallest) << f.mantissa
	}
	if drop > 25 {
		return 0
	}
	kept, rest, half := fraction>>drop, fraction&(1<<drop-1), uint32(1)<<(drop-1)
	if rest > half || (rest == half && kept&1 == 1) {
		kept++
	}
	return base + kept
}

func decodeE8M0(code uint8) float32 {
	switch code {
	case 0:
		return math.Float32frombits(1 << 22) // 2^-127, a subnormal
	case 0xff:
		return float32(math.NaN())
	}
	return math.Float32frombits(uint32(code) << 23)
}

// encodeE8M0 rounds the magnitude to a power of two, up from one and a half times it. Below 2^-126 the mantissa has no hidden
// bit, so that 2^-127 looks like a half; anything above it goes up, as torch has it.
func encodeE8M0(x float32) uint8 {
	bits := math.Float32bits(x)
	exponent, fraction := uint8(bits>>23), bits&0x7fffff
	if exponent != 0xff && (fraction > 1<<22 || (fraction == 1<<22 && exponent > 0)) {
		exponent++
	}
	return exponent
}

// byTable makes a kernel of an operation on two 8-bit values: there are only 65,536 pairs. The table is computed when it is
// used first and kept, 64 KiB for each of the few that a program uses.
func byTable(c codec, op func(a, b float32) float32) kernel {
	table := sync.OnceValue(func() *[1 << 16]uint8 {
		out := new([1 << 16]uint8)
		for pair := range out {
			out[pair] = c.encode(op(c.decode(uint8(pair>>8)), c.decode(uint8(pair))))
		}
		return out
	})
	return func(out, a, b []byte) {
		lookup := table()
		a, b = a[:len(out)], b[:len(out)]
		for i := range out {
			out[i] = lookup[uint16(a[i])<<8|uint16(b[i])]
		}
	}
}

const halfInfinity, brainInfinity = 0x7c00, 0x7f80

// decodeHalf moves the bits into place and lets a multiplication rescale: it is exact, for subnormals too.
func decodeHalf(h uint16) float32 {
	bits := uint32(h&0x7fff) << 13
	if h&halfInfinity == halfInfinity {
		return math.Float32frombits(bits | 0x7f800000 | uint32(h&0x8000)<<16)
	}
	x := math.Float32frombits(bits) * (1 << 112)
	return math.Float32frombits(math.Float32bits(x) | uint32(h&0x8000)<<16)
}

func encodeHalf(x float32) uint16 {
	const (
		overflow  = (127 + 16) << 23 // 65536, beyond every value that rounds to a finite one
		normal    = (127 - 14) << 23 // 2^-14, the smallest normal value
		rebias    = (127 - 15) << 23
		subnormal = 0.5 // a float32 of this size counts in units of 2^-24, as a subnormal float16 does
	)
	bits := math.Float32bits(x)
	sign, magnitude := uint16(bits>>16&0x8000), bits&0x7fffffff
	switch {
	case magnitude > 0x7f800000:
		return sign | 0x7e00
	case magnitude >= overflow:
		return sign | halfInfinity
	case magnitude < normal:
		counted := math.Float32frombits(magnitude) + subnormal
		return sign | uint16(math.Float32bits(counted)-math.Float32bits(subnormal))
	}
	// Adding just under half a unit, or half when the result would be odd, rounds to nearest even; a carry runs into
	// the exponent and from the largest value on into infinity.
	return sign | uint16((magnitude-rebias+0xfff+(magnitude>>13&1))>>13)
}

func decodeBrain(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

func encodeBrain(x float32) uint16 {
	bits := math.Float32bits(x)
	if x != x {
		return uint16(bits>>16&0x8000) | 0x7fc0
	}
	return uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)
}

func addHalf(out, a, b []uint16) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = encodeHalf(decodeHalf(a[i]) + decodeHalf(b[i]))
	}
}

func addBrain(out, a, b []uint16) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		out[i] = encodeBrain(decodeBrain(a[i]) + decodeBrain(b[i]))
	}
}

func largerHalf(out, a, b []uint16)   { pick(out, a, b, halfInfinity, false) }
func largerBrain(out, a, b []uint16)  { pick(out, a, b, brainInfinity, false) }
func smallerHalf(out, a, b []uint16)  { pick(out, a, b, halfInfinity, true) }
func smallerBrain(out, a, b []uint16) { pick(out, a, b, brainInfinity, true) }

// pick keeps the larger or the smaller of two 16-bit values without converting them: above the sign, their bits count up
// with the magnitude. A magnitude beyond infinity is NaN and wins.
func pick(out, a, b []uint16, infinity uint16, smaller bool) {
	a, b = a[:len(out)], b[:len(out)]
	for i := range out {
		x, y := a[i], b[i]
		switch {
		case x&0x7fff > infinity:
			out[i] = x
		case y&0x7fff > infinity:
			out[i] = y
		case (ascending(x) < ascending(y)) == smaller:
			out[i] = x
		default:
			out[i] = y
		}
	}
}

// ascending maps sign and magnitude to a number that is ordered as the value is, -0 before +0.
func ascending(h uint16) int16 {
	if h&0x8000 != 0 {
		return int16(h ^ 0x7fff)
	}
	return int16(h)
}
