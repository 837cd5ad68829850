package catalog

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/bitset"
	"transferqueue/core/tqerr"
)

func (f *fixture) clearSamples(partition string, indexes ...int64) {
	f.t.Helper()
	samples := at(indexes...)
	for k := range samples {
		samples[k] = f.sample(samples[k].Index)
	}
	f.FinishClear(f.StartClearSamples(partition, samples))
}

func (f *fixture) view(partition string) *readyView {
	return f.ready(f.partitions[partition], []string{"x"}, "t")
}

func TestGroupsOfAPartitionThatGrowsAloneAreConsecutiveIndexes(t *testing.T) {
	for _, c := range []struct {
		ready    []int64
		n, count int
		want     []int64
	}{
		{[]int64{3, 4, 5, 6, 7, 8}, 3, 2, []int64{3, 4, 5, 6, 7, 8}},
		{[]int64{1, 2, 4, 5, 6, 9}, 3, 1, []int64{4, 5, 6}},
		{[]int64{1, 2, 3, 4}, 3, 1, []int64{1, 2, 3}},
		{[]int64{0, 2, 3, 5, 6, 7}, 2, 2, []int64{2, 3, 5, 6}},
		{[]int64{1, 3, 5, 7}, 2, 1, nil},
		{[]int64{4, 5, 6}, 3, 2, nil},
		{[]int64{62, 63, 64, 65, 128, 129, 130, 131}, 4, 2, []int64{62, 63, 64, 65, 128, 129, 130, 131}},
	} {
		f := newFixture(t, Options{})
		f.insert("p", 200, "other")
		f.must(&Write{Partition: "p", Samples: at(c.ready...), Columns: ints(len(c.ready), "x")})
		require.Equal(t, c.want, f.view("p").Groups(c.n, c.count), "%v", c.ready)
		require.Len(t, f.partitions["p"].births.list, 1)
	}
}

// a owns 0 to 3, b 4 to 7; then a goes, and b grows into the indexes of a.
func TestGroupsStayTogetherAndInPutOrderWhenIndexesAreUsedAgain(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("a", 4, "x")
	f.insert("b", 4, "x")
	f.clearSamples("a", 0, 1, 2, 3)
	require.Equal(t, span(0, 4), f.insert("b", 4, "x"))
	require.Equal(t, []int64{4, 5, 6, 7, 0, 1, 2, 3}, f.view("b").Groups(4, 2))
	require.Equal(t, []int64{4, 5, 6, 7, 0, 1, 2, 3}, slices.Collect(f.view("b").Born()))
	require.Equal(t, []int64{4, 5, 6}, f.view("b").Groups(3, 1))
	f.clearSamples("b", 5)
	require.Equal(t, []int64{6, 7, 0, 1}, f.view("b").Groups(4, 1), "groups begin anywhere, as among consecutive indexes")
}

// A recycled index lies in the middle of a group: 2 and 3 are free between what others own.
func TestAGroupMayConsistOfIndexesThatAreNotConsecutive(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("a", 4, "x")
	f.insert("b", 3, "x")
	f.clearSamples("a", 1, 2)
	require.Equal(t, []int64{1, 2, 7}, f.insert("b", 3, "x"))
	require.Equal(t, []int64{4, 5, 6, 1, 2, 7}, f.view("b").Groups(3, 2))
	require.Nil(t, f.view("b").Groups(3, 3))
}

func TestAnIndexThatReturnsToItsPartitionIsYoung(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 6, "x")
	f.clearSamples("p", 2, 3)
	require.Equal(t, []int64{2, 3}, f.insert("p", 2, "x"))
	require.Equal(t, []int64{0, 1, 4, 5, 2, 3}, slices.Collect(f.view("p").Born()))
	require.Equal(t, []int64{0, 1, 4, 5, 2, 3}, f.view("p").Groups(2, 3))
	o, err := f.Offer(offered)
	require.NoError(t, err)
	require.Equal(t, &Offer{Ready: span(0, 6), Births: []int64{0, 1, 6, 7, 4, 5}}, o)
	f.clearSamples("p", 0, 1, 2, 3, 4, 5)
	require.Zero(t, f.partitions["p"].births.list)
}

func TestBirthsAgainstANaiveOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	for round := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, round))
		f := newFixture(t, Options{})
		names := []string{"a", "b", "c"}
		order := map[string][]int64{} // by birth, -1 for one that is gone
		for range 120 {
			name := names[rng.IntN(len(names))]
			if rng.IntN(5) < 3 {
				order[name] = append(order[name], f.insert(name, 1+rng.IntN(9), "x")...)
			} else {
				var gone []int64
				for k, i := range order[name] {
					if i >= 0 && rng.IntN(3) == 0 {
						gone = append(gone, i)
						order[name][k] = -1
					}
				}
				if gone != nil {
					f.clearSamples(name, gone...)
				}
			}
			require.NoError(t, f.Verify())
			for name, list := range order {
				if f.partitions[name] == nil {
					continue
				}
				taken := &bitset.Set{}
				for _, i := range list {
					if i >= 0 && rng.IntN(4) == 0 {
						taken.Add(i)
					}
				}
				compareGroups(t, f.view(name).Without(taken), list, taken, 1+rng.IntN(4))
			}
		}
	}
}

// compareGroups looks for windows of n in a list of births, one after the other.
func compareGroups(t *testing.T, ready Ready, order []int64, taken *bitset.Set, n int) {
	var groups, all []int64
	is := func(i int64) bool { return i >= 0 && !taken.Has(i) }
	for _, i := range order {
		if is(i) {
			all = append(all, i)
		}
	}
	for k := 0; k+n <= len(order); {
		if window := order[k : k+n]; !slices.ContainsFunc(window, func(i int64) bool { return !is(i) }) {
			groups = append(groups, window...)
			k += n
		} else {
			k++
		}
	}
	require.Equal(t, all, slices.Collect(ready.Born()))
	view := ready.(*readyView)
	sorted := slices.Sorted(slices.Values(all))
	for k, number := range view.p.births.numbers(view.query, sorted) {
		require.Equal(t, sorted[k], order[number-view.p.births.next+int64(len(order))])
	}
	if len(groups) > 0 {
		require.Equal(t, groups, ready.Groups(n, len(groups)/n))
		require.Equal(t, groups[:n], ready.Groups(n, 1))
	}
	require.Nil(t, ready.Groups(n, len(groups)/n+1))
}

// Single samples that come and go in turn leave a stretch each; those without samples are not kept.
func TestStretchesWithoutSamplesAreDropped(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("other", 1, "x")
	last := f.insert("p", 2, "x")[1]
	for range 10 * fewStretches {
		kept := last
		last = f.insert("p", 1, "x")[0]
		f.insert("other", 1, "x")
		f.clearSamples("p", kept)
	}
	require.LessOrEqual(t, len(f.partitions["p"].births.list), 2*fewStretches)
}

func BenchmarkGroups1024OfMillion(b *testing.B) {
	for name, prepare := range map[string]func(c *Catalog){
		"none consumed": func(*Catalog) {},
		"most consumed": func(c *Catalog) {
			_, err := c.Fetch(FetchRequest{Partition: "p", Fields: eight, N: million - 1024, Task: "t"}, &first{})
			require.NoError(b, err)
		},
		"every other one taken": func(c *Catalog) {
			var odd []int64
			for i := int64(1); i < million-2048; i += 2 {
				odd = append(odd, i)
			}
			c.consume(c.partitions["p"], "t", odd)
		},
	} {
		b.Run(name, func(b *testing.B) {
			c := filled(b, "p", million)
			prepare(c)
			for b.Loop() {
				if got := c.ready(c.partitions["p"], eight, "t").Groups(8, 128); len(got) != 1024 {
					b.Fatal(len(got))
				}
			}
		})
	}
}

func TestTheOrderOfBirthSurvivesACheckpoint(t *testing.T) {
	f := newFixture(t, Options{})
	f.insert("p", 6, "x")
	f.clearSamples("p", 2, 3)
	f.insert("p", 2, "x")
	f.must(&Write{Partition: "p", Insert: 1, Columns: ints(1, "x"), Last: true})
	triples, complete := f.BirthOrder("p")
	require.True(t, complete)
	require.NoError(t, f.RestoreBirths("p", nil, false))
	require.Equal(t, span(0, 7), slices.Collect(f.view("p").Born()))
	require.NoError(t, f.RestoreBirths("p", triples, complete))
	require.Equal(t, []int64{0, 1, 4, 5, 2, 3, 6}, slices.Collect(f.view("p").Born()))
	for _, wrong := range [][]int64{{0, 7}, {0, 3, 0}, {0, 7, 5, 3, 9, 9}, {0, 9, 4, 9, 12, 3}, {-1, 9, 0}, {0, 1 << 40, 0}} {
		requireError(t, f.RestoreBirths("p", wrong, false), tqerr.Corruption, `"p"`)
	}
	require.Equal(t, []int64{0, 1, 4, 5, 2, 3, 6}, slices.Collect(f.view("p").Born()))
	requireError(t, f.RestoreBirths("nowhere", nil, false), tqerr.NotFound)
}
