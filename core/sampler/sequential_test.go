package sampler_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/sampler"
	"transferqueue/core/tqerr"
)

var _ sampler.Sampler = sampler.Sequential{}

// ready is a Ready of a given list that counts what was asked of it.
type ready struct {
	list []int64
	all  int
}

func (r *ready) Len() int            { return len(r.list) }
func (r *ready) First(n int) []int64 { return r.list[:min(n, len(r.list))] }
func (r *ready) All() []int64        { r.all++; return r.list }
func (r *ready) Tags(int64) []byte   { return []byte{0x80} }

func TestSequentialTakesTheFirstAndNeverBuildsTheWholeList(t *testing.T) {
	view := &ready{list: []int64{3, 7, 9}}
	sampled, consumed, err := sampler.Sequential{}.Sample(view, sampler.Request{N: 2})
	require.NoError(t, err)
	require.Equal(t, []int64{3, 7}, sampled)
	require.Equal(t, []int64{3, 7}, consumed)
	require.Zero(t, view.all)
}

func TestSequentialTakesNoneWhenThereAreTooFew(t *testing.T) {
	sampled, consumed, err := sampler.Sequential{}.Sample(&ready{list: []int64{3}}, sampler.Request{N: 2})
	require.NoError(t, err)
	require.Empty(t, sampled)
	require.Empty(t, consumed)
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
