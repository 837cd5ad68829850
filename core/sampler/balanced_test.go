package sampler_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/sampler"
)

// Groups weigh 20, 2, 12 and 10. Karmarkar-Karp: (10, 2) spreads 8, (20, 12) spreads 8; 20 + 2 against 12 + 10.
func TestBalancedSharesByHand(t *testing.T) {
	s := newStage(t, sampler.NewBalanced(2, 2))
	s.put("p", false, 9, 11, 1, 1, 6, 6, 7)
	require.Nil(t, s.got(4, rank(0, 0)), "one sample too few")
	s.put("p", false, 3)
	require.Equal(t, []int64{4, 5, 6, 7}, s.got(4, rank(0, 0)))
	require.Equal(t, []int64{0, 1, 2, 3}, s.got(4, rank(1, 0)))
	require.Equal(t, []int64{4, 5, 6, 7}, s.got(4, rank(0, 0)))
	require.Nil(t, s.got(4, rank(2, 0)), "there is no third rank")
	require.Equal(t, []int64{4, 5, 6, 7}, s.got(4, nil), "rank 0 and batch 0 when none are given")
}

func TestASampleWithoutALengthWeighsOne(t *testing.T) {
	s := newStage(t, sampler.NewBalanced(1, 2))
	s.put("p", false, 5, 2)
	_, err := s.Apply(insertOf(2), make([]uint32, 2))
	require.NoError(t, err)
	require.Equal(t, []int64{0, 2}, s.got(2, rank(0, 0)))
	require.Equal(t, []int64{1, 3}, s.got(2, rank(1, 0)))
}

func TestBalancedRefusesWhatMakesNoSense(t *testing.T) {
	s := newStage(t, sampler.NewBalanced(2, 2))
	s.refused(3, rank(0, 0), "SeqlenBalancedSampler", "batch_size 3 must be a multiple of n_samples_per_prompt 2")
	s.refused(2, rank(-1, 0), "dp_rank -1")
	s.put("p", false, 1, 1, 1)
	w := insertOf(1)
	w.Tags = [][]byte{pack(t, where{"total_lengths": "long"})}
	_, err := s.Apply(w, make([]uint32, 1))
	require.NoError(t, err)
	s.refused(2, rank(0, 0), "total_lengths", "sample 3")
	require.Equal(t, []byte{0, 0, 0, 0}, s.Consumption("p", "t").Cells)
}

func TestPromisedSharesAreKeptInWhateverOrderRanksAsk(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	const ranks, batches, size = 4, 6, 4
	for round := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, round))
		picks := sampler.NewBalanced(2, ranks)
		s := newStage(t, picks)
		for range ranks * batches {
			s.put("p", false, 1+rng.IntN(9), 1+rng.IntN(9), 1+rng.IntN(9), 1+rng.IntN(9))
		}
		seen, shares := map[int64]bool{}, map[[2]int][]int64{}
		for _, k := range rng.Perm(ranks * batches) {
			r, b := k%ranks, k/ranks
			share := s.got(size, rank(r, b))
			require.Len(t, share, size)
			for i, index := range share {
				require.False(t, seen[index], "sample %d for two", index)
				seen[index] = true
				if i%2 == 1 {
					require.Equal(t, share[i-1]+1, index, "whole groups")
				}
			}
			shares[[2]int{r, b}] = share
			if rng.IntN(5) == 0 { // the state goes on elsewhere
				state, err := picks.Save()
				require.NoError(t, err)
				picks = sampler.NewBalanced(2, ranks)
				require.NoError(t, picks.Load(state))
				s.picks = picks
			}
		}
		require.Len(t, seen, ranks*batches*size)
		for k, share := range shares {
			require.Equal(t, share, s.got(size, rank(k[0], k[1])))
		}
	}
}

func TestAResetEndsPromises(t *testing.T) {
	s := newStage(t, sampler.NewBalanced(1, 2))
	s.put("p", false, 1, 1)
	require.Len(t, s.got(1, rank(0, 0)), 1)
	require.Nil(t, s.got(1, rank(0, 1)))
	s.reset("p", "")
	require.Len(t, s.got(1, rank(0, 1)), 1, "both samples are there again")
	s.clear("p", 0, 1)
	s.put("p", false, 1, 1)
	require.Len(t, s.got(1, rank(1, 1)), 1, "the batch is decided anew")
}

// Half of a promised share is cleared; its index comes back as a sample of nobody.
func TestAPromisedSampleThatIsCleared(t *testing.T) {
	s := newStage(t, sampler.NewBalanced(1, 2))
	s.put("p", false, ones(4)...)
	mine := s.got(2, rank(0, 0))
	other := slices.DeleteFunc(span(0, 4), func(i int64) bool { return slices.Contains(mine, i) })
	s.clear("p", other[0])
	require.Equal(t, other[:1], s.put("p", false, 1))
	s.put("p", false, 1)
	require.Equal(t, []int64{other[0], 4}, slices.Sorted(slices.Values(append(s.got(1, rank(0, 1)), s.got(1, rank(1, 1))...))))
	require.Equal(t, other[1:], s.got(2, rank(1, 0)))
}

func TestPartitionByHand(t *testing.T) {
	for _, c := range []struct {
		lengths []float64
		k       int
		equal   bool
		want    [][]int
	}{
		{[]float64{8, 7, 6, 5}, 2, true, [][]int{{1, 2}, {0, 3}}},
		{[]float64{10, 4, 3, 2, 1}, 2, false, [][]int{{1, 2, 3, 4}, {0}}},
		{[]float64{9, 3, 2, 1}, 2, true, [][]int{{0, 3}, {1, 2}}},
		{[]float64{5, 5, 5}, 3, true, [][]int{{2}, {1}, {0}}},
		{[]float64{4, 4}, 1, true, [][]int{{0, 1}}},
	} {
		require.Equal(t, c.want, sampler.Partition(c.lengths, c.k, c.equal))
	}
}

// The second opinion keeps all states in a list that it sorts anew in every round, and compares sets by what they print.
func TestPartitionAgainstASimpleOne(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 400 {
		k, equal := 1+rng.IntN(5), rng.IntN(2) == 0
		n := k * (1 + rng.IntN(6))
		if !equal {
			n += rng.IntN(4)
		}
		lengths := make([]float64, n)
		for i := range lengths {
			lengths[i] = float64(1 + rng.IntN(6)) // many ties
		}
		got := sampler.Partition(lengths, k, equal)
		require.Equal(t, simplePartition(lengths, k, equal), got, "%v in %d", lengths, k)
		all := slices.Sorted(slices.Values(slices.Concat(got...)))
		require.Len(t, slices.Compact(all), n)
		for _, part := range got {
			require.True(t, !equal || len(part) == n/k)
		}
	}
}

type pile struct {
	sum   float64
	items [][2]float64 // index, length
}

func (p pile) less(q pile) bool {
	if p.sum != q.sum {
		return p.sum < q.sum
	}
	if len(p.items) != len(q.items) {
		return len(p.items) < len(q.items)
	}
	for i := range p.items {
		if p.items[i] != q.items[i] {
			return cmp.Compare(p.items[i][0], q.items[i][0]) < 0 || p.items[i][0] == q.items[i][0] && p.items[i][1] < q.items[i][1]
		}
	}
	return false
}

func descending(piles []pile) []pile {
	for i := range piles {
		for j := i; j > 0 && piles[j-1].less(piles[j]); j-- {
			piles[j-1], piles[j] = piles[j], piles[j-1]
		}
	}
	return piles
}

func simplePartition(lengths []float64, k int, equal bool) [][]int {
	var order []int
	for i := range lengths {
		order = append(order, i)
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(lengths[a], lengths[b]) })
	var all [][]pile
	for at, i := range order {
		if !equal || at%k == 0 {
			all = append(all, make([]pile, k))
		}
		slot := 0
		if equal {
			slot = at % k
		}
		all[len(all)-1][slot] = pile{lengths[i], [][2]float64{{float64(i), lengths[i]}}}
	}
	for i := range all {
		descending(all[i])
	}
	spread := func(p []pile) float64 { return p[0].sum - p[k-1].sum }
	for len(all) > 1 {
		slices.SortFunc(all, func(a, b []pile) int {
			switch {
			case spread(a) != spread(b):
				return cmp.Compare(spread(b), spread(a))
			case b[0].less(a[0]):
				return -1
			}
			return 1
		})
		joined := make([]pile, k)
		for i := range joined {
			a, b := all[0][i], all[1][k-1-i]
			joined[i] = pile{a.sum + b.sum, slices.Concat(a.items, b.items)}
		}
		all = append([][]pile{descending(joined)}, all[2:]...)
	}
	out := make([][]int, k)
	for i, p := range all[0] {
		for _, it := range p.items {
			out[i] = append(out[i], int(it[0]))
		}
		slices.Sort(out[i])
	}
	return out
}

func BenchmarkBalanced8RanksOf128Groups(b *testing.B) {
	lengths := make([]float64, 1024)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range lengths {
		lengths[i] = float64(rng.IntN(8192))
	}
	for b.Loop() {
		sampler.Partition(lengths, 8, true)
	}
}
