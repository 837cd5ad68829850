package foreign_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/foreign"
	"transferqueue/core/foreign/foreigntest"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

const (
	tensor = uint8(schema.Tensor)
	object = uint8(schema.Object)
	u8     = uint8(schema.Uint8)
	i16    = uint8(schema.Int16)
)

func seq(n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(i)
	}
	return out
}

// taken copies rows [from, to) and checks that Size and Pieces agree with it.
func taken(t *testing.T, in *foreign.Input, from, to int) []byte {
	t.Helper()
	dst := make([]byte, in.Size(from, to)+1)
	rest := in.CopyRows(dst, from, to)
	require.Len(t, rest, 1)
	var pieces []byte
	for piece := range in.Pieces(from, to) {
		require.NotEmpty(t, piece)
		pieces = append(pieces, piece...)
	}
	got := dst[:len(dst)-1]
	require.True(t, bytes.Equal(got, pieces))
	return got
}

func pieces(in *foreign.Input) (n int) {
	for range in.Pieces(0, in.Column.Rows) {
		n++
	}
	return n
}

func TestForms(t *testing.T) {
	m := foreigntest.New(t, 1<<16)
	data := foreigntest.Lend(m, seq(64)...)
	at := func(offsets ...uint64) uint64 {
		for i := range offsets {
			offsets[i] += data
		}
		return foreigntest.Lend(m, offsets...)
	}
	cases := map[string]struct {
		raw    foreign.Raw
		rows   int
		want   [][]byte
		form   schema.Form
		pieces int
	}{
		"strided, tight": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data, Stride: 2, Rank: 1, Dims: foreigntest.Lend(m, int64(2))},
			3, [][]byte{{0, 1}, {2, 3}, {4, 5}}, schema.Uniform, 1},
		"strided, every other row": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data + 1, Stride: 4, Rank: 1, Dims: foreigntest.Lend(m, int64(2))},
			3, [][]byte{{1, 2}, {5, 6}, {9, 10}}, schema.Uniform, 3},
		"strided, expanded": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data, Stride: 0, Rank: 1, Dims: foreigntest.Lend(m, int64(3))},
			2, [][]byte{{0, 1, 2}, {0, 1, 2}}, schema.Uniform, 2},
		"strided, backwards": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data + 4, Stride: -2, Rank: 1, Dims: foreigntest.Lend(m, int64(2))},
			3, [][]byte{{4, 5}, {2, 3}, {0, 1}}, schema.Uniform, 3},
		"scalars": {foreign.Raw{Kind: tensor, DType: i16, Form: uint8(foreign.Strided), Base: data, Stride: 2},
			2, [][]byte{{0, 1}, {2, 3}}, schema.Uniform, 1},
		"one row of a huge stride": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data, Stride: math.MaxInt64, Rank: 1, Dims: foreigntest.Lend(m, int64(2))},
			1, [][]byte{{0, 1}}, schema.Uniform, 1},
		"no rows": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Rank: 1, Dims: foreigntest.Lend(m, int64(2))},
			0, nil, schema.Uniform, 0},
		"rows without bytes": {foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Rank: 2, Dims: foreigntest.Lend(m, int64(2), 0)},
			2, [][]byte{{}, {}}, schema.Uniform, 0},
		"offsets": {foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Offsets), Base: data, Rank: 1, Dims: foreigntest.Lend(m, int64(0)), Offsets: foreigntest.Lend(m, int64(0), 2, 2, 5)},
			3, [][]byte{{0, 1}, {}, {2, 3, 4}}, schema.Varying, 1},
		"offsets from the middle": {foreign.Raw{Kind: tensor, DType: i16, Ragged: 1, Form: uint8(foreign.Offsets), Base: data, Rank: 2, Dims: foreigntest.Lend(m, int64(0), 2), Offsets: foreigntest.Lend(m, int64(1), 2, 4)},
			2, [][]byte{{4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}, schema.Varying, 1},
		"offsets of equal lengths": {foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Offsets), Base: data, Rank: 1, Dims: foreigntest.Lend(m, int64(0)), Offsets: foreigntest.Lend(m, int64(1), 3, 5)},
			2, [][]byte{{1, 2}, {3, 4}}, schema.Uniform, 1},
		"pointers": {foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Pointers), Pointers: at(9, 3, 0), NDims: foreigntest.Lend(m, uint8(1), 2, 1), Dims: foreigntest.Lend(m, int64(2), 1, 3, 0)},
			3, [][]byte{{9, 10}, {3, 4, 5}, {}}, schema.Free, 2},
		"pointers to rows of one shape": {foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Pointers), Pointers: at(9, 3), NDims: foreigntest.Lend(m, uint8(1), 1), Dims: foreigntest.Lend(m, int64(2), 2)},
			2, [][]byte{{9, 10}, {3, 4}}, schema.Uniform, 2},
		"a null pointer without bytes": {foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Pointers), Pointers: foreigntest.Lend(m, uint64(0), data), NDims: foreigntest.Lend(m, uint8(1), 1), Dims: foreigntest.Lend(m, int64(0), 1)},
			2, [][]byte{{}, {0}}, schema.Varying, 1},
		"objects": {foreign.Raw{Kind: object, Form: uint8(foreign.Objects), Base: data, Sizes: foreigntest.Lend(m, int64(2), 0, 1), Codecs: foreigntest.Lend(m, uint8(1), 2, 3)},
			3, [][]byte{{0, 1}, {}, {2}}, schema.Objects, 1},
		"objects at pointers": {foreign.Raw{Kind: object, Form: uint8(foreign.Objects), Pointers: at(7, 5), Sizes: foreigntest.Lend(m, int64(2), 1), Codecs: foreigntest.Lend(m, uint8(1), 2)},
			2, [][]byte{{7, 8}, {5}}, schema.Objects, 2},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			in, err := foreign.New("f", c.rows, &c.raw)
			require.NoError(t, err)
			require.NoError(t, in.Column.Validate())
			require.Equal(t, c.form, in.Column.Form)
			require.Equal(t, "f", in.Column.Field)
			require.Equal(t, c.pieces, pieces(in))
			for from := range c.rows {
				for to := from; to <= c.rows; to++ {
					require.Equal(t, append([]byte{}, bytes.Join(c.want[from:to], nil)...), append([]byte{}, taken(t, in, from, to)...))
				}
			}
			require.EqualValues(t, len(bytes.Join(c.want, nil)), foreign.TotalBytes([]*foreign.Input{in}))
			all := taken(t, in, 0, c.rows)
			m2 := foreigntest.New(t, 1<<12)
			packed := foreign.Packed(in.Column, foreign.Bytes(uintptr(foreigntest.Lend(m2, all...)), int64(len(all))))
			require.Equal(t, all, taken(t, packed, 0, c.rows))
		})
	}
}

// What is described is copied: the arrays may change afterwards, only the bytes of the rows are read later.
func TestTheDescriptionIsCopied(t *testing.T) {
	m := foreigntest.New(t, 1<<12)
	raw := m.Ragged([]int64{1}, []int64{2, 3})
	in, err := foreign.New("f", 2, &raw)
	require.NoError(t, err)
	for _, address := range []uint64{raw.Offsets, raw.Dims} {
		copy(foreign.Bytes(uintptr(address), 8), bytes.Repeat([]byte{0x7f}, 8))
	}
	require.EqualValues(t, 24, in.Size(0, 2))
	require.Equal(t, []int64{1, 2}, in.Column.Lengths)
}

func TestBadColumns(t *testing.T) {
	m := foreigntest.New(t, 1<<16)
	data := foreigntest.Lend(m, seq(64)...)
	dims := func(d ...int64) uint64 { return foreigntest.Lend(m, d...) }
	strided := foreign.Raw{Kind: tensor, DType: u8, Form: uint8(foreign.Strided), Base: data, Stride: 2, Rank: 1, Dims: dims(2)}
	offsets := foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Offsets), Base: data, Rank: 1, Dims: dims(0), Offsets: dims(0, 1, 2)}
	pointers := foreign.Raw{Kind: tensor, DType: u8, Ragged: 1, Form: uint8(foreign.Pointers), Pointers: foreigntest.Lend(m, data, data), NDims: foreigntest.Lend(m, uint8(1), 1), Dims: dims(1, 2)}
	objects := foreign.Raw{Kind: object, Form: uint8(foreign.Objects), Base: data, Sizes: dims(1, 2), Codecs: foreigntest.Lend(m, uint8(1), 1)}
	with := func(raw foreign.Raw, change func(*foreign.Raw)) foreign.Raw {
		change(&raw)
		return raw
	}
	for name, raw := range map[string]foreign.Raw{
		"no form":                    with(strided, func(r *foreign.Raw) { r.Form = 0 }),
		"an unknown form":            with(strided, func(r *foreign.Raw) { r.Form = 9 }),
		"an unknown kind":            with(strided, func(r *foreign.Raw) { r.Kind = 7 }),
		"an unknown dtype":           with(strided, func(r *foreign.Raw) { r.DType = 200 }),
		"an object with a shape":     with(strided, func(r *foreign.Raw) { r.Kind = object }),
		"a rank beyond the limit":    with(strided, func(r *foreign.Raw) { r.Rank = 65 }),
		"an absurd rank":             with(strided, func(r *foreign.Raw) { r.Rank = math.MaxUint32 }),
		"a negative dimension":       with(strided, func(r *foreign.Raw) { r.Dims = dims(-1) }),
		"a size beyond 64 bit":       with(strided, func(r *foreign.Raw) { r.Rank, r.Dims = 2, dims(math.MaxInt64, 2) }),
		"all rows beyond 64 bit":     with(strided, func(r *foreign.Raw) { r.Dims = dims(math.MaxInt64 / 2 * 2) }),
		"no address":                 with(strided, func(r *foreign.Raw) { r.Base = 0 }),
		"no address, strided":        with(strided, func(r *foreign.Raw) { r.Base, r.Stride = 0, 10 }),
		"offsets that go back":       with(offsets, func(r *foreign.Raw) { r.Offsets = dims(0, 2, 1) }),
		"offsets below 0":            with(offsets, func(r *foreign.Raw) { r.Offsets = dims(-1, 1, 2) }),
		"offsets that are absurd":    with(offsets, func(r *foreign.Raw) { r.Rank, r.Dims, r.Offsets = 2, dims(0, 8), dims(0, math.MaxInt64, math.MaxInt64) }),
		"no offsets":                 with(offsets, func(r *foreign.Raw) { r.Offsets = 0 }),
		"offsets of scalars":         with(offsets, func(r *foreign.Raw) { r.Rank = 0 }),
		"offsets without an address": with(offsets, func(r *foreign.Raw) { r.Base = 0 }),
		"no pointers":                with(pointers, func(r *foreign.Raw) { r.Pointers = 0 }),
		"no ranks":                   with(pointers, func(r *foreign.Raw) { r.NDims = 0 }),
		"no dimensions":              with(pointers, func(r *foreign.Raw) { r.Dims = 0 }),
		"a null pointer":             with(pointers, func(r *foreign.Raw) { r.Pointers = foreigntest.Lend(m, data, uint64(0)) }),
		"no sizes":                   with(objects, func(r *foreign.Raw) { r.Sizes = 0 }),
		"no codecs":                  with(objects, func(r *foreign.Raw) { r.Codecs = 0 }),
		"a negative size":            with(objects, func(r *foreign.Raw) { r.Sizes = dims(1, -1) }),
		"objects without an address": with(objects, func(r *foreign.Raw) { r.Base = 0 }),
		"objects at a null pointer":  with(objects, func(r *foreign.Raw) { r.Pointers = foreigntest.Lend(m, uint64(0), data) }),
		"an object with a dtype":     with(objects, func(r *foreign.Raw) { r.DType = u8 }),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := foreign.New("f", 2, &raw)
			require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%v", err)
			require.ErrorContains(t, err, `field "f"`)
		})
	}
	for _, rows := range []int{-1, math.MinInt, math.MaxInt, 1 << 40} {
		_, err := foreign.New("f", rows, &strided)
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err))
	}
}
