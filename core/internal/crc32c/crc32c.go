// Package crc32c makes the checksums of payload: CRC32C, as hash/crc32 does with its Castagnoli table, and several times as fast
// on a processor that multiplies polynomials in wide registers. There a checksum costs little beside the copy it goes with.
package crc32c

import "hash/crc32"

var table = crc32.MakeTable(crc32.Castagnoli)

// wideMin is from how many bytes on wide registers are worth their start.
const wideMin = 1 << 10

// Update returns the checksum of what crc is the checksum of, followed by data.
func Update(crc uint32, data []byte) uint32 {
	if wide && len(data) >= wideMin {
		return updateWide(crc, data)
	}
	return crc32.Update(crc, table, data)
}

// Checksum returns the checksum of data.
func Checksum(data []byte) uint32 { return Update(0, data) }
