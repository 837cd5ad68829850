package sampler_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
)

func TestGroupsAreHandedOutWholeAndRepeatedOnlyForARank(t *testing.T) {
	s := newStage(t, sampler.NewGroups(2))
	require.Nil(t, s.got(4, nil))
	s.put("p", false, ones(9)...)
	require.Equal(t, span(0, 4), s.got(4, nil))
	require.Equal(t, span(4, 6), s.got(2, rank(0, 0)))
	require.Equal(t, span(4, 6), s.got(2, rank(0, 0)))
	require.Equal(t, span(4, 6), s.got(4, rank(0, 0)), "the remembered answer, whatever the size")
	require.Equal(t, span(6, 8), s.got(2, rank(1, 0)))
	require.Nil(t, s.got(2, rank(1, 1)), "one sample is left")
	require.Nil(t, s.got(2, nil))
	d, err := s.fetch("p", "other", 2, rank(0, 0))
	require.NoError(t, err)
	require.Equal(t, span(0, 2), indexesOf(d), "tasks are apart")
}

func TestGroupsRefuseAtOnceWhatMakesNoSense(t *testing.T) {
	s := newStage(t, sampler.NewGroups(3))
	s.refused(4, nil, "GRPOGroupNSampler", "must be a multiple of n_samples_per_prompt 3")
	s.refused(3, rank(-1, 0), "dp_rank -1 must be greater than or equal to 0")
	s.refused(3, where{"dp_rank": "first"}, "dp_rank is no whole number")
	s.refused(3, where{"token_budget": 5}, "StreamingTokenBudgetSampler", "GRPOGroupNSampler")
	require.Nil(t, s.got(3, where{"dp_rank": nil, "batch_index": nil, "else": []int{1}, "partition_id": "p"}))
}

// Two partitions whose indexes are used again by each other: whole groups all the same (contract F21).
func TestGroupsOfTwoPartitionsThatShareIndexes(t *testing.T) {
	s := newStage(t, sampler.NewGroups(4))
	first := s.put("q", false, ones(4)...)
	groups := [][]int64{s.put("p", false, ones(4)...)}
	for round := range 5 {
		s.clear("q", first[:2]...)
		groups = append(groups, s.put("p", false, ones(4)...))
		first = append(first[2:], s.put("q", false, ones(3)...)...)
		require.Equal(t, groups[round], s.got(4, nil))
	}
	require.Equal(t, groups[5], s.got(4, nil))
}

func TestAClearedSampleLeavesItsAnswerAndComesBackAsAnother(t *testing.T) {
	s := newStage(t, sampler.NewGroups(2))
	s.put("p", false, ones(4)...)
	require.Equal(t, span(0, 4), s.got(4, rank(0, 7)))
	s.clear("p", 1)
	require.Equal(t, []int64{0, 2, 3}, s.got(4, rank(0, 7)))
	require.Equal(t, []int64{1, 4}, s.put("p", false, ones(2)...))
	require.Equal(t, []int64{0, 2, 3}, s.got(4, rank(0, 7)), "index 1 is another sample now")
	require.Equal(t, []int64{1, 4}, s.got(2, rank(0, 8)))
	s.clear("p", 0, 2, 3)
	s.put("p", false, ones(4)...)
	require.Len(t, s.got(4, rank(0, 7)), 4, "an answer without samples is forgotten")
}

func TestAfterAResetANewBatchStartsOver(t *testing.T) {
	s := newStage(t, sampler.NewGroups(2))
	s.put("p", false, ones(4)...)
	require.Equal(t, span(0, 4), s.got(4, rank(0, 0)))
	require.Nil(t, s.got(4, rank(0, 1)))
	s.reset("p", "t")
	require.Equal(t, span(0, 4), s.got(4, rank(0, 1)))
	require.Equal(t, span(0, 4), s.got(4, rank(0, 0)))
	s.clearAll("p")
	s.put("p", false, ones(2)...)
	require.Len(t, s.got(2, rank(0, 0)), 2)
}

func TestRankAware(t *testing.T) {
	s := newStage(t, sampler.NewRankAware())
	s.refused(1, nil, "RankAwareSampler", "needs dp_rank and batch_index")
	s.refused(1, where{"dp_rank": 0}, "needs dp_rank and batch_index")
	s.refused(1, rank(-2, 0), "dp_rank -2 must be greater than or equal to 0")
	s.put("p", false, ones(5)...)
	require.Nil(t, s.got(6, rank(0, 0)))
	require.Equal(t, span(0, 2), s.got(2, rank(0, 0)))
	require.Equal(t, span(2, 4), s.got(2, rank(1, 0)))
	require.Nil(t, s.got(2, rank(0, "next")))
	require.Equal(t, span(0, 2), s.got(2, rank(0, 0)), "though too few are ready")
	require.Equal(t, span(2, 4), s.got(9, rank(1, 0)))
}

func TestMake(t *testing.T) {
	for _, spec := range []sampler.Spec{
		{}, {Name: "SequentialSampler"}, {Name: "RankAwareSampler"}, {Name: "GRPOGroupNSampler", Group: 2},
		{Name: "SeqlenBalancedSampler", Group: 2, Ranks: 3}, {Name: "StreamingTokenBudgetSampler", Group: 1},
	} {
		s, err := sampler.Make(spec, nil, 0)
		require.NoError(t, err)
		require.Contains(t, []string{spec.Name, "SequentialSampler"}, s.Name())
	}
	for text, spec := range map[string]sampler.Spec{
		"could not find sampler \"Other\"":   {Name: "Other", Group: 1},
		"n_samples_per_prompt must be posit": {Name: "GRPOGroupNSampler"},
		"dp_size must be positive, got 0":    {Name: "SeqlenBalancedSampler", Group: 1},
		"has no Python to run the sampler S": {Name: "S", Pickled: []byte{1}},
	} {
		_, err := sampler.Make(spec, nil, 0)
		require.ErrorContains(t, err, text)
	}
}

// BenchmarkFetch1024OfMillionByGroups is a whole fetch of the table: groups of 8 among a million ready samples.
func BenchmarkFetch1024OfMillionByGroups(b *testing.B) {
	c := catalog.New(catalog.Options{})
	c.AddUnit(0, "h")
	for range 1000 {
		_, err := c.Apply(&catalog.Write{Partition: "p", Insert: 1000, Columns: columns(1000)}, make([]uint32, 1000))
		require.NoError(b, err)
	}
	picks := sampler.NewGroups(8)
	for b.Loop() {
		d, err := c.Fetch(catalog.FetchRequest{Partition: "p", Fields: []string{"x"}, N: 1024, Task: "t"}, picks)
		require.NoError(b, err)
		if d == nil {
			c.ResetConsumption("p", "t")
		}
	}
}
