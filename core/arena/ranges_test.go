package arena

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// naive is the model of a ranges tree: one bool per address.
type naive []bool

func (m naive) spans() (out []span) {
	for i := 0; i < len(m); i++ {
		if !m[i] {
			continue
		}
		start := i
		for i < len(m) && m[i] {
			i++
		}
		out = append(out, span{uint64(start), uint64(i - start)})
	}
	return out
}

func (m naive) set(s span, v bool) {
	for i := s.start; i < s.end(); i++ {
		m[i] = v
	}
}

func (m naive) fit(size, align uint64) (uint64, bool) {
	for _, s := range m.spans() {
		if start := roundUp(s.start, align); start+size <= s.end() {
			return start, true
		}
	}
	return 0, false
}

func collect(r *ranges) (out []span) {
	r.each(func(s span) { out = append(out, s) })
	return out
}

func TestRangesAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	const size = 4096
	for _, dense := range []int{2, 5, 8} { // in tenths: how many addresses tend to be members
		var r ranges
		model := make(naive, size)
		for step := range 6000 {
			s := span{rnd.Uint64N(size - 8), 1 + rnd.Uint64N(8)}
			if rnd.IntN(10) < dense {
				if free := !slices.Contains(model[s.start:s.end()], true); free {
					model.set(s, true)
					r.merge(s)
				}
			} else if before, _ := r.around(s.start); before.end() >= s.end() && before.size > 0 {
				model.set(s, false)
				r.cut(s)
			}
			require.Equal(t, slices.Contains(model[s.start:s.end()], true), r.overlaps(s), "seed %d", seed)
			if step%50 == 0 {
				require.Equal(t, model.spans(), collect(&r), "seed %d step %d", seed, step)
				require.NoError(t, r.check(), "seed %d step %d", seed, step)
				checkSearches(t, &r, model, rnd)
			}
		}
		for _, s := range collect(&r) {
			r.cut(s)
		}
		require.NoError(t, r.check())
		require.Zero(t, r.count)
		require.LessOrEqual(t, r.nodes.Cap(), keepNodes)
	}
}

func checkSearches(t *testing.T, r *ranges, model naive, rnd *rand.Rand) {
	t.Helper()
	need := 1 + rnd.Uint64N(12)
	want, ok := model.fit(need, 1)
	got, found := r.fit(need, 1)
	require.Equal(t, ok, found)
	require.Equal(t, want, got)
	if start, ok := r.fit(need, 4); ok {
		require.Zero(t, start%4)
		require.NotContains(t, model[start:start+need], false)
	}
	limit := rnd.Uint64N(uint64(len(model)))
	spans := model.spans()
	slices.Reverse(spans)
	i := slices.IndexFunc(spans, func(s span) bool { return s.start < limit && s.size >= need })
	s, found := r.below(limit, need)
	require.Equal(t, i >= 0, found)
	if found {
		require.Equal(t, spans[i], s)
	}
}

func TestRangesJoinBothNeighbours(t *testing.T) {
	var r ranges
	r.merge(span{0, 10})
	r.merge(span{20, 10})
	require.Equal(t, span{0, 30}, r.merge(span{10, 10}))
	require.Equal(t, []span{{0, 30}}, collect(&r))
	require.Panics(t, func() { r.merge(span{29, 5}) })
	require.Panics(t, func() { r.merge(span{5, 1}) })
	r.cut(span{10, 10})
	require.Panics(t, func() { r.merge(span{15, 6}) })
}

func TestRangesManyMisfits(t *testing.T) {
	var r ranges
	for i := range uint64(1000) {
		r.merge(span{i*16 + 1, 8}) // long enough for 8, never on a multiple of 8
	}
	_, ok := r.fit(8, 8)
	require.False(t, ok)
	r.merge(span{20_003, 15})
	start, ok := r.fit(8, 8)
	require.True(t, ok)
	require.Equal(t, uint64(20_008), start)
}

func BenchmarkRangesScattered(b *testing.B) {
	const n = 1 << 20
	var r ranges
	order := rand.New(rand.NewPCG(1, 2)).Perm(n)
	for _, i := range order {
		r.merge(span{uint64(i) * 128, 64})
	}
	b.ReportMetric(float64(r.nodes.Cap()*664)/(1<<20), "MiB")
	i := 0
	for b.Loop() {
		s := span{uint64(order[i%n]) * 128, 64}
		r.cut(s)
		r.merge(s)
		i++
	}
}
