package session_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/sampler"
	"transferqueue/core/session"
	"transferqueue/core/tqerr"
)

// A sampler that there is not costs no session: the next one opens at once.
func TestASamplerThatThereIsNot(t *testing.T) {
	leaktest.Check(t)
	cfg := config(t)
	for text, spec := range map[string]sampler.Spec{
		"could not find sampler \"Nobody\"": {Name: "Nobody", Group: 1},
		"must be positive, got 0":           {Name: "GRPOGroupNSampler"},
	} {
		cfg.Sampler = spec
		_, err := session.Open(context.Background(), cfg)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
		require.ErrorContains(t, err, text)
	}
	cfg.Sampler = sampler.Spec{Name: "GRPOGroupNSampler", Group: 2}
	s, err := session.Open(context.Background(), cfg)
	require.NoError(t, err)
	require.True(t, s.Info.Owner)
	alive(t, s)
	require.NoError(t, s.Close(time.Second))
}
