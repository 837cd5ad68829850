package catalog

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

func unpack(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var out map[string]any
	require.NoError(t, msgpack.Unmarshal(b, &out))
	return out
}

// everyForm has a value in each of msgpack's forms.
func everyForm(t testing.TB) []any {
	long := strings.Repeat("x", 300)
	huge := strings.Repeat("y", 70_000)
	many := make([]any, 70_000)
	return []any{
		nil, true, false, 1, -1, 200, 70_000, 1 << 40, -100, -1000, -100_000, -1 << 40, uint64(math.MaxUint64), float32(1.5), 1.5,
		"", "short", strings.Repeat("s", 40), long, huge, []byte{}, []byte("b"), []byte(long), []byte(huge),
		[]any{}, []any{1, []any{"deep", map[string]any{"k": 1}}}, make([]any, 20), many,
		map[string]any{}, map[string]any{"a": []any{nil}},
		msgpack.RawMessage{0xd4, 7, 1}, msgpack.RawMessage{0xd8, 7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
		msgpack.RawMessage{0xc7, 2, 7, 1, 2}, msgpack.RawMessage{0xc8, 0, 2, 7, 1, 2}, msgpack.RawMessage{0xc9, 0, 0, 0, 2, 7, 1, 2},
	}
}

func TestScanningFindsTheEndOfEveryForm(t *testing.T) {
	for i, v := range everyForm(t) {
		raw := pack(t, v)
		n, ok := valueLen(append(bytes.Clone(raw), 0xff))
		require.True(t, ok, "value %d", i)
		require.Equal(t, len(raw), n, "value %d", i)
		for _, cut := range []int{0, 1, len(raw) / 2, len(raw) - 1} {
			if cut < len(raw) {
				_, ok = valueLen(raw[:cut])
				require.False(t, ok, "value %d cut to %d bytes", i, cut)
			}
		}
	}
}

func TestScanningRefusesLiesAndNonsense(t *testing.T) {
	for name, raw := range map[string][]byte{
		"a byte that is never used":      {0xc1},
		"a map longer than the message":  {0xdf, 0xff, 0xff, 0xff, 0xff, 1, 1},
		"an array longer":                {0xdd, 0x7f, 0xff, 0xff, 0xff},
		"nested maps that claim it all":  bytes.Repeat([]byte{0xde, 0, 2}, 9),
		"a string longer":                {0xdb, 0xff, 0xff, 0xff, 0xff, 'a'},
		"a length without all its bytes": {0xdb, 0},
	} {
		_, ok := valueLen(raw)
		require.False(t, ok, name)
	}
	for name, raw := range map[string][]byte{"no map": {0x90}, "bytes behind it": {0x80, 0x80}, "half a map": {0x81, 1}} {
		require.False(t, validTags(raw), name)
	}
	require.True(t, validTags(nil))
	_, ok := valueLen(append(bytes.Repeat([]byte{0x91}, 1<<20), 1))
	require.True(t, ok, "depth does not matter")
}

func TestMergeIsTheOneOfAPythonDict(t *testing.T) {
	big, want := map[string]any{}, map[string]any{"a": int8(9)}
	for i := range 70_000 {
		big[fmt.Sprint("k", i)] = true
		want[fmt.Sprint("k", i)] = true
	}
	for name, test := range map[string]struct {
		stored, update []byte
		want           map[string]any
	}{
		"nothing stored":    {nil, pack(t, map[string]any{"a": 1}), map[string]any{"a": int8(1)}},
		"last writer wins":  {pack(t, map[string]any{"a": 1, "b": 2}), pack(t, map[string]any{"b": "x", "c": nil}), map[string]any{"a": int8(1), "b": "x", "c": nil}},
		"twice in one":      {nil, []byte{0x82, 0xa1, 'a', 1, 0xa1, 'a', 2}, map[string]any{"a": int8(2)}},
		"more than 15":      {pack(t, map[string]any{"a": 1}), pack(t, firstOf(big, 20)), nil},
		"more than 24":      {pack(t, map[string]any{"k1": 1}), pack(t, firstOf(big, 30)), nil},
		"more than 2 to 16": {pack(t, map[string]any{"a": 9}), pack(t, big), want},
	} {
		t.Run(name, func(t *testing.T) {
			got := mergeTags(test.stored, test.update)
			require.True(t, validTags(got))
			if test.want == nil {
				test.want = unpack(t, test.update)
				for k, v := range unpack(t, test.stored) {
					if _, newer := test.want[k]; !newer {
						test.want[k] = v
					}
				}
			}
			require.Equal(t, test.want, unpack(t, got))
		})
	}
	require.Nil(t, mergeTags(nil, []byte{0x80}))
}

func firstOf(all map[string]any, n int) map[string]any {
	out := map[string]any{}
	for i := range n {
		key := fmt.Sprint("k", i)
		out[key] = all[key]
	}
	return out
}

func TestMergeKeepsRawBytesOrderAndStrangeKeys(t *testing.T) {
	stored := []byte{0x83, 0xc0, 1, 0x91, 5, 2, 0xa1, 'z', 0xcd, 0, 3} // {nil: 1, [5]: 2, "z": 3 as uint16}
	got := mergeTags(stored, []byte{0x82, 0x91, 5, 7, 0xa1, 'a', 1})
	require.Equal(t, []byte{0x84, 0xc0, 1, 0x91, 5, 7, 0xa1, 'z', 0xcd, 0, 3, 0xa1, 'a', 1}, got)
}

func TestMergeSharesNoMemoryWithTheRequest(t *testing.T) {
	update := pack(t, map[string]any{"a": "value"})
	got := mergeTags(nil, update)
	want := bytes.Clone(got)
	for i := range update {
		update[i] = 0xff
	}
	require.Equal(t, want, got)
}

func matches(t *testing.T, filter, tags []byte) bool {
	t.Helper()
	f, err := newTagFilter(filter)
	require.NoError(t, err)
	return f.match(tags)
}

func entry(value []byte) []byte { return append([]byte{0x81, 0xa1, 'k'}, value...) }

func TestFilterComparesAsPythonDoes(t *testing.T) {
	groups := [][][]byte{ // values of one group are equal, those of different groups are not
		{{1}, {0xcc, 1}, {0xcd, 0, 1}, {0xd3, 0, 0, 0, 0, 0, 0, 0, 1}, pack(t, float32(1)), pack(t, 1.0), {0xc3}},
		{{0}, {0xc2}, pack(t, 0.0), pack(t, math.Copysign(0, -1))},
		{{0xff}, {0xd0, 0xff}, {0xd1, 0xff, 0xff}, {0xd2, 0xff, 0xff, 0xff, 0xff}, pack(t, -1.0)},
		{pack(t, uint64(1<<63)), pack(t, float64(1<<63))},
		{pack(t, int64(math.MinInt64)), pack(t, float64(math.MinInt64))},
		{pack(t, int64(1<<53+1))}, {pack(t, int64(1<<53)), pack(t, float64(1<<53))},
		{pack(t, 0.5), pack(t, float32(0.5))}, {pack(t, math.Inf(1)), pack(t, float32(math.Inf(1)))}, {pack(t, math.Inf(-1))}, {pack(t, 1e300)},
		{{0xc0}}, {pack(t, "1"), {0xd9, 1, '1'}, {0xda, 0, 1, '1'}}, {pack(t, []byte("1")), {0xc5, 0, 1, '1'}}, {pack(t, "")}, {pack(t, []byte{})},
		{{0x90}, {0xdc, 0, 0}}, {{0x80}, {0xde, 0, 0}}, {{0x91, 1}, {0xdc, 0, 1, 0xc3}}, {{0x92, 1, 2}}, {{0x92, 2, 1}}, {{0x91, 0x91, 1}},
		{{0x82, 0xa1, 'a', 1, 0xa1, 'b', 2}, {0x82, 0xa1, 'b', 0xcc, 2, 0xa1, 'a', 0xc3}}, {{0x82, 0xa1, 'a', 2, 0xa1, 'b', 1}},
		{{0xd4, 7, 1}, {0xc7, 1, 7, 1}}, {{0xd4, 8, 1}},
	}
	for i, left := range groups {
		for k, right := range groups {
			for _, a := range left {
				for _, b := range right {
					require.Equal(t, i == k, matches(t, entry(a), entry(b)), "%x and %x", a, b)
				}
			}
		}
	}
	require.True(t, matches(t, entry(pack(t, math.NaN())), entry(pack(t, math.NaN()))), "the same bytes are the same tag")
}

func TestFilterWithManyEntries(t *testing.T) {
	all := map[string]any{}
	for i := range 40_000 {
		all[fmt.Sprint("k", i)] = i
	}
	raw := pack(t, all)
	require.True(t, matches(t, raw, raw))
	require.True(t, matches(t, pack(t, firstOf(all, 100)), raw))
	require.False(t, matches(t, raw, pack(t, firstOf(all, 100))))
	all["k7"] = -7
	require.False(t, matches(t, raw, pack(t, all)))
}

func TestFilterOfDeepValues(t *testing.T) {
	deep := append(bytes.Repeat([]byte{0x91}, 100_000), 1)
	wide := append(bytes.Repeat([]byte{0x91}, 100_000), 0xcc, 1)
	require.True(t, matches(t, entry(deep), entry(deep)))
	require.False(t, matches(t, entry(deep), entry(wide)), "below the bound bytes count")
}

func FuzzTags(f *testing.F) {
	for _, v := range everyForm(f)[:20] {
		f.Add(entry(pack(f, v)), entry([]byte{1}))
	}
	f.Add([]byte{0xdf, 0xff, 0xff, 0xff, 0xff}, []byte{0x82, 0x91, 5, 7, 0xa1, 'a', 1})
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if n, ok := valueLen(a); ok && (n < 1 || n > len(a)) {
			t.Fatalf("%x: a value of %d bytes", a, n)
		}
		if !validTags(a) || !validTags(b) {
			return
		}
		merged := mergeTags(a, b)
		if !validTags(merged) {
			t.Fatalf("%x and %x merge to %x", a, b, merged)
		}
		if again := mergeTags(merged, b); !bytes.Equal(again, merged) {
			t.Fatalf("%x changes to %x by the same update", merged, again)
		}
		filter, err := newTagFilter(mergeTags(nil, b))
		if err != nil || !filter.match(merged) {
			t.Fatalf("%x does not match %x: %v", merged, b, err)
		}
		for i, e := range filter.entries {
			if form, rest := canonical(nil, e.value, 0); len(rest) != 0 || !bytes.Equal(form, filter.canonical[i]) {
				t.Fatalf("%x: form %x, rest %x", e.value, form, rest)
			}
		}
	})
}
