package journal

import "hash/crc32"

// Sum is the checksum of a header.
func Sum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
