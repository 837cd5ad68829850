package catalog

import (
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// modelSave is a state, what the model was then, and the samples that there had been.
type modelSave struct {
	state *State
	parts map[string]*modelPartition
	given map[schema.Sample]bool
}

func cloneParts(parts map[string]*modelPartition) map[string]*modelPartition {
	out := map[string]*modelPartition{}
	for name, p := range parts {
		q := &modelPartition{samples: map[schema.Sample]*modelSample{}, types: maps.Clone(p.types)}
		q.born = slices.Clone(p.born)
		q.reserved, q.order, q.fields = slices.Clone(p.reserved), slices.Clone(p.order), slices.Clone(p.fields)
		for s, row := range p.samples {
			copied := *row
			copied.tags, copied.shapes, copied.consumed = maps.Clone(row.tags), maps.Clone(row.shapes), maps.Clone(row.consumed)
			q.samples[s] = &copied
		}
		out[name] = q
	}
	return out
}

func (m *modelRun) save() {
	if m.rng.IntN(3) == 0 {
		m.saved = &modelSave{m.c.Export(), cloneParts(m.parts), maps.Clone(m.given)}
	}
}

// load goes back to what was saved, in the same session or in a new one with another number of units. Samples that are
// being cleared are gone then, and no sample that comes later is ever mistaken for one of before.
func (m *modelRun) load() {
	if m.saved == nil || m.rng.IntN(3) > 0 {
		return
	}
	if m.rng.IntN(3) == 0 {
		m.c = New(Options{PreAllocate: modelReserve, SampleLimitPerUnit: modelLimit})
		for id := range uint32(3) {
			m.c.AddUnit(id, "h")
		}
		m.given = maps.Clone(m.saved.given)
	}
	r, err := restore(m.c, m.saved.state)
	require.NoError(m.t, err)
	m.parts = cloneParts(m.saved.parts)
	m.clearing, m.open = map[schema.Sample]modelCleared{}, nil
	placeAll(m.t, m.c, r, func(partition string, s schema.Sample, unit uint32) { m.parts[partition].samples[s].unit = unit })
	require.NoError(m.t, r.Complete())
	require.NoError(m.t, m.c.Fits(r))
	m.c.Adopt(r)
	for _, p := range m.parts {
		slices.Sort(p.reserved)
		samples := map[schema.Sample]*modelSample{}
		for s, row := range p.samples {
			now := m.c.Samples([]int64{s.Index})[0]
			require.False(m.t, now != s && m.given[now], "%v was another sample once", now)
			m.given[now] = true
			samples[now] = row
			if at := slices.Index(p.born, s); now != s {
				p.born[at] = now
			}
		}
		p.samples = samples
	}
}

// placeAll places every sample of a catalog in the making with all its cells.
func placeAll(t *testing.T, c *Catalog, r *Restored, placed func(partition string, s schema.Sample, unit uint32)) {
	for _, p := range r.c.order {
		for _, i := range p.active.Members(nil) {
			var cols []schema.Column
			for _, f := range p.ordered {
				if f.has.Has(i) {
					cols = append(cols, f.describe([]int64{i}))
				}
			}
			s := r.c.sample(i)
			var rooms []Room
			for _, u := range c.units {
				rooms = append(rooms, Room{Unit: u.id, Free: math.MaxInt64, Used: r.c.SamplesOn(u.id)})
			}
			units, err := r.Place(p.name, []schema.Sample{s}, cols, rooms, func(int) int64 { return 8 })
			require.NoError(t, err)
			placed(p.name, s, units[0])
		}
	}
}

// restore begins a catalog of a state for the units of another.
func restore(c *Catalog, s *State) (*Restored, error) {
	r := c.Blank()
	return r, r.Fill(s)
}

func reload(t *testing.T, c *Catalog, s *State) {
	t.Helper()
	r, err := restore(c, s)
	require.NoError(t, err)
	placeAll(t, c, r, func(string, schema.Sample, uint32) {})
	require.NoError(t, r.Complete())
	c.Adopt(r)
	require.NoError(t, c.Verify())
}

func TestARestoredSampleIsItselfAndItsIndexIsNeverMistaken(t *testing.T) {
	f := newFixture(t, Options{})
	saved := f.put([]string{"a"}, "x").Samples[0]
	state := f.Export()
	f.clear("a")
	later := f.put([]string{"b"}, "x").Samples[0]
	require.Equal(t, saved.Index, later.Index)

	reload(t, f.Catalog, state)
	_, err := f.Describe("p", []schema.Sample{saved}, nil)
	require.NoError(t, err, "whoever kept the saved sample reaches it")
	_, err = f.Describe("p", []schema.Sample{later}, nil)
	requireError(t, err, tqerr.SampleGone)

	f.clear("a")
	again := f.put([]string{"c"}, "x").Samples[0]
	require.Equal(t, saved.Index, again.Index)
	require.Greater(t, again.Generation, later.Generation)
}

func TestASampleOfAnotherSessionDoesNotPassForOneOfThis(t *testing.T) {
	a, b := newFixture(t, Options{}), newFixture(t, Options{})
	theirs := a.put([]string{"a"}, "x").Samples[0]
	ours := b.put([]string{"b"}, "x").Samples[0]
	require.Equal(t, theirs, ours, "two sessions count alike")
	a.clear("a")
	a.put([]string{"c"}, "x") // generation 2 of the same index, gone at the time of the save
	a.clear("c")
	a.put([]string{"d"}, "x")

	reload(t, b.Catalog, a.Export())
	_, err := b.Describe("p", []schema.Sample{ours}, nil)
	requireError(t, err, tqerr.SampleGone)

	fresh := newFixture(t, Options{})
	state := a.Export()
	reload(t, fresh.Catalog, state)
	require.Equal(t, state.Partitions[0].Samples, fresh.Export().Partitions[0].Samples, "a new session takes them as they are")
	fresh.clear("d")
	require.Equal(t, uint32(4), fresh.put([]string{"e"}, "x").Samples[0].Generation)
}

func TestAStateThatContradictsItselfIsCorrupt(t *testing.T) {
	good := func() *State {
		f := newFixture(t, Options{})
		f.must(&Write{Partition: "p", Keys: []string{"a", "b"}, Columns: ints(2, "x"), Tags: [][]byte{pack(t, map[string]int{"n": 1}), nil}})
		f.fetch(1, "task", "x")
		f.insert("q", 2, "y")
		return f.Export()
	}
	c := newFixture(t, Options{})
	_, err := restore(c.Catalog, good())
	require.NoError(t, err)
	for name, spoil := range map[string]func(s *State){
		"negative index":     func(s *State) { s.Partitions[0].Samples[0].Index = -1 },
		"huge index":         func(s *State) { s.Partitions[0].Samples[0].Index = math.MaxInt64 },
		"generation 0":       func(s *State) { s.Partitions[0].Samples[0].Generation = 0 },
		"two owners":         func(s *State) { s.Partitions[1].Samples[0].Index = s.Partitions[0].Samples[0].Index },
		"partition twice":    func(s *State) { s.Partitions[1].Name = "p" },
		"key twice":          func(s *State) { s.Partitions[0].Keys[1] = "a" },
		"key of nobody":      func(s *State) { s.Partitions[0].Keyed[0] = 77 },
		"key too few":        func(s *State) { s.Partitions[0].Keys = s.Partitions[0].Keys[:1] },
		"tags are no map":    func(s *State) { s.Partitions[0].Tags[0] = []byte{1} },
		"tags of nobody":     func(s *State) { s.Partitions[0].Tagged[0] = -3 },
		"field twice":        func(s *State) { s.Partitions[0].Fields = append(s.Partitions[0].Fields, s.Partitions[0].Fields[0]) },
		"holder is nobody":   func(s *State) { s.Partitions[0].Fields[0].Holders[1] = 99 },
		"holders unordered":  func(s *State) { slices.Reverse(s.Partitions[0].Fields[0].Holders) },
		"other dtype":        func(s *State) { s.Partitions[0].Fields[0].DType = schema.Int8 },
		"no kind":            func(s *State) { s.Partitions[0].Fields[0].Kind = 0 },
		"shapes too few":     func(s *State) { s.Partitions[0].Fields[0].Shapes.Rows = 1 },
		"consumed by nobody": func(s *State) { s.Partitions[0].Tasks[0].Consumed[0] = 1 << 40 },
		"generations": func(s *State) {
			s.Used = append(s.Used, UsedRun{From: 5, Count: math.MaxInt64, Generation: 1})
		},
		"generations again": func(s *State) { s.Used = append(s.Used, s.Used[0]) },
	} {
		t.Run(name, func(t *testing.T) {
			s := good()
			spoil(s)
			_, err := restore(c.Catalog, s)
			requireError(t, err, tqerr.Corruption)
		})
	}
}

func TestValuesThatDoNotFitTheStateAreCorrupt(t *testing.T) {
	f := newFixture(t, Options{})
	f.put([]string{"a", "b"}, "x", "y")
	state, samples := f.Export(), f.Samples([]int64{0, 1})
	rooms := []Room{{Unit: 0, Free: math.MaxInt64}, {Unit: 1, Free: math.MaxInt64}}
	place := func(r *Restored, samples []schema.Sample, columns []schema.Column) error {
		_, err := r.Place("p", samples, columns, rooms, func(int) int64 { return 1 })
		return err
	}
	for name, columns := range map[string][]schema.Column{
		"unknown field": ints(2, "z"), "other dtype": columns(2, schema.Int8, []int64{2}, "x"), "twice": ints(2, "x", "x"), "rows": ints(1, "x"),
	} {
		t.Run(name, func(t *testing.T) {
			r, err := restore(f.Catalog, state)
			require.NoError(t, err)
			requireError(t, place(r, samples, columns), tqerr.Corruption)
		})
	}
	r, err := restore(f.Catalog, state)
	require.NoError(t, err)
	requireError(t, place(r, []schema.Sample{{Index: 0, Generation: 9}}, ints(1, "x")), tqerr.Corruption)
	require.NoError(t, place(r, samples[:1], ints(1, "x")))
	requireError(t, place(r, samples[:1], ints(1, "x")), tqerr.Corruption, "twice")
	requireError(t, r.Complete(), tqerr.Corruption, "1 samples have no values")
	require.NoError(t, place(r, samples[1:], ints(1, "x", "y")))
	requireError(t, r.Complete(), tqerr.Corruption, `field "y": 1 values are missing`)
	f.AddUnit(7, "h")
	requireError(t, f.Fits(r), tqerr.Unavailable)
}

func TestGroupsHaveOneUnitAndOneSetOfFields(t *testing.T) {
	f := newFixture(t, Options{})
	f.put([]string{"a", "b", "c"}, "x")
	f.put([]string{"b"}, "y")
	w := &Write{Partition: "p", Keys: []string{"d"}, Columns: ints(1, "x")}
	_, err := f.Apply(w, []uint32{1})
	require.NoError(t, err)
	f.put([]string{"e"})
	groups := f.Groups()
	require.Equal(t, []Group{
		{"p", 0, []string{"x"}, f.Samples([]int64{0, 2})},
		{"p", 1, []string{"x"}, f.Samples([]int64{3})},
		{"p", 0, []string{"x", "y"}, f.Samples([]int64{1})},
		{"p", 0, nil, f.Samples([]int64{4})},
	}, groups)
	groups, missing := f.GroupsOf("p", []string{"e", "no", "a"})
	require.Equal(t, []string{"no"}, missing)
	require.Len(t, groups, 2)
	_, missing = f.GroupsOf("q", []string{"a"})
	require.Equal(t, []string{"a"}, missing)
}

// What CheckAll lets pass can be applied one after another.
func TestCheckAllCountsAllWritesTogether(t *testing.T) {
	f := newFixture(t, Options{SampleLimitPerUnit: 3})
	one := &Write{Partition: "p", Keys: []string{"a", "b"}, Columns: ints(2, "x")}
	two := &Write{Partition: "p", Keys: []string{"c", "d"}, Columns: ints(2, "x")}
	requireError(t, f.CheckAll([]*Write{one, two}, [][]uint32{{0, 0}, {0, 0}}), tqerr.Conflict, "no room")
	require.NoError(t, f.CheckAll([]*Write{one, two}, [][]uint32{{0, 0}, {0, 1}}))
	require.Empty(t, f.Partitions())
}
