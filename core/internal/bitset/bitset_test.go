package bitset

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSetHoldsWhatWasAdded(t *testing.T) {
	var s Set
	require.False(t, s.Has(0))
	require.False(t, s.Remove(7))
	for _, i := range []int64{9_000_000, 63, 64, 4095, 4096, 0} {
		require.True(t, s.Add(i))
		require.False(t, s.Add(i))
		require.True(t, s.Has(i))
	}
	require.Equal(t, 6, s.Count())
	require.Equal(t, []int64{0, 63, 64, 4095, 4096, 9_000_000}, s.Members(nil))
	require.False(t, s.Has(1))
	require.False(t, s.Has(10_000_000))
}

func TestSetGivesMemoryBackWithItsLastMember(t *testing.T) {
	var s Set
	s.Add(3)
	s.Add(1_000_000)
	require.True(t, s.Remove(1_000_000))
	require.Nil(t, s.pages[len(s.pages)-1].words)
	require.True(t, s.Remove(3))
	require.Equal(t, Set{}, s)
}

func TestMaskOfUnorderedAndRepeatedIndexes(t *testing.T) {
	var s Set
	s.Add(70)
	m := NewMask([]int64{5, 70, 5, 6, 71, 6})
	require.False(t, s.HasAll(m))
	require.True(t, s.HasAny(m))
	require.Equal(t, 3, s.AddAll(m))
	require.True(t, s.HasAll(m))
	require.Equal(t, []int64{5, 6, 70, 71}, s.Members(nil))
	require.Equal(t, 4, s.RemoveAll(m))
	require.False(t, s.HasAny(m))
}

func TestIntersectKeepsTheCommonPart(t *testing.T) {
	var s Set
	for _, i := range []int64{2, 3, 200} {
		s.Add(i)
	}
	require.Equal(t, []int64{3, 200}, slices.Collect(s.Intersect(NewMask([]int64{1, 3, 200, 201})).All()))
}

func TestQueryAgainstANaiveOne(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 60 {
		sets, maps := make([]*Set, 4), make([]map[int64]bool, 4)
		span := int64(1) << (3 + rng.IntN(14))
		base := rng.Int64N(1 << 16)
		for k := range sets {
			sets[k], maps[k] = &Set{}, map[int64]bool{}
			for range rng.IntN(400) {
				i := base + rng.Int64N(span)
				sets[k].Add(i)
				maps[k][i] = true
				if j := base + rng.Int64N(span); rng.IntN(2) == 0 {
					sets[k].Remove(j)
					delete(maps[k], j)
				}
			}
		}
		want := []int64(nil)
		for i := range maps[0] {
			if maps[1][i] && !maps[2][i] && !maps[3][i] {
				want = append(want, i)
			}
		}
		slices.Sort(want)
		q := Query{All: sets[:2], Not: sets[2:]}
		require.Equal(t, want, q.Append(nil, -1))
		require.Equal(t, len(want), q.Count(-1))
		require.Equal(t, min(2, len(want)), q.Count(2))
		require.Equal(t, len(want[:min(2, len(want))]), len(q.Append(nil, 2)))
		require.Empty(t, q.Append(nil, 0))
		probe := []int64{base + span, base, -1, base + span/2, base}
		require.Equal(t, slices.DeleteFunc(slices.Clone(probe), func(i int64) bool { return !slices.Contains(want, i) }), q.Filter(probe))
		for range 20 {
			from := base + rng.Int64N(span)
			to := from + rng.Int64N(span)
			inside := slices.ContainsFunc(want, func(i int64) bool { return from <= i && i < to })
			require.Equal(t, inside, setOf(want).HasIn(from, to), "%d to %d", from, to)
		}
		for w := base >> 6; w <= (base+span)>>6; w++ {
			selected := q.Word(w)
			for bit := range int64(64) {
				require.Equal(t, slices.Contains(want, w<<6+bit), selected>>bit&1 == 1)
			}
			for bit := range int64(64) {
				if maps[0][w<<6+bit] != (sets[0].Word(w)>>bit&1 == 1) {
					t.Fatalf("bit %d of word %d", bit, w)
				}
			}
		}
	}
}

func setOf(indexes []int64) *Set {
	s := &Set{}
	s.AddAll(NewMask(indexes))
	return s
}

func TestFreeTakesTheSmallestNumbers(t *testing.T) {
	var f Free
	require.Equal(t, []int64{0, 1, 2}, f.Take(nil, 3))
	f.Release(1)
	require.Equal(t, []int64{1, 3}, f.Take(nil, 2))
	require.Equal(t, 4, f.Used())
	require.False(t, f.Has(4))
}

func TestFreeAgainstANaiveOne(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var f Free
	used := map[int64]bool{}
	for range 300 {
		if n := rng.IntN(600); rng.IntN(2) == 0 || len(used) < n {
			got := f.Take(nil, n)
			for i, at := int64(0), 0; at < n; i++ {
				if !used[i] {
					if i != got[at] {
						t.Fatalf("took %d, want %d", got[at], i)
					}
					used[i] = true
					at++
				}
			}
		} else {
			for i := range used {
				if n--; n < 0 {
					break
				}
				f.Release(i)
				delete(used, i)
			}
		}
		require.Equal(t, len(used), f.Used())
	}
	for i := range int64(300_000) {
		if used[i] != f.Has(i) {
			t.Fatalf("%d in use: %v", i, f.Has(i))
		}
	}
}

// Three levels of the tree are full at 64^3, so a fourth has to grow on top.
func TestFreeGrowsAndFindsAHoleInAFullTree(t *testing.T) {
	var f Free
	n := 64 * 64 * 64
	got := f.Take(make([]int64, 0, n), n)
	require.Equal(t, int64(n-1), got[n-1])
	f.Release(77_777)
	require.Equal(t, []int64{77_777, int64(n), int64(n + 1)}, f.Take(nil, 3))
	f.Release(0)
	f.Release(int64(n))
	require.Equal(t, []int64{0, int64(n), int64(n + 2)}, f.Take(nil, 3))
}

func BenchmarkQueryCount(b *testing.B) {
	sets := make([]*Set, 9)
	for k := range sets {
		sets[k] = &Set{}
		for i := range int64(1_000_000) {
			sets[k].Add(i)
		}
	}
	sets[8].Remove(3)
	q := Query{All: sets[:8], Not: sets[8:]}
	for b.Loop() {
		if q.Count(-1) != 1 {
			b.Fatal("wrong count")
		}
	}
}

func TestFreeUsesNumbersInAnyOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, span := range []int64{50, 5_000, 400_000} {
		var f Free
		used := map[int64]bool{}
		for range 3_000 {
			i := rng.Int64N(span)
			require.Equal(t, !used[i], f.Use(i))
			used[i] = true
		}
		require.Equal(t, len(used), f.Used())
		for i := int64(0); i < 2*span; i++ {
			if used[i] != f.Has(i) {
				t.Fatalf("%d in use: %v", i, f.Has(i))
			}
		}
		for at, got := range f.Take(nil, 2_000) {
			want := int64(0)
			for used[want] {
				want++
			}
			if got != want {
				t.Fatalf("took %d as number %d, want %d", got, at, want)
			}
			used[want] = true
			if at > 200 {
				break
			}
		}
	}
	var full Free
	for i := range int64(64 * 64) {
		require.True(t, full.Use(i))
	}
	require.Equal(t, []int64{64 * 64}, full.Take(nil, 1))
	require.True(t, full.Use(1<<24))
	full.Release(70)
	require.Equal(t, []int64{70, 64*64 + 1}, full.Take(nil, 2))
}
