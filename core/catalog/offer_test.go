package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

var offered = FetchRequest{Partition: "p", Fields: []string{"x"}, N: 2, Task: "t"}

func (f *fixture) offer() *Offer {
	f.t.Helper()
	o, err := f.Offer(offered)
	require.NoError(f.t, err)
	return o
}

func (f *fixture) deliver(o *Offer, sampled, consumed []int64, remembered bool) ([]int64, error) {
	d, err := f.Deliver(offered, "S", o, Pick{Sampled: sampled, Consumed: consumed}, remembered, nil)
	if d == nil {
		return nil, err
	}
	return indexes(d.Samples), err
}

func TestDeliverHandsOutInTheOrderOfThePick(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 4, "x")
	f.must(&Write{Partition: "p", Insert: 1})
	o := f.offer()
	require.Equal(t, span(0, 4), o.Ready)
	got, err := f.deliver(o, []int64{3, 0}, []int64{3, 4}, false)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 0}, got)
	require.Equal(t, []byte{0, 0, 0, 1, 1}, f.Consumption("p", "t").Cells)
}

func TestDeliverRefusesWhatNoSamplerMayPick(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 3, "x")
	f.insert("q", 2, "x")
	o := f.offer()
	for text, pick := range map[string]Pick{
		"sample 1 twice":         {Sampled: []int64{1, 0, 1}},
		"sample 4, which is not": {Sampled: []int64{0, 4}},
		"sample -1, which":       {Sampled: []int64{-1}},
		"consumed sample 3":      {Sampled: []int64{0}, Consumed: []int64{0, 3}},
	} {
		_, err := f.Deliver(offered, "S", o, pick, false, nil)
		requireError(t, err, tqerr.Failed, "S ", text)
	}
	require.Equal(t, []byte{0, 0, 0}, f.Consumption("p", "t").Cells)
}

func TestDeliverLeavesOutWhatWasClearedAndRefusesWhatWasConsumed(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 4, "x")
	o := f.offer()
	f.clearSamples("p", 1)
	f.fetch(1, "t", "x") // 0
	_, err := f.deliver(o, []int64{0, 1}, nil, false)
	requireError(t, err, tqerr.Conflict, "sample 0")
	got, err := f.deliver(o, []int64{1, 2}, []int64{1, 2}, false)
	require.NoError(t, err)
	require.Equal(t, []int64{2}, got)
	got, err = f.deliver(o, []int64{0, 2, 9}, []int64{0, 2, 9}, true)
	require.NoError(t, err)
	require.Equal(t, []int64{0, 2}, got, "an answer that is given again")
	got, err = f.deliver(o, nil, []int64{3}, false)
	require.NoError(t, err)
	require.Nil(t, got)
	require.Equal(t, []byte{1, 1, 0}, f.Consumption("p", "t").Cells)
}

func TestOfferOfNothing(t *testing.T) {
	f := newFixture(t, Options{})
	require.Nil(t, f.offer())
	got, err := f.deliver(&Offer{}, []int64{0}, nil, false)
	require.NoError(t, err)
	require.Nil(t, got)
	_, err = f.Offer(FetchRequest{Partition: "p", N: 1})
	requireError(t, err, tqerr.InvalidArgument, "task_name")
	require.False(t, f.Enough(offered))
	f.insert("p", 1, "x")
	require.False(t, f.Enough(offered))
	f.insert("p", 1, "x")
	require.True(t, f.Enough(offered))
}

// Production is complete from the last put on until samples come after the last one was cleared.
func TestCompleteProduction(t *testing.T) {
	f := newFixture(t, Options{})
	stream := func() [2]bool {
		completed, drained := f.Stream("p", "t")
		return [2]bool{completed, drained}
	}
	require.Equal(t, [2]bool{}, stream())
	f.insert("p", 2, "x")
	require.Equal(t, [2]bool{}, stream())
	f.must(&Write{Partition: "p", Insert: 1, Last: true})
	require.Equal(t, [2]bool{true, false}, stream())
	require.False(t, f.view("p").Final(), "sample 2 may get the field")
	f.must(&Write{Partition: "p", Samples: at(2), Columns: ints(1, "x")})
	require.True(t, f.view("p").Final())
	require.Equal(t, []int64{0, 1, 2}, f.fetch(3, "t", "x"))
	require.Equal(t, [2]bool{true, true}, stream())
	f.clearSamples("p", 0, 1, 2)
	require.Equal(t, [2]bool{true, true}, stream())
	f.insert("p", 1, "x")
	require.Equal(t, [2]bool{}, stream())
	f.must(&Write{Partition: "p", Insert: 1, Last: true})
	f.FinishClear(f.StartClearPartition("p"))
	require.Equal(t, [2]bool{}, stream())
}
