package catalog

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// newUneven has key0..key2 with prompt, key2 with reply too, and bare with nothing.
func newUneven(t *testing.T) *fixture {
	f := newFixture(t, Options{})
	f.put(names(3), "prompt")
	f.put([]string{"key2"}, "reply")
	f.must(&Write{Partition: "p", Keys: []string{"bare"}})
	return f
}

func TestSelectKeysFindsRowsAndCommonFields(t *testing.T) {
	f := newUneven(t)
	_, err := f.Apply(&Write{Partition: "p", Keys: []string{"far"}, Columns: ints(1, "prompt")}, []uint32{1})
	require.NoError(t, err)
	for name, test := range map[string]struct {
		keys, fields []string
		want         Selection
	}{
		"common fields":         {names(3), nil, Selection{Rows: []int{0, 1, 2}, Samples: at(0, 1, 2), Units: []uint32{0, 0, 0}, Fields: []string{"prompt"}}},
		"sorted fields":         {[]string{"key2"}, []string{"reply", "prompt", "reply"}, Selection{Rows: []int{0}, Samples: at(2), Units: []uint32{0}, Fields: []string{"prompt", "reply"}}},
		"missing keys":          {[]string{"no", "far", "none", "key0"}, nil, Selection{Rows: []int{1, 3}, Samples: at(4, 0), Units: []uint32{1, 0}, Fields: []string{"prompt"}}},
		"a key twice":           {[]string{"key1", "key0", "key1"}, nil, Selection{Rows: []int{0, 1, 2}, Samples: at(1, 0, 1), Units: []uint32{0, 0, 0}, Fields: []string{"prompt"}}},
		"fields not common":     {names(3), []string{"reply", "unknown", "prompt"}, Selection{Rows: []int{0, 1, 2}, Samples: at(0, 1, 2), Units: []uint32{0, 0, 0}, Fields: []string{"prompt"}}},
		"only fields not there": {names(2), []string{"reply"}, Selection{Rows: []int{0, 1}, Samples: at(0, 1), Units: []uint32{0, 0}, Fields: []string{}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := f.SelectKeys("p", test.keys, test.fields, false)
			require.NoError(t, err)
			require.Equal(t, &test.want, got)
		})
	}
}

// at names samples of the first generation.
func at(indexes ...int64) []schema.Sample {
	out := make([]schema.Sample, len(indexes))
	for i, index := range indexes {
		out[i] = schema.Sample{Index: index, Generation: 1}
	}
	return out
}

func TestSelectKeysThatFails(t *testing.T) {
	f := newUneven(t)
	f.put([]string{"other"}, "answer")
	for name, test := range map[string]struct {
		partition    string
		keys, fields []string
		strict       bool
		code         tqerr.Code
		parts        []string
		without      []string
	}{
		"no key exists":             {"p", []string{"absent", "gone"}, nil, false, tqerr.NotFound, []string{"keys or partition were not found!", `"absent"`, `"gone"`, `"p"`}, nil},
		"no such partition":         {"nowhere", []string{"key0"}, nil, false, tqerr.NotFound, []string{"keys or partition were not found!", `"key0"`, `"nowhere"`}, nil},
		"a key without fields":      {"p", []string{"key0", "bare"}, nil, false, tqerr.InvalidArgument, []string{"ready", `"bare"`, `"p"`}, []string{"key0"}},
		"the same with fields":      {"p", []string{"key0", "bare"}, []string{"prompt"}, false, tqerr.InvalidArgument, []string{"ready", `"bare"`}, []string{"key0"}},
		"nothing in common":         {"p", []string{"key0", "other"}, nil, false, tqerr.InvalidArgument, []string{"ready", `"key0"`, `"other"`}, nil},
		"many missing keys":         {"p", []string{"a", "b", "c", "d", "e", "f", "g", "h"}, nil, false, tqerr.NotFound, []string{`"e" ... 3 more`}, []string{`"f"`}},
		"strict, missing keys":      {"p", []string{"key0", "absent", "key1", "gone"}, nil, true, tqerr.NotFound, []string{"not found", `"absent", "gone"`, `"p"`}, []string{"key0", "key1"}},
		"strict, keys and fields":   {"p", []string{"key0", "absent"}, []string{"prompt", "zeta"}, true, tqerr.NotFound, []string{`keys were not found: "absent"; `, `"zeta" (keys "key0")`}, []string{"prompt"}},
		"strict, no key exists":     {"p", []string{"a", "b", "c", "d", "e", "f", "g"}, nil, true, tqerr.NotFound, []string{"not found", `"g"`}, nil},
		"strict, missing fields":    {"p", names(3), []string{"prompt", "reply", "zeta"}, true, tqerr.NotFound, []string{`"reply" (keys "key0", "key1")`, `"zeta" (keys "key0", "key1", "key2")`}, []string{"prompt"}},
		"strict, a key has nothing": {"p", []string{"key0", "bare"}, []string{"prompt"}, true, tqerr.NotFound, []string{`"prompt" (keys "bare")`}, []string{"key0"}},
		"strict, nothing in common": {"p", []string{"key0", "other"}, nil, true, tqerr.InvalidArgument, []string{"ready"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := f.SelectKeys(test.partition, test.keys, test.fields, test.strict)
			requireError(t, err, test.code, test.parts...)
			for _, part := range test.without {
				require.NotContains(t, err.Error(), part)
			}
		})
	}
}

func TestStrictReturnsTheSameWhenNothingIsMissing(t *testing.T) {
	f := newUneven(t)
	loose, err := f.SelectKeys("p", []string{"key2", "key0"}, []string{"prompt"}, false)
	require.NoError(t, err)
	strict, err := f.SelectKeys("p", []string{"key2", "key0"}, []string{"prompt"}, true)
	require.NoError(t, err)
	require.Equal(t, loose, strict)
}

func TestSelectSamples(t *testing.T) {
	f := newUneven(t)
	s, err := f.SelectSamples(at(2, 0), "p", []string{"prompt"})
	require.NoError(t, err)
	require.Equal(t, &Selection{Rows: []int{0, 1}, Samples: at(2, 0), Units: []uint32{0, 0}, Fields: []string{"prompt"}}, s)
	s, err = f.SelectSamples(at(2), "p", nil)
	require.NoError(t, err)
	require.Equal(t, []string{"prompt", "reply"}, s.Fields)
	s, err = f.SelectSamples(nil, "nowhere", []string{"x"})
	require.NoError(t, err)
	require.Empty(t, s.Fields)

	_, err = f.SelectSamples(at(0, 1, 2), "p", []string{"reply"})
	requireError(t, err, tqerr.InvalidArgument, `field "reply"`, "samples 0, 1;", `"prompt"`)
	_, err = f.SelectSamples(at(3), "p", []string{"zeta"})
	requireError(t, err, tqerr.InvalidArgument, `field "zeta"`, "samples 3", "no field")
	for _, wrong := range []schema.Sample{{Index: 0, Generation: 2}, {Index: 99, Generation: 1}, {Index: -1, Generation: 1}} {
		_, err = f.SelectSamples([]schema.Sample{wrong}, "p", nil)
		requireError(t, err, tqerr.SampleGone, fmt.Sprintf("sample %d", wrong.Index), `"p"`)
	}
	_, err = f.SelectSamples(at(0), "nowhere", nil)
	requireError(t, err, tqerr.SampleGone, `"nowhere"`)
}

func TestGenerationOfAnIndex(t *testing.T) {
	f := newUneven(t)
	f.EnsurePartition("q")
	require.Equal(t, uint32(1), f.Generation("p", 0))
	for _, index := range []int64{-1, 99, math.MaxInt64} {
		require.Zero(t, f.Generation("p", index))
	}
	require.Zero(t, f.Generation("q", 0))
	require.Zero(t, f.Generation("nowhere", 0))

	cl := f.StartClearKeys("p", []string{"key0"})
	require.Equal(t, uint32(1), f.Generation("p", 0), "a second clear finds what the first has not finished")
	f.FinishClear(cl)
	require.Zero(t, f.Generation("p", 0))
	f.put([]string{"next"}, "prompt")
	require.Equal(t, uint32(2), f.Generation("p", 0))
}

func TestASampleThatIsBeingClearedIsGoneAndNamedByItsKey(t *testing.T) {
	f := newUneven(t)
	f.StartClearKeys("p", []string{"key1"})
	_, err := f.SelectSamples(at(0, 1), "p", []string{"prompt"})
	requireError(t, err, tqerr.SampleGone, "sample 1", `"key1"`, `"p"`)
	_, err = f.SelectKeys("p", []string{"key1"}, nil, false)
	requireError(t, err, tqerr.NotFound)
}

func newTagged(t *testing.T) *fixture {
	f := newFixture(t, Options{})
	f.EnsurePartition("other")
	f.must(&Write{Partition: "p", Keys: []string{"run1/a", "run1/b", "run2/a"}, Tags: [][]byte{
		pack(t, map[string]any{"done": true, "n": 1}), pack(t, map[string]any{"done": false, "n": 1}), pack(t, map[string]any{"done": true, "n": 2}),
	}})
	f.put([]string{"run2/a", "run1/b"}, "x")
	return f
}

func TestListFilters(t *testing.T) {
	f := newTagged(t)
	for name, test := range map[string]struct {
		filter ListFilter
		want   []string
	}{
		"none":                   {ListFilter{}, []string{"run1/a", "run1/b", "run2/a"}},
		"keys":                   {ListFilter{Keys: []string{"run2/a", "absent", "run1/a", "run2/a"}}, []string{"run1/a", "run2/a"}},
		"no keys":                {ListFilter{Keys: []string{}}, []string{}},
		"prefix":                 {ListFilter{Prefix: "run1/"}, []string{"run1/a", "run1/b"}},
		"prefix of none":         {ListFilter{Prefix: "run3"}, []string{}},
		"a tag":                  {ListFilter{Tags: pack(t, map[string]any{"done": true})}, []string{"run1/a", "run2/a"}},
		"two tags":               {ListFilter{Tags: pack(t, map[string]any{"done": true, "n": 2.0})}, []string{"run2/a"}},
		"fields":                 {ListFilter{Fields: []string{"x"}}, []string{"run1/b", "run2/a"}},
		"fields nobody has":      {ListFilter{Fields: []string{"x", "unknown"}}, []string{}},
		"prefix and fields":      {ListFilter{Prefix: "run1/", Fields: []string{"x"}}, []string{"run1/b"}},
		"no tags is no filter":   {ListFilter{Tags: []byte{0x80}}, []string{"run1/a", "run1/b", "run2/a"}},
		"a tag that nobody has":  {ListFilter{Tags: pack(t, map[string]any{"more": nil})}, []string{}},
		"keys that have the tag": {ListFilter{Keys: []string{"run1/b"}, Tags: pack(t, map[string]any{"n": 1})}, []string{"run1/b"}},
	} {
		t.Run(name, func(t *testing.T) {
			test.filter.Partition = ptr("p")
			got, err := f.List(test.filter)
			require.NoError(t, err)
			require.Len(t, got, 1)
			require.Equal(t, "p", got[0].Name)
			require.Equal(t, test.want, got[0].Keys)
			require.Len(t, got[0].Tags, len(test.want))
		})
	}
}

func TestListOrderAndUnknownPartition(t *testing.T) {
	f := newTagged(t)
	f.clear("run1/b")
	f.put([]string{"run1/b"})
	got, err := f.List(ListFilter{})
	require.NoError(t, err)
	require.Equal(t, "other", got[0].Name)
	require.Equal(t, []string{"run1/a", "run2/a", "run1/b"}, got[1].Keys)
	got, err = f.List(ListFilter{Partition: ptr("nowhere")})
	require.NoError(t, err)
	require.Empty(t, got)
	_, err = f.List(ListFilter{Tags: []byte{0xc0}})
	requireError(t, err, tqerr.InvalidArgument)
}

func TestOrderSurvivesManyClears(t *testing.T) {
	f := newFixture(t, Options{})
	all := names(5000)
	f.put(all)
	f.clear(all[:4000]...)
	require.Less(t, len(f.partitions["p"].registered), 2500, "places of cleared keys are dropped")
	got, err := f.List(ListFilter{})
	require.NoError(t, err)
	require.Equal(t, all[4000:], got[0].Keys)
	require.NoError(t, f.Verify())
	f.clear(all...)
	require.Nil(t, f.partitions["p"].registered)
}

func TestMatch(t *testing.T) {
	f := newTagged(t)
	done, unmet := pack(t, map[string]any{"done": true}), []string(nil)
	for name, test := range map[string]struct {
		spec WaitSpec
		want []string // nil: not yet
	}{
		"keys in their order":     {WaitSpec{Keys: []string{"run2/a", "run1/a"}}, []string{"run2/a", "run1/a"}},
		"a key that is missing":   {WaitSpec{Keys: []string{"run2/a", "absent"}}, unmet},
		"a key without the field": {WaitSpec{Keys: []string{"run1/a"}, Fields: []string{"x"}}, unmet},
		"a key with the field":    {WaitSpec{Keys: []string{"run1/b"}, Fields: []string{"x"}}, []string{"run1/b"}},
		"a key with another tag":  {WaitSpec{Keys: []string{"run1/b"}, Tags: done}, unmet},
		"a count":                 {WaitSpec{Count: 2}, []string{"run1/a", "run1/b", "run2/a"}},
		"a count not reached":     {WaitSpec{Count: 4}, unmet},
		"a count with fields":     {WaitSpec{Count: 2, Fields: []string{"x"}}, []string{"run1/b", "run2/a"}},
		"too few have the field":  {WaitSpec{Count: 3, Fields: []string{"x"}}, unmet},
		"a count with tags":       {WaitSpec{Count: 2, Tags: done}, []string{"run1/a", "run2/a"}},
		"too few have the tag":    {WaitSpec{Count: 3, Tags: done}, unmet},
		"a field nobody has":      {WaitSpec{Count: 1, Fields: []string{"y"}}, unmet},
	} {
		t.Run(name, func(t *testing.T) {
			test.spec.Partition = "p"
			got, err := f.Match(test.spec)
			require.NoError(t, err)
			if test.want == nil {
				require.Nil(t, got)
				return
			}
			require.Equal(t, test.want, got.Keys)
			require.Len(t, got.Tags, len(test.want))
		})
	}
	got, err := f.Match(WaitSpec{Partition: "p", Keys: []string{"run1/b"}})
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, got.Fields)
	got, err = f.Match(WaitSpec{Partition: "nowhere", Count: 1})
	require.NoError(t, err)
	require.Nil(t, got)
	_, err = f.Match(WaitSpec{Partition: "p", Tags: []byte{0x81}})
	requireError(t, err, tqerr.InvalidArgument)
}

func TestLookupAndKeysOf(t *testing.T) {
	f := newUneven(t)
	d := f.Lookup("p", []string{"key2", "absent", "key0"})
	require.Equal(t, at(2, 0), d.Samples)
	require.Equal(t, ints(2, "prompt"), d.Columns)
	require.Equal(t, []byte{1, 1}, d.Status)
	d = f.Lookup("p", []string{"key0", "bare"})
	require.Equal(t, []byte{0, 0}, d.Status)
	require.Empty(t, d.Columns)
	require.Empty(t, f.Lookup("nowhere", names(1)).Samples)
	require.Empty(t, f.Lookup("p", []string{"absent"}).Samples)

	f.insert("p", 1)
	keys, known, err := f.KeysOf("p", []int64{2, 4, 0, 77, -1})
	require.NoError(t, err)
	require.Equal(t, []string{"key2", "", "key0", "", ""}, keys)
	require.Equal(t, []bool{true, false, true, false, false}, known)
	_, _, err = f.KeysOf("nowhere", nil)
	requireError(t, err, tqerr.InvalidState, `"nowhere"`)
}

func TestObjectsAreDescribedWithoutSizes(t *testing.T) {
	f := newFixture(t, Options{})
	f.must(&Write{Partition: "p", Keys: names(2), Columns: []schema.Column{objects("o", 2)}})
	d := f.Lookup("p", names(2))
	require.Equal(t, []schema.Column{objects("o", 2)}, d.Columns)
	require.NoError(t, d.Columns[0].Validate())
}
