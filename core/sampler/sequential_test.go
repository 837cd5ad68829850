package sampler_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
)

var _ sampler.Picker = sampler.Sequential{}

// ready is a Ready of a given list that counts what was asked of it, and has no more than Sequential may need.
type ready struct {
	sampler.Ready
	list []int64
	all  int
}

func (r *ready) Len() int            { return len(r.list) }
func (r *ready) First(n int) []int64 { return r.list[:min(n, len(r.list))] }
func (r *ready) All() []int64        { r.all++; return r.list }

func TestSequentialTakesTheFirstAndNeverBuildsTheWholeList(t *testing.T) {
	view := &ready{list: []int64{3, 7, 9}}
	pick, err := sampler.Sequential{}.Sample(view, sampler.Request{N: 2})
	require.NoError(t, err)
	require.Equal(t, sampler.Pick{Sampled: []int64{3, 7}, Consumed: []int64{3, 7}}, pick)
	require.Zero(t, view.all)
}

func TestSequentialTakesNoneWhenThereAreTooFew(t *testing.T) {
	pick, err := sampler.Sequential{}.Sample(&ready{list: []int64{3}}, sampler.Request{N: 2})
	require.NoError(t, err)
	require.Zero(t, pick)
}

func TestSequentialIgnoresRanks(t *testing.T) {
	s := newStage(t, sampler.Sequential{})
	s.put("p", false, ones(4)...)
	require.Equal(t, span(0, 2), s.got(2, rank(-1, 0)))
	require.Equal(t, span(2, 4), s.got(2, rank(-1, 0)))
	s.refused(1, where{"token_budget": 3}, "StreamingTokenBudgetSampler", "SequentialSampler")
}

func TestSequentialHasNoState(t *testing.T) {
	s := sampler.Sequential{}
	require.False(t, s.Cached(sampler.Request{N: 1}))
	s.ClearPartition("p")
	state, err := s.Save()
	require.NoError(t, err)
	require.NoError(t, s.Load(state))
	require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(s.Load([]byte{1})))
}
