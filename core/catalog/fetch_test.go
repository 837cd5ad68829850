package catalog

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func TestFetchHandsOutReadySamplesOncePerTask(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 5, "x")
	require.Equal(t, []int64{0, 1}, f.fetch(2, "train", "x"))
	require.Equal(t, []int64{2, 3, 4}, f.fetch(3, "train", "x"))
	require.Nil(t, f.fetch(1, "train", "x"))
	require.Equal(t, []int64{0, 1, 2, 3}, f.fetch(4, "other", "x"))
}

func TestFetchTakesOnlySamplesWithEveryField(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 4, "x")
	f.must(&Write{Partition: "p", Samples: at(3, 1), Columns: ints(2, "y")})
	require.Nil(t, f.fetch(3, "t", "x", "y"))
	require.Nil(t, f.fetch(1, "t", "x", "unknown"))
	require.Equal(t, []int64{1, 3}, f.fetch(2, "t", "x", "y"))
	require.Equal(t, []int64{0, 2}, f.fetch(2, "t"), "without fields every sample is ready")
}

func TestFetchDescribesWhatItHandsOut(t *testing.T) {
	f := newFixture(t, Options{})
	tags := pack(t, map[string]any{"n": 1})
	f.must(&Write{Partition: "p", Keys: names(2), Columns: append(ints(2, "x"), ragged("y", 3, 4)), Tags: [][]byte{tags, nil}})
	d, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"y", "x", "y"}, N: 2, Task: "t"}, &first{})
	require.NoError(t, err)
	x := ints(2, "x")[0]
	y := ragged("y", 3, 4)
	y.Shape = d.Columns[0].Shape // the varying dimension of Shape means nothing
	taken := Taken{Partition: "p", Task: "t", Samples: at(0, 1)}
	require.Equal(t, &Described{at(0, 1), []schema.Column{y, x}, []byte{1, 1}, [][]byte{tags, {0x80}}, false, taken}, d)
}

func TestOnlyWhatIsStillTakenIsReturnable(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "x")
	d, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 2, Task: "t"}, &first{})
	require.NoError(t, err)
	require.Equal(t, at(0, 1), f.Returnable(d.Taken))
	f.GiveBack("p", "t", f.Returnable(d.Taken)[:1])
	require.Equal(t, []byte{0, 1, 0}, f.Consumption("p", "t").Cells)
	f.ResetConsumption("p", "t")
	require.Empty(t, f.Returnable(d.Taken), "the task has started over")
	require.Empty(t, f.Returnable(Taken{Partition: "p", Task: "other", Samples: at(0)}))
	f.GiveBack("nowhere", "t", at(0))
}

func TestTooFewSamplesConsumeNothingAndDoNotAskTheSampler(t *testing.T) {
	f := newFixture(t, Options{})
	s := &first{}
	for _, partition := range []string{"p", "nowhere"} {
		d, err := f.Fetch(FetchRequest{Partition: partition, Fields: []string{"x"}, N: 3, Task: "t"}, s)
		require.NoError(t, err)
		require.Nil(t, d)
		f.insert("p", 2, "x")
	}
	require.Zero(t, s.asked)
	require.NotContains(t, f.Consumption("p", "t").Cells, byte(1))
	require.Equal(t, []string{"p"}, f.Partitions())
}

func TestFetchNeedsATaskAndANumber(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 2, "x")
	_, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 1}, &first{})
	requireError(t, err, tqerr.InvalidArgument, "task_name")
	for _, n := range []int{0, -1} {
		_, err = f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: n, Task: "t"}, &first{})
		requireError(t, err, tqerr.InvalidArgument, "batch_size")
	}
}

func TestARememberedAnswerComesWithoutWhatWasCleared(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "x")
	f.fetch(3, "t", "x")
	f.FinishClear(f.StartClearSamples("p", at(1)))
	d, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 3, Task: "t"}, &first{cached: []int64{2, 1, 0, 99, -4}})
	require.NoError(t, err)
	require.Equal(t, at(2, 0), d.Samples)
}

func TestASamplerThatFailsConsumesNothing(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "x")
	_, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 3, Task: "t"}, &first{err: errors.New("sampler bug"), cached: []int64{0}})
	require.ErrorContains(t, err, "sampler bug")
	d, err := f.Fetch(FetchRequest{Partition: "p", Fields: []string{"x"}, N: 3, Task: "t"}, &first{cached: []int64{}})
	require.NoError(t, err)
	require.Nil(t, d)
	require.Equal(t, []byte{0, 0, 0}, f.Consumption("p", "t").Cells)
}

func TestReadyIsAscendingAndHasTags(t *testing.T) {
	f := newFixture(t, Options{})
	tags := pack(t, map[string]any{"n": 1})
	f.must(&Write{Partition: "p", Keys: names(3), Columns: ints(3, "x"), Tags: [][]byte{nil, tags, nil}})
	f.fetch(1, "t", "x")
	v := f.ready(f.partitions["p"], []string{"x"}, "t")
	require.Equal(t, 2, v.Len())
	require.Equal(t, []int64{1, 2}, v.All())
	require.Equal(t, []int64{1}, v.First(1))
	require.Equal(t, []int64{1, 2}, v.First(9))
	require.Empty(t, v.First(-1))
	require.Equal(t, tags, v.Tags(1))
}

func TestProductionHasAColumnPerFieldInRegistrationOrder(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "zeta")
	f.must(&Write{Partition: "p", Samples: at(2), Columns: ints(1, "alpha")})
	require.Equal(t, &Status{span(0, 3), 2, []byte{1, 0, 1, 0, 1, 1}}, f.Production("p", []string{"alpha", "zeta", "alpha"}))
	require.Nil(t, f.Production("p", []string{"alpha", "unknown"}))
	require.Nil(t, f.Production("p", nil))
	require.Nil(t, f.Production("nowhere", []string{"alpha"}))
}

func TestForceFetchMarksOnlySamplesThatHaveTheKnownFields(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "x")
	f.must(&Write{Partition: "p", Samples: at(1), Columns: ints(1, "y")})
	d, err := f.ForceFetch("p", []string{"x", "y", "unknown"})
	require.NoError(t, err)
	require.Equal(t, []byte{0, 1, 0}, d.Status)
	require.Equal(t, []string{"x", "y"}, d.fieldNames())
	d, err = f.ForceFetch("p", []string{"unknown"})
	require.NoError(t, err)
	require.Equal(t, []byte{0, 0, 0}, d.Status)
	f.ClearFields("p", nil, at(1), []string{"y"})
	d, err = f.ForceFetch("p", []string{"y"})
	require.NoError(t, err)
	require.Equal(t, []schema.Column{{Field: "y", Rows: 3}}, d.Columns, "registered, but without a schema")
}

func TestResetConsumption(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 2, "x")
	for _, task := range []string{"train", "eval"} {
		f.fetch(2, task, "x")
	}
	require.True(t, f.ResetConsumption("p", "train"))
	require.Equal(t, []byte{0, 0}, f.Consumption("p", "train").Cells)
	require.Equal(t, []byte{1, 1}, f.Consumption("p", "eval").Cells)
	require.True(t, f.ResetConsumption("p", ""))
	require.Equal(t, []byte{0, 0}, f.Consumption("p", "eval").Cells)
	require.False(t, f.ResetConsumption("nowhere", ""))
}

func TestSummary(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 9})
	f.put(names(2), "y", "x")
	f.insert("p", 1, "z")
	f.fetch(1, "train", "x")
	f.fetch(2, "eval", "x")
	f.ClearFields("p", nil, at(2), []string{"z"})
	f.EnsurePartition("q")
	require.Equal(t, []Summary{
		{"p", 3, 2, 2, []string{"x", "y"}, []string{"eval", "train"}, []int64{2, 1}},
		{"q", 0, 0, 0, []string{}, nil, nil},
	}, f.Summary())
}

func TestSamplesThatHaveAField(t *testing.T) {
	f := newFixture(t, Options{})
	produced := func() int { return f.Summary()[0].Produced }
	f.put(names(2), "x")
	f.put([]string{"bare"})
	require.Equal(t, 2, produced(), "a key alone is no field")
	f.put(names(3), "y")
	require.Equal(t, 3, produced(), "two fields count once")
	f.ClearFields("p", names(1), nil, []string{"x"})
	require.Equal(t, 3, produced())
	f.ClearFields("p", names(1), nil, []string{"y"})
	require.Equal(t, 2, produced())
}

func TestIndexCounts(t *testing.T) {
	f := newFixture(t, Options{PreAllocate: 4})
	counts := func() []int64 {
		allocated, reusable := f.Indexes()
		return []int64{allocated, reusable}
	}
	require.Equal(t, []int64{0, 0}, counts())
	f.EnsurePartition("p")
	require.Equal(t, []int64{4, 0}, counts(), "reserved ones are in use")
	f.put(names(6), "x")
	require.Equal(t, []int64{6, 0}, counts())
	f.FinishClear(f.StartClearKeys("p", names(2)))
	require.Equal(t, []int64{4, 2}, counts())
	f.put([]string{"again"}, "x")
	require.Equal(t, []int64{5, 1}, counts())
}
