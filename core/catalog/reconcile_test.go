package catalog

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// onUnits writes int64 columns under keys of partition "p", each row on the unit that is given.
func (f *fixture) onUnits(keys []string, units []uint32, cols []schema.Column) []schema.Sample {
	f.t.Helper()
	a, err := f.Apply(&Write{Partition: "p", Keys: keys, Columns: cols}, units)
	require.NoError(f.t, err)
	return a.Samples
}

func stock(samples []schema.Sample, cols []schema.Column) (out []schema.Stock) {
	for _, col := range cols {
		out = append(out, schema.Stock{Partition: "p", Column: col, Samples: samples})
	}
	return out
}

func (f *fixture) selects(keys []string, fields ...string) error {
	_, err := f.SelectKeys("p", keys, fields, false)
	return err
}

func TestWhatTheUnitHasIsKeptAndTheRestIsLost(t *testing.T) {
	f := newFixture(t, Options{})
	s := f.onUnits(names(4), []uint32{0, 0, 0, 1}, ints(4, "x", "y"))
	f.fetch(4, "train", "x")
	r := f.Reconcile(0, append(stock(s[:2], ints(2, "x")), stock(s[1:3], ints(2, "y"))...))
	require.Equal(t, 4, r.Kept)
	require.Empty(t, r.Unknown)
	require.Equal(t, []Cells{{"p", "x", s[2:3]}, {"p", "y", s[:1]}}, r.Lost)
	require.Equal(t, []string{"p"}, r.Changed)
	require.Equal(t, []Event{{EventLost, "key0", []string{"y"}, nil}, {EventLost, "key2", []string{"x"}, nil}}, r.Events["p"])
	require.Equal(t, []byte{1, 0, 1, 1, 0, 1, 1, 1}, f.Production("p", []string{"x", "y"}).Cells)
	require.Equal(t, []byte{1, 1, 1, 1}, f.Consumption("p", "train").Cells)
	require.Equal(t, map[uint32]int64{0: 2}, f.LostOn())
	require.Equal(t, []LostCells{
		{"p", "x", []int64{2}, []string{"key2"}, []bool{true}}, {"p", "y", []int64{0}, []string{"key0"}, []bool{true}},
	}, f.Lost(nil))
	require.Equal(t, f.Lost(nil), f.Lost(ptr("p")))
	require.Empty(t, f.Lost(ptr("q")))

	require.NoError(t, f.selects(names(2), "x"))
	requireError(t, f.selects(names(4), "x"), tqerr.DataLost, `partition "p"`, `"x"`, `"key2"`)
	requireError(t, f.selects(names(4)), tqerr.DataLost, `"x" of keys "key2"`, `"y" of keys "key0"`)
	_, err := f.SelectSamples(s, "p", []string{"y"})
	requireError(t, err, tqerr.DataLost, `"y"`, `"key0"`)
	_, err = f.Check(&Write{Partition: "p", Keys: names(1), Columns: ints(1, "y"), Update: true})
	requireError(t, err, tqerr.DataLost, `"y"`, `"key0"`)
}

func TestALossEndsWithAWriteOrAClear(t *testing.T) {
	for name, end := range map[string]func(f *fixture){
		"write":           func(f *fixture) { f.put(names(1), "x") },
		"clear":           func(f *fixture) { f.clear("key0") },
		"clear of fields": func(f *fixture) { f.ClearFields("p", names(1), nil, []string{"x"}) },
		"clear of all":    func(f *fixture) { f.FinishClear(f.StartClearPartition("p")) },
		"it turns up":     func(f *fixture) { f.Reconcile(0, stock(at(0), ints(1, "x"))) },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{})
			f.put(names(1), "x")
			f.Reconcile(0, nil)
			require.NotEmpty(t, f.Lost(nil))
			end(f)
			require.Empty(t, f.Lost(nil))
			require.Empty(t, f.LostOn())
			require.NotEqual(t, tqerr.DataLost, tqerr.CodeOf(f.selects(names(1), "x")))
		})
	}
}

func TestWhatTheCatalogDoesNotHaveIsUnknown(t *testing.T) {
	f := newFixture(t, Options{})
	s := f.onUnits(names(3), []uint32{0, 0, 1}, ints(3, "x", "y"))
	f.clear("key0")
	reused := f.put([]string{"new"}, "x").Samples
	require.Equal(t, s[0].Index, reused[0].Index)
	f.ClearFields("p", []string{"key1"}, nil, []string{"y"})
	hidden := f.put([]string{"hidden"}, "x").Samples
	cl := f.StartClearKeys("p", []string{"hidden"})
	for name, one := range map[string]schema.Stock{
		"older generation":   {Partition: "p", Column: ints(1, "x")[0], Samples: s[:1]},
		"cleared field":      {Partition: "p", Column: ints(1, "y")[0], Samples: s[1:2]},
		"field never seen":   {Partition: "p", Column: ints(1, "z")[0], Samples: s[1:2]},
		"on another unit":    {Partition: "p", Column: ints(1, "x")[0], Samples: s[2:]},
		"other partition":    {Partition: "q", Column: ints(1, "x")[0], Samples: s[1:2]},
		"being cleared":      {Partition: "p", Column: ints(1, "x")[0], Samples: hidden},
		"index out of range": {Partition: "p", Column: ints(1, "x")[0], Samples: []schema.Sample{{Index: 1 << 40, Generation: 1}}},
		"negative index":     {Partition: "p", Column: ints(1, "x")[0], Samples: []schema.Sample{{Index: -1, Generation: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			kept := append(stock(reused, ints(1, "x")), stock(s[1:2], ints(1, "x"))...)
			r := f.Reconcile(0, append(kept, one))
			require.Equal(t, []Cells{{one.Partition, one.Column.Field, one.Samples}}, r.Unknown)
			require.Equal(t, 2, r.Kept)
			require.Empty(t, r.Lost)
			require.Empty(t, r.Changed)
		})
	}
	f.FinishClear(cl)
	r := f.Reconcile(0, append(stock(reused, ints(1, "x")), stock(s[1:2], ints(1, "x"))...))
	require.Equal(t, 2, r.Kept)
}

func TestKnownAndUnknownCellsOfOneStock(t *testing.T) {
	f := newFixture(t, Options{})
	s := f.put(names(6), "x").Samples
	for _, i := range []int{0, 2, 3, 5} {
		f.ClearFields("p", names(6)[i:i+1], nil, []string{"x"})
	}
	r := f.Reconcile(0, stock(s, ints(6, "x")))
	require.Equal(t, []Cells{{"p", "x", s[:1]}, {"p", "x", s[2:4]}, {"p", "x", s[5:]}}, r.Unknown)
	require.Equal(t, 2, r.Kept)
	require.Empty(t, r.Lost)
}

// A write that nobody was told the success of may have happened in the catalog alone; the cells are then what the unit says.
func TestKeptCellsAreDescribedAsTheUnitDoes(t *testing.T) {
	f := newFixture(t, Options{})
	before := columns(2, schema.Float32, []int64{3}, "x")
	s := f.onUnits(names(2), []uint32{0, 0}, before)
	f.put(names(2), "x")
	r := f.Reconcile(0, append(stock(s[:1], columns(1, schema.Float32, []int64{3}, "x")), stock(s[1:], columns(1, schema.Float32, []int64{4}, "x"))...))
	require.Equal(t, 2, r.Kept)
	require.Empty(t, append(r.Lost, r.Unknown...))
	require.Empty(t, f.Lost(nil))
	d, err := f.Describe("p", s, nil)
	require.NoError(t, err)
	require.Equal(t, schema.Float32, d.Columns[0].DType)
	require.Equal(t, []int64{12, 16}, []int64{rowBytes(&d.Columns[0], 0), rowBytes(&d.Columns[0], 1)})

	f.onUnits([]string{"else"}, []uint32{1}, columns(1, schema.Float32, []int64{3}, "x"))
	r = f.Reconcile(0, stock(s, ints(2, "x")))
	require.Equal(t, []Cells{{"p", "x", s}}, r.Unknown, "cells of other units have another type")
	require.Equal(t, []Cells{{"p", "x", s}}, r.Lost)
}

func rowBytes(c *schema.Column, row int) int64 {
	offsets := c.Offsets()
	return offsets[row+1] - offsets[row]
}

func TestAUnitIsReplacedWithAllThatItHas(t *testing.T) {
	f := newFixture(t, Options{})
	s := f.onUnits(names(2), []uint32{0, 1}, ints(2, "x"))
	f.ReplaceUnit(0, 7, "other")
	require.Equal(t, int64(1), f.SamplesOn(7))
	sel, err := f.SelectKeys("p", names(2), nil, true)
	require.NoError(t, err)
	require.Equal(t, []uint32{7, 1}, sel.Units)
	require.Equal(t, 1, f.Reconcile(7, stock(s[:1], ints(1, "x"))).Kept)
}

func TestALossOutlivesASave(t *testing.T) {
	f := newFixture(t, Options{})
	f.put(names(3), "x", "y")
	f.Reconcile(0, stock(at(0, 1), ints(2, "x")))
	state, lost := f.Export(), f.Lost(nil)
	reload(t, f.Catalog, state)
	require.Equal(t, lost, f.Lost(nil))
	requireError(t, f.selects(names(3), "y"), tqerr.DataLost)

	for name, spoil := range map[string]func(*FieldState){
		"no sample": func(s *FieldState) { s.Lost = []int64{99} },
		"twice":     func(s *FieldState) { s.Lost = []int64{2, 2} },
		"there too": func(s *FieldState) { s.Lost = []int64{0} },
	} {
		t.Run(name, func(t *testing.T) {
			state := f.Export()
			spoil(&state.Partitions[0].Fields[0])
			_, err := restore(f.Catalog, state)
			requireError(t, err, tqerr.Corruption, `"x"`)
		})
	}
}

// Random writes and clears with a unit that misses some; what it is left with is a model of what must be there.
func TestReconcileAgainstAModel(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	type cellName struct{ key, field string }
	for range 200 {
		f := newFixture(t, Options{})
		fields, has := []string{"x", "y", "z"}, map[cellName]schema.Sample{}
		var old []schema.Stock
		for range 20 {
			key, field := fmt.Sprint("k", rng.IntN(6)), fields[rng.IntN(3)]
			switch rng.IntN(4) {
			case 0:
				f.clear(key)
				for _, field := range fields {
					delete(has, cellName{key, field})
				}
			case 1:
				f.ClearFields("p", []string{key}, nil, []string{field})
				delete(has, cellName{key, field})
			default:
				s := f.put([]string{key}, field).Samples
				has[cellName{key, field}] = s[0]
				old = append(old, stock(s, ints(1, field))...)
			}
		}
		want, kept := map[cellName]bool{}, map[string]bool{}
		var inventory []schema.Stock
		for name, s := range has {
			if want[name] = rng.IntN(2) == 0; want[name] {
				inventory = append(inventory, stock([]schema.Sample{s}, ints(1, name.field))...)
				kept[fmt.Sprint(name.field, s)] = true
			}
		}
		unknown := map[string]bool{}
		for _, o := range old {
			id, current := fmt.Sprint(o.Column.Field, o.Samples[0]), false
			for name, s := range has {
				current = current || fmt.Sprint(name.field, s) == id
			}
			if !current && !unknown[id] {
				inventory, unknown[id] = append(inventory, o), true
			}
		}
		rng.Shuffle(len(inventory), func(i, j int) { inventory[i], inventory[j] = inventory[j], inventory[i] })
		r := f.Reconcile(0, inventory)
		require.Equal(t, len(kept), r.Kept)
		got := 0
		for _, c := range r.Unknown {
			for _, s := range c.Samples {
				require.True(t, unknown[fmt.Sprint(c.Field, s)])
				got++
			}
		}
		require.Equal(t, len(unknown), got)
		for name, there := range want {
			err := f.selects([]string{name.key}, name.field)
			if there {
				require.NoError(t, err)
			} else {
				requireError(t, err, tqerr.DataLost, name.key, name.field)
			}
		}
		require.NoError(t, f.Verify())
	}
}
