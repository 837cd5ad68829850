package crc32c

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func random(n int, seed uint64) []byte {
	rnd := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16), byte(seed >> 24)})
	out := make([]byte, n)
	_, _ = rnd.Read(out)
	return out
}

// The standard library is the model.
func TestAnyLengthAlignmentAndStart(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	data := random(64<<10, seed)
	lengths := []int{0, 1, 63, 255, wideMin - 1, wideMin, wideMin + 1, wideMin + 255, wideMin + 256, 64<<10 - 64}
	for range 2000 {
		lengths = append(lengths, rnd.IntN(8<<10))
	}
	for _, n := range lengths {
		from, crc := rnd.IntN(64), rnd.Uint32()
		part := data[from : from+n]
		require.Equal(t, crc32.Update(crc, table, part), Update(crc, part), "length %d from %d, crc %#x, seed %d", n, from, crc, seed)
		require.Equal(t, crc32.Checksum(part, table), Checksum(part), "length %d from %d, seed %d", n, from, seed)
	}
}

// Every part of a message counts: one bit that differs gives another sum.
func TestEveryBitCounts(t *testing.T) {
	data := random(4*wideMin+17, 5)
	want := Checksum(data)
	for i := range 8 * len(data) {
		data[i/8] ^= 1 << (i % 8)
		require.NotEqual(t, want, Checksum(data), "bit %d", i)
		data[i/8] ^= 1 << (i % 8)
	}
	require.Equal(t, want, Checksum(data))
}

func TestPiecesAreTheWhole(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 2))
	data := random(300<<10, seed)
	for range 50 {
		crc := uint32(0)
		for at := 0; at < len(data); {
			n := min(rnd.IntN(20<<10), len(data)-at)
			crc, at = Update(crc, data[at:at+n]), at+n
		}
		require.Equal(t, crc32.Checksum(data, table), crc, "seed %d", seed)
	}
}

func TestKnownSums(t *testing.T) {
	require.Equal(t, uint32(0xe3069283), Checksum([]byte("123456789"))) // of the catalogue of CRCs
	require.Equal(t, uint32(0x8a9136aa), Checksum(make([]byte, 32)))    // of RFC 3720
	require.Equal(t, crc32.Checksum(bytes.Repeat([]byte{0xff}, 1<<20), table), Checksum(bytes.Repeat([]byte{0xff}, 1<<20)))
}

func BenchmarkUpdate(b *testing.B) {
	data := random(256<<10, 1)
	for _, n := range []int{512, 1 << 10, 4 << 10, 64 << 10, 256 << 10} {
		b.Run(fmt.Sprintf("ours/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				Update(0, data[:n])
			}
		})
		b.Run(fmt.Sprintf("hash-crc32/%d", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				crc32.Update(0, table, data[:n])
			}
		})
	}
}
