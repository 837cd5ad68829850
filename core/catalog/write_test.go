package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func TestPutReportsRowsFieldsTagsAndEvents(t *testing.T) {
	f := newFixture(t, Options{})
	f.put([]string{"k"}, "zeta")
	a := f.must(&Write{Partition: "p", Keys: []string{"new", "k"}, Columns: ints(2, "b", "a"),
		Tags: [][]byte{nil, pack(t, map[string]any{"n": 1})}})
	require.Equal(t, []int64{1, 0}, indexes(a.Samples))
	require.Equal(t, []string{"a", "b"}, a.Fields)
	require.Equal(t, [][]byte{{0x80}, pack(t, map[string]any{"n": 1})}, a.Tags)
	require.Equal(t, []Event{{"put", "new", []string{"a", "b"}, a.Tags[0]}, {"put", "k", []string{"a", "b"}, a.Tags[1]}}, a.Events)
	require.Equal(t, []string{"a", "b", "zeta"}, f.put([]string{"k"}, "a").Fields)
}

func TestSamplesWithoutAKeyMakeNoEvents(t *testing.T) {
	f := newFixture(t, Options{})
	a := f.must(&Write{Partition: "p", Insert: 2, Columns: ints(2, "x")})
	require.Empty(t, a.Events)
	require.Equal(t, map[string]map[string]any{"p": {}}, f.list())
	require.Empty(t, f.StartClearSamples("p", a.Samples).Events)
}

func TestTagsMergeKeyByKeyAndAPutWithoutTagsKeepsThem(t *testing.T) {
	f := newFixture(t, Options{})
	f.must(&Write{Partition: "p", Keys: []string{"k"}, Tags: [][]byte{pack(t, map[string]any{"a": 1, "b": map[string]any{"deep": []any{1}}})}})
	f.must(&Write{Partition: "p", Keys: []string{"k"}, Tags: [][]byte{pack(t, map[string]any{"b": 2, "c": nil})}})
	f.put([]string{"k"}, "x")
	f.must(&Write{Partition: "p", Keys: []string{"k"}, Tags: [][]byte{{0x80}}})
	require.Equal(t, map[string]any{"a": int8(1), "b": int8(2), "c": nil}, f.list()["p"]["k"])
}

func TestSetTagsReplaces(t *testing.T) {
	f := newFixture(t, Options{})
	a := f.must(&Write{Partition: "p", Keys: names(2), Tags: [][]byte{pack(t, map[string]any{"a": 1}), pack(t, map[string]any{"a": 2})}})
	events, err := f.SetTags("p", a.Samples, [][]byte{pack(t, map[string]any{"b": 3}), {0x80}})
	require.NoError(t, err)
	require.Equal(t, map[string]any{"key0": map[string]any{"b": int8(3)}, "key1": map[string]any{}}, f.list()["p"])
	require.Equal(t, []Event{{"put", "key0", []string{}, pack(t, map[string]any{"b": 3})}, {"put", "key1", []string{}, []byte{0x80}}}, events)
	_, err = f.SetTags("p", a.Samples, nil)
	requireError(t, err, tqerr.InvalidArgument, "0 tags for 2 rows")
}

func TestWritesThatContradictThemselvesChangeNothing(t *testing.T) {
	sample := schema.Sample{Index: 0, Generation: 1}
	for name, test := range map[string]struct {
		w     Write
		parts []string
	}{
		"the same new key twice":      {Write{Keys: []string{"twin", "other", "twin"}, Columns: ints(3, "x")}, []string{"Got duplicated keys", `"twin"`, `"p"`}},
		"the same existing key twice": {Write{Keys: []string{"key1", "key1"}}, []string{"Got duplicated keys", `"key1"`}},
		"the same sample twice":       {Write{Samples: []schema.Sample{sample, sample}}, []string{"sample 0", "twice"}},
		"fewer rows than keys":        {Write{Keys: names(5), Columns: ints(3, "x")}, []string{"3 rows", "want 5", `"x"`}},
		"fewer tags than keys":        {Write{Keys: names(2), Tags: [][]byte{{0x80}}}, []string{"1 tags", "2 rows"}},
		"tags that are no map":        {Write{Keys: names(2), Tags: [][]byte{{0x80}, {0x90}}}, []string{"row 1"}},
		"a field twice":               {Write{Keys: names(2), Columns: ints(2, "x", "x")}, []string{`"x"`, "twice"}},
		"no rows":                     {Write{Keys: []string{}}, []string{"0 rows"}},
		"a negative number of rows":   {Write{Insert: -3}, []string{"-3 rows"}},
		"rows named twice":            {Write{Keys: names(1), Insert: 1}, []string{"2 ways"}},
		"rows not named":              {Write{}, []string{"0 ways"}},
		"an update of new rows":       {Write{Insert: 1, Update: true}, []string{"update"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{})
			f.put(names(2), "x")
			before := f.list()
			test.w.Partition = "p"
			_, err := f.Check(&test.w)
			requireError(t, err, tqerr.InvalidArgument, test.parts...)
			_, err = f.Apply(&test.w, make([]uint32, 5))
			requireError(t, err, tqerr.InvalidArgument, test.parts...)
			require.Equal(t, before, f.list())
			test.w.Partition = "fresh"
			_, err = f.Apply(&test.w, make([]uint32, 5))
			require.Error(t, err)
			require.Equal(t, []string{"p"}, f.Partitions())
		})
	}
}

func TestCheckChangesNothing(t *testing.T) {
	f := newFixture(t, Options{})
	units, err := f.Check(&Write{Partition: "p", Keys: names(2), Columns: ints(2, "x")})
	require.NoError(t, err)
	require.Equal(t, []uint32{NoUnit, NoUnit}, units)
	require.Empty(t, f.Partitions())
}

func TestOtherSamplesPinTheTypeOfAColumn(t *testing.T) {
	for name, test := range map[string]struct {
		col   schema.Column
		parts []string
	}{
		"float32 for int64": {columns(1, schema.Float32, nil, "x")[0], []string{"dtype float32, want dtype int64"}},
		"object for tensor": {objects("x", 1), []string{"non-tensor, want int64 tensor"}},
		"tensor for object": {columns(1, schema.Int64, nil, "note")[0], []string{"int64 tensor, want non-tensor"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{})
			cols := append(ints(2, "x"), objects("note", 2))
			f.must(&Write{Partition: "p", Keys: names(2), Columns: cols})
			for _, key := range []string{"key1", "new"} {
				w := &Write{Partition: "p", Keys: []string{key}, Columns: append(ints(1, "extra"), test.col), Tags: [][]byte{pack(t, map[string]any{"n": 5})}}
				_, err := f.Check(w)
				requireError(t, err, tqerr.SchemaMismatch, append(test.parts, `"p"`, `"`+test.col.Field+`"`)...)
				_, err = f.Apply(w, []uint32{0})
				requireError(t, err, tqerr.SchemaMismatch)
			}
			require.Equal(t, map[string]map[string]any{"p": {"key0": map[string]any{}, "key1": map[string]any{}}}, f.list())
			require.Nil(t, f.Production("p", []string{"extra"}))
		})
	}
}

func TestAColumnMayChangeItsTypeWhenAllHoldersAreWritten(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "x")
	f.must(&Write{Partition: "p", Keys: names(2), Columns: []schema.Column{objects("x", 2)}})
	f.must(&Write{Partition: "p", Keys: names(3), Columns: columns(3, schema.Bool, nil, "x")})
	require.Equal(t, schema.Bool, f.Lookup("p", names(3)).Columns[0].DType)
}

func TestTheTypeIsForgottenWithTheLastHolder(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "x")
	f.clear("key0")
	_, err := f.apply(&Write{Partition: "p", Keys: []string{"new"}, Columns: []schema.Column{objects("x", 1)}})
	requireError(t, err, tqerr.SchemaMismatch)
	f.ClearFields("p", []string{"key1"}, nil, []string{"x"})
	f.must(&Write{Partition: "p", Keys: []string{"new"}, Columns: []schema.Column{objects("x", 1)}})
}

func TestAKeyThatAppearedElsewhereMeanwhileIsAConflict(t *testing.T) {
	f := newFixture(t, Options{})
	w := &Write{Partition: "p", Keys: []string{"k"}, Columns: ints(1, "x")}
	_, err := f.Check(w)
	require.NoError(t, err)
	_, err = f.Apply(w, []uint32{1})
	require.NoError(t, err)
	_, err = f.Apply(w, []uint32{0})
	requireError(t, err, tqerr.Conflict, "unit 1", "unit 0")
	_, err = f.Apply(w, []uint32{1})
	require.NoError(t, err)
}

func TestAKeyThatWasClearedMeanwhileIsCreatedAgainWhereItIsStaged(t *testing.T) {
	f := newFixture(t, Options{})
	old := f.put([]string{"k"}, "x", "y").Samples
	cl := f.StartClearKeys("p", []string{"k"})
	a := f.put([]string{"k"}, "x")
	require.NotEqual(t, old, a.Samples)
	require.Equal(t, []string{"x"}, a.Fields)
	f.FinishClear(cl)
	_, err := f.SelectKeys("p", []string{"k"}, nil, true)
	require.NoError(t, err)
}

func TestUnitsThatTakeNothingAreAConflict(t *testing.T) {
	f := newFixture(t, Options{})
	_, err := f.Apply(&Write{Partition: "p", Insert: 1}, []uint32{9})
	requireError(t, err, tqerr.Conflict, "unit 9")
	_, err = f.Apply(&Write{Partition: "p", Insert: 2}, []uint32{0})
	requireError(t, err, tqerr.InvalidArgument, "1 units for 2 rows")
	require.Empty(t, f.Partitions())
}

func TestUpdateNeedsRowsAndFieldsThatExist(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "ids")
	f.put([]string{"key1"}, "extra")
	for name, test := range map[string]struct {
		partition string
		keys      []string
		fields    []string
		code      tqerr.Code
		parts     []string
	}{
		"unknown key":               {"p", []string{"key0", "absent"}, []string{"ids"}, tqerr.NotFound, []string{"not found", `"absent"`}},
		"unknown partition":         {"nowhere", []string{"key0"}, []string{"ids"}, tqerr.NotFound, []string{"not found", `"nowhere"`}},
		"fields that one key lacks": {"p", names(2), []string{"zeta", "ids", "extra"}, tqerr.InvalidArgument, []string{"not produced", `"extra", "zeta"`}},
		"the same key twice":        {"p", []string{"key0", "key0"}, []string{"ids"}, tqerr.InvalidArgument, []string{"Got duplicated keys", `"key0"`}},
	} {
		t.Run(name, func(t *testing.T) {
			w := &Write{Partition: test.partition, Keys: test.keys, Columns: ints(len(test.keys), test.fields...), Update: true}
			_, err := f.Check(w)
			requireError(t, err, test.code, test.parts...)
			_, err = f.Apply(w, make([]uint32, len(test.keys)))
			requireError(t, err, test.code, test.parts...)
			require.Equal(t, []string{"p"}, f.Partitions())
		})
	}
}

func TestUpdateChecksTheStoredTypeOnlyWhenItIsApplied(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "x")
	w := &Write{Partition: "p", Keys: names(1), Columns: columns(1, schema.Float32, nil, "x"), Update: true}
	_, err := f.Check(w)
	require.NoError(t, err, "a merge function may turn float32 into what is stored")
	_, err = f.Apply(w, []uint32{0})
	requireError(t, err, tqerr.SchemaMismatch)
	w.Columns = ints(1, "x")
	a, err := f.Apply(w, []uint32{0})
	require.NoError(t, err)
	require.Equal(t, "update", a.Events[0].Kind)
}

func TestUpdateKeepsTagsAndConsumption(t *testing.T) {
	f := newFixture(t, Options{})
	tags := pack(t, map[string]any{"n": 1})
	f.must(&Write{Partition: "p", Keys: names(2), Columns: ints(2, "x"), Tags: [][]byte{tags, tags}})
	f.fetch(1, "train", "x")
	a := f.must(&Write{Partition: "p", Keys: names(2), Columns: []schema.Column{ragged("x", 4, 6)}, Update: true})
	require.Equal(t, [][]byte{tags, tags}, a.Tags)
	require.Equal(t, []byte{1, 0}, f.Consumption("p", "train").Cells)
	require.Equal(t, []int64{4, 6}, f.Lookup("p", names(2)).Columns[0].Lengths)
}

func (f *fixture) shapesOf(field string, keys ...string) [][]int64 {
	f.t.Helper()
	s, err := f.SelectKeys("p", keys, nil, true)
	require.NoError(f.t, err)
	d, err := f.Describe("p", s.Samples, []string{field})
	require.NoError(f.t, err)
	require.NoError(f.t, d.Columns[0].Validate())
	out := make([][]int64, len(keys))
	for i := range out {
		out[i] = d.Columns[0].RowShape(i)
	}
	return out
}

func TestShapesOfRowsThatDeviate(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(3), "x")
	f.must(&Write{Partition: "p", Keys: []string{"key1"}, Columns: columns(1, schema.Int64, []int64{5, 3}, "x")})
	f.must(&Write{Partition: "p", Keys: []string{"key2"}, Columns: []schema.Column{ragged("x", 9)}})
	require.Equal(t, [][]int64{{2}, {5, 3}, {9}}, f.shapesOf("x", names(3)...))
	require.Equal(t, schema.Free, f.Lookup("p", names(3)).Columns[0].Form)
	require.Equal(t, schema.Varying, f.Lookup("p", []string{"key2", "key0"}).Columns[0].Form)
	require.Equal(t, schema.Uniform, f.Lookup("p", []string{"key2"}).Columns[0].Form)
}

func TestRowsThatAgreeAgainHaveOneShape(t *testing.T) {
	f := newFixture(t, Options{})
	f.must(&Write{Partition: "p", Keys: names(4), Columns: []schema.Column{ragged("x", 3, 7, 7, 5)}})
	shapes := &f.partitions["p"].fields["x"].shapes
	require.Equal(t, 3, shapes.deviating)
	f.ClearFields("p", []string{"key3"}, nil, []string{"x"})
	f.clear("key0")
	require.Zero(t, shapes.deviating)
	require.Equal(t, [][]int64{{7}, {7}}, f.shapesOf("x", "key1", "key2"))
	f.must(&Write{Partition: "p", Keys: []string{"key1"}, Columns: []schema.Column{ragged("x", 8)}})
	f.must(&Write{Partition: "p", Keys: []string{"key2"}, Columns: []schema.Column{ragged("x", 8)}})
	require.Zero(t, shapes.deviating)
	require.Equal(t, [][]int64{{8}, {8}}, f.shapesOf("x", "key1", "key2"))
}

func TestRankZeroEmptyAndMissingRows(t *testing.T) {
	f := newFixture(t, Options{})
	f.must(&Write{Partition: "p", Keys: names(1), Columns: columns(1, schema.Int64, nil, "x")})
	f.must(&Write{Partition: "p", Keys: []string{"b"}, Columns: columns(1, schema.Int64, []int64{0}, "x")})
	f.must(&Write{Partition: "p", Keys: []string{"c"}})
	require.Equal(t, [][]int64{{}, {0}, {}}, func() [][]int64 {
		d, err := f.ForceFetch("p", []string{"x"})
		require.NoError(t, err)
		require.Equal(t, []byte{1, 1, 0}, d.Status)
		return [][]int64{d.Columns[0].RowShape(0), d.Columns[0].RowShape(1), d.Columns[0].RowShape(2)}
	}())
}

func TestRaggedDimensionIsKeptWhileRowsAgreeOnIt(t *testing.T) {
	f := newFixture(t, Options{})
	col := columns(1, schema.Int64, []int64{4, 7}, "x")[0]
	col.Ragged = 2
	f.must(&Write{Partition: "p", Keys: []string{"a"}, Columns: []schema.Column{col}})
	require.Equal(t, uint8(2), f.Lookup("p", []string{"a"}).Columns[0].Ragged)
	f.put([]string{"b"}, "x")
	require.Equal(t, uint8(1), f.Lookup("p", []string{"a"}).Columns[0].Ragged)
}

// Between Check and Apply others may write and clear.
func TestApplyFindsWhatHasChangedSinceCheck(t *testing.T) {
	for name, test := range map[string]struct {
		existing []string
		keys     []string
		between  func(f *fixture)
		want     []int64
	}{
		"nothing":                    {[]string{"a"}, []string{"b", "a"}, func(*fixture) {}, []int64{1, 0}},
		"a key was made":             {[]string{"a"}, []string{"b", "c"}, func(f *fixture) { f.put([]string{"c"}, "x") }, []int64{2, 1}},
		"its partition was made":     {nil, []string{"b", "c"}, func(f *fixture) { f.put([]string{"c"}, "x") }, []int64{1, 0}},
		"a key was cleared":          {[]string{"a", "b"}, []string{"a", "b"}, func(f *fixture) { f.FinishClear(f.StartClearKeys("p", []string{"a"})) }, []int64{0, 1}},
		"a key was made anew":        {[]string{"a", "b"}, []string{"a"}, remade, []int64{1}},
		"another partition was made": {[]string{"a"}, []string{"a"}, func(f *fixture) { f.must(&Write{Partition: "q", Keys: []string{"a"}}) }, []int64{0}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{})
			if test.existing != nil {
				f.put(test.existing, "x")
			}
			w := &Write{Partition: "p", Keys: test.keys, Columns: ints(len(test.keys), "x")}
			units, err := f.Check(w)
			require.NoError(t, err)
			for i := range units {
				units[i] = 0
			}
			test.between(f)
			a, err := f.Apply(w, units)
			require.NoError(t, err)
			require.Equal(t, test.want, indexes(a.Samples))
			require.Equal(t, test.want, indexes(f.put(test.keys, "x").Samples), "the keys lead to the samples that were written")
		})
	}
}

// remade gives key a another index.
func remade(f *fixture) {
	f.FinishClear(f.StartClearPartition("p"))
	f.put([]string{"c", "a"}, "x")
}

func TestAnUpdateOfAKeyThatWasClearedSinceCheckIsRefused(t *testing.T) {
	f := newFixture(t, Options{})
	f.put([]string{"a", "b"}, "x")
	w := &Write{Partition: "p", Keys: []string{"a"}, Columns: ints(1, "x"), Update: true}
	units, err := f.Check(w)
	require.NoError(t, err)
	f.FinishClear(f.StartClearKeys("p", []string{"a"}))
	_, err = f.Apply(w, units)
	requireError(t, err, tqerr.NotFound, `"a"`)
}
