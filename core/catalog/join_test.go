package catalog

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/tqerr"
)

func TestAUnitThatJoinsWhileEverySlotIsTakenGetsSamplesToo(t *testing.T) {
	c := New(Options{})
	c.AddUnit(0, "h")
	for i := range numSlots {
		_, err := c.Apply(&Write{Partition: "p", Keys: []string{fmt.Sprint(i)}}, []uint32{0})
		require.NoError(t, err)
	}
	c.AddUnit(1, "h")
	require.Len(t, c.units[1].slots, 1)
	units, err := place(c, 2, "", 1, Room{0, 0, 1}, Room{1, 100, 0})
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 1}, units)
	_, err = c.Apply(&Write{Partition: "p", Keys: []string{"a", "b"}, Columns: ints(2, "x")}, units)
	require.NoError(t, err)
	require.Equal(t, int64(2), c.SamplesOn(1))
	require.NoError(t, c.Verify())
}

func TestUnitsHaveLimitsOfTheirOwn(t *testing.T) {
	f := newFixture(t, Options{})
	f.LimitUnit(0, 3)
	f.LimitUnit(1, 1)
	rooms := []Room{{0, math.MaxInt64, 0}, {1, math.MaxInt64, 1}}
	units, err := place(f.Catalog, 4, "", 1, rooms...)
	require.NoError(t, err)
	require.Equal(t, []uint32{0, 0, 0, 1}, units)
	_, err = place(f.Catalog, 5, "", 1, rooms...)
	requireError(t, err, tqerr.CapacityExceeded, "0 existing + 5 new samples > limit 4 (of 2 units)")
	f.LimitUnit(1, 0)
	_, err = place(f.Catalog, 5000, "", 1, rooms...)
	require.NoError(t, err)
}

// A unit that is gone makes a clear fail once for the samples that were still seen; those are told apart from the others.
func TestAClearingTellsFreshSamplesAndThoseOfSomeUnits(t *testing.T) {
	f := newFixture(t, Options{})
	for i, key := range []string{"a", "b", "c"} {
		_, err := f.Apply(&Write{Partition: "p", Keys: []string{key}, Columns: ints(1, "x")}, []uint32{uint32(i % 2)})
		require.NoError(t, err)
	}
	require.Equal(t, 1, f.StartClearKeys("p", []string{"b"}).Fresh)
	cl := f.StartClearKeys("p", []string{"b", "a", "c"})
	require.Equal(t, 2, cl.Fresh)
	require.Equal(t, []uint32{0, 0, 1}, cl.Units)
	f.FinishClear(cl.Without(map[uint32]bool{1: true}))
	require.Equal(t, []int64{0, 1}, []int64{f.SamplesOn(0), f.SamplesOn(1)})
	whole := f.StartClearPartition("p")
	require.Zero(t, whole.Fresh)
	f.FinishClear(whole.Without(map[uint32]bool{1: true}))
	require.Equal(t, []string{"p"}, f.Partitions(), "it stays while a sample waits for its unit")
	f.FinishClear(f.StartClearPartition("p"))
	require.Empty(t, f.Partitions())
	require.Equal(t, int64(0), f.SamplesOn(1))
}
