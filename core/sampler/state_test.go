package sampler_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
)

func TestAStateThatCannotBeLoadedChangesNothing(t *testing.T) {
	picks := sampler.NewRankAware()
	s := newStage(t, picks)
	s.put("p", false, ones(4)...)
	require.Equal(t, span(0, 2), s.got(2, rank(0, 0)))
	good, err := picks.Save()
	require.NoError(t, err)
	foreign, err := sampler.NewGroups(2).Save()
	require.NoError(t, err)
	for at := range good {
		require.Error(t, picks.Load(good[:at]), "cut at %d", at)
	}
	err = picks.Load(foreign)
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	require.ErrorContains(t, err, `"GRPOGroupNSampler", want "RankAwareSampler"`)
	require.Equal(t, span(0, 2), s.got(2, rank(0, 0)))
	s.picks = sampler.NewRankAware()
	require.NoError(t, s.picks.Load(good))
	require.Equal(t, span(0, 2), s.got(2, rank(0, 0)))
}

func TestAnEmptyStateIsOne(t *testing.T) {
	for _, spec := range []sampler.Spec{
		{}, {Name: "RankAwareSampler"}, {Name: "GRPOGroupNSampler", Group: 1}, {Name: "SeqlenBalancedSampler", Group: 1, Ranks: 1},
		{Name: "StreamingTokenBudgetSampler", Group: 1},
	} {
		s, err := sampler.New(spec)
		require.NoError(t, err)
		state, err := s.Save()
		require.NoError(t, err)
		require.NoError(t, s.Load(state))
	}
}

func TestEndsAreSaved(t *testing.T) {
	picks := sampler.NewStream(1)
	s := newStage(t, picks)
	s.put("p", true, 1)
	s.got(1, budget(0, 0, 10))
	require.True(t, s.ended(budget(0, 1, 10)))
	state, err := picks.Save()
	require.NoError(t, err)
	fresh := sampler.NewStream(1)
	require.NoError(t, fresh.Load(state))
	s.picks = fresh
	s.put("p", false, 10)
	require.True(t, s.ended(budget(0, 1, 10)))
}

func FuzzLoad(f *testing.F) {
	picks := sampler.NewBalanced(1, 2)
	state, err := picks.Save()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(state)
	f.Fuzz(func(t *testing.T, state []byte) {
		fresh := sampler.NewBalanced(1, 2)
		if fresh.Load(state) != nil {
			return
		}
		again, err := fresh.Save()
		require.NoError(t, err)
		require.NoError(t, fresh.Load(again))
	})
}
