package catalog

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// first is the sampler of these tests. Package sampler stands above this one.
type first struct {
	cached []int64
	err    error
	asked  int
}

func (f *first) Check(SampleRequest) error { return nil }

func (f *first) Sample(r Ready, q SampleRequest) (Pick, error) {
	f.asked++
	got := f.cached
	if f.cached == nil && f.err == nil {
		got = r.First(q.N)
	}
	return Pick{Sampled: got, Consumed: got}, f.err
}

func (f *first) Cached(SampleRequest) bool { return f.cached != nil }

// fixture is a catalog whose invariants are checked at the end of the test.
type fixture struct {
	*Catalog
	t *testing.T
}

// newFixture has units 0 and 1 on host "h".
func newFixture(t *testing.T, o Options) *fixture {
	f := &fixture{New(o), t}
	f.AddUnit(0, "h")
	f.AddUnit(1, "h")
	t.Cleanup(func() { require.NoError(t, f.Verify()) })
	return f
}

// apply stages new rows on unit 0.
func (f *fixture) apply(w *Write) (*Applied, error) {
	units, err := f.Check(w)
	if err != nil {
		return nil, err
	}
	for i, u := range units {
		if u == NoUnit {
			units[i] = 0
		}
	}
	return f.Apply(w, units)
}

func (f *fixture) must(w *Write) *Applied {
	f.t.Helper()
	a, err := f.apply(w)
	require.NoError(f.t, err)
	return a
}

// put writes int64 columns of shape (2) under keys of partition "p".
func (f *fixture) put(keys []string, fields ...string) *Applied {
	f.t.Helper()
	return f.must(&Write{Partition: "p", Keys: keys, Columns: ints(len(keys), fields...)})
}

func (f *fixture) insert(partition string, n int, fields ...string) []int64 {
	f.t.Helper()
	return indexes(f.must(&Write{Partition: partition, Insert: n, Columns: ints(n, fields...)}).Samples)
}

func (f *fixture) fetch(n int, task string, fields ...string) []int64 {
	f.t.Helper()
	d, err := f.Fetch(FetchRequest{Partition: "p", Fields: fields, N: n, Task: task}, &first{})
	require.NoError(f.t, err)
	if d == nil {
		return nil
	}
	return indexes(d.Samples)
}

func (f *fixture) list() map[string]map[string]any {
	f.t.Helper()
	listed, err := f.List(ListFilter{})
	require.NoError(f.t, err)
	out := map[string]map[string]any{}
	for _, p := range listed {
		out[p.Name] = map[string]any{}
		for i, key := range p.Keys {
			var tags any
			require.NoError(f.t, msgpack.Unmarshal(p.Tags[i], &tags))
			out[p.Name][key] = tags
		}
	}
	return out
}

func (f *fixture) clear(keys ...string) {
	f.FinishClear(f.StartClearKeys("p", keys))
}

func ints(rows int, fields ...string) []schema.Column {
	return columns(rows, schema.Int64, []int64{2}, fields...)
}

func columns(rows int, dtype schema.DType, shape []int64, fields ...string) []schema.Column {
	var out []schema.Column
	for _, name := range fields {
		out = append(out, schema.Column{Field: name, Kind: schema.Tensor, DType: dtype, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: shape})
	}
	return out
}

// ragged is a column of vectors.
func ragged(field string, lengths ...int64) schema.Column {
	return schema.Column{Field: field, Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: len(lengths),
		Form: schema.Varying, Shape: []int64{0}, Lengths: lengths}
}

func objects(field string, rows int) schema.Column {
	return schema.Column{Field: field, Kind: schema.Object, Rows: rows, Form: schema.Objects,
		Sizes: make([]int64, rows), Codecs: make([]schema.Codec, rows)}
}

func indexes(samples []schema.Sample) []int64 {
	out := make([]int64, len(samples))
	for i, s := range samples {
		out[i] = s.Index
	}
	return out
}

func names(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("key%d", i)
	}
	return out
}

func pack(t testing.TB, v any) []byte {
	b, err := msgpack.Marshal(v)
	require.NoError(t, err)
	return b
}

// requireError checks the code, and that the text has every part.
func requireError(t *testing.T, err error, code tqerr.Code, parts ...string) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, code, tqerr.CodeOf(err), "%v", err)
	for _, part := range parts {
		require.Contains(t, err.Error(), part)
	}
}

func ptr[T any](v T) *T { return &v }

func TestIndexesCountUpAndThoseOfAClearedPartitionAreUsedFirst(t *testing.T) {
	f := newFixture(t, Options{})
	require.Equal(t, span(0, 32), f.insert("first", 32, "x"))
	require.Equal(t, span(32, 48), f.insert("second", 16, "x"))
	f.FinishClear(f.StartClearPartition("first"))
	require.Equal(t, append(span(0, 32), span(48, 80)...), f.insert("third", 64, "x"))
}

func TestReservedIndexesAreSeenBeforeTheyAreWrittenAndUsedFirst(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 5})
	f.insert("p", 2, "x")
	require.Equal(t, &Status{span(0, 5), 1, []byte{0, 0, 0, 0, 0}}, f.Consumption("p", "train"))
	require.Equal(t, &Status{span(0, 5), 1, []byte{1, 1, 0, 0, 0}}, f.Production("p", []string{"x"}))
	d, err := f.ForceFetch("p", []string{"x"})
	require.NoError(t, err)
	require.Equal(t, span(0, 5), indexes(d.Samples))
	require.Equal(t, []byte{1, 1, 0, 0, 0}, d.Status)
	require.Equal(t, []int64{0, 1}, f.fetch(2, "train", "x"))
	require.Equal(t, []int64{2, 3, 4, 5}, f.insert("p", 4, "x"))
}

func TestNewSamplesGetTheSmallestFreeIndexesInRowOrder(t *testing.T) {
	f := newFixture(t, Options{})
	all := f.must(&Write{Partition: "p", Insert: 8}).Samples
	for _, i := range []int{6, 2, 5, 3} {
		f.FinishClear(f.StartClearSamples("p", all[i:i+1]))
	}
	require.Equal(t, []int64{2, 3, 5}, f.insert("p", 3, "x"))
}

func TestAReservedSampleCanBeWrittenAndIsActiveThen(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 3})
	f.EnsurePartition("p")
	d, err := f.ForceFetch("p", nil)
	require.NoError(t, err)
	w := &Write{Partition: "p", Samples: d.Samples[1:2], Columns: ints(1, "x")}
	units, err := f.Check(w)
	require.NoError(t, err)
	require.Equal(t, []uint32{NoUnit}, units)
	_, err = f.Apply(w, []uint32{1})
	require.NoError(t, err)
	require.Equal(t, int64(1), f.SamplesOn(1))
	require.Equal(t, []int64{1}, f.fetch(1, "t", "x"))
	require.Equal(t, []int64{0, 2, 3}, f.insert("p", 3, "x"))
}

func TestAClearReleasesReservedSamplesToo(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 3})
	f.EnsurePartition("p")
	d, err := f.ForceFetch("p", nil)
	require.NoError(t, err)
	require.Empty(t, f.StartClearSamples("p", d.Samples).Samples)
	require.Empty(t, f.Consumption("p", "t").Indexes)
}

func TestARecycledIndexShowsNothingOfTheOldSample(t *testing.T) {
	f := newFixture(t, Options{})
	old := f.must(&Write{Partition: "p", Keys: []string{"old"}, Columns: ints(1, "x", "y"), Tags: [][]byte{pack(t, map[string]any{"of": "old"})}}).Samples
	require.Equal(t, []int64{0}, f.fetch(1, "train", "x"))
	f.clear("old")
	now := f.put([]string{"new"}, "x").Samples
	require.Equal(t, old[0].Index, now[0].Index)
	require.NotEqual(t, old[0].Generation, now[0].Generation)

	require.Equal(t, map[string]map[string]any{"p": {"new": map[string]any{}}}, f.list())
	_, err := f.SelectSamples(old, "p", []string{"x"})
	requireError(t, err, tqerr.SampleGone, "sample 0", `"p"`)
	_, err = f.apply(&Write{Partition: "p", Samples: old, Columns: ints(1, "x", "z")})
	requireError(t, err, tqerr.SampleGone)
	require.Empty(t, f.StartClearSamples("p", old).Samples)
	require.Empty(t, f.ClearFields("p", nil, old, []string{"x"}).Samples)
	events, err := f.SetTags("p", old, [][]byte{pack(t, map[string]any{"a": 1})})
	require.NoError(t, err)
	require.Empty(t, events)
	require.Equal(t, []int64{0}, f.fetch(1, "train", "x"))
}

func TestAnIndexInAnotherPartitionIsNotSeenThroughTheFirst(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(3), "x")
	f.clear(names(3)...)
	got := f.must(&Write{Partition: "q", Insert: 3, Columns: ints(3, "x")}).Samples
	d, err := f.ForceFetch("p", []string{"x"})
	require.NoError(t, err)
	require.Empty(t, d.Samples)
	_, err = f.SelectSamples(got, "p", nil)
	requireError(t, err, tqerr.SampleGone)
}

func TestForceFetchOfAnUnknownPartitionIsNotFound(t *testing.T) {
	_, err := newFixture(t, Options{}).ForceFetch("nowhere", nil)
	requireError(t, err, tqerr.NotFound, `"nowhere"`)
}

func span(from, to int64) []int64 {
	var out []int64
	for i := from; i < to; i++ {
		out = append(out, i)
	}
	return out
}

func TestSlotsAreDealtEvenlyAndEmptyOnesMove(t *testing.T) {
	f := newFixture(t, Options{})
	require.Equal(t, uint64(2), f.Epoch())
	f.AddUnit(1, "elsewhere")
	require.Equal(t, uint64(2), f.Epoch())
	for i := range 300 { // fills slots of unit 0 one after the other
		f.must(&Write{Partition: "p", Keys: []string{fmt.Sprint(i)}})
	}
	f.AddUnit(2, "h")
	require.Equal(t, uint64(3), f.Epoch())
	require.Equal(t, []int{numSlots / 3, numSlots/3 + 1, numSlots / 3}, []int{len(f.units[0].slots), len(f.units[1].slots), len(f.units[2].slots)})
	require.Equal(t, int64(300), f.SamplesOn(0))
}

func TestNewRowsOfOneWriteShareASlotAndWritesTakeTurns(t *testing.T) {
	f := newFixture(t, Options{})
	a, b := f.insert("p", 3, "x"), f.insert("p", 2, "x")
	require.Equal(t, f.slots.get(a[0]), f.slots.get(a[2]))
	require.NotEqual(t, f.slots.get(a[0]), f.slots.get(b[0]))
}

func place(c *Catalog, rows int, host string, bytes int64, rooms ...Room) ([]uint32, error) {
	units := make([]uint32, rows)
	for i := range units {
		units[i] = NoUnit
	}
	return units, c.Place(units, host, func(int) int64 { return bytes }, rooms)
}

func TestPlace(t *testing.T) {
	const unlimited = math.MaxInt64
	for name, test := range map[string]struct {
		rows  int
		host  string
		bytes int64
		rooms []Room
		want  []uint32
	}{
		"the unit on the writer's host first": {2, "far", 10, []Room{{0, unlimited, 0}, {1, unlimited, 0}, {2, 100, 50}}, []uint32{2, 2}},
		"else the unit with most free bytes":  {2, "", 10, []Room{{0, 100, 0}, {1, 200, 90}, {2, 150, 0}}, []uint32{1, 1}},
		"without limits the least used":       {2, "", 10, []Room{{0, unlimited, 9}, {1, unlimited, 5}, {2, unlimited, 7}}, []uint32{1, 1}},
		"the lowest of equals":                {1, "", 10, []Room{{2, unlimited, 5}, {1, unlimited, 5}}, []uint32{1}},
		"a full local unit is passed over":    {2, "far", 10, []Room{{0, unlimited, 0}, {2, 5, 95}}, []uint32{0, 0}},
		"one that takes all before a split":   {3, "", 10, []Room{{0, 25, 0}, {1, 30, 0}}, []uint32{1, 1, 1}},
		"split into runs by bytes":            {4, "", 10, []Room{{0, 25, 0}, {1, 20, 0}}, []uint32{0, 0, 1, 1}},
		"what fits nowhere goes to most free": {2, "", 99, []Room{{0, 25, 0}, {1, 30, 0}}, []uint32{1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{})
			f.AddUnit(2, "far")
			got, err := place(f.Catalog, test.rows, test.host, test.bytes, test.rooms...)
			require.NoError(t, err)
			require.Equal(t, test.want, got)
		})
	}
}

func TestPlaceKeepsRowsThatHaveAUnit(t *testing.T) {
	units := []uint32{1, NoUnit, 1, NoUnit}
	f := newFixture(t, Options{})
	require.NoError(t, f.Place(units, "", func(int) int64 { return 1 }, []Room{{0, 9, 0}, {1, 5, 0}}))
	require.Equal(t, []uint32{1, 0, 1, 0}, units)
}

func TestSampleLimitSplitsAndIsAnErrorWhenAllAreFull(t *testing.T) {
	f := newFixture(t, Options{SampleLimitPerUnit: 4})
	rooms := []Room{{0, math.MaxInt64, 0}, {1, math.MaxInt64, 1}}
	units, err := place(f.Catalog, 6, "h", 10, rooms...)
	require.NoError(t, err)
	require.Equal(t, []uint32{0, 0, 0, 0, 1, 1}, units)
	w := &Write{Partition: "p", Keys: names(6), Columns: ints(6, "x")}
	_, err = f.Apply(w, units)
	require.NoError(t, err)
	_, err = place(f.Catalog, 3, "h", 10, rooms...)
	requireError(t, err, tqerr.CapacityExceeded, "6 existing + 3 new samples > limit 8")
	require.Regexp(t, "^Storage capacity exceeded: ", err.Error())
	_, err = f.apply(&Write{Partition: "p", Keys: []string{"more"}})
	requireError(t, err, tqerr.Conflict, "unit 0")

	cl := f.StartClearKeys("p", []string{"key0"})
	require.Equal(t, int64(4), f.SamplesOn(0), "until the unit has deleted it")
	f.FinishClear(cl)
	require.Equal(t, int64(3), f.SamplesOn(0))
	f.must(&Write{Partition: "p", Keys: []string{"more"}})
}

func TestPlaceWithoutUnitsIsUnavailable(t *testing.T) {
	_, err := place(New(Options{}), 1, "", 1, Room{7, 5, 5})
	requireError(t, err, tqerr.Unavailable)
}
