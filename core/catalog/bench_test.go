package catalog

import (
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
)

const million = 1_000_000

var eight = []string{"advantages", "attention_mask", "input_ids", "log_probs", "prompts", "responses", "rewards", "uid"}

// filled has samples with eight fields in a partition, without keys.
func filled(tb testing.TB, partition string, samples int) *Catalog {
	c := New(Options{})
	c.AddUnit(0, "h")
	for range samples / 1000 {
		_, err := c.Apply(&Write{Partition: partition, Insert: 1000, Columns: ints(1000, eight...)}, make([]uint32, 1000))
		require.NoError(tb, err)
	}
	return c
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestMemoryPerSample(t *testing.T) {
	const samples = 200_000
	before := heap()
	c := filled(t, "p", samples)
	uniform := float64(heap()-before) / samples
	for k := range samples / 1000 {
		w := &Write{Partition: "p", Samples: make([]schema.Sample, 1000)}
		lengths := make([]int64, 1000)
		for i := range lengths {
			w.Samples[i] = schema.Sample{Index: int64(1000*k + i), Generation: 1}
			lengths[i] = int64(k*i) % 8192
		}
		for _, field := range eight {
			w.Columns = append(w.Columns, ragged(field, lengths...))
		}
		_, err := c.Apply(w, make([]uint32, 1000))
		require.NoError(t, err)
	}
	varying := float64(heap()-before) / samples
	t.Logf("bytes per sample: %.1f, with 8 ragged fields: %.1f", uniform, varying)
	require.Less(t, uniform, 20.0)
	require.Less(t, varying, 80.0)
	runtime.KeepAlive(c)
}

func BenchmarkFetch1024OfMillion(b *testing.B) {
	c := filled(b, "p", million)
	for b.Loop() {
		d, err := c.Fetch(FetchRequest{Partition: "p", Fields: eight, N: 1024, Task: "t"}, &first{})
		if err != nil || (d == nil && c.partitions["p"].consumed["t"].Count()+1024 <= million) {
			b.Fatal("wrong number of samples")
		}
		if d == nil {
			c.ResetConsumption("p", "t")
		}
	}
}

func BenchmarkFetchTooFewOfMillion(b *testing.B) {
	c := filled(b, "p", million)
	_, err := c.Fetch(FetchRequest{Partition: "p", Fields: eight, N: million - 7, Task: "t"}, &first{})
	require.NoError(b, err)
	for b.Loop() {
		if d, err := c.Fetch(FetchRequest{Partition: "p", Fields: eight, N: 1024, Task: "t"}, &first{}); err != nil || d != nil {
			b.Fatal("there were seven")
		}
	}
}

// put does what the controller does for a write.
func put(b *testing.B, c *Catalog, w *Write, rooms []Room) {
	units, err := c.Check(w)
	if err == nil {
		err = c.Place(units, "h", func(int) int64 { return 1000 }, rooms)
	}
	if err == nil {
		_, err = c.Apply(w, units)
	}
	if err != nil {
		b.Fatal(err)
	}
}

func BenchmarkPut1024Keys(b *testing.B) {
	lengths := make([]int64, 1024)
	for i := range lengths {
		lengths[i] = int64(i*i) % 1000
	}
	var uneven []schema.Column
	for _, field := range eight {
		uneven = append(uneven, ragged(field, lengths...))
	}
	rooms := []Room{{0, math.MaxInt64, 0}}
	for name, columns := range map[string][]schema.Column{"uniform": ints(1024, eight...), "ragged": uneven} {
		b.Run(name+"/new", func(b *testing.B) {
			c := New(Options{})
			c.AddUnit(0, "h")
			keys := prefixed("sample", 1024*20)
			b.ResetTimer()
			for i := range b.N {
				from := i % 20 * 1024
				put(b, c, &Write{Partition: "p", Keys: keys[from : from+1024], Columns: columns}, rooms)
				if i%20 == 19 {
					b.StopTimer()
					c.FinishClear(c.StartClearPartition("p"))
					b.StartTimer()
				}
			}
		})
		b.Run(name+"/again", func(b *testing.B) {
			c := New(Options{})
			c.AddUnit(0, "h")
			keys := names(1024)
			for b.Loop() {
				put(b, c, &Write{Partition: "p", Keys: keys, Columns: columns}, rooms)
			}
		})
	}
}

func BenchmarkSelect1024Keys(b *testing.B) {
	c := New(Options{})
	c.AddUnit(0, "h")
	for k := range 20 {
		put(b, c, &Write{Partition: "p", Keys: prefixed(fmt.Sprint(k), 1024), Columns: ints(1024, eight...)}, []Room{{0, math.MaxInt64, 0}})
	}
	keys := prefixed("7", 1024)
	for b.Loop() {
		if s, err := c.SelectKeys("p", keys, nil, false); err != nil || len(s.Fields) != 8 {
			b.Fatal(err)
		}
	}
}

func prefixed(prefix string, n int) []string {
	out := names(n)
	for i := range out {
		out[i] = prefix + "/" + out[i]
	}
	return out
}

func BenchmarkPutOneRow(b *testing.B) {
	rooms := []Room{{0, math.MaxInt64, 0}}
	empty := New(Options{})
	empty.AddUnit(0, "h")
	for _, bench := range []struct {
		name      string
		c         *Catalog
		partition string
	}{{"empty", empty, "p"}, {"beside a million", filled(b, "other", million), "p"}, {"among a million", filled(b, "p", million), "p"}} {
		b.Run(bench.name, func(b *testing.B) {
			columns := ints(1, eight...)
			keys := names(b.N)
			b.ResetTimer()
			for i := range b.N {
				put(b, bench.c, &Write{Partition: bench.partition, Keys: keys[i : i+1], Columns: columns}, rooms)
			}
			b.StopTimer()
			bench.c.FinishClear(bench.c.StartClearKeys(bench.partition, keys))
		})
	}
}

func BenchmarkTags10000(b *testing.B) {
	keys, tags := names(10_000), make([][]byte, 10_000)
	for i := range tags {
		tags[i] = pack(b, map[string]any{"step": i, "state": "running", "reward": 0.5})
	}
	c := New(Options{})
	c.AddUnit(0, "h")
	b.Run("put", func(b *testing.B) {
		for b.Loop() {
			put(b, c, &Write{Partition: "p", Keys: keys, Tags: tags}, []Room{{0, math.MaxInt64, 0}})
		}
	})
	b.Run("put new", func(b *testing.B) {
		for b.Loop() {
			put(b, c, &Write{Partition: "q", Keys: keys, Tags: tags}, []Room{{0, math.MaxInt64, 0}})
			b.StopTimer()
			c.FinishClear(c.StartClearPartition("q"))
			b.StartTimer()
		}
	})
	filter := pack(b, map[string]any{"state": "running", "reward": 0.5})
	for name, f := range map[string]ListFilter{"list": {}, "list by tag": {Tags: filter}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if l, err := c.List(f); err != nil || len(l[0].Keys) != 10_000 {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkClear28000(b *testing.B) {
	c := New(Options{})
	c.AddUnit(0, "h")
	keys := names(28_000)
	for b.Loop() {
		b.StopTimer()
		put(b, c, &Write{Partition: "p", Keys: keys, Columns: ints(28_000, eight...)}, []Room{{0, math.MaxInt64, 0}})
		b.StartTimer()
		c.FinishClear(c.StartClearKeys("p", keys))
	}
}
