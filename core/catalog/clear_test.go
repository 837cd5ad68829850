package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

func TestClearHidesAtOnceAndReleasesWhenTheUnitsAreDone(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(3), "x")
	f.fetch(3, "train", "x")
	cl := f.StartClearKeys("p", []string{"key2", "absent", "key0", "key2"})
	require.Equal(t, at(2, 0), cl.Samples)
	require.Equal(t, []uint32{0, 0}, cl.Units)
	require.Nil(t, cl.Fields)
	require.Equal(t, []Event{{Kind: "clear", Key: "key2"}, {Kind: "clear", Key: "key0"}}, cl.Events)
	require.Equal(t, map[string]any{"key1": map[string]any{}}, f.list()["p"])
	require.Equal(t, &Status{[]int64{1}, 1, []byte{1}}, f.Consumption("p", "train"))
	require.Equal(t, &Status{[]int64{1}, 1, []byte{1}}, f.Production("p", []string{"x"}))
	require.Equal(t, []int64{3}, f.insert("p", 1), "indexes that are being cleared are not free")
	require.NoError(t, f.Verify())

	f.FinishClear(cl)
	require.Equal(t, []int64{0, 2}, f.insert("p", 2))
}

func TestAClearWhoseUnitFailedIsFinishedByTheNextOne(t *testing.T) {
	f := newFixture(t, Options{})
	old := f.put([]string{"k"}, "x").Samples
	for name, again := range map[string]func() *Clearing{
		"by key":       func() *Clearing { return f.StartClearKeys("p", []string{"k"}) },
		"by sample":    func() *Clearing { return f.StartClearSamples("p", old) },
		"by partition": func() *Clearing { return f.StartClearPartition("p") },
	} {
		t.Run(name, func(t *testing.T) {
			cl := again()
			require.Equal(t, old, cl.Samples)
			require.NoError(t, f.Verify())
		})
	}
	now := f.put([]string{"k"}, "x").Samples
	cl := f.StartClearKeys("p", []string{"k"})
	require.ElementsMatch(t, append(old, now...), cl.Samples)
	f.FinishClear(cl)
	require.Empty(t, f.StartClearKeys("p", []string{"k"}).Samples)
	require.Zero(t, f.SamplesOn(0))
}

func TestFinishingTwiceOrLateReleasesNothingElse(t *testing.T) {
	f := newFixture(t, Options{})
	f.put([]string{"k"}, "x")
	one, two := f.StartClearKeys("p", []string{"k"}), f.StartClearKeys("p", []string{"k"})
	f.FinishClear(one)
	f.put([]string{"k"}, "x")
	f.FinishClear(two)
	f.FinishClear(&Clearing{Partition: "nowhere", Samples: at(0)})
	require.Equal(t, map[string]any{"k": map[string]any{}}, f.list()["p"])
	started := f.StartClearKeys("p", []string{"k"})
	f.FinishClear(one)
	require.NotEqual(t, one.Samples, started.Samples)
	require.Equal(t, int64(1), f.SamplesOn(0))
}

func TestClearsOfWhatIsNotThereAreSilent(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(1), "x")
	for _, cl := range []*Clearing{
		f.StartClearKeys("nowhere", names(1)), f.StartClearKeys("p", []string{"absent"}), f.StartClearKeys("p", nil),
		f.StartClearSamples("nowhere", at(0)), f.StartClearSamples("p", at(9)), f.StartClearPartition("nowhere"),
		f.ClearFields("nowhere", names(1), nil, []string{"x"}), f.ClearFields("p", []string{"absent"}, at(9), []string{"x"}),
		f.ClearFields("p", names(1), nil, []string{"unknown"}), f.ClearFields("p", names(1), nil, nil), f.ClearFields("p", nil, nil, []string{"x"}),
	} {
		require.Empty(t, cl.Samples)
		require.Empty(t, cl.Events)
		f.FinishClear(cl)
	}
	require.Equal(t, []string{"x"}, f.put(names(1)).Fields)
}

func TestAPartitionStaysListedUntilItIsClearedItself(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "x")
	f.clear(names(2)...)
	require.Equal(t, []string{"p"}, f.Partitions())
	require.NotNil(t, f.Production("p", []string{"x"}))
	f.FinishClear(f.StartClearPartition("p"))
	require.Empty(t, f.Partitions())
	require.Nil(t, f.Consumption("p", "t"))
	require.Nil(t, f.Production("p", []string{"x"}))
}

func TestClearOfAPartitionForgetsEverythingAndReleasesReservedIndexes(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 4})
	f.EnsurePartition("first")
	f.put(names(2), "x")
	f.fetch(2, "t", "x")
	cl := f.StartClearPartition("p")
	require.Len(t, cl.Samples, 2)
	require.Nil(t, f.Production("p", []string{"x"}))
	f.FinishClear(cl)
	require.Equal(t, []string{"first"}, f.Partitions())
	require.Equal(t, 4, f.indexes.Used())
	f.put(names(2), "x")
	require.Equal(t, []byte{0, 0, 0, 0}, f.Consumption("p", "t").Cells)
}

func TestAPartitionThatIsWrittenWhileItIsClearedStays(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(2), "x")
	cl := f.StartClearPartition("p")
	f.put([]string{"late"}, "y")
	f.FinishClear(cl)
	require.Equal(t, map[string]map[string]any{"p": {"late": map[string]any{}}}, f.list())
	require.Equal(t, []string{"y"}, f.Lookup("p", []string{"late"}).fieldNames())
}

func (d *Described) fieldNames() []string {
	var out []string
	for _, c := range d.Columns {
		out = append(out, c.Field)
	}
	return out
}

func TestClearingFieldsHitsOnlyTheCellsThatExist(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(3), "x", "x2", "score")
	f.put([]string{"key2"}, "extra")
	f.fetch(3, "train", "score")
	cl := f.ClearFields("p", []string{"key0", "key2", "key0"}, at(2, 1), []string{"extra", "score", "unknown"})
	require.Equal(t, at(0, 2, 1), cl.Samples)
	require.Equal(t, []uint32{0, 0, 0}, cl.Units)
	require.Equal(t, []string{"extra", "score"}, cl.Fields)
	require.Equal(t, []Event{
		{Kind: "clear", Key: "key0", Fields: []string{"score"}},
		{Kind: "clear", Key: "key2", Fields: []string{"extra", "score"}},
		{Kind: "clear", Key: "key1", Fields: []string{"score"}},
	}, cl.Events)
	f.FinishClear(cl)
	require.Equal(t, []string{"x", "x2"}, f.Lookup("p", []string{"key2"}).fieldNames())
	require.Equal(t, []byte{1, 1, 1}, f.Consumption("p", "train").Cells)
	require.Len(t, f.list()["p"], 3)
	require.Equal(t, &Status{span(0, 3), 1, []byte{0, 0, 0}}, f.Production("p", []string{"score"}))

	f.put(names(3), "score")
	require.Nil(t, f.fetch(1, "train", "score"), "what was consumed is not handed out again")
}

func TestAKeyWithoutAnyFieldLeftIsListedAndNotReady(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(1), "x")
	f.ClearFields("p", names(1), nil, []string{"x"})
	require.Len(t, f.list()["p"], 1)
	_, err := f.SelectKeys("p", names(1), nil, false)
	requireError(t, err, tqerr.InvalidArgument, "ready")
	require.Len(t, f.StartClearKeys("p", names(1)).Samples, 1)
}

func TestFieldsOfAReservedOrClearingSampleAreNotThere(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 2})
	f.put(names(1), "x")
	require.Empty(t, f.ClearFields("p", nil, at(1), []string{"x"}).Samples)
	f.StartClearKeys("p", names(1))
	require.Empty(t, f.ClearFields("p", names(1), at(0), []string{"x"}).Samples)
}
