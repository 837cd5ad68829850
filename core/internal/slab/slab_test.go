package slab

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRecordsKeepTheirValuesAndAddresses(t *testing.T) {
	type record struct{ a int }
	var s Slab[record]
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	want := map[uint32]int{}
	where := map[uint32]*record{}
	for step := range 5_000 {
		if len(want) == 0 || rnd.IntN(5) < 3 {
			id := s.New()
			require.NotZero(t, id)
			require.NotContains(t, want, id, "seed %d", seed)
			require.Equal(t, record{}, *s.At(id), "seed %d", seed)
			s.At(id).a, want[id], where[id] = step, step, s.At(id)
			continue
		}
		for id, value := range want {
			require.Equal(t, value, s.At(id).a)
			require.Same(t, where[id], s.At(id))
			s.Free(id)
			delete(want, id)
			break
		}
	}
	require.Equal(t, len(want), s.Len())
	for id, value := range want {
		require.Equal(t, value, s.At(id).a, "seed %d", seed)
		s.Free(id)
	}
	require.Zero(t, s.Len())
	require.Equal(t, chunk, s.Cap(), "an empty table keeps one chunk")
	require.Equal(t, uint32(1), s.New())
}

func TestKeepBoundsWhatAnEmptyTableHolds(t *testing.T) {
	for keep, want := range map[int]int{0: chunk, 3 * chunk: 3 * chunk, 100 * chunk: 5 * chunk} {
		s := Slab[int]{Keep: keep}
		for range 5*chunk - 1 {
			s.New()
		}
		for id := range uint32(5*chunk - 1) {
			s.Free(id + 1)
		}
		require.Equal(t, want, s.Cap())
		require.Equal(t, uint32(1), s.New())
	}
}
