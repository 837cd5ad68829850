package wire

import (
	"encoding/binary"
	"unicode/utf8"
	"unsafe"
)

// littleEndian tells whether an int64 in memory looks as it does on the wire.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

func appendInts(b []byte, v []int64) []byte {
	if v == nil {
		return appendNil(b)
	}
	b = appendBinHeader(b, 8*len(v))
	if len(v) > 0 && littleEndian {
		return append(b, unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 8*len(v))...)
	}
	for _, n := range v {
		b = binary.LittleEndian.AppendUint64(b, uint64(n))
	}
	return b
}

// ints reads a list of integers. The bytes may lie at any address, so they are copied, never cast.
func (s *scanner) ints() ([]int64, error) {
	raw, err := s.bin()
	if err != nil || raw == nil {
		return nil, err
	}
	if len(raw)%8 != 0 {
		return nil, s.fail("bin of %d bytes, want a multiple of 8", len(raw))
	}
	out := make([]int64, len(raw)/8)
	if len(out) > 0 && littleEndian {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(out))), len(raw)), raw)
		return out, nil
	}
	for i := range out {
		out[i] = int64(binary.LittleEndian.Uint64(raw[8*i:]))
	}
	return out, nil
}

func (v *Ints) appendTo(b []byte) []byte { return appendInts(b, *v) }

func (v *Ints) parse(s *scanner) (err error) {
	*v, err = s.ints()
	return err
}

func (v *Strings) appendTo(b []byte) []byte {
	if *v == nil {
		return appendNil(b)
	}
	size := arraySize(len(*v))
	for _, item := range *v {
		size += stringSize(len(item))
	}
	b = appendArrayHeader(appendBinHeader(b, size), len(*v))
	for _, item := range *v {
		b = appendString(b, item)
	}
	return b
}

// parse makes one allocation for all characters; who keeps a single string for long clones it.
func (v *Strings) parse(s *scanner) error {
	*v = nil
	raw, err := s.bin()
	if err != nil || raw == nil {
		return err
	}
	inner := scanner{data: raw}
	n, absent, err := inner.want(kindArray)
	if err != nil || absent {
		return err
	}
	backing := string(raw)
	out := make(Strings, n)
	for i := range out {
		tok, err := inner.next()
		if err != nil {
			return err
		}
		if tok.kind != kindStr {
			return s.fail("item %d is %s, want str", i, kindNames[tok.kind])
		}
		out[i] = backing[inner.at : inner.at+tok.n]
		inner.at += tok.n
		if !utf8.ValidString(out[i]) {
			return s.fail("item %d is not UTF-8", i)
		}
	}
	*v = out
	return inner.end()
}

func (v *List) appendTo(b []byte) []byte {
	if *v == nil {
		return appendNil(b)
	}
	size := arraySize(len(*v))
	for _, item := range *v {
		size += max(len(item), 1)
	}
	b = appendArrayHeader(appendBinHeader(b, size), len(*v))
	for _, item := range *v {
		if len(item) == 0 {
			b = appendNil(b)
		}
		b = append(b, item...)
	}
	return b
}

// parse makes one allocation for the bytes of all items.
func (v *List) parse(s *scanner) error {
	*v = nil
	raw, err := s.bytes()
	if err != nil || raw == nil {
		return err
	}
	inner := scanner{data: raw}
	*v, err = inner.items(MaxDepth - 1)
	return err
}
