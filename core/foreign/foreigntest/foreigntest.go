// Package foreigntest lends memory that looks to package foreign as a caller's does: outside the Go heap, at addresses that
// stay. The helpers build columns out of Go values.
package foreigntest

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"transferqueue/core/foreign"
	"transferqueue/core/schema"
)

// Memory is handed out front to back and unmapped when the test ends. It is not for concurrent use.
type Memory struct {
	t    testing.TB
	data []byte
	at   int
}

// New maps size bytes.
func New(t testing.TB, size int) *Memory {
	t.Helper()
	data, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(data) })
	return &Memory{t: t, data: data}
}

// Lend copies values into the memory and returns their address, which is aligned and never 0.
func Lend[T any](m *Memory, values ...T) uint64 {
	var zero T
	size := len(values) * int(unsafe.Sizeof(zero))
	m.at = (m.at + 63) &^ 63
	if m.at+max(size, 1) > len(m.data) {
		m.t.Fatalf("foreigntest: %d bytes more than the %d there are", m.at+size-len(m.data), len(m.data))
	}
	base := unsafe.Pointer(&m.data[m.at])
	m.at += max(size, 1)
	if size > 0 {
		copy(unsafe.Slice((*T)(base), len(values)), values)
	}
	return uint64(uintptr(base))
}

// Reset hands the memory out from the front again. What was lent must not be in use.
func (m *Memory) Reset() { m.at = 0 }

// Ints is a tensor column of int64 whose rows have the given shape, one after another.
func (m *Memory) Ints(shape []int64, values ...int64) foreign.Raw {
	row := int64(8)
	for _, d := range shape {
		row *= d
	}
	return foreign.Raw{
		Kind: uint8(schema.Tensor), DType: uint8(schema.Int64), Ragged: uint8(min(len(shape), 1)), Form: uint8(foreign.Strided),
		Rank: uint32(len(shape)), Dims: Lend(m, shape...), Base: Lend(m, values...), Stride: row,
	}
}

// Ragged is a tensor column of int64 whose rows differ in length, tightly packed.
func (m *Memory) Ragged(rows ...[]int64) foreign.Raw {
	offsets, values := []int64{0}, []int64{}
	for _, row := range rows {
		values = append(values, row...)
		offsets = append(offsets, int64(len(values)))
	}
	return foreign.Raw{
		Kind: uint8(schema.Tensor), DType: uint8(schema.Int64), Ragged: 1, Form: uint8(foreign.Offsets),
		Rank: 1, Dims: Lend(m, int64(0)), Base: Lend(m, values...), Offsets: Lend(m, offsets...),
	}
}

// Objects is a column of opaque values, tightly packed, all of the same codec.
func (m *Memory) Objects(codec uint8, rows ...[]byte) foreign.Raw {
	var data, codecs []byte
	var sizes []int64
	for _, row := range rows {
		data, sizes, codecs = append(data, row...), append(sizes, int64(len(row))), append(codecs, codec)
	}
	return foreign.Raw{
		Kind: uint8(schema.Object), Form: uint8(foreign.Objects),
		Base: Lend(m, data...), Sizes: Lend(m, sizes...), Codecs: Lend(m, codecs...),
	}
}
