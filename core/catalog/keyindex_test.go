package catalog

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKeyIndexAgainstMap adds, looks up and removes at random. Few hashes make keys collide, and run over the end of the table.
func TestKeyIndexAgainstMap(t *testing.T) {
	for _, hashes := range []uint64{1, 7, 1 << 62} {
		t.Run(fmt.Sprint(hashes), func(t *testing.T) {
			seed := rand.Uint64()
			t.Log("seed", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			var x keyIndex
			var keys paged[string]
			want := map[string]int64{}
			hash := func(key string) uint64 { return math.MaxUint64 - hashOf(key)%hashes }
			for range 5000 {
				index := r.Int64N(150)
				key := fmt.Sprint("k", index)
				_, known := want[key]
				switch r.IntN(3) {
				case 0:
					if known {
						x.remove(hash(key), index)
						delete(want, key)
					}
				default:
					if !known {
						*keys.at(index) = key
						x.add(hash(key), index)
						want[key] = index
					}
				}
				probe := fmt.Sprint("k", r.Int64N(160))
				got, ok := x.find(&keys, probe, hash(probe))
				index, known = want[probe]
				require.Equal(t, known, ok, probe)
				if known {
					require.Equal(t, index, got, probe)
				}
				require.Equal(t, len(want), x.count)
			}
			for key, index := range want {
				got, ok := x.find(&keys, key, hash(key))
				require.True(t, ok, key)
				require.Equal(t, index, got, key)
			}
		})
	}
}

func TestKeyIndexMakesRoomOnce(t *testing.T) {
	var x keyIndex
	x.reserve(1000)
	size := len(x.slots)
	for i := range int64(1000) {
		x.add(hashOf(fmt.Sprint(i)), i)
	}
	require.Len(t, x.slots, size)
	x.add(0, 1000)
	require.LessOrEqual(t, 4*x.count, 3*len(x.slots))
}

func TestRepeatedWithEqualHashes(t *testing.T) {
	keys := []string{"a", "b", "a", "c", "b", "a"}
	require.Equal(t, []string{"a", "b"}, repeated(keys, make([]uint64, len(keys))))
	require.Nil(t, repeated([]string{"a", "b", "c"}, make([]uint64, 3)))
}
