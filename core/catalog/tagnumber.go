package catalog

import (
	"bytes"
	"encoding/binary"
	"math"
)

// tagState says what tagNumber has found.
type tagState int

const (
	tagMissing tagState = iota
	tagNumeric
	tagNoNumber
)

// extNumber is the type of the extension in which Python puts a number of numpy or torch: a float64, and the pickled number.
const extNumber = 2

// tagNumber reads a number out of a valid map of tags. Names of up to 31 bytes are found. nil counts as missing, as a tag
// that Python programs leave at None.
func tagNumber(tags []byte, name string) (float64, tagState) {
	for e := range entries(tags) {
		if int(e.key[0]) != 0xa0|len(name) || !bytes.Equal(e.key[1:], []byte(name)) {
			continue
		}
		return number(e.value)
	}
	return 0, tagMissing
}

// number reads one msgpack value.
func number(b []byte) (float64, tagState) {
	wide := func(size int) uint64 {
		var full [8]byte
		copy(full[8-size:], b[1:1+size])
		return binary.BigEndian.Uint64(full[:])
	}
	switch c := b[0]; {
	case c < 0x80:
		return float64(c), tagNumeric
	case c >= 0xe0:
		return float64(int8(c)), tagNumeric
	case c == 0xc0:
		return 0, tagMissing
	case c == 0xc2, c == 0xc3:
		return float64(c & 1), tagNumeric
	case c >= 0xc7 && c <= 0xc9:
		at := 1 + 1<<(c-0xc7)
		if b[at] != extNumber || len(b) < at+9 {
			return 0, tagNoNumber
		}
		return math.Float64frombits(binary.BigEndian.Uint64(b[at+1:])), tagNumeric
	case c == 0xca:
		return float64(math.Float32frombits(uint32(wide(4)))), tagNumeric
	case c == 0xcb:
		return math.Float64frombits(wide(8)), tagNumeric
	case c >= 0xcc && c <= 0xcf:
		return float64(wide(1 << (c - 0xcc))), tagNumeric
	case c >= 0xd0 && c <= 0xd3:
		size := 1 << (c - 0xd0)
		return float64(int64(wide(size)<<(64-8*size)) >> (64 - 8*size)), tagNumeric
	default:
		return 0, tagNoNumber
	}
}
