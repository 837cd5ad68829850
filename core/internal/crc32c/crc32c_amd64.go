package crc32c

import (
	"hash/crc32"
	"unsafe"

	"golang.org/x/sys/cpu"
)

// A message is a polynomial over GF(2), and its checksum the remainder of dividing that by the polynomial of CRC32C. A part of the
// message may be replaced by anything with the same remainder: fold replaces 64 bytes by their product with x^n mod P, added
// to the bytes that lie n bits further on, and that for all but the last 64 bytes, which hash/crc32 sums.

// wide says whether the processor has what fold uses.
var wide = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42

const (
	lane = 64  // bytes of a register
	turn = 256 // bytes that fold takes at once, in four registers
)

// multipliers are x^n mod P for the low and the high half of each 16 bytes.
type multipliers [2]uint64

var byTurn, byLane = multipliersOf(8 * turn), multipliersOf(8 * lane)

// multipliersOf moves by so many bits. The product of two reversed factors is one bit lower than the reversed product, and a
// remainder of 32 bits sits 32 bits higher in a half of 64: hence the shift and the two exponents.
func multipliersOf(bits int) multipliers {
	return multipliers{uint64(power(bits+32)) << 1, uint64(power(bits-32)) << 1}
}

// power is x^n mod P, its bits reversed.
func power(n int) uint32 {
	r := uint32(1) << 31
	for range n {
		r = r>>1 ^ crc32.Castagnoli&-(r&1)
	}
	return r
}

// fold takes n bytes, a positive multiple of turn, whose first four have crc added, and leaves 64 bytes of the same remainder.
//
//go:noescape
func fold(rest *[lane]byte, crc uint32, data unsafe.Pointer, n uintptr, byTurn, byLane *multipliers)

func updateWide(crc uint32, data []byte) uint32 {
	n := len(data) &^ (turn - 1)
	var rest [lane]byte
	fold(&rest, ^crc, unsafe.Pointer(unsafe.SliceData(data)), uintptr(n), &byTurn, &byLane)
	return crc32.Update(crc32.Update(^uint32(0), table, rest[:]), table, data[n:])
}
