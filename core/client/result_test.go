package client

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

func tensor(rows int, ragged uint8, shape ...int64) schema.Column {
	return schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Ragged: ragged, Rows: rows, Form: schema.Uniform, Shape: shape}
}

func varying(ragged, vary uint8, shape []int64, lengths ...int64) schema.Column {
	return schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Ragged: ragged, Rows: len(lengths), Form: schema.Varying, Shape: shape, Vary: vary, Lengths: lengths}
}

func free(ndims []uint8, dims ...int64) schema.Column {
	return schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: len(ndims), Form: schema.Free, NDims: ndims, Dims: dims}
}

// The container of a column follows from its rows' shapes and the ragged dimension that the writer gave: contract K3.
func TestContainers(t *testing.T) {
	cases := map[string]struct {
		column          schema.Column
		dense           bool
		form            Form
		ragged          uint8
		dims            []int64
		shortest, total int64
	}{
		"scalars":                             {tensor(3, 0), false, Dense, 0, nil, 0, 0},
		"equal shapes are jagged":             {tensor(3, 1, 2, 5), false, Jagged, 1, []int64{6, 5}, 2, 6},
		"one row is jagged":                   {tensor(1, 1, 2), false, Jagged, 1, []int64{2}, 2, 2},
		"equal shapes where dense is wanted":  {tensor(3, 1, 2, 5), true, Dense, 0, []int64{2, 5}, 0, 0},
		"different lengths":                   {varying(1, 0, []int64{0, 5}, 2, 4), true, Jagged, 1, []int64{6, 5}, 2, 6},
		"ragged on the second":                {varying(2, 1, []int64{4, 0}, 7, 9), false, Jagged, 2, []int64{4, 16}, 7, 16},
		"ragged on the second, equal":         {tensor(2, 2, 4, 7), false, Jagged, 2, []int64{4, 14}, 7, 14},
		"ragged on the first by name only":    {varying(2, 0, []int64{0, 3}, 1, 2), false, Jagged, 1, []int64{3, 3}, 1, 3},
		"varies where it is not ragged":       {varying(1, 1, []int64{4, 0}, 7, 9), false, Nested, 1, nil, 0, 0},
		"a ragged dimension that is not here": {tensor(2, 5, 4), false, Jagged, 1, []int64{8}, 4, 8},
		"different ranks":                     {free([]uint8{1, 2}, 3, 4, 5), false, Nested, 1, nil, 0, 0},
		"empty rows":                          {tensor(2, 1, 0), false, Jagged, 1, []int64{0}, 0, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := ResultColumn{Column: c.column}
			r.shape(c.dense)
			require.Equal(t, c.form, r.Form)
			require.Equal(t, c.ragged, r.Ragged)
			require.Equal(t, c.dims, r.Dims)
			if r.Form == Jagged {
				require.Equal(t, c.shortest, r.MinLength)
				offsets := make([]int64, c.column.Rows+1)
				r.fillOffsets(offsets)
				require.Zero(t, offsets[0])
				require.Equal(t, c.total, offsets[c.column.Rows])
			}
		})
	}
}

// Rows that are ragged on a later dimension lie side by side along it.
func TestPlaceInterleavesALaterRaggedDimension(t *testing.T) {
	r := ResultColumn{Column: varying(2, 1, []int64{2, 0, 2}, 1, 2)}
	r.shape(false)
	r.Data = make([]byte, 12)
	r.place([]byte{1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16, 17})
	require.Equal(t, []byte{
		1, 2, 10, 11, 12, 13, // outer 0: row 0 [1 2], row 1 [10 11][12 13]
		3, 4, 14, 15, 16, 17, // outer 1
	}, r.Data)
}

func TestSameLengths(t *testing.T) {
	shaped := func(c schema.Column) *ResultColumn {
		r := &ResultColumn{Column: c}
		r.shape(false)
		return r
	}
	a := shaped(varying(1, 0, []int64{0}, 2, 4))
	require.True(t, a.sameLengths(shaped(varying(1, 0, []int64{0, 3}, 2, 4))))
	require.False(t, a.sameLengths(shaped(varying(1, 0, []int64{0}, 4, 2))))
	require.False(t, a.sameLengths(shaped(varying(1, 0, []int64{0}, 2, 4, 2))))
	require.True(t, shaped(tensor(2, 1, 3)).sameLengths(shaped(tensor(2, 1, 3, 9))))
	require.False(t, shaped(tensor(2, 1, 3)).sameLengths(shaped(tensor(2, 1, 4))))
}

func TestHeldMemoryGoesBackWithItsLastHolder(t *testing.T) {
	before, freed := Held(), 0
	m := &memory{free: func() { freed++ }}
	a, b := hold(m), hold(m)
	require.Equal(t, before+2, Held())
	Release(a)
	Release(a)
	Release(0)
	require.Zero(t, freed)
	Release(b)
	require.Equal(t, 1, freed)
	require.Equal(t, before, Held())
}
