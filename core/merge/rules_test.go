package merge

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func TestLookup(t *testing.T) {
	for _, name := range []string{"concat", "add", "replace", "max", "min"} {
		require.Equal(t, name, lookup(t, name).name)
	}
	for _, name := range []string{"", "Add", "mul"} {
		_, ok := Lookup(name)
		require.False(t, ok, name)
	}
}

func TestPlanGivesTheShapeOfTheResult(t *testing.T) {
	f := schema.Float32
	sparse := free(f, []int64{2, 3}, []int64{4})
	cases := map[string]struct {
		merge            string
		old, added, want schema.Column
	}{
		"concat of equal lengths":        {"concat", uniform(f, 3, 2), uniform(f, 3, 5), uniform(f, 3, 7)},
		"concat of rank 2":               {"concat", uniform(f, 3, 2, 4), uniform(f, 3, 1, 4), uniform(f, 3, 3, 4)},
		"concat of lengths to lengths":   {"concat", varying(f, 1, 2, 3), varying(f, 4, 0, 1), varying(f, 5, 2, 4)},
		"concat of one length to others": {"concat", varying(f, 1, 2, 3), uniform(f, 3, 2), varying(f, 3, 4, 5)},
		"concat that evens lengths out":  {"concat", varying(f, 1, 2), varying(f, 2, 1), uniform(f, 2, 3)},
		"concat of mixed ranks":          {"concat", sparse, free(f, []int64{1, 3}, []int64{0}), free(f, []int64{3, 3}, []int64{4})},
		"concat of rows of no elements":  {"concat", uniform(f, 2, 0), uniform(f, 2, 0), uniform(f, 2, 0)},
		"add of equal lengths":           {"add", uniform(f, 3, 2), uniform(f, 3, 2), uniform(f, 3, 2)},
		"add of scalars":                 {"add", uniform(f, 3), uniform(f, 3), uniform(f, 3)},
		"add of lengths":                 {"add", varying(f, 1, 2), varying(f, 1, 2), varying(f, 1, 2)},
		"add of one form to another":     {"add", varying(f, 2, 2), uniform(f, 2, 2), varying(f, 2, 2)},
		"max of mixed ranks":             {"max", sparse, sparse, sparse},
		"replace by other shapes":        {"replace", uniform(f, 2, 2), sparse, sparse},
		"replace of objects":             {"replace", objects(3, 4), objects(0, 9), objects(0, 9)},
		"no rows":                        {"add", uniform(f, 0, 2), uniform(f, 0, 3), uniform(f, 0, 2)},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := lookup(t, c.merge).Plan(&c.old, &c.added, key)
			require.NoError(t, err)
			require.NoError(t, got.Validate())
			require.Equal(t, c.want.Form, got.Form)
			require.Equal(t, c.want.Bytes(), got.Bytes())
			require.Equal(t, c.want.Ragged, got.Ragged)
			for i := range c.want.Rows {
				require.Equal(t, c.want.RowShape(i), got.RowShape(i), "row %d", i)
			}
		})
	}
}

func TestConcatAlongAnotherDimensionThanTheRaggedOne(t *testing.T) {
	// Rows (2, n) whose second dimension differs: every row keeps its own length there.
	old := uniform(schema.Int64, 2, 2, 0)
	old.Form, old.Vary, old.Lengths, old.Ragged = schema.Varying, 1, []int64{3, 5}, 2
	got, err := lookup(t, "concat").Plan(&old, &old, key)
	require.NoError(t, err)
	require.Equal(t, []int64{4, 3}, got.RowShape(0))
	require.Equal(t, []int64{4, 5}, got.RowShape(1))
	require.Equal(t, schema.Varying, got.Form)
	require.EqualValues(t, 2, got.Ragged)
}

func TestPlanRefuses(t *testing.T) {
	f := schema.Float32
	cases := map[string]struct {
		merge      string
		old, added schema.Column
		text       string
	}{
		"another dtype": {"add", uniform(f, 2, 2), uniform(schema.Float64, 2, 2),
			`field "x" of "key0": merge "add": must keep dtype: have float64, want float32`},
		"another dtype, replace": {"replace", uniform(f, 2, 2), uniform(schema.Int8, 2, 2),
			`field "x" of "key0": merge "replace": must keep dtype: have int8, want float32`},
		"a tensor for an object": {"replace", objects(3), uniform(f, 1, 2),
			`field "x" of "key0": merge "replace": the stored value is a Python object and must remain non-tensor, ` +
				`have a tensor of dtype float32`},
		"an object for a tensor": {"replace", uniform(f, 1, 2), objects(3),
			`field "x" of "key0": merge "replace": the stored value must remain a tensor of dtype float32, have a Python object`},
		"concat of objects": {"concat", objects(3), objects(3),
			`field "x" of "key0": merge "concat": not defined for Python objects, only "replace" is`},
		"add of objects": {"add", objects(3), objects(3),
			`field "x" of "key0": merge "add": not defined for Python objects, only "replace" is`},
		"max of complex numbers": {"max", uniform(schema.Complex64, 1, 2), uniform(schema.Complex64, 1, 2),
			`field "x" of "key0": merge "max": not defined for dtype complex64`},
		"min of complex numbers": {"min", uniform(schema.Complex128, 1), uniform(schema.Complex128, 1),
			`field "x" of "key0": merge "min": not defined for dtype complex128`},
		"add of another length": {"add", uniform(f, 2, 2), uniform(f, 2, 3),
			`field "x" of "key0": merge "add": shapes must be equal: stored (2,), new (3,)`},
		"add of a scalar is not broadcast": {"add", uniform(f, 2, 2), uniform(f, 2),
			`field "x" of "key0": merge "add": shapes must be equal: stored (2,), new ()`},
		"add of another length in one row": {"add", varying(f, 2, 3), varying(f, 2, 4),
			`field "x" of "key1": merge "add": shapes must be equal: stored (3,), new (4,)`},
		"min of another rank with as many elements": {"min", uniform(f, 1, 6), uniform(f, 1, 2, 3),
			`field "x" of "key0": merge "min": shapes must be equal: stored (6,), new (2, 3)`},
		"concat of scalars": {"concat", uniform(f, 2), uniform(f, 2),
			`field "x" of "key0": merge "concat": a tensor of rank 0 cannot be joined: stored (), new ()`},
		"concat of a scalar in one row": {"concat", uniform(f, 2, 3), free(f, []int64{3}, nil),
			`field "x" of "key1": merge "concat": a tensor of rank 0 cannot be joined: stored (3,), new ()`},
		"concat of another width": {"concat", uniform(f, 2, 2, 3), uniform(f, 2, 2, 4),
			`field "x" of "key0": merge "concat": shapes must be equal but for dim 0: stored (2, 3), new (2, 4)`},
		"concat of another rank": {"concat", free(f, []int64{3}, []int64{2, 3}), uniform(f, 2, 3),
			`field "x" of "key1": merge "concat": shapes must be equal but for dim 0: stored (2, 3), new (3,)`},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := lookup(t, c.merge).Plan(&c.old, &c.added, key)
			require.EqualError(t, err, c.text)
			require.Equal(t, tqerr.Failed, tqerr.CodeOf(err))
		})
	}
}

func TestPlanRefusesSizesBeyond64Bit(t *testing.T) {
	old := uniform(schema.Float32, 1, 1<<62, 0)
	_, err := lookup(t, "concat").Plan(&old, &old, key)
	require.Equal(t, tqerr.Failed, tqerr.CodeOf(err))
	require.ErrorContains(t, err, `field "x": merge "concat"`)
}

func TestPlanRefusesColumnsOfDifferentRows(t *testing.T) {
	old, added := uniform(schema.Int8, 2, 1), uniform(schema.Int8, 3, 1)
	_, err := lookup(t, "add").Plan(&old, &added, key)
	require.Equal(t, tqerr.Internal, tqerr.CodeOf(err))
}

func TestPlanLeavesItsArgumentsAlone(t *testing.T) {
	old, added := varying(schema.Int8, 1, 2), uniform(schema.Int8, 2, 2)
	_, err := lookup(t, "concat").Plan(&old, &added, key)
	require.NoError(t, err)
	require.Equal(t, varying(schema.Int8, 1, 2), old)
	require.Equal(t, uniform(schema.Int8, 2, 2), added)
}

func TestReplaceKeepsTheNewCodecs(t *testing.T) {
	old, added := objects(2, 3), objects(1, 0)
	added.Codecs = []schema.Codec{7, 8}
	result, out := merged(t, "replace", &old, []byte("aabbb"), &added, []byte("c"))
	require.Equal(t, []schema.Codec{7, 8}, result.Codecs)
	require.Equal(t, "c", string(out))
}
