// Package storetest is what every tier must do, as one suite: Run it with a factory of the tier. Tiers that can verify
// themselves have a method Check() error, which is called when a test ends.
package storetest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/leaktest"
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

// Options ask for a store with certain limits.
type Options struct {
	MemoryLimit int64 // 0: none
}

// Factory opens an empty store. The suite closes it.
type Factory func(t *testing.T, o Options) store.Store

// tests is the suite. Each test gets a store of its own and leaves it empty.
var tests = []struct {
	name  string
	limit int64
	run   func(h *harness)
}{
	{"staged is invisible until commit", 0, stagedIsInvisible},
	{"abort leaves no byte", 0, abortLeavesNoByte},
	{"a write ends once", 0, writeEndsOnce},
	{"bad columns are refused", 0, badColumns},
	{"overwrite frees", 0, overwriteFrees},
	{"rows are freed one by one", 0, rowsAreFreedOneByOne},
	{"fields are freed alone", 0, fieldsAreFreedAlone},
	{"order and duplicates of a read", 0, orderAndDuplicates},
	{"runs are merged", 0, runsAreMerged},
	{"missing cells", 0, missingCells},
	{"generations", 0, generations},
	{"a stale commit does not replace a newer cell", 0, staleCommit},
	{"a lease keeps its bytes", 0, leaseKeepsBytes},
	{"a lease keeps no row it does not cover", 0, leaseIsExact},
	{"overlapping leases", 0, overlappingLeases},
	{"limit", 1 << 20, limit},
	{"zombies count against the limit", 1 << 20, zombiesCount},
	{"rows without bytes", 0, rowsWithoutBytes},
	{"columns without rows", 0, columnsWithoutRows},
	{"objects", 0, objects},
	{"varying rows", 0, varyingRows},
	{"free rows", 0, freeRows},
	{"forms meet in one read", 0, formsMeet},
	{"kinds do not meet in one read", 0, kindsDoNotMeet},
	{"indexes far apart", 0, farApart},
	{"partitions are apart", 0, partitionsAreApart},
	{"on free is told", 0, onFree},
	{"shared rows", 0, sharedRows},
	{"shared rows are replaced one by one", 0, sharedRowsAreReplaced},
	{"a lease keeps a shared row", 0, leaseKeepsSharedRow},
	{"shared rows beside others", 0, sharedBesideOthers},
	{"bad shares are refused", 0, badShares},
	{"a stale commit of shared rows", 0, staleShared},
	{"close refuses while in use", 0, closeRefuses},
	{"random operations", 8 << 20, randomOperations},
}

// Run runs the suite.
func Run(t *testing.T, open Factory) {
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			leaktest.Check(t)
			s := open(t, Options{MemoryLimit: test.limit})
			h := &harness{T: t, s: s}
			test.run(h)
			h.clear()
			h.requireEmpty()
			require.NoError(t, s.Close())
			require.NoError(t, s.Close(), "closing twice is fine")
			_, err := s.Stage("p", nil)
			require.Error(t, err, "a closed store takes nothing")
		})
	}
}

// harness is a store under test and what was written to it.
type harness struct {
	*testing.T
	s       store.Store
	written []written
}

type written struct {
	partition string
	samples   []schema.Sample
}

// clear deletes everything that was committed.
func (h *harness) clear() {
	h.Helper()
	for _, w := range h.written {
		h.s.Delete(w.partition, nil, w.samples)
	}
}

// requireEmpty checks that nothing is left, to the byte.
func (h *harness) requireEmpty() {
	h.Helper()
	stats := h.s.Stats()
	stats.MemoryLimit, stats.DiskLimit = 0, 0
	require.Equal(h, store.Stats{}, stats)
	h.check()
}

func (h *harness) check() {
	h.Helper()
	if c, ok := h.s.(interface{ Check() error }); ok {
		require.NoError(h, c.Check())
	}
}

// used is the memory and disk in use.
func (h *harness) used() int64 {
	stats := h.s.Stats()
	return stats.MemoryUsed + stats.DiskUsed
}

// stage reserves and fills columns with the given rows of bytes.
func (h *harness) stage(partition string, columns ...filled) store.Staged {
	h.Helper()
	tx, err := h.s.Stage(partition, descriptors(columns))
	require.NoError(h, err)
	fill(h.s, tx, columns)
	return tx
}

func (h *harness) put(partition string, samples []schema.Sample, columns ...filled) {
	h.Helper()
	h.stage(partition, columns...).Commit(samples)
	h.written = append(h.written, written{partition, samples})
}

func (h *harness) read(partition string, fields []string, samples []schema.Sample) store.Lease {
	h.Helper()
	l, err := h.s.Read(partition, fields, samples)
	require.NoError(h, err)
	return l
}

// requireRows reads one field and compares shapes and bytes row by row.
func (h *harness) requireRows(partition string, samples []schema.Sample, want filled) {
	h.Helper()
	l := h.read(partition, []string{want.Field}, samples)
	defer l.Release()
	require.Len(h, l.Columns(), 1)
	require.Equal(h, want.list(), rowsOf(h.s, l.Columns()[0]).list())
	require.Equal(h, want.Field, l.Columns()[0].Column.Field)
}

func (h *harness) requireMissing(partition, field string, samples []schema.Sample, at int, stale bool) {
	h.Helper()
	require.False(h, h.s.Has(partition, []string{field}, samples))
	_, err := h.s.Read(partition, []string{field}, samples)
	var missing *store.MissingError
	require.ErrorAs(h, err, &missing)
	require.Equal(h, store.MissingError{Field: field, Sample: samples[at], Stale: stale}, *missing)
}
