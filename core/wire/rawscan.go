package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"
)

// MaxDepth bounds how deep a value may nest, so that no reader of it, in any language, runs out of stack.
const MaxDepth = 64

// kind is the class of a msgpack value.
type kind uint8

const (
	kindInvalid kind = iota
	kindNil
	kindBool
	kindUint
	kindInt // negative or written as signed
	kindFloat
	kindStr
	kindBin
	kindArray
	kindMap
	kindExt
)

var kindNames = [...]string{"an invalid code", "nil", "bool", "integer", "integer", "float", "str", "bin", "array", "map", "ext"}

// heads describes the codes 0xc0 to 0xdf: the class, how many bytes of number or length follow, and a fixed length or
// value for codes that have none.
var heads = [32]struct {
	kind  kind
	width uint8
	fixed uint8
}{
	{kindNil, 0, 0}, {kindInvalid, 0, 0}, {kindBool, 0, 0}, {kindBool, 0, 1},
	{kindBin, 1, 0}, {kindBin, 2, 0}, {kindBin, 4, 0},
	{kindExt, 1, 0}, {kindExt, 2, 0}, {kindExt, 4, 0},
	{kindFloat, 4, 0}, {kindFloat, 8, 0},
	{kindUint, 1, 0}, {kindUint, 2, 0}, {kindUint, 4, 0}, {kindUint, 8, 0},
	{kindInt, 1, 0}, {kindInt, 2, 0}, {kindInt, 4, 0}, {kindInt, 8, 0},
	{kindExt, 0, 1}, {kindExt, 0, 2}, {kindExt, 0, 4}, {kindExt, 0, 8}, {kindExt, 0, 16},
	{kindStr, 1, 0}, {kindStr, 2, 0}, {kindStr, 4, 0},
	{kindArray, 2, 0}, {kindArray, 4, 0}, {kindMap, 2, 0}, {kindMap, 4, 0},
}

// head is the start of a value: its class, the bytes (str, bin, ext with its type byte) or items (array; map: two per
// entry) that follow, or the bits of a number.
type head struct {
	kind kind
	n    int
	bits uint64
}

// scanner walks over msgpack without copying. It never passes a length on that is larger than what is left to read, so
// a caller may allocate by it.
type scanner struct {
	data []byte
	at   int
	// bare admits columns without a schema, which only a MetaReply has.
	bare bool
}

// malformed is why bytes are not the message they should be.
type malformed struct {
	path string // field names, outermost first
	what string
	at   int
}

func (m *malformed) Error() string { return fmt.Sprintf("%s (byte %d)", m.what, m.at) }

func (s *scanner) fail(format string, args ...any) error {
	return &malformed{what: fmt.Sprintf(format, args...), at: s.at}
}

func (s *scanner) left() int { return len(s.data) - s.at }

// next reads the head of a value and stops behind it: behind a number, before the contents of anything longer.
func (s *scanner) next() (head, error) {
	if s.at >= len(s.data) {
		return head{}, s.fail("truncated")
	}
	c := s.data[s.at]
	s.at++
	switch {
	case c <= 0x7f:
		return head{kind: kindUint, bits: uint64(c)}, nil
	case c >= 0xe0:
		return head{kind: kindInt, bits: uint64(int64(int8(c)))}, nil
	case c <= 0x8f:
		return s.sized(kindMap, 2*int(c&0x0f))
	case c <= 0x9f:
		return s.sized(kindArray, int(c&0x0f))
	case c <= 0xbf:
		return s.sized(kindStr, int(c&0x1f))
	}
	h := heads[c-0xc0]
	if h.kind == kindInvalid {
		return head{}, s.fail("invalid msgpack code 0x%02x", c)
	}
	v := uint64(h.fixed)
	if h.width > 0 {
		if s.left() < int(h.width) {
			return head{}, s.fail("truncated")
		}
		v = bigEndian(s.data[s.at : s.at+int(h.width)])
		s.at += int(h.width)
	}
	switch h.kind {
	case kindInt:
		shift := 64 - 8*uint(h.width)
		return head{kind: kindInt, bits: uint64(int64(v<<shift) >> shift)}, nil
	case kindMap:
		return s.sized(kindMap, 2*int(v))
	case kindExt:
		return s.sized(kindExt, int(v)+1)
	case kindStr, kindBin, kindArray:
		return s.sized(h.kind, int(v))
	default:
		return head{kind: h.kind, bits: v}, nil
	}
}

func bigEndian(b []byte) uint64 {
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	default:
		return binary.BigEndian.Uint64(b)
	}
}

// sized refuses a length that cannot be: every item has at least one byte.
func (s *scanner) sized(k kind, n int) (head, error) {
	if n > s.left() {
		return head{}, s.fail("%s of %d with %d bytes left", kindNames[k], n, s.left())
	}
	return head{kind: k, n: n}, nil
}

// want reads the head of a value of one class; absent is true for a nil.
func (s *scanner) want(k kind) (n int, absent bool, err error) {
	tok, err := s.next()
	if err != nil {
		return 0, false, err
	}
	if tok.kind == kindNil {
		return 0, true, nil
	}
	if tok.kind != k {
		return 0, false, s.fail("%s, want %s", kindNames[tok.kind], kindNames[k])
	}
	return tok.n, false, nil
}

// skip passes over one value of any class that nests at most depth levels.
func (s *scanner) skip(depth int) error {
	tok, err := s.next()
	if err != nil {
		return err
	}
	switch tok.kind {
	case kindStr, kindBin, kindExt:
		s.at += tok.n
	case kindArray, kindMap:
		if depth == 0 {
			return s.fail("nested deeper than %d", MaxDepth)
		}
		for range tok.n {
			if err := s.skip(depth - 1); err != nil {
				return err
			}
		}
	}
	return nil
}

// bin reads a bin without copying it; nil for an absent one.
func (s *scanner) bin() ([]byte, error) {
	n, absent, err := s.want(kindBin)
	if err != nil || absent {
		return nil, err
	}
	s.at += n
	return s.data[s.at-n : s.at : s.at], nil
}

// bytes reads a bin into memory of its own; nil for an absent one, never nil for an empty one.
func (s *scanner) bytes() ([]byte, error) {
	raw, err := s.bin()
	if err != nil || raw == nil {
		return nil, err
	}
	return append(make([]byte, 0, len(raw)), raw...), nil
}

func (s *scanner) string() (string, error) {
	n, absent, err := s.want(kindStr)
	if err != nil || absent {
		return "", err
	}
	raw := s.data[s.at : s.at+n]
	if !utf8.Valid(raw) {
		return "", s.fail("str is not UTF-8")
	}
	s.at += n
	return string(raw), nil
}

func (s *scanner) bool() (bool, error) {
	tok, err := s.next()
	if err != nil {
		return false, err
	}
	if tok.kind != kindBool && tok.kind != kindNil {
		return false, s.fail("%s, want bool", kindNames[tok.kind])
	}
	return tok.bits == 1, nil
}

// int reads an integer written in any width that fits into bits bits.
func (s *scanner) int(bits int) (int64, error) {
	tok, err := s.next()
	if err != nil {
		return 0, err
	}
	n := int64(tok.bits)
	switch tok.kind {
	case kindNil:
		return 0, nil
	case kindUint:
		if tok.bits > math.MaxInt64 {
			return 0, s.fail("%d does not fit into %d bits with sign", tok.bits, bits)
		}
	case kindInt:
	default:
		return 0, s.fail("%s, want integer", kindNames[tok.kind])
	}
	if shift := 64 - uint(bits); n<<shift>>shift != n {
		return 0, s.fail("%d does not fit into %d bits with sign", n, bits)
	}
	return n, nil
}

// uint reads a non-negative integer written in any width that fits into bits bits.
func (s *scanner) uint(bits int) (uint64, error) {
	tok, err := s.next()
	if err != nil {
		return 0, err
	}
	switch tok.kind {
	case kindNil:
		return 0, nil
	case kindUint:
	case kindInt:
		if int64(tok.bits) < 0 {
			return 0, s.fail("negative %d, want an unsigned integer", int64(tok.bits))
		}
	default:
		return 0, s.fail("%s, want integer", kindNames[tok.kind])
	}
	if bits < 64 && tok.bits>>uint(bits) != 0 {
		return 0, s.fail("%d does not fit into %d bits", tok.bits, bits)
	}
	return tok.bits, nil
}

// end checks that everything has been read.
func (s *scanner) end() error {
	if s.left() > 0 {
		return s.fail("%d bytes behind the end", s.left())
	}
	return nil
}

// items splits an array into its values, which share the memory of data; nil for a nil. Values nest at most depth deep.
func (s *scanner) items(depth int) ([][]byte, error) {
	n, absent, err := s.want(kindArray)
	if err != nil {
		return nil, err
	}
	if absent {
		return nil, s.end()
	}
	out := make([][]byte, 0, min(n, maxPrealloc))
	for range n {
		from := s.at
		if err := s.skip(depth); err != nil {
			return nil, err
		}
		out = append(out, s.data[from:s.at:s.at])
	}
	return slices.Clip(out), s.end()
}

// maxPrealloc bounds the items that are allocated before any of them was read.
const maxPrealloc = 4096
