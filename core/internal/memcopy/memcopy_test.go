package memcopy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// copiers are the functions under test by name; copiers_amd64_test.go adds the kinds the processor would not pick.
var copiers = map[string]func(dst, src []byte) int{"Copy": Copy, "CopyNT": CopyNT, "Put": Put}

func TestCopyAnyLengthAndAlignment(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	for name, fn := range copiers {
		t.Run(name, func(t *testing.T) {
			for range 400 {
				checkCopy(t, fn, rnd.IntN(2048), rnd.IntN(70), rnd.IntN(70), seed)
			}
			for _, n := range []int{0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 4096, PutThreshold - 1, PutThreshold, PutThreshold + 1,
				GetThreshold - 1, GetThreshold, GetThreshold + 63} {
				checkCopy(t, fn, n, rnd.IntN(70), rnd.IntN(70), seed)
			}
		})
	}
}

// checkCopy copies n bytes between two offsets of larger buffers and looks at every byte around them.
func checkCopy(t *testing.T, fn func(dst, src []byte) int, n, to, from int, seed uint64) {
	t.Helper()
	src := make([]byte, from+n+64)
	for i := range src {
		src[i] = byte(i*7 + i>>8)
	}
	dst := bytes.Repeat([]byte{0xA5}, to+n+130)
	want := bytes.Clone(dst)
	copy(want[to:], src[from:from+n])
	require.Equal(t, n, fn(dst[to:], src[from:from+n]))
	require.True(t, bytes.Equal(want, dst), "length %d, to +%d, from +%d, seed %d", n, to, from, seed)
}

func TestCopyRefusesAShortDestination(t *testing.T) {
	for name, fn := range copiers {
		require.Panics(t, func() { fn(make([]byte, 999), make([]byte, 1000)) }, name)
	}
}

// BenchmarkCopy walks through buffers far larger than the cache, as puts do; both are touched beforehand.
func BenchmarkCopy(b *testing.B) {
	const pool = 256 << 20
	src, dst := bytes.Repeat([]byte{1}, pool), bytes.Repeat([]byte{2}, pool)
	for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20} {
		for _, name := range []string{"Copy", "CopyNT"} {
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) {
				b.SetBytes(int64(size))
				at := 0
				for b.Loop() {
					copiers[name](dst[at:at+size], src[at:at+size])
					at = (at + size) % pool
				}
			})
		}
	}
}
