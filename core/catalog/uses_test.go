package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

func TestUsesSayWhatSamplesAreNeededFor(t *testing.T) {
	f := newFixture(t, Options{})
	samples := f.put([]string{"a", "b", "c"}, "x").Samples
	uses := func(partition string, list []schema.Sample) []Use {
		out := make([]Use, len(list))
		f.Uses(partition, list, func(i int, u Use) { out[i] = u })
		return out
	}
	require.Equal(t, []Use{Wanted, Wanted, Wanted}, uses("p", samples), "nobody has fetched anything")
	f.put([]string{"a", "b"}, "y")
	require.Equal(t, []Use{Wanted, Wanted, Unready}, uses("p", samples))
	fetch := func(task string, n int) {
		_, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: n, Task: task}, &first{})
		require.NoError(t, err)
	}
	fetch("one", 2)
	require.Equal(t, []Use{Consumed, Consumed, Unready}, uses("p", samples))
	fetch("two", 1)
	require.Equal(t, []Use{Consumed, Wanted, Unready}, uses("p", samples), "what one task has left")
	require.Equal(t, []Use{Consumed, Consumed}, uses("q", samples[:2]), "samples that are gone")
	f.ClearFields("p", []string{"a", "b"}, nil, []string{"y"})
	require.Equal(t, []Use{Consumed, Wanted, Wanted}, uses("p", samples), "no sample has the field any more")
}
