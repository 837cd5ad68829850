package merge

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

// newRandom returns a source whose seed the test prints.
func newRandom(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func randomBytes(random *rand.Rand, n int64) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(random.Uint32())
	}
	return out
}

// naive computes one element in float64 and rounds it as the element type would. 64-bit integers are computed exactly, as
// float64 cannot hold them.
func naive(merge string, dtype schema.DType, a, b []byte) any {
	if merge == "add" && (dtype == schema.Int64 || dtype == schema.Uint64) {
		return binary.LittleEndian.Uint64(a) + binary.LittleEndian.Uint64(b)
	}
	x, y := number(dtype, a), number(dtype, b)
	if dtype == schema.Bool && merge == "add" {
		return max(x, y)
	}
	var z float64
	switch merge {
	case "add":
		z = x + y
	case "max":
		z = math.Max(x, y)
	case "min":
		z = math.Min(x, y)
	}
	if math.IsNaN(x) || math.IsNaN(y) {
		z = math.NaN()
	}
	if small, ok := smallTypes[dtype]; ok {
		return naiveRound(small, z)
	}
	switch dtype {
	case schema.Complex32:
		return naiveRound(smallTypes[schema.Float16], z)
	case schema.Float32, schema.Complex64:
		return float64(float32(z))
	case schema.Float64, schema.Complex128:
		return z
	}
	return wrapped(dtype, z)
}

// wrapped brings a sum of two integers back into the range of the type.
func wrapped(dtype schema.DType, z float64) float64 {
	bits := float64(dtype.Size() * 8)
	low, high := 0.0, math.Pow(2, bits)-1
	switch dtype {
	case schema.Int8, schema.Int16, schema.Int32, schema.Int64:
		low, high = -math.Pow(2, bits-1), math.Pow(2, bits-1)-1
	}
	switch {
	case z < low:
		return z + math.Pow(2, bits)
	case z > high:
		return z - math.Pow(2, bits)
	}
	return z
}

func requireElement(t *testing.T, want any, dtype schema.DType, got []byte, text string) {
	t.Helper()
	if exact, ok := want.(uint64); ok {
		require.Equal(t, exact, binary.LittleEndian.Uint64(got), text)
		return
	}
	w, g := want.(float64), number(dtype, got)
	if math.IsNaN(w) {
		require.True(t, math.IsNaN(g), "%s: want NaN, got %v", text, g)
		return
	}
	require.Equal(t, w, g, text)
}

func TestEveryElementTypeAgainstANaiveModel(t *testing.T) {
	random := newRandom(t)
	for _, merge := range []string{"add", "max", "min"} {
		for dtype := schema.Bool; dtype.Valid(); dtype++ {
			if lookup(t, merge).kernels[dtype] == nil {
				require.Greater(t, parts(dtype), int64(1), "%s of %s is missing", merge, dtype)
				continue
			}
			t.Run(fmt.Sprintf("%s of %s", merge, dtype), func(t *testing.T) {
				c := uniform(dtype, 13, 3)
				a, b := randomBytes(random, c.Bytes()), randomBytes(random, c.Bytes())
				_, out := merged(t, merge, &c, a, &c, b)
				size := dtype.Size() / parts(dtype)
				for at := int64(0); at < c.Bytes(); at += size {
					x, y := a[at:at+size], b[at:at+size]
					requireElement(t, naive(merge, dtype, x, y), dtype, out[at:at+size],
						fmt.Sprintf("%x %s %x = %x", x, merge, y, out[at:at+size]))
				}
			})
		}
	}
}

func TestEvery8BitPairAgainstANaiveModel(t *testing.T) {
	for dtype, small := range smallTypes {
		if dtype.Size() != 1 {
			continue
		}
		t.Run(dtype.String(), func(t *testing.T) {
			a, b := make([]byte, 1<<16), make([]byte, 1<<16)
			for i := range a {
				a[i], b[i] = byte(i>>8), byte(i)
			}
			c := uniform(dtype, 1, 1<<16)
			rounded := map[float64]float64{} // few sums differ, and the model is slow
			_, out := merged(t, "add", &c, a, &c, b)
			for i := range out {
				z := naiveDecode(small, uint32(a[i])) + naiveDecode(small, uint32(b[i]))
				want, ok := rounded[z]
				if !ok {
					want = naiveRound(small, z)
					rounded[z] = want
				}
				if got := naiveDecode(small, uint32(out[i])); got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
					require.Failf(t, "wrong sum", "%x + %x = %v, want %v", a[i], b[i], got, want)
				}
			}
		})
	}
}

func TestIntegersWrap(t *testing.T) {
	c := uniform(schema.Int8, 1, 2)
	_, out := merged(t, "add", &c, []byte{127, 0x80}, &c, []byte{1, 0xff})
	require.Equal(t, []byte{0x80, 127}, out)
}

func TestBoolsAreNormalised(t *testing.T) {
	c := uniform(schema.Bool, 1, 6)
	a, b := []byte{0, 1, 0, 1, 2, 255}, []byte{0, 0, 1, 1, 1, 0}
	for merge, want := range map[string][]byte{
		"add": {0, 1, 1, 1, 1, 1}, "max": {0, 1, 1, 1, 1, 1}, "min": {0, 0, 0, 1, 1, 0},
	} {
		_, out := merged(t, merge, &c, a, &c, b)
		require.Equal(t, want, out, merge)
	}
}

// floats writes numbers as elements of a floating point type.
func floats(dtype schema.DType, values ...float32) []byte {
	var out []byte
	for _, x := range values {
		switch dtype {
		case schema.Float16:
			out = binary.LittleEndian.AppendUint16(out, encodeHalf(x))
		case schema.BFloat16:
			out = binary.LittleEndian.AppendUint16(out, encodeBrain(x))
		case schema.Float32:
			out = binary.LittleEndian.AppendUint32(out, math.Float32bits(x))
		case schema.Float64:
			out = binary.LittleEndian.AppendUint64(out, math.Float64bits(float64(x)))
		}
	}
	return out
}

func TestNaNWinsMaxAndMin(t *testing.T) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, dtype := range []schema.DType{schema.Float16, schema.BFloat16, schema.Float32, schema.Float64} {
		a, b := floats(dtype, nan, 1, nan, nan, -inf, inf), floats(dtype, 2, nan, -inf, inf, 3, 3)
		c := uniform(dtype, 1, 6)
		for merge, want := range map[string][]float64{"max": {3, math.Inf(1)}, "min": {math.Inf(-1), 3}} {
			_, out := merged(t, merge, &c, a, &c, b)
			for i := range int64(6) {
				got := number(dtype, out[i*dtype.Size():])
				if i < 4 {
					require.True(t, math.IsNaN(got), "%s of %s, element %d: %v", merge, dtype, i, got)
				} else {
					require.Equal(t, want[i-4], got, "%s of %s, element %d", merge, dtype, i)
				}
			}
		}
	}
}

// TestRowsMayLieAnywhere merges columns of random shapes whose rows lie in random pieces at odd addresses, and compares
// with the same merge of tight columns.
func TestRowsMayLieAnywhere(t *testing.T) {
	random := newRandom(t)
	dtypes := []schema.DType{schema.Int8, schema.BFloat16, schema.Float32, schema.Int64, schema.Complex64}
	for turn := range 200 {
		name := []string{"concat", "add", "replace"}[turn%3]
		dtype := dtypes[random.IntN(len(dtypes))]
		old := randomColumn(random, dtype, 1+random.IntN(20))
		added := old
		if name != "add" {
			added = randomColumn(random, dtype, old.Rows)
		}
		a, b := randomBytes(random, old.Bytes()), randomBytes(random, added.Bytes())
		result, want := merged(t, name, &old, a, &added, b)
		backing := make([]byte, len(want)+turn%2)
		got := backing[turn%2:]
		lookup(t, name).Apply(&result, got, &old, pieces(t, random, &old, a, turn%2 == 0), &added,
			pieces(t, random, &added, b, turn%4 < 2))
		require.Equal(t, want, got, "turn %d: %s of %s", turn, name, dtype)
	}
}

// randomColumn has rows of rank 1, of one length or of several, with empty rows among them.
func randomColumn(random *rand.Rand, dtype schema.DType, rows int) schema.Column {
	if random.IntN(3) == 0 {
		return uniform(dtype, rows, int64(random.IntN(9)))
	}
	lengths := make([]int64, rows)
	for i := range lengths {
		lengths[i] = max(0, int64(random.IntN(12))-3)
	}
	return varying(dtype, lengths...)
}

// rowsOf returns the Rows of a column whose bytes lie in one piece.
func rowsOf(c *schema.Column, data []byte) Rows {
	offsets := c.Offsets()
	return func(i int) []byte { return data[offsets[i]:offsets[c.Rows]] }
}

func TestConcatAppendsRowByRow(t *testing.T) {
	random := newRandom(t)
	old, added := varying(schema.Int16, 2, 0, 3), varying(schema.Int16, 1, 2, 0)
	a, b := randomBytes(random, 10), randomBytes(random, 6)
	_, out := merged(t, "concat", &old, a, &added, b)
	require.Equal(t, slices.Concat(a[0:4], b[0:2], b[2:6], a[4:10]), out)
}

func TestApplyAsksForEachPieceOnce(t *testing.T) {
	c := uniform(schema.Float32, 64, 2)
	data := make([]byte, c.Bytes())
	for _, name := range []string{"concat", "add", "replace"} {
		asked := 0
		whole := rowsOf(&c, data)
		counted := func(i int) []byte {
			asked++
			return whole(i)
		}
		m := lookup(t, name)
		result, err := m.Plan(&c, &c, key)
		require.NoError(t, err)
		m.Apply(&result, make([]byte, result.Bytes()), &c, counted, &c, counted)
		require.LessOrEqual(t, asked, 2, name)
	}
}

func TestAShortRowPanics(t *testing.T) {
	c := uniform(schema.Float32, 2, 2)
	short := func(int) []byte { return make([]byte, 7, 64) }
	for _, name := range []string{"concat", "add", "replace"} {
		m := lookup(t, name)
		result, err := m.Plan(&c, &c, key)
		require.NoError(t, err)
		require.PanicsWithValue(t, shortPiece, func() {
			m.Apply(&result, make([]byte, result.Bytes()), &c, short, &c, short)
		}, name)
	}
}

func TestNoRowsNeedNoMemory(t *testing.T) {
	c := uniform(schema.Float32, 0, 2)
	for _, name := range []string{"concat", "add", "replace"} {
		_, out := merged(t, name, &c, nil, &c, nil)
		require.Empty(t, out)
	}
}
