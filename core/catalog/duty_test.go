package catalog

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// peopled is a catalog with samples on two units in turn.
func peopled(t *testing.T, n int) (c *Catalog, samples []schema.Sample, units []uint32) {
	t.Helper()
	c = New(Options{})
	c.AddUnit(1, "a")
	c.AddUnit(2, "b")
	units = make([]uint32, n)
	for i := range units {
		units[i] = uint32(1 + i%2)
	}
	applied, err := c.Apply(&Write{Partition: "p", Insert: n}, units)
	require.NoError(t, err)
	require.NoError(t, c.Verify())
	return c, applied.Samples, units
}

func TestOnlyActiveUnitsTakeSamples(t *testing.T) {
	rooms := []Room{{Unit: 1, Free: 1 << 20}, {Unit: 2, Free: 1 << 10}}
	for _, duty := range []Duty{Cordoned, Draining, Drained} {
		c, samples, _ := peopled(t, 4)
		epoch := c.Epoch()
		c.SetDuty(1, duty)
		require.Greater(t, c.Epoch(), epoch)
		units := []uint32{NoUnit, NoUnit, 1}
		require.NoError(t, c.Place(units, "a", func(int) int64 { return 1 }, rooms))
		require.Equal(t, []uint32{2, 2, 1}, units, "%s: what lives there stays there", duty)
		_, err := c.Apply(&Write{Partition: "p", Insert: 1}, []uint32{1})
		require.Equal(t, tqerr.Conflict, tqerr.CodeOf(err))
		_, err = c.Apply(&Write{Partition: "p", Samples: samples[:1]}, []uint32{1})
		require.NoError(t, err)
		c.SetDuty(2, duty)
		err = c.Place([]uint32{NoUnit}, "", func(int) int64 { return 1 }, rooms)
		require.Equal(t, tqerr.Unavailable, tqerr.CodeOf(err))
		again, err := Restore(Options{}, c.Image())
		require.NoError(t, err)
		require.Equal(t, []Duty{duty, duty}, []Duty{again.Duty(1), again.Duty(2)})
		c.SetDuty(1, Active)
		_, err = c.Apply(&Write{Partition: "p", Insert: 1}, []uint32{1})
		require.NoError(t, err)
		require.NoError(t, c.Verify())
	}
}

func TestRelocate(t *testing.T) {
	c, samples, _ := peopled(t, 10)
	c.LimitUnit(2, 7)
	require.NoError(t, c.Relocate("p", []schema.Sample{samples[0], samples[4]}, 1, 2))
	require.NoError(t, c.Verify())
	require.Equal(t, []int64{3, 7}, []int64{c.SamplesOn(1), c.SamplesOn(2)})
	require.Len(t, c.GroupsOn(2, "p", samples), 1)
	require.Len(t, c.GroupsOn(2, "p", samples)[0].Samples, 7)
	require.Empty(t, c.GroupsOn(1, "q", samples))
	refused := func(code tqerr.Code, list []schema.Sample, from, to uint32) {
		t.Helper()
		before := c.Image()
		require.Equal(t, code, tqerr.CodeOf(c.Relocate("p", list, from, to)))
		require.Equal(t, before, c.Image(), "nothing has changed")
	}
	refused(tqerr.CapacityExceeded, samples[2:3], 1, 2)
	c.LimitUnit(2, 0)
	refused(tqerr.Conflict, samples[0:1], 1, 2)
	refused(tqerr.Conflict, samples[1:3], 2, 1)
	refused(tqerr.Conflict, []schema.Sample{{Index: samples[1].Index, Generation: 9}}, 2, 1)
	refused(tqerr.Conflict, samples[1:2], 2, 3)
	c.SetDuty(1, Draining)
	refused(tqerr.Conflict, samples[1:2], 2, 1)
	c.SetDuty(1, Active)
	cl := c.StartClearSamples("p", samples[1:2])
	refused(tqerr.Conflict, samples[1:2], 2, 1)
	c.FinishClear(cl)
	require.NoError(t, c.Relocate("p", samples[3:4], 2, 1))
	require.NoError(t, c.Verify())
}

// A walk finds each sample of the unit once, in steps that look at so many indexes at most.
func TestResidents(t *testing.T) {
	const n = 3*residentWords*64 + 100
	c, samples, units := peopled(t, n)
	for _, i := range []int{0, 63, 64, n - 1} {
		if units[i] == 1 {
			require.NoError(t, c.Relocate("p", samples[i:i+1], 1, 2))
		}
	}
	_, err := c.Apply(&Write{Partition: "q", Insert: 3}, []uint32{2, 1, 2})
	require.NoError(t, err)
	found, steps, last := map[string]int{}, 0, int64(-1)
	for at, end := (Cursor{}), false; !end; steps++ {
		var partition string
		var some []schema.Sample
		partition, some, at, end = c.Residents(2, at, 1000)
		require.LessOrEqual(t, len(some), 1000)
		found[partition] += len(some)
		for _, s := range some {
			require.Greater(t, s.Index, last)
			last = s.Index
		}
	}
	require.EqualValues(t, c.SamplesOn(2), found["p"]+found["q"])
	require.Equal(t, 2, found["q"])
	require.Less(t, steps, n/2/1000+8)
	require.NoError(t, c.Relocate("p", c.GroupsOn(2, "p", samples)[0].Samples[:1], 2, 1))

	empty, steps := 0, 0
	for at, end := (Cursor{}), false; !end; steps++ { // nobody lives there: as many steps as the bound makes
		var some []schema.Sample
		_, some, at, end = c.Residents(9, at, 1000)
		empty += len(some)
	}
	require.Zero(t, empty)
	require.GreaterOrEqual(t, steps, 4)
}

func TestChosen(t *testing.T) {
	c := New(Options{})
	c.AddUnit(1, "")
	_, err := c.Apply(&Write{Partition: "p", Keys: []string{"a", "b"}}, []uint32{1, 1})
	require.NoError(t, err)
	all, err := c.Chosen("p", nil)
	require.NoError(t, err)
	require.Len(t, all, 2)
	one, err := c.Chosen("p", []string{"b"})
	require.NoError(t, err)
	require.Equal(t, all[1:], one)
	twice, err := c.Chosen("p", []string{"b", "a", "b"})
	require.NoError(t, err)
	require.Equal(t, all, twice)
	_, err = c.Chosen("p", []string{"b", "c"})
	require.ErrorContains(t, err, `"c"`)
	_, err = c.Chosen("q", nil)
	require.Equal(t, tqerr.NotFound, tqerr.CodeOf(err))
}
