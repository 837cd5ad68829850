package sampler_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
)

func budget(r int, batch any, tokens any) where {
	return where{"dp_rank": r, "batch_index": batch, "token_budget": tokens}
}

func (s *stage) ended(config where) bool {
	s.t.Helper()
	d, err := s.fetch("p", "t", 1, config)
	require.NoError(s.t, err)
	return d != nil && d.End
}

func TestAStreamIsCutByTheBudget(t *testing.T) {
	s := newStage(t, sampler.NewStream(1))
	s.put("p", false, 4, 3)
	require.Nil(t, s.got(1, budget(0, 0, 10)), "3 more might fit")
	s.put("p", false, 3, 50, 2)
	require.Equal(t, span(0, 3), s.got(1, budget(0, 0, 10)), "just full")
	require.Equal(t, []int64{3}, s.got(1, budget(1, 0, 10)), "larger than the budget")
	require.Nil(t, s.got(1, budget(0, 1, 10)))
	s.put("p", false, 9)
	require.Equal(t, []int64{4}, s.got(1, budget(0, 1, 10)), "9 would not fit")
	require.Nil(t, s.got(1, budget(1, 1, 10)))
	s.put("p", true, 1, 1)
	require.Equal(t, []int64{5, 6}, s.got(1, budget(1, 1, 10)))
	require.Equal(t, []int64{7}, s.got(1, budget(0, 2, 10)), "what is left when production is complete")
	require.True(t, s.ended(budget(0, 3, 10)))
	require.True(t, s.ended(budget(1, 2, 10)))
	for batch, want := range map[int][]int64{0: span(0, 3), 1: {4}, 2: {7}} {
		require.Equal(t, want, s.got(1, budget(0, batch, 10)), "every stage gets the same")
		require.False(t, s.ended(budget(0, batch, 10)))
	}
}

func TestTheEndWaitsForSamplesThatLackAField(t *testing.T) {
	s := newStage(t, sampler.NewStream(1))
	s.put("p", false, 2)
	late, err := s.Apply(&catalog.Write{Partition: "p", Insert: 1, Last: true}, make([]uint32, 1))
	require.NoError(t, err)
	require.Nil(t, s.got(1, budget(0, 0, 10)))
	require.False(t, s.ended(budget(0, 0, 10)))
	_, err = s.Apply(&catalog.Write{Partition: "p", Samples: late.Samples, Columns: columns(1)}, make([]uint32, 1))
	require.NoError(t, err)
	require.Equal(t, span(0, 2), s.got(1, budget(0, 0, 10)))
	require.True(t, s.ended(budget(0, 1, 10)))
}

// What comes after the end was given changes nothing for the stages that have not asked yet.
func TestAnEndIsRepeated(t *testing.T) {
	s := newStage(t, sampler.NewStream(1))
	s.put("p", true, 1)
	require.Len(t, s.got(1, budget(0, 0, 10)), 1)
	require.True(t, s.ended(budget(0, 1, 10)))
	s.put("p", false, 10)
	require.True(t, s.ended(budget(0, 1, 10)))
	require.Len(t, s.got(1, budget(0, 2, 10)), 1)
	s.clear("p", 0, 1)
	s.put("p", false, 10)
	require.Len(t, s.got(1, budget(0, 1, 10)), 1, "another stream in the same partition")
}

func TestStreamRefusesWhatMakesNoSense(t *testing.T) {
	s := newStage(t, sampler.NewStream(2))
	s.refused(1, where{"token_budget": 5}, "needs dp_rank and batch_index")
	for _, wrong := range []any{0, -1, "many"} {
		s.refused(1, budget(0, 0, wrong), "token_budget must be a number above 0")
	}
	s.refused(3, nil, "must be a multiple of n_samples_per_prompt 2")
	s.put("p", false, ones(4)...)
	require.Equal(t, span(0, 2), s.got(2, nil), "without a budget by groups")
}

// Put order counts, not the order of indexes that were used before.
func TestAStreamIsInPutOrder(t *testing.T) {
	s := newStage(t, sampler.NewStream(1))
	s.put("q", false, ones(2)...)
	s.put("p", false, 1, 1)
	s.clear("q", 0, 1)
	require.Equal(t, span(0, 2), s.put("p", true, 1, 1))
	require.Equal(t, []int64{2, 3, 0}, s.got(1, budget(0, 0, 3)))
}

func TestRanksAndStagesShareAStream(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	for round := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, round))
		s := newStage(t, sampler.NewStream(1))
		const ranks, stages, total = 3, 3, 40
		made, order, length := 0, []int64{}, map[int64]int{}
		given := [ranks][]([]int64){}
		at, done := [ranks][stages]int{}, 0
		for done < ranks*stages {
			if made < total && rng.IntN(3) == 0 {
				lengths := make([]int, 1+rng.IntN(min(4, total-made)))
				for i := range lengths {
					lengths[i] = 1 + rng.IntN(12)
				}
				made += len(lengths)
				for i, index := range s.put("p", made == total, lengths...) {
					order, length[index] = append(order, index), lengths[i]
				}
			}
			r, stage := rng.IntN(ranks), rng.IntN(stages)
			if at[r][stage] < 0 {
				continue
			}
			d, err := s.fetch("p", "t", 1, budget(r, at[r][stage], 10))
			require.NoError(t, err)
			switch batch := at[r][stage]; {
			case d == nil:
				require.Less(t, made, total, "with everything there somebody gets something")
			case d.End:
				require.Len(t, given[r], batch, "at the same batch for every stage")
				at[r][stage] = -1
				done++
			default:
				if batch == len(given[r]) {
					given[r] = append(given[r], indexesOf(d))
				}
				require.Equal(t, given[r][batch], indexesOf(d))
				at[r][stage]++
			}
		}
		seen := map[int64]bool{}
		for _, batches := range given {
			for _, batch := range batches {
				tokens := 0
				for _, index := range batch {
					require.False(t, seen[index])
					seen[index] = true
					tokens += length[index]
				}
				require.True(t, tokens <= 10 || len(batch) == 1)
			}
		}
		require.Len(t, seen, len(order))
	}
}
