package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

func TestPartitionSnapshot(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 4})
	require.Nil(t, f.PartitionSnapshot("p"))

	column := func(field string, rows int, shape ...int64) schema.Column {
		return schema.Column{
			Field: field, Kind: schema.Tensor, DType: schema.Float32, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape,
		}
	}
	_, err := f.apply(&Write{
		Partition: "p", Keys: []string{"b", "a", "c"}, Columns: []schema.Column{column("y", 3, 2)},
		Tags: [][]byte{{0x81, 0xa1, 'n', 0x01}, nil, nil},
	})
	require.NoError(t, err)
	_, err = f.apply(&Write{Partition: "p", Keys: []string{"a"}, Columns: []schema.Column{column("x", 1, 5)}})
	require.NoError(t, err)
	_, err = f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 1, Task: "train"}, &first{})
	require.NoError(t, err)
	f.FinishClear(f.StartClearKeys("p", []string{"c"}))

	got := f.PartitionSnapshot("p")
	require.Equal(t, []schema.Sample{{Index: 0, Generation: 1}, {Index: 1, Generation: 1}}, got.Samples)
	require.Equal(t, [][]byte{{0x81, 0xa1, 'n', 0x01}, emptyTags}, got.Tags)
	require.Equal(t, []int64{3}, got.Reserved)
	require.Equal(t, []string{"b", "a"}, got.Keys)
	require.Equal(t, []int64{0, 1}, got.KeyIndexes)
	require.Equal(t, []FieldSnapshot{
		{Holders: []int64{0, 1}, Column: column("y", 2, 2)}, {Holders: []int64{1}, Column: column("x", 1, 5)},
	}, got.Fields)
	require.Equal(t, []TaskSnapshot{{Task: "train", Consumed: []int64{1}}}, got.Tasks)
}
