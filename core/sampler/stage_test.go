package sampler_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"transferqueue/core/catalog"
	"transferqueue/core/sampler"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// stage is a catalog with a sampler at work, as the controller runs them.
type stage struct {
	t *testing.T
	*catalog.Catalog
	picks sampler.Picker
}

func newStage(t *testing.T, picks sampler.Picker) *stage {
	s := &stage{t, catalog.New(catalog.Options{}), picks}
	s.AddUnit(0, "h")
	t.Cleanup(func() { require.NoError(t, s.Verify()) })
	return s
}

// put makes one sample of field "x" for each length, which is its tag.
func (s *stage) put(partition string, last bool, lengths ...int) []int64 {
	s.t.Helper()
	w := &catalog.Write{Partition: partition, Insert: len(lengths), Last: last, Columns: columns(len(lengths))}
	for _, n := range lengths {
		w.Tags = append(w.Tags, pack(s.t, map[string]any{"total_lengths": n}))
	}
	applied, err := s.Apply(w, make([]uint32, len(lengths)))
	require.NoError(s.t, err)
	var out []int64
	for _, sample := range applied.Samples {
		out = append(out, sample.Index)
	}
	return out
}

func columns(rows int) []schema.Column {
	return []schema.Column{{Field: "x", Kind: schema.Tensor, DType: schema.Int64, Rows: rows, Form: schema.Uniform}}
}

func pack(t *testing.T, value any) []byte {
	t.Helper()
	out, err := msgpack.Marshal(value)
	require.NoError(t, err)
	return out
}

// where is a sampling_config.
type where = map[string]any

func rank(rank int, batch any) where { return where{"dp_rank": rank, "batch_index": batch} }

func (s *stage) fetch(partition, task string, n int, config where) (*catalog.Described, error) {
	r := catalog.FetchRequest{Partition: partition, Fields: []string{"x"}, N: n, Task: task}
	if config != nil {
		r.Sampling = pack(s.t, config)
	}
	return s.Fetch(r, s.picks)
}

// got is a fetch of task "t" from partition "p"; nil for none.
func (s *stage) got(n int, config where) []int64 {
	s.t.Helper()
	d, err := s.fetch("p", "t", n, config)
	require.NoError(s.t, err)
	return indexesOf(d)
}

func indexesOf(d *catalog.Described) (out []int64) {
	if d != nil {
		for _, sample := range d.Samples {
			out = append(out, sample.Index)
		}
	}
	return out
}

func (s *stage) refused(n int, config where, texts ...string) {
	s.t.Helper()
	_, err := s.fetch("p", "t", n, config)
	require.Equal(s.t, tqerr.InvalidArgument, tqerr.CodeOf(err), "%v", err)
	for _, text := range texts {
		require.ErrorContains(s.t, err, text)
	}
}

func (s *stage) clear(partition string, indexes ...int64) {
	s.t.Helper()
	d, err := s.ForceFetch(partition, nil)
	require.NoError(s.t, err)
	var samples []schema.Sample
	for _, sample := range d.Samples {
		for _, i := range indexes {
			if sample.Index == i {
				samples = append(samples, sample)
			}
		}
	}
	require.Len(s.t, samples, len(indexes))
	cl := s.StartClearSamples(partition, samples)
	s.picks.Cleared(partition, indexes)
	s.FinishClear(cl)
}

func (s *stage) clearAll(partition string) {
	s.FinishClear(s.StartClearPartition(partition))
	s.picks.ClearPartition(partition)
}

func (s *stage) reset(partition, task string) {
	s.ResetConsumption(partition, task)
	s.picks.Reset(partition, task)
}

func ones(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = 1
	}
	return out
}

func span(from, to int64) (out []int64) {
	for ; from < to; from++ {
		out = append(out, from)
	}
	return out
}

// insertOf is a write of new samples without tags.
func insertOf(n int) *catalog.Write {
	return &catalog.Write{Partition: "p", Insert: n, Columns: columns(n)}
}
