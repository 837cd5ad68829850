package catalog

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"

	"transferqueue/core/tqerr"
)

// tagFilter matches maps that have every one of its entries. Values are equal when their bytes are, or when Python would
// call them equal: numbers compare by value whatever their type and width, maps without regard to order.
type tagFilter struct {
	entries   []tagEntry // distinct keys
	index     map[string]int
	canonical [][]byte
	scratch   []byte
}

// newTagFilter prepares a filter; no bytes or an empty map match everything.
func newTagFilter(raw []byte) (*tagFilter, error) {
	if !validTags(raw) {
		return nil, tqerr.New(tqerr.InvalidArgument, "the tags to filter by are not a msgpack map")
	}
	f := &tagFilter{}
	for e := range entries(mergeTags(nil, raw)) {
		f.entries = append(f.entries, e)
		form, _ := canonical(nil, e.value, 0)
		f.canonical = append(f.canonical, form)
	}
	if len(f.entries) > indexedFrom {
		f.index = make(map[string]int, len(f.entries))
		for i, e := range f.entries {
			f.index[string(e.key)] = i
		}
	}
	return f, nil
}

// match reports whether a stored map has all entries. A filter may be used by one goroutine at a time.
func (f *tagFilter) match(tags []byte) bool {
	missing := len(f.entries)
	if missing == 0 {
		return true
	}
	for e := range entries(tags) {
		i, wanted := findEntry(f.entries, f.index, e.key)
		if !wanted {
			continue
		}
		if !f.equal(i, e.value) {
			return false
		}
		if missing--; missing == 0 {
			return true
		}
	}
	return false
}

// equal compares a stored value with that of entry i.
func (f *tagFilter) equal(i int, value []byte) bool {
	if bytes.Equal(value, f.entries[i].value) {
		return true
	}
	f.scratch, _ = canonical(f.scratch[:0], value, 0)
	return bytes.Equal(f.scratch, f.canonical[i])
}

// maxNesting is the depth from which values are compared byte by byte only.
const maxNesting = 64

// canonical appends a form of the valid value at the start of raw that is the same bytes for equal values, and returns
// what follows the value. The form is only ever compared.
func canonical(dst, raw []byte, depth int) (form, rest []byte) {
	size, elements, _ := header(raw)
	c := raw[0]
	if isNumber(c) {
		return appendNumber(dst, raw), raw[size:]
	}
	if !isMap(c) && !isArray(c) {
		return appendLeaf(dst, raw[:size]), raw[size:]
	}
	if depth == maxNesting {
		n, _ := valueLen(raw)
		return append(append(dst, 'r'), raw[:n]...), raw[n:]
	}
	rest = raw[size:]
	if isMap(c) {
		return canonicalMap(dst, rest, elements/2, depth+1)
	}
	dst = binary.BigEndian.AppendUint32(append(dst, 'a'), uint32(elements))
	for range elements {
		dst, rest = canonical(dst, rest, depth+1)
	}
	return dst, rest
}

func canonicalMap(dst, rest []byte, n, depth int) ([]byte, []byte) {
	dst = binary.BigEndian.AppendUint32(append(dst, 'm'), uint32(n))
	sorted := make([][]byte, n)
	for i := range sorted {
		sorted[i], rest = canonical(nil, rest, depth)
		sorted[i], rest = canonical(sorted[i], rest, depth)
	}
	slices.SortFunc(sorted, bytes.Compare)
	return append(dst, bytes.Join(sorted, nil)...), rest
}

// appendLeaf writes nil, str, bin and ext without the width that their length was written in.
func appendLeaf(dst, raw []byte) []byte {
	c := raw[0]
	skip, class := 1, c
	switch {
	case c&0xe0 == 0xa0:
		class = 's'
	case c >= 0xd9 && c <= 0xdb:
		skip, class = 1+1<<(c-0xd9), 's'
	case c >= 0xc4 && c <= 0xc6:
		skip, class = 1+1<<(c-0xc4), 'b'
	case c >= 0xc7 && c <= 0xc9:
		skip, class = 1+1<<(c-0xc7), 'e'
	case c >= 0xd4 && c <= 0xd8:
		class = 'e'
	}
	dst = binary.BigEndian.AppendUint32(append(dst, class), uint32(len(raw)-skip))
	return append(dst, raw[skip:]...)
}

func isMap(c byte) bool   { return c&0xf0 == 0x80 || c == 0xde || c == 0xdf }
func isArray(c byte) bool { return c&0xf0 == 0x90 || c == 0xdc || c == 0xdd }

// isNumber tells ints, floats and, as Python does, bools.
func isNumber(c byte) bool {
	return c < 0x80 || c >= 0xe0 || c == 0xc2 || c == 0xc3 || c >= 0xca && c <= 0xd3
}

// appendNumber writes integral values as integers, whatever they were.
func appendNumber(dst, raw []byte) []byte {
	c := raw[0]
	u, signed := uint64(0), int64(0)
	switch {
	case c < 0x80:
		u = uint64(c)
	case c >= 0xe0:
		return appendInteger(dst, int64(int8(c)))
	case c == 0xc2, c == 0xc3:
		u = uint64(c & 1)
	case c == 0xca:
		return appendFloat(dst, float64(math.Float32frombits(binary.BigEndian.Uint32(raw[1:]))))
	case c == 0xcb:
		return appendFloat(dst, math.Float64frombits(binary.BigEndian.Uint64(raw[1:])))
	case c <= 0xcf:
		u, _ = length(raw, 1<<(c-0xcc))
	default:
		width := 1 << (c - 0xd0)
		n, _ := length(raw, width)
		shift := 64 - 8*width
		signed = int64(n<<shift) >> shift
		return appendInteger(dst, signed)
	}
	if u > math.MaxInt64 {
		return binary.BigEndian.AppendUint64(append(dst, 'u'), u)
	}
	return appendInteger(dst, int64(u))
}

func appendInteger(dst []byte, n int64) []byte {
	return binary.BigEndian.AppendUint64(append(dst, 'i'), uint64(n))
}

func appendFloat(dst []byte, x float64) []byte {
	switch {
	case x != math.Trunc(x) || math.IsInf(x, 0):
	case x >= -1<<63 && x < 1<<63:
		return appendInteger(dst, int64(x))
	case x >= 1<<63 && x < 1<<64:
		return binary.BigEndian.AppendUint64(append(dst, 'u'), uint64(x))
	}
	return binary.BigEndian.AppendUint64(append(dst, 'f'), math.Float64bits(x))
}
