package catalog

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

// twins are a catalog and one that is made anew from images of it again and again; both do the same.
type twins struct {
	t        *testing.T
	rng      *rand.Rand
	a, b     *Catalog
	clearing [][2]*Clearing
}

func (w *twins) options() Options { return Options{PreAllocate: 2} }

// renew makes the second one from an image of it.
func (w *twins) renew() {
	var err error
	w.b, err = Restore(w.options(), w.b.Image())
	require.NoError(w.t, err)
	require.NoError(w.t, w.b.Verify())
	for k := range w.clearing { // what was begun in an earlier life is known by its samples
		cl := w.clearing[k][1]
		w.clearing[k][1] = Finishing(cl.Partition, cl.Samples, cl.Whole())
	}
}

func (w *twins) partition() string { return fmt.Sprintf("p%d", w.rng.IntN(3)) }

func (w *twins) keys() (keys []string) {
	for _, i := range w.rng.Perm(20)[:1+w.rng.IntN(5)] {
		keys = append(keys, fmt.Sprintf("k%d", i))
	}
	return keys
}

func (w *twins) put() {
	wr := &Write{Partition: w.partition(), Last: w.rng.IntN(20) == 0}
	rows := 1 + w.rng.IntN(4)
	if w.rng.IntN(3) == 0 {
		wr.Insert = rows
	} else {
		wr.Keys = w.keys()
		rows = len(wr.Keys)
	}
	for _, name := range []string{"x", "y"} {
		if w.rng.IntN(2) == 0 {
			wr.Columns = append(wr.Columns, schema.Column{
				Field: name, Kind: schema.Tensor, DType: schema.Int64, Rows: rows, Form: schema.Uniform, Shape: []int64{w.rng.Int64N(3)},
			})
		}
	}
	if w.rng.IntN(2) == 0 {
		for range rows {
			wr.Tags = append(wr.Tags, []byte{0x81, 0xa1, 't', byte(w.rng.IntN(100))})
		}
	}
	units, err := w.a.Check(wr)
	require.NoError(w.t, err)
	for k := range units {
		if units[k] == NoUnit {
			units[k] = w.rng.Uint32N(uint32(len(w.a.units)))
		}
	}
	first, err := w.a.Apply(wr, units)
	require.NoError(w.t, err)
	second, err := w.b.Apply(wr, units)
	require.NoError(w.t, err)
	require.Equal(w.t, first, second)
}

func (w *twins) clear() {
	partition, keys := w.partition(), w.keys()
	begin := func(c *Catalog) *Clearing { return c.StartClearKeys(partition, keys) }
	switch w.rng.IntN(8) {
	case 0:
		begin = func(c *Catalog) *Clearing { return c.StartClearPartition(partition) }
	case 1, 2:
		fields := []string{"x"}
		begin = func(c *Catalog) *Clearing { return c.ClearFields(partition, keys, nil, fields) }
	}
	first, second := begin(w.a), begin(w.b)
	require.ElementsMatch(w.t, first.Samples, second.Samples) // those that wait for their units already are in no order
	require.ElementsMatch(w.t, first.Units, second.Units)
	require.Equal(w.t, first.Events, second.Events)
	w.clearing = append(w.clearing, [2]*Clearing{first, second})
}

func (w *twins) finish() {
	if n := len(w.clearing); n > 0 {
		k := w.rng.IntN(n)
		pair := w.clearing[k]
		w.clearing = append(w.clearing[:k], w.clearing[k+1:]...)
		// A journal says that a clear has ended only when that means something.
		if w.a.Current(pair[0]) {
			w.a.FinishClear(pair[0])
			w.b.FinishClear(Finishing(pair[1].Partition, pair[1].Samples, pair[1].Whole()))
		}
	}
}

func (w *twins) fetch() {
	r := FetchRequest{Partition: w.partition(), Fields: []string{"x"}, N: 1 + w.rng.IntN(3), Task: fmt.Sprintf("t%d", w.rng.IntN(2))}
	var pick Pick
	first, err := w.a.FetchNoted(r, firstReady{}, func(p Pick) error { pick = p; return nil })
	require.NoError(w.t, err)
	if first == nil {
		return
	}
	second, err := w.b.Hand(r, pick)
	require.NoError(w.t, err)
	require.Equal(w.t, first, second)
}

// firstReady picks the first samples that are ready.
type firstReady struct{}

func (firstReady) Check(SampleRequest) error { return nil }
func (firstReady) Cached(SampleRequest) bool { return false }
func (firstReady) Sample(ready Ready, r SampleRequest) (Pick, error) {
	first := ready.First(r.N)
	return Pick{Sampled: first, Consumed: first}, nil
}

func (w *twins) join() {
	if n := uint32(len(w.a.units)); n < 5 {
		for _, c := range []*Catalog{w.a, w.b} {
			c.AddUnit(n, "host")
		}
	}
}

// A catalog that is made anew from an image goes on exactly as the other: it gives the same indexes, generations and slots.
func TestAnImageIsEverything(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	for round := range uint64(20) {
		w := &twins{t: t, rng: rand.New(rand.NewPCG(seed, round))}
		w.a, w.b = New(w.options()), New(w.options())
		w.b.lineage = w.a.lineage
		w.join()
		w.join()
		for range 300 {
			steps := []func(){w.put, w.put, w.put, w.clear, w.finish, w.fetch, w.join, w.renew}
			steps[w.rng.IntN(len(steps))]()
		}
		require.NoError(t, w.a.Verify())
		require.NoError(t, w.b.Verify())
		require.Equal(t, w.a.Image(), w.b.Image())
		require.Len(t, w.b.Unfinished(), len(w.a.Unfinished()))
	}
}

// An image that contradicts itself is refused.
func TestImagesThatMakeNoSense(t *testing.T) {
	c := New(Options{})
	c.AddUnit(0, "h")
	c.AddUnit(1, "h")
	_, err := c.Apply(&Write{Partition: "p", Keys: []string{"a", "b"}}, []uint32{0, 1})
	require.NoError(t, err)
	c.StartClearKeys("p", []string{"b"})
	for name, spoil := range map[string]func(m *Image){
		"a unit twice":          func(m *Image) { m.Units[1].ID = 0 },
		"a slot of two units":   func(m *Image) { m.Units[1].Slots[0] = m.Units[0].Slots[0] },
		"a slot of nobody":      func(m *Image) { m.Slots[0][0] = 5000 },
		"a negative slot":       func(m *Image) { m.Units[0].Slots[0] = -1 },
		"fewer slots":           func(m *Image) { m.Slots[0] = nil },
		"a turn beyond":         func(m *Image) { m.Units[0].Turn = 1 << 20 },
		"no such partition":     func(m *Image) { m.Clearing[0].Partition = "q" },
		"cleared and there":     func(m *Image) { m.Clearing[0].Samples[0].Index = m.Partitions[0].Samples[0].Index },
		"keys of other samples": func(m *Image) { m.Clearing[0].Keys = nil },
	} {
		m := c.Image()
		spoil(m)
		_, err := Restore(Options{}, m)
		require.Error(t, err, name)
	}
	_, err = Restore(Options{}, c.Image())
	require.NoError(t, err)
}
