package storetest

import (
	"github.com/stretchr/testify/require"

	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

func rowsAreFreedOneByOne(h *harness) {
	x := dense("x", 7, 1, 1000)
	h.put("p", samples(0, 7), x)
	for left, i := range []int{3, 0, 6, 5, 1} {
		require.Equal(h, int64(4000), h.s.Delete("p", nil, samples(int64(i), 1)))
		require.Equal(h, int64(4000*(6-left)), h.used())
	}
	require.Zero(h, h.s.Delete("p", nil, samples(3, 1)), "it is gone already")
	h.requireRows("p", at(samples(0, 7), 2, 4), x.pick(2, 4))
	h.requireMissing("p", "x", samples(2, 3), 1, false)
}

func fieldsAreFreedAlone(h *harness) {
	x, y := dense("x", 4, 1, 10), dense("y", 4, 2, 20)
	h.put("p", samples(0, 4), x, y, object("o", 3, 5, 6, 7, 8))
	require.Equal(h, int64(2*40+6+7), h.s.Delete("p", []string{"x", "o", "none"}, samples(1, 2)))
	h.requireRows("p", samples(0, 4), y)
	h.requireMissing("p", "o", samples(0, 4), 1, false)
	require.True(h, h.s.Has("p", []string{"x", "o"}, at(samples(0, 4), 0, 3)))
	require.Zero(h, h.s.Delete("p", []string{}, samples(0, 4)), "no fields are not all fields")
	require.Equal(h, int64(4*80+2*40+5+8), h.s.Delete("p", nil, samples(0, 4)))
	require.Zero(h, h.s.Stats().Cells)
}

func orderAndDuplicates(h *harness) {
	x, v := dense("x", 5, 1, 3), varying("v", 2, 4, 0, 1, 2, 4)
	h.put("p", samples(10, 5), x, v)
	for _, order := range [][]int{{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2}, {1, 1}, {3, 4, 0, 0, 3, 4}, {}} {
		h.requireRows("p", at(samples(10, 5), order...), withField(x.pick(order...), "x"))
		h.requireRows("p", at(samples(10, 5), order...), withField(v.pick(order...), "v"))
	}
}

// withField names a column that was built of no rows.
func withField(f filled, field string) filled {
	f.Field = field
	return f
}

func runsAreMerged(h *harness) {
	h.put("p", samples(0, 600), dense("x", 600, 1, 4))
	l := h.read("p", []string{"x"}, samples(0, 600))
	require.Len(h, l.Columns()[0].Runs, 1)
	l.Release()
	l = h.read("p", []string{"x"}, append(samples(300, 300), samples(0, 300)...))
	require.Len(h, l.Columns()[0].Runs, 2)
	l.Release()
}

func missingCells(h *harness) {
	h.put("p", samples(0, 3), dense("x", 3, 1, 3))
	h.put("p", samples(0, 2), dense("y", 2, 1, 3))
	h.requireMissing("p", "x", samples(1, 4), 2, false)
	h.requireMissing("p", "none", samples(1, 1), 0, false)
	h.requireMissing("q", "x", samples(0, 1), 0, false)
	h.requireMissing("p", "x", samples(1<<40, 1), 0, false)
	require.True(h, h.s.Has("p", []string{"x", "y"}, samples(0, 2)))
	require.False(h, h.s.Has("p", []string{"x", "y"}, samples(0, 3)))
	_, err := h.s.Read("p", []string{"x", "y"}, samples(0, 3))
	require.Error(h, err)
	require.Zero(h, h.s.Stats().Leases, "a failed read leases nothing")
	h.check()
}

func generations(h *harness) {
	old := samples(0, 3)
	h.put("p", old, dense("x", 3, 1, 3))
	h.requireMissing("p", "x", newer(old), 0, true)
	require.Zero(h, h.s.Delete("p", nil, newer(old)), "a newer sample does not own the cell")
	x := dense("x", 2, 2, 3)
	h.put("p", newer(old[1:]), x)
	require.Equal(h, int64(3*12), h.used(), "the older cells are freed")
	h.requireRows("p", newer(old[1:]), x)
	h.requireMissing("p", "x", old, 1, true)
	require.Equal(h, int64(12), h.s.Delete("p", nil, old), "only the one of that generation")
	h.requireRows("p", newer(old[1:]), x)
}

func leaseKeepsBytes(h *harness) {
	x := bytesColumn("x", 4, 70_000, 1)
	h.put("p", samples(0, 4), x)
	l := h.read("p", []string{"x"}, samples(0, 4))
	require.Zero(h, h.s.Delete("p", nil, samples(0, 4)))
	require.Equal(h, int64(280_000), h.used(), "leased bytes are in use")
	require.Zero(h, h.s.Stats().Cells)
	h.requireMissing("p", "x", samples(0, 4), 0, false)
	h.put("p", samples(0, 4), bytesColumn("x", 4, 70_000, 2))
	require.Equal(h, int64(560_000), h.used())
	require.Equal(h, x.list(), rowsOf(h.s, l.Columns()[0]).list())
	h.check()
	l.Release()
	l.Release()
	require.Equal(h, int64(280_000), h.used())
	require.Zero(h, h.s.Stats().Leases)
}

func leaseIsExact(h *harness) {
	x := dense("x", 10, 1, 100)
	h.put("p", samples(0, 10), x, object("o", 3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
	l := h.read("p", []string{"x"}, at(samples(0, 10), 7, 2, 3))
	require.Equal(h, int64(7*400+55), h.s.Delete("p", nil, samples(0, 10)))
	require.Equal(h, int64(3*400), h.used())
	require.Equal(h, x.pick(7, 2, 3).list(), rowsOf(h.s, l.Columns()[0]).list())
	h.check()
	l.Release()
	require.Zero(h, h.used())
}

func overlappingLeases(h *harness) {
	h.put("p", samples(0, 10), dense("x", 10, 1, 100))
	first, second := h.read("p", []string{"x"}, samples(0, 6)), h.read("p", []string{"x"}, samples(4, 4))
	twice := h.read("p", []string{"x"}, at(samples(0, 10), 5, 5))
	require.Equal(h, int64(800), h.s.Delete("p", nil, samples(0, 10)))
	first.Release()
	require.Equal(h, int64(4*400), h.used())
	h.check()
	second.Release()
	require.Equal(h, int64(400), h.used())
	h.check()
	twice.Release()
	require.Zero(h, h.used())
}

func zombiesCount(h *harness) {
	h.put("p", samples(0, 3), bytesColumn("x", 3, 300<<10, 1))
	l := h.read("p", []string{"x"}, samples(0, 2))
	h.s.Delete("p", nil, samples(0, 3))
	_, err := h.s.Stage("p", []schema.Column{bytesColumn("x", 2, 300<<10, 1).Column})
	require.Equal(h, tqerr.ResourceExhausted, tqerr.CodeOf(err))
	h.stage("p", bytesColumn("x", 1, 300<<10, 1)).Abort()
	l.Release()
	h.stage("p", bytesColumn("x", 3, 300<<10, 1)).Abort()
}

func rowsWithoutBytes(h *harness) {
	empty := dense("x", 4, 1, 3, 0)
	h.put("p", samples(0, 4), empty, varying("v", 2, 0, 0, 0, 0), object("o", 3, 0, 0, 0, 0), dense("y", 4, 1, 2))
	require.Equal(h, int64(32), h.used())
	require.Equal(h, int64(16), h.s.Stats().Cells)
	h.requireRows("p", samples(0, 4), empty)
	h.requireRows("p", samples(1, 2), varying("v", 2, 0, 0))
	h.requireRows("p", samples(0, 4), object("o", 3, 0, 0, 0, 0))
	l := h.read("p", []string{"x"}, samples(0, 4))
	require.Equal(h, int64(16), h.s.Delete("p", nil, samples(0, 2)))
	h.requireMissing("p", "x", samples(0, 4), 0, false)
	h.check()
	l.Release()
	h.requireRows("p", samples(2, 2), empty.pick(2, 3))
}

func columnsWithoutRows(h *harness) {
	h.put("p", nil, dense("x", 0, 1, 3), object("o", 1))
	require.Zero(h, h.s.Stats().Cells)
	h.put("p", nil)
	h.requireMissing("p", "x", samples(0, 1), 0, false)
}

func objects(h *harness) {
	o := object("o", 1, 3, 0, 500, 70_000, 9)
	h.put("p", samples(0, 5), o)
	h.requireRows("p", samples(0, 5), o)
	h.requireRows("p", at(samples(0, 5), 4, 1, 3), o.pick(4, 1, 3))
	single := object("o", 2, 1234)
	h.put("p", samples(5, 1), single)
	h.requireRows("p", samples(5, 1), single)
	l := h.read("p", []string{"o"}, samples(3, 3))
	got := rowsOf(h.s, l.Columns()[0]).list()
	require.Equal(h, append(o.pick(3, 4).list(), single.list()...), got)
	l.Release()
	require.Equal(h, int64(500), h.s.Delete("p", nil, samples(2, 1)))
}

func varyingRows(h *harness) {
	v := varying("v", 1, 3, 1, 4, 0, 5)
	h.put("p", samples(0, 5), v)
	h.requireRows("p", samples(0, 5), v)
	h.requireRows("p", at(samples(0, 5), 2, 3, 0), v.pick(2, 3, 0))
	single := varying("v", 2, 4)
	h.put("p", samples(5, 1), single)
	h.requireRows("p", samples(5, 1), single)
	l := h.read("p", []string{"v"}, at(samples(0, 6), 5, 2))
	require.Equal(h, schema.Uniform, l.Columns()[0].Column.Form, "rows of one shape are uniform, wherever they came from")
	l.Release()
	require.Equal(h, int64(4*16), h.s.Delete("p", nil, samples(2, 1)))
	h.requireRows("p", at(samples(0, 5), 1, 3, 4), v.pick(1, 3, 4))
}

func freeRows(h *harness) {
	f := free("f", 1, []int64{2, 3}, []int64{}, []int64{4}, []int64{2, 3}, []int64{0, 9})
	h.put("p", samples(0, 5), f)
	h.requireRows("p", samples(0, 5), f)
	h.requireRows("p", at(samples(0, 5), 3, 0), f.pick(3, 0))
	h.requireRows("p", at(samples(0, 5), 4, 2, 1), f.pick(4, 2, 1))
	require.Equal(h, int64(8), h.s.Delete("p", nil, samples(1, 1)))
	h.requireRows("p", samples(2, 3), f.pick(2, 3, 4))
}

func formsMeet(h *harness) {
	f, v := free("x", 1, []int64{2, 3}, []int64{4}), varying("x", 2, 1, 7)
	u := withBytes(schema.Column{
		Field: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: 2, Form: schema.Uniform, Shape: []int64{5, 2},
	}, 3)
	h.put("p", samples(0, 2), f)
	h.put("p", samples(2, 2), v)
	h.put("p", samples(4, 2), u)
	all := append(append(f.list(), v.list()...), u.list()...)
	l := h.read("p", []string{"x"}, samples(0, 6))
	require.Equal(h, all, rowsOf(h.s, l.Columns()[0]).list())
	l.Release()
	l = h.read("p", []string{"x"}, samples(2, 4))
	require.Equal(h, all[2:], rowsOf(h.s, l.Columns()[0]).list())
	require.Equal(h, schema.Varying, l.Columns()[0].Column.Form)
	l.Release()
}

func kindsDoNotMeet(h *harness) {
	h.put("p", samples(0, 1), dense("x", 1, 1, 3))
	h.put("p", samples(1, 1), bytesColumn("x", 1, 3, 1))
	h.put("p", samples(2, 1), object("x", 1, 3))
	for _, pair := range [][]int{{0, 1}, {1, 2}} {
		_, err := h.s.Read("p", []string{"x"}, at(samples(0, 3), pair...))
		require.Equal(h, tqerr.SchemaMismatch, tqerr.CodeOf(err))
	}
	require.Zero(h, h.s.Stats().Leases)
	h.check()
}

func farApart(h *harness) {
	x := dense("x", 6, 1, 3)
	far := samples(0, 6)
	for i := range far {
		far[i].Index = int64(i) * int64(i) * 1_000_003
	}
	h.put("p", far, x)
	h.requireRows("p", far, x)
	require.Equal(h, int64(24), h.s.Delete("p", nil, at(far, 5, 2)))
	h.requireRows("p", at(far, 0, 1, 3, 4), x.pick(0, 1, 3, 4))
}

func partitionsAreApart(h *harness) {
	a, b := dense("x", 3, 1, 3), dense("x", 3, 2, 8)
	h.put("a", samples(0, 3), a)
	h.put("b", samples(0, 3), b)
	h.s.Delete("a", nil, samples(1, 2))
	h.requireRows("b", samples(0, 3), b)
	h.requireRows("a", samples(0, 1), a.pick(0))
}
