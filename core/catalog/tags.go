package catalog

import (
	"bytes"
	"encoding/binary"
	"iter"

	"transferqueue/core/tqerr"
)

// Tags are msgpack maps that the catalog never decodes: it finds the ends of their keys and values and keeps the bytes the
// writer sent. A stored map is never modified in place, so it may be handed out without a copy.

// emptyTags is what a sample without tags reports.
var emptyTags = []byte{0x80}

// tagEntry is one raw key and one raw value of a map.
type tagEntry struct{ key, value []byte }

// header reads the first bytes of the value at b: the bytes it takes itself, payload included, and the number of values
// that follow as its elements.
func header(b []byte) (size, elements int, ok bool) {
	if len(b) == 0 {
		return 0, 0, false
	}
	c := b[0]
	switch {
	case c < 0x80, c >= 0xe0: // fixint
		return 1, 0, true
	case c < 0x90: // fixmap
		return 1, 2 * int(c&0x0f), true
	case c < 0xa0: // fixarray
		return 1, int(c & 0x0f), true
	case c < 0xc0: // fixstr
		return fits(b, 1+uint64(c&0x1f))
	}
	switch c {
	case 0xc0, 0xc2, 0xc3: // nil, false, true
		return 1, 0, true
	case 0xc4, 0xd9: // bin 8, str 8
		return sized(b, 1, 0)
	case 0xc5, 0xda:
		return sized(b, 2, 0)
	case 0xc6, 0xdb:
		return sized(b, 4, 0)
	case 0xc7: // ext 8, with a type byte
		return sized(b, 1, 1)
	case 0xc8:
		return sized(b, 2, 1)
	case 0xc9:
		return sized(b, 4, 1)
	case 0xca, 0xce, 0xd2: // float 32, uint 32, int 32
		return fits(b, 5)
	case 0xcb, 0xcf, 0xd3:
		return fits(b, 9)
	case 0xcc, 0xd0:
		return fits(b, 2)
	case 0xcd, 0xd1:
		return fits(b, 3)
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8: // fixext 1 to 16
		return fits(b, 2+uint64(1)<<(c-0xd4))
	case 0xdc, 0xdd, 0xde, 0xdf: // array 16, array 32, map 16, map 32
		return counted(b, c)
	default: // 0xc1 is never used
		return 0, 0, false
	}
}

func fits(b []byte, size uint64) (int, int, bool) {
	if size > uint64(len(b)) {
		return 0, 0, false
	}
	return int(size), 0, true
}

// length reads a big-endian number of the given width behind the first byte.
func length(b []byte, width int) (uint64, bool) {
	if len(b) < 1+width {
		return 0, false
	}
	n := uint64(0)
	for _, c := range b[1 : 1+width] {
		n = n<<8 | uint64(c)
	}
	return n, true
}

func sized(b []byte, width int, extra uint64) (int, int, bool) {
	n, ok := length(b, width)
	if !ok {
		return 0, 0, false
	}
	return fits(b, 1+uint64(width)+extra+n)
}

func counted(b []byte, c byte) (int, int, bool) {
	width, each := 2, uint64(1)
	if c == 0xdd || c == 0xdf {
		width = 4
	}
	if c >= 0xde {
		each = 2
	}
	n, ok := length(b, width)
	// Every element takes at least one byte, so a count beyond the bytes that are left is a lie.
	if !ok || n*each > uint64(len(b)) {
		return 0, 0, false
	}
	return 1 + width, int(n * each), true
}

// valueLen returns the bytes of the value that b starts with, elements included. It does not recurse, so nesting cannot
// exhaust the stack.
func valueLen(b []byte) (int, bool) {
	at := 0
	for pending := 1; pending > 0; pending-- {
		size, elements, ok := header(b[at:])
		if !ok {
			return 0, false
		}
		at += size
		pending += elements
		if pending-1 > len(b)-at {
			return 0, false
		}
	}
	return at, true
}

// mapHeader returns the number of entries of the map that b starts with and the bytes of its header.
func mapHeader(b []byte) (entries, size int, ok bool) {
	if len(b) == 0 || !isMap(b[0]) {
		return 0, 0, false
	}
	size, elements, ok := header(b)
	return elements / 2, size, ok
}

// validTags checks that b is exactly one msgpack map. No bytes at all count as an empty one.
func validTags(b []byte) bool {
	if len(b) == 0 {
		return true
	}
	if _, _, ok := mapHeader(b); !ok {
		return false
	}
	n, ok := valueLen(b)
	return ok && n == len(b)
}

// entries yields the keys and values of a valid map.
func entries(b []byte) iter.Seq[tagEntry] {
	return func(yield func(tagEntry) bool) {
		n, at, _ := mapHeader(b)
		for range n {
			k, _ := valueLen(b[at:])
			v, _ := valueLen(b[at+k:])
			if !yield(tagEntry{b[at : at+k], b[at+k : at+k+v]}) {
				return
			}
			at += k + v
		}
	}
}

// indexedFrom is the number of entries from which merging looks keys up instead of comparing each with each.
const indexedFrom = 24

// fewEntries is the number of entries up to which a map that comes first is looked at for its keys alone.
const fewEntries = 8

// eachOnce reports that a valid map has few entries and none of its keys twice, as what Python sends.
func eachOnce(b []byte) bool {
	n, _, _ := mapHeader(b)
	if n > fewEntries {
		return false
	}
	var keys [fewEntries][]byte
	seen := 0
	for e := range entries(b) {
		for _, key := range keys[:seen] {
			if bytes.Equal(key, e.key) {
				return false
			}
		}
		keys[seen] = e.key
		seen++
	}
	return true
}

// mergeTags returns a new map with the entries of stored, overridden and extended by those of update; both are valid. A
// key keeps its place, as in a Python dict. The result shares no memory with update.
func mergeTags(stored, update []byte) []byte {
	have, _, _ := mapHeader(stored)
	more, _, _ := mapHeader(update)
	if have == 0 && more > 0 && eachOnce(update) {
		return bytes.Clone(update)
	}
	var few [indexedFrom]tagEntry
	list := few[:0]
	var index map[string]int
	if have+more > indexedFrom {
		list, index = make([]tagEntry, 0, have+more), make(map[string]int, have+more)
	}
	for _, source := range [2][]byte{stored, update} {
		for e := range entries(source) {
			at, known := findEntry(list, index, e.key)
			if known {
				list[at].value = e.value
				continue
			}
			if index != nil {
				index[string(e.key)] = len(list)
			}
			list = append(list, e)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return encodeTags(list)
}

func findEntry(list []tagEntry, index map[string]int, key []byte) (int, bool) {
	if index != nil {
		at, known := index[string(key)]
		return at, known
	}
	for i := range list {
		if bytes.Equal(list[i].key, key) {
			return i, true
		}
	}
	return 0, false
}

func encodeTags(list []tagEntry) []byte {
	size := 5
	for _, e := range list {
		size += len(e.key) + len(e.value)
	}
	out := make([]byte, 0, size)
	switch n := len(list); {
	case n < 16:
		out = append(out, 0x80|byte(n))
	case n < 1<<16:
		out = binary.BigEndian.AppendUint16(append(out, 0xde), uint16(n))
	default:
		out = binary.BigEndian.AppendUint32(append(out, 0xdf), uint32(n))
	}
	for _, e := range list {
		out = append(append(out, e.key...), e.value...)
	}
	return out
}

// checkTags validates one map per row.
func checkTags(tags [][]byte, rows int) error {
	if tags != nil && len(tags) != rows {
		return tqerr.New(tqerr.InvalidArgument, "%d tags for %d rows", len(tags), rows)
	}
	for i, t := range tags {
		if !validTags(t) {
			return tqerr.New(tqerr.InvalidArgument, "tags of row %d are not a msgpack map", i)
		}
	}
	return nil
}
