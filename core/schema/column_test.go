package schema

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

func uniform(rows int, shape ...int64) Column {
	return Column{Field: "x", Kind: Tensor, DType: Float32, Ragged: 1, Rows: rows, Form: Uniform, Shape: shape}
}

func varying(vary uint8, shape []int64, lengths ...int64) Column {
	return Column{
		Field: "x", Kind: Tensor, DType: Float32, Ragged: 1, Rows: len(lengths), Form: Varying, Shape: shape, Vary: vary, Lengths: lengths,
	}
}

func free(shapes ...[]int64) Column {
	c := Column{Field: "x", Kind: Tensor, DType: Float32, Ragged: 1, Rows: len(shapes), Form: Free}
	for _, shape := range shapes {
		c.NDims, c.Dims = append(c.NDims, uint8(len(shape))), append(c.Dims, shape...)
	}
	return c
}

func objects(sizes ...int64) Column {
	c := Column{Field: "x", Kind: Object, Rows: len(sizes), Form: Objects, Sizes: sizes}
	for i := range sizes {
		c.Codecs = append(c.Codecs, Codec(i))
	}
	return c
}

func with(c Column, change func(*Column)) Column {
	change(&c)
	return c
}

func TestValidate(t *testing.T) {
	for name, c := range map[string]Column{
		"uniform": uniform(3, 2, 5), "rank 0": uniform(3), "no rows": uniform(0, 7), "zero dimension": uniform(3, 0, math.MaxInt64),
		"varying": varying(1, []int64{2, -9, 3}, 4, 0, 5), "free": free([]int64{2}, nil, []int64{0, 3}), "objects": objects(0, 3),
	} {
		require.NoError(t, c.Validate(), name)
	}
	for text, c := range map[string]Column{
		"negative row count -1":                         uniform(-1, 2),
		"unknown kind number 0":                         with(uniform(1), func(c *Column) { c.Kind = 0 }),
		"a tensor column cannot have form 4":            with(objects(1), func(c *Column) { c.Kind = Tensor }),
		"a non-tensor column cannot have form 1":        with(uniform(1), func(c *Column) { c.Kind = Object }),
		"a non-tensor column cannot have dtype float32": with(objects(1), func(c *Column) { c.DType = Float32 }),
		"unknown dtype number 0":                        with(uniform(1), func(c *Column) { c.DType = NoDType }),
		"unknown dtype number 99":                       with(uniform(1), func(c *Column) { c.DType = 99 }),
		"rank 65, want at most 64":                      uniform(1, make([]int64, 65)...),
		"rank 66, want at most 64":                      free(make([]int64, 66)),
		"2 lengths for 3 rows":                          with(varying(0, []int64{0}, 1, 2), func(c *Column) { c.Rows = 3 }),
		"varying dimension 1 of rank 1":                 varying(1, []int64{2}, 1),
		"2 ranks and 2 dimensions for 1 rows":           with(free([]int64{1}, []int64{2}), func(c *Column) { c.Rows = 1 }),
		"1 ranks and 1 dimensions for 1 rows":           with(free([]int64{1}), func(c *Column) { c.NDims = []uint8{2} }),
		"2 sizes and 1 codecs for 2 rows":               with(objects(1, 2), func(c *Column) { c.Codecs = c.Codecs[:1] }),
		"unknown form 9":                                with(uniform(1), func(c *Column) { c.Form = 9 }),
	} {
		err := c.Validate()
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), text)
		require.EqualError(t, err, `field "x": `+text)
	}
}

func TestValidateRefusesOverflow(t *testing.T) {
	const big = math.MaxInt64
	for name, c := range map[string]Column{
		"negative dimension": uniform(1, 2, -1), "elements": uniform(1, big, 2), "bytes": uniform(1, big/4+1),
		"rows": uniform(3, big/8), "uniform without rows": uniform(0, big, 2), "overflow behind a zero": uniform(1, 0, big, big),
		"length": varying(0, []int64{0, big / 4}, 2), "negative length": varying(0, []int64{0}, -1), "sum of lengths": varying(0, []int64{0}, big/4, big/4),
		"fixed dimensions": varying(1, []int64{big, 0, 3}, 1), "negative fixed dimension": varying(1, []int64{-2, 0}, 1),
		"free": free([]int64{big, 3}), "sum of free": free([]int64{big / 4}, []int64{big / 4}), "negative free": free([]int64{-1}),
		"negative size": objects(3, -1), "sum of sizes": objects(big, 1),
	} {
		require.ErrorContains(t, c.Validate(), "a size is negative or beyond 64 bit", name)
	}
	require.NoError(t, ref(uniform(2, big/8)).Validate())
	require.NoError(t, ref(objects(big-1, 1)).Validate())
}

func ref[T any](v T) *T { return &v }

func TestSizesOfEveryForm(t *testing.T) {
	for name, test := range map[string]struct {
		c    Column
		want []int64
	}{
		"uniform": {uniform(2, 3), []int64{0, 12, 24}}, "rank 0": {uniform(2), []int64{0, 4, 8}},
		"varying": {varying(0, []int64{9, 2}, 1, 0, 3), []int64{0, 8, 8, 32}},
		"free":    {free([]int64{2, 2}, nil, []int64{0}), []int64{0, 16, 20, 20}},
		"objects": {objects(5, 0, 1), []int64{0, 5, 5, 6}}, "no rows": {uniform(0, 3), []int64{0}},
	} {
		require.Equal(t, test.want, test.c.Offsets(), name)
		require.Equal(t, test.want[len(test.want)-1], test.c.Bytes(), name)
	}
	require.Equal(t, int64(24), ref(uniform(7, 2, 3)).RowBytes())
}

// shapesOf spells out every row of a tensor column.
func shapesOf(c Column) [][]int64 {
	out := [][]int64{}
	for i, shape := range c.Shapes() {
		if len(out) != i {
			panic("rows out of order")
		}
		out = append(out, append([]int64{}, shape...))
	}
	return out
}

func TestShapesAgreeWithRowShape(t *testing.T) {
	for _, c := range []Column{uniform(3, 2, 5), varying(1, []int64{2, 0, 3}, 4, 0, 5), free([]int64{2}, nil, []int64{0, 3})} {
		for i, shape := range shapesOf(c) {
			require.Equal(t, shape, append([]int64{}, c.RowShape(i)...))
		}
	}
	require.Nil(t, ref(objects(1)).RowShape(0))
	for i := range ref(uniform(5, 1)).Shapes() {
		if i == 2 {
			break // an iteration may stop early
		}
	}
}

// randomShapes gives rows that fit each form now and then: sometimes all equal, sometimes different in one dimension.
func randomShapes(rnd *rand.Rand) [][]int64 {
	rows, rank := 1+rnd.IntN(6), rnd.IntN(4)
	base := make([]int64, rank)
	for i := range base {
		base[i] = rnd.Int64N(3)
	}
	kind, dim := rnd.IntN(3), rnd.IntN(max(rank, 1))
	out := make([][]int64, rows)
	for i := range out {
		out[i] = slices.Clone(base)
		switch {
		case kind == 1 && rank > 0:
			out[i][dim] = rnd.Int64N(4)
		case kind == 2 && rnd.IntN(3) == 0:
			out[i] = append(out[i], rnd.Int64N(3))
		case kind == 2 && rank > 1:
			out[i][rnd.IntN(rank)] = rnd.Int64N(3)
		}
	}
	return out
}

// simplest is the form rows must have after Normalize, found the slow way.
func simplest(shapes [][]int64) Form {
	differ := map[int]bool{}
	for _, shape := range shapes {
		if len(shape) != len(shapes[0]) {
			return Free
		}
		for i, d := range shape {
			if d != shapes[0][i] {
				differ[i] = true
			}
		}
	}
	return []Form{Uniform, Varying, Free}[min(len(differ), 2)]
}

func TestNormalizeAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	seen := map[Form]int{}
	for range 2000 {
		shapes := randomShapes(rnd)
		c := free(shapes...)
		dims := slices.Clone(c.Dims)
		before := c
		c.Normalize()
		require.NoError(t, c.Validate(), "seed %d", seed)
		require.Equal(t, shapesOf(before), shapesOf(c), "seed %d", seed)
		require.Equal(t, simplest(shapes), c.Form, "seed %d shapes %v", seed, shapes)
		require.Equal(t, before.Offsets(), c.Offsets())
		require.Equal(t, dims, before.Dims, "shared arrays are not modified")
		require.Equal(t, "x", c.Field)
		seen[c.Form]++
	}
	require.Len(t, seen, 3, "every form occurs")
}

func TestNormalizeVaryingAndObjects(t *testing.T) {
	c := varying(1, []int64{2, 7, 3}, 4, 4)
	shape := c.Shape
	c.Normalize()
	require.Equal(t, uniform(2, 2, 4, 3), c)
	require.Equal(t, []int64{2, 7, 3}, shape)
	kept := varying(0, []int64{0}, 1, 2)
	kept.Normalize()
	require.Equal(t, Varying, kept.Form)
	o := objects(1, 2)
	o.Normalize()
	require.Equal(t, objects(1, 2), o)
	empty := with(free(), func(c *Column) { c.Rows = 0 })
	empty.Normalize()
	require.Equal(t, Free, empty.Form)
}

func TestSlice(t *testing.T) {
	for _, c := range []Column{
		uniform(5, 2, 5), varying(1, []int64{2, 0, 3}, 4, 0, 5, 1, 1), free([]int64{2}, nil, []int64{0, 3}, []int64{1, 1, 1}, []int64{9}),
	} {
		for from := 0; from <= c.Rows; from++ {
			for to := from; to <= c.Rows; to++ {
				s := c.Slice(from, to)
				require.NoError(t, s.Validate())
				require.Equal(t, shapesOf(c)[from:to], shapesOf(s))
			}
		}
	}
	o := objects(5, 6, 7)
	s := o.Slice(1, 3)
	require.Equal(t, []int64{6, 7}, s.Sizes)
	require.Equal(t, []Codec{1, 2}, s.Codecs)
	require.NoError(t, s.Validate())
}

// randomColumn gives rows in one of the forms that fit them.
func randomColumn(rnd *rand.Rand) Column {
	c := free(randomShapes(rnd)...)
	if rnd.IntN(3) > 0 {
		c.Normalize()
	}
	return c
}

func TestBuilderAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		b := NewBuilder("y")
		b.Grow(rnd.IntN(20))
		want := [][]int64{}
		for range rnd.IntN(5) {
			c := randomColumn(rnd)
			before := shapesOf(c)
			from := rnd.IntN(c.Rows + 1)
			to := from + rnd.IntN(c.Rows-from+1)
			if rnd.IntN(2) == 0 {
				b.AppendRows(&c, from, to)
				want = append(want, before[from:to]...)
			} else {
				b.Append(c)
				want = append(want, before...)
			}
			require.Equal(t, before, shapesOf(c), "appended columns are not modified, seed %d", seed)
		}
		out := b.Column()
		require.Equal(t, want, shapesOf(out), "seed %d", seed)
		require.Equal(t, "y", out.Field)
		if len(want) == 0 {
			continue
		}
		require.NoError(t, out.Validate(), "seed %d", seed)
		out.Normalize()
		require.Equal(t, simplest(want), out.Form, "seed %d shapes %v", seed, want)
	}
}

func TestBuilderObjects(t *testing.T) {
	b := NewBuilder("y")
	o := objects(5, 6, 7)
	b.AppendRows(&o, 1, 3)
	b.Append(objects(8))
	b.AppendRows(&o, 0, 1)
	b.AppendRows(&o, 0, 0)
	out := b.Column()
	require.NoError(t, out.Validate())
	require.Equal(t, []int64{6, 7, 8, 5}, out.Sizes)
	require.Equal(t, []Codec{1, 2, 0, 0}, out.Codecs)
	require.Equal(t, []int64{5, 6, 7}, o.Sizes)
}

func TestBuilderRaggedDimension(t *testing.T) {
	ragged := func(n uint8) Column { return with(varying(1, []int64{2, 0}, 3, 4), func(c *Column) { c.Ragged = n }) }
	for _, test := range []struct{ first, second, want uint8 }{{2, 2, 2}, {2, 1, 1}, {2, 3, 1}} {
		for _, rows := range []bool{false, true} {
			b := NewBuilder("x")
			b.Append(ragged(test.first))
			if second := ragged(test.second); rows {
				b.AppendRows(&second, 0, 2)
			} else {
				b.Append(second)
			}
			require.Equal(t, test.want, b.Column().Ragged)
		}
	}
}

func TestKindNames(t *testing.T) {
	require.Equal(t, []string{"tensor", "non-tensor", "invalid"}, []string{Tensor.String(), Object.String(), Kind(0).String()})
}
