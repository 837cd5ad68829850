package wire

import (
	"encoding/binary"
	"math"
)

// The append functions write one msgpack value in its shortest form. Lengths beyond 32 bit are cut off here and refused
// by Marshal, whose limit is far below.

func appendNil(b []byte) []byte { return append(b, 0xc0) }

func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 0xc3)
	}
	return append(b, 0xc2)
}

func appendUint(b []byte, n uint64) []byte {
	switch {
	case n < 0x80:
		return append(b, byte(n))
	case n <= math.MaxUint8:
		return append(b, 0xcc, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(n))
	case n <= math.MaxUint32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(n))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), n)
	}
}

func appendInt(b []byte, n int64) []byte {
	switch {
	case n >= 0:
		return appendUint(b, uint64(n))
	case n >= -32:
		return append(b, byte(n))
	case n >= math.MinInt8:
		return append(b, 0xd0, byte(n))
	case n >= math.MinInt16:
		return binary.BigEndian.AppendUint16(append(b, 0xd1), uint16(n))
	case n >= math.MinInt32:
		return binary.BigEndian.AppendUint32(append(b, 0xd2), uint32(n))
	default:
		return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(n))
	}
}

// appendLength writes a header whose three codes for 8, 16 and 32 bit lengths follow one another. Arrays have no 8 bit
// form and pass 0 for it.
func appendLength(b []byte, n int, code8, code16 byte) []byte {
	switch {
	case n <= math.MaxUint8 && code8 != 0:
		return append(b, code8, byte(n))
	case n <= math.MaxUint16:
		return binary.BigEndian.AppendUint16(append(b, code16), uint16(n))
	default:
		return binary.BigEndian.AppendUint32(append(b, code16+1), uint32(n))
	}
}

func appendArrayHeader(b []byte, n int) []byte {
	if n < 16 {
		return append(b, 0x90|byte(n))
	}
	return appendLength(b, n, 0, 0xdc)
}

func appendBinHeader(b []byte, n int) []byte { return appendLength(b, n, 0xc4, 0xc5) }

func appendString(b []byte, s string) []byte {
	if len(s) < 32 {
		b = append(b, 0xa0|byte(len(s)))
	} else {
		b = appendLength(b, len(s), 0xd9, 0xda)
	}
	return append(b, s...)
}

func appendBytes(b, p []byte) []byte {
	if p == nil {
		return appendNil(b)
	}
	return append(appendBinHeader(b, len(p)), p...)
}

// stringSize returns the bytes that appendString writes.
func stringSize(n int) int {
	switch {
	case n < 32:
		return n + 1
	case n <= math.MaxUint8:
		return n + 2
	case n <= math.MaxUint16:
		return n + 3
	default:
		return n + 5
	}
}

// arraySize returns the bytes that appendArrayHeader writes.
func arraySize(n int) int {
	switch {
	case n < 16:
		return 1
	case n <= math.MaxUint16:
		return 3
	default:
		return 5
	}
}
