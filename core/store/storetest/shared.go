package storetest

import (
	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// sharing makes the rows of a column those of more samples.
func sharing(f filled, share ...uint32) filled {
	f.Share = share
	return f
}

func sharedRows(h *harness) {
	s := samples(0, 5)
	for _, x := range []filled{
		sharing(dense("x", 2, 1, 25), 0, 1, 0, 0, 1), sharing(varying("x", 2, 6, 7), 1, 1, 1, 1, 0),
		sharing(object("x", 3, 90, 100), 0, 0, 1, 0, 0), sharing(free("x", 4, []int64{3, 4}, []int64{13}), 0, 1, 1, 1, 1),
		sharing(dense("x", 1, 5, 50), 0, 0, 0, 0, 0),
	} {
		h.put("p", s, x)
		bytes := x.Bytes()
		require.Equal(h, bytes, h.used(), "a row is stored once")
		require.Equal(h, int64(5), h.s.Stats().Cells)
		h.requireRows("p", s, x.expand())
		h.requireRows("p", at(s, 3, 1, 1, 4), x.expand().pick(3, 1, 1, 4))
		h.check()
		last := map[uint32]int{}
		for i, row := range x.Share {
			last[row] = i
		}
		offsets := x.Offsets()
		for i, row := range x.Share {
			h.s.Delete("p", nil, at(s, i))
			if last[row] == i {
				bytes -= offsets[row+1] - offsets[row]
			}
			require.Equal(h, bytes, h.used(), "it is freed with its last holder")
			h.check()
		}
	}
}

func sharedRowsAreReplaced(h *harness) {
	s := samples(0, 3)
	x := sharing(dense("x", 1, 1, 100), 0, 0, 0)
	h.put("p", s, x)
	other := dense("x", 1, 2, 10)
	h.put("p", at(s, 1), other)
	require.Equal(h, int64(440), h.used())
	h.requireRows("p", at(s, 0, 2), x.pick(0, 0))
	h.requireRows("p", at(s, 1), other)
	again := sharing(dense("x", 1, 3, 50), 0, 0)
	h.put("p", at(s, 0, 1), again)
	require.Equal(h, int64(600), h.used())
	h.requireRows("p", at(s, 2), x.pick(0))
	h.requireRows("p", at(s, 1, 0), again.pick(0, 0))
	h.put("p", at(s, 2), other)
	require.Equal(h, int64(240), h.used())
	h.check()
}

func leaseKeepsSharedRow(h *harness) {
	s := samples(0, 3)
	x := sharing(dense("x", 1, 1, 100), 0, 0, 0)
	h.put("p", s, x)
	l := h.read("p", []string{"x"}, at(s, 0, 1))
	h.s.Delete("p", nil, at(s, 0, 1))
	h.requireRows("p", at(s, 2), x.pick(0))
	h.s.Delete("p", nil, at(s, 2))
	require.GreaterOrEqual(h, h.used(), int64(400))
	h.check()
	require.Equal(h, x.pick(0, 0).list(), rowsOf(h.s, l.Columns()[0]).list())
	l.Release()
	require.Zero(h, h.used())
}

func sharedBesideOthers(h *harness) {
	s := samples(250, 12) // over two pages
	x := sharing(dense("x", 3, 1, 200), 0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 0, 2)
	y, o := dense("y", 12, 2, 7), sharing(object("o", 3, 10, 1000), 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1)
	h.put("p", s, x, y, o)
	require.Equal(h, int64(3*800+12*28+1010), h.used())
	for _, f := range []filled{x, y, o} {
		h.requireRows("p", s, f.expand())
	}
	h.stage("p", x, y, o).Abort()
	require.Equal(h, int64(3*800+12*28+1010), h.used())
	h.s.Delete("p", []string{"x"}, at(s, 0, 1, 6, 9, 10))
	require.Equal(h, int64(2*800+12*28+1010), h.used())
	h.check()
}

func badShares(h *harness) {
	for name, x := range map[string]filled{
		"a row that is not there": sharing(dense("x", 2, 1, 5), 0, 2, 1), "a row of nobody": sharing(dense("x", 2, 1, 5), 0, 0, 0),
		"no sample": sharing(dense("x", 1, 1, 5), []uint32{}...),
	} {
		if x.Share == nil {
			x.Share = []uint32{}
		}
		_, err := h.s.Stage("p", []schema.Column{x.Column})
		require.Equal(h, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
	_, err := h.s.Stage("p", []schema.Column{sharing(dense("x", 2, 1, 5), 0, 1, 0).Column, dense("y", 2, 1, 5).Column})
	require.Equal(h, tqerr.InvalidArgument, tqerr.CodeOf(err), "samples differ")
	h.requireEmpty()
}

func staleShared(h *harness) {
	s := samples(0, 3)
	newest := dense("x", 1, 1, 4)
	h.put("p", newer(at(s, 1)), newest)
	x := sharing(dense("x", 1, 2, 100), 0, 0, 0)
	h.put("p", s, x)
	require.Equal(h, int64(416), h.used())
	h.requireRows("p", newer(at(s, 1)), newest)
	h.requireRows("p", at(s, 0, 2), x.pick(0, 0))
	h.s.Delete("p", nil, at(s, 0, 2))
	require.Equal(h, int64(16), h.used())
}
