package machine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestID(t *testing.T) {
	t.Setenv(Variable, "")
	own := ID()
	require.NotEmpty(t, own)
	require.Equal(t, own, ID())
	t.Setenv(Variable, "another")
	require.Equal(t, "another", ID())
	t.Setenv(Variable, strings.Repeat("n", 1000))
	require.Len(t, ID(), maxID)
	Use("told")
	require.Equal(t, "told", ID())
	Use("")
	require.Len(t, ID(), maxID)
}
