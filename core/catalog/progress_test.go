package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProgressCountsReservedSamplesToo(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 8})
	f.insert("p", 3, "x")
	f.fetch(2, "t", "x")
	for task, want := range map[string]int{"t": 2, "other": 0} {
		samples, consumed, known := f.Progress("p", task)
		require.True(t, known)
		require.Equal(t, []int{8, want}, []int{samples, consumed}, task)
	}
	_, _, known := f.Progress("nowhere", "t")
	require.False(t, known)
}
