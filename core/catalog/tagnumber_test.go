package catalog

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

func TestTagNumberReadsEveryKindOfNumber(t *testing.T) {
	for _, want := range []any{
		0, 1, 127, 128, 255, 256, 65535, 65536, math.MaxUint32, 1 << 40, -1, -32, -33, -128, -129, -32768, -32769, math.MinInt32,
		math.MinInt32 - 1, 1.5, float32(-2.25), true, false,
	} {
		got, state := tagNumber(pack(t, map[string]any{"n": want}), "n")
		require.Equal(t, tagNumeric, state, "%v", want)
		switch want := want.(type) {
		case int:
			require.Equal(t, float64(want), got)
		case float64:
			require.Equal(t, want, got)
		case float32:
			require.Equal(t, float64(want), got)
		case bool:
			require.Equal(t, want, got == 1)
		}
	}
	for _, size := range []int{0, 12, 200} {
		ext := append([]byte{0x40, 0x59, 0, 0, 0, 0, 0, 0}, make([]byte, 12+size)...)
		tags := append([]byte{0x81, 0xa1, 'n', 0xc7, byte(len(ext)), extNumber}, ext...)
		require.True(t, validTags(tags))
		got, state := tagNumber(tags, "n")
		require.Equal(t, tagNumeric, state)
		require.Equal(t, 100.0, got)
		tags[5] = 1
		_, state = tagNumber(tags, "n")
		require.Equal(t, tagNoNumber, state)
	}
	_, short := tagNumber([]byte{0x81, 0xa1, 'n', 0xc7, 3, extNumber, 1, 2, 3}, "n")
	require.Equal(t, tagNoNumber, short)
	for _, other := range []any{"12", []int{1}, map[string]int{"n": 1}} {
		_, state := tagNumber(pack(t, map[string]any{"n": other}), "n")
		require.Equal(t, tagNoNumber, state)
	}
	for _, tags := range []map[string]any{{}, {"m": 3}, {"n": nil}, {"nn": 3}} {
		_, state := tagNumber(pack(t, tags), "n")
		require.Equal(t, tagMissing, state)
	}
	_, state := tagNumber(nil, "n")
	require.Equal(t, tagMissing, state)
}

func TestNumbersOfReadySamples(t *testing.T) {
	f := newFixture(t, Options{})
	f.must(&Write{Partition: "p", Keys: names(3), Columns: ints(3, "x"), Tags: [][]byte{
		pack(t, map[string]any{"total_lengths": 300}), nil, pack(t, map[string]any{"total_lengths": "long"}),
	}})
	v := f.view("p")
	n, err := v.Number(0, "total_lengths", 1)
	require.NoError(t, err)
	require.Equal(t, 300.0, n)
	n, err = v.Number(1, "total_lengths", 1)
	require.NoError(t, err)
	require.Equal(t, 1.0, n)
	_, err = v.Number(2, "total_lengths", 1)
	requireError(t, err, tqerr.InvalidArgument, "total_lengths", "sample 2", `"p"`)
}
