package snapshot

import (
	"encoding/binary"
	"hash/crc32"
)

// fixSums makes the checksums of a damaged file right, so that a fuzzer comes to what is behind them.
func fixSums(b []byte) {
	if len(b) < headerSize {
		return
	}
	binary.LittleEndian.PutUint32(b[12:], crc32.Checksum(b[:12], crc32.MakeTable(crc32.Castagnoli)))
	at := headerSize
	for n := uint64(0); len(b)-at >= headSize; n++ {
		size := int(binary.LittleEndian.Uint32(b[at+4:]))
		if size > len(b)-at-headSize {
			return
		}
		sum := crc32.Checksum(binary.LittleEndian.AppendUint64(nil, n), crc32.MakeTable(crc32.Castagnoli))
		sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), b[at:at+12])
		sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), b[at+headSize:at+headSize+size])
		binary.LittleEndian.PutUint32(b[at+12:], sum)
		at += headSize + size
	}
}
