package storetest

import (
	"math"
	"sync/atomic"

	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func stagedIsInvisible(h *harness) {
	x := dense("x", 3, 1, 5)
	tx := h.stage("p", x)
	require.Equal(h, int64(1), h.s.Stats().Staged)
	require.Equal(h, int64(60), h.used())
	require.Zero(h, h.s.Stats().Cells)
	h.requireMissing("p", "x", samples(0, 3), 0, false)
	h.check()
	tx.Commit(samples(0, 3))
	h.written = append(h.written, written{"p", samples(0, 3)})
	require.Zero(h, h.s.Stats().Staged)
	require.Equal(h, int64(3), h.s.Stats().Cells)
	require.True(h, h.s.Has("p", []string{"x"}, samples(0, 3)))
	h.requireRows("p", samples(0, 3), x)
}

func abortLeavesNoByte(h *harness) {
	h.stage("p", dense("x", 3, 1, 5), object("o", 2, 7, 0, 9), varying("v", 3, 1, 2, 0)).Abort()
	h.requireEmpty()
	old := dense("x", 3, 1, 5)
	h.put("p", samples(0, 3), old)
	h.stage("p", dense("x", 3, 2, 7)).Abort()
	h.requireRows("p", samples(0, 3), old)
	require.Equal(h, int64(60), h.used())
}

func writeEndsOnce(h *harness) {
	tx := h.stage("p", dense("x", 2, 1, 5))
	tx.Commit(samples(0, 2))
	tx.Abort()
	tx.Commit(samples(4, 2))
	require.Equal(h, int64(40), h.used())
	require.True(h, h.s.Has("p", []string{"x"}, samples(0, 2)))
	require.False(h, h.s.Has("p", []string{"x"}, samples(4, 1)))
	h.written = append(h.written, written{"p", samples(0, 2)})

	tx = h.stage("p", dense("x", 2, 1, 5))
	tx.Abort()
	tx.Commit(samples(8, 2))
	tx.Abort()
	require.Equal(h, int64(40), h.used())
	require.False(h, h.s.Has("p", []string{"x"}, samples(8, 1)))
}

func badColumns(h *harness) {
	for name, columns := range map[string][]schema.Column{
		"rows differ":   {dense("x", 2, 1, 5).Column, dense("y", 3, 1, 5).Column},
		"field twice":   {dense("x", 2, 1, 5).Column, dense("y", 2, 1, 5).Column, dense("x", 2, 1, 5).Column},
		"bad dtype":     {{Field: "x", Kind: schema.Tensor, DType: 200, Form: schema.Uniform, Rows: 1}},
		"sum overflows": {dense("x", 0, 1, 5).Column, dense("y", 0, 1, 5).Column},
	} {
		if name == "sum overflows" {
			for i := range columns {
				columns[i].Rows, columns[i].DType, columns[i].Shape = 1, schema.Uint8, []int64{math.MaxInt64}
			}
		}
		_, err := h.s.Stage("p", columns)
		require.Equal(h, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
	h.requireEmpty()
}

func overwriteFrees(h *harness) {
	h.put("p", samples(0, 4), dense("x", 4, 1, 100), dense("y", 4, 1, 1))
	x := dense("x", 2, 2, 3)
	h.put("p", samples(1, 2), x)
	require.Equal(h, int64(2*400+2*12+4*4), h.used())
	h.requireRows("p", samples(1, 2), x)
	h.requireRows("p", samples(0, 1), dense("x", 4, 1, 100).pick(0))
	require.Equal(h, int64(8), h.s.Stats().Cells)
	h.put("p", samples(0, 4), dense("x", 4, 3, 2))
	require.Equal(h, int64(4*8+4*4), h.used())
}

func staleCommit(h *harness) {
	now := newer(samples(0, 4))
	x := dense("x", 4, 1, 5)
	h.put("p", now[1:3], x.pick(1, 2))
	h.put("p", samples(0, 4), dense("x", 4, 2, 5))
	require.Equal(h, int64(4*20), h.used(), "rows of samples that are gone are freed")
	h.requireRows("p", now[1:3], x.pick(1, 2))
	h.requireRows("p", at(samples(0, 4), 0, 3), dense("x", 4, 2, 5).pick(0, 3))
}

func limit(h *harness) {
	h.put("p", samples(0, 3), bytesColumn("x", 3, 256<<10, 1))
	h.stage("p", bytesColumn("x", 1, 256<<10, 2)).Abort()
	tx := h.stage("p", bytesColumn("x", 1, 200<<10, 2))
	_, err := h.s.Stage("p", []schema.Column{bytesColumn("x", 1, 50<<10, 3).Column, bytesColumn("y", 1, 7<<10, 3).Column})
	require.Equal(h, tqerr.ResourceExhausted, tqerr.CodeOf(err))
	require.ErrorContains(h, err, "58368 bytes needed")
	require.ErrorContains(h, err, "991232 of 1048576 used")
	require.Equal(h, int64(968<<10), h.used(), "a refused write changes nothing")
	tx.Abort()
	h.put("p", samples(3, 1), bytesColumn("x", 1, 256<<10, 2))
	_, err = h.s.Stage("p", []schema.Column{bytesColumn("x", 1, 1, 3).Column})
	require.Equal(h, tqerr.ResourceExhausted, tqerr.CodeOf(err))
	h.s.Delete("p", nil, samples(1, 1))
	h.stage("p", bytesColumn("x", 1, 256<<10, 2)).Abort()
}

func onFree(h *harness) {
	var calls atomic.Int64
	h.s.OnFree(func() {
		_ = h.s.Stats() // no lock is held
		calls.Add(1)
	})
	told := func(want bool, what string) {
		h.Helper()
		require.Equal(h, want, calls.Swap(0) > 0, what)
	}
	h.put("p", samples(0, 4), dense("x", 4, 1, 5))
	told(false, "a first commit frees nothing")
	h.put("p", samples(0, 2), dense("x", 2, 1, 5))
	told(true, "an overwrite frees")
	h.stage("p", dense("x", 2, 1, 5)).Abort()
	told(true, "an abort frees")
	h.s.Delete("p", nil, samples(9, 1))
	told(false, "nothing was deleted")
	l := h.read("p", []string{"x"}, samples(2, 1))
	told(false, "a read frees nothing")
	h.s.Delete("p", nil, samples(2, 1))
	told(false, "the row is leased")
	l.Release()
	told(true, "the zombie is freed")
	h.s.Delete("p", nil, samples(3, 1))
	told(true, "a delete frees")
}

func closeRefuses(h *harness) {
	tx := h.stage("p", dense("x", 2, 1, 5))
	require.Equal(h, tqerr.InvalidState, tqerr.CodeOf(h.s.Close()))
	tx.Commit(samples(0, 2))
	h.written = append(h.written, written{"p", samples(0, 2)})
	l := h.read("p", []string{"x"}, samples(0, 2))
	require.Equal(h, tqerr.InvalidState, tqerr.CodeOf(h.s.Close()))
	h.requireRows("p", samples(0, 2), dense("x", 2, 1, 5))
	l.Release()
}
