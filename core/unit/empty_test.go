package unit_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/unit"
)

// rowsOf reads a field row by row: the shape or codec of each, and its bytes.
func rowsOf(t *testing.T, u *unit.Unit, field string, samples ...schema.Sample) (out []string) {
	t.Helper()
	for _, sample := range samples {
		l, err := u.Read("p", []string{field}, []schema.Sample{sample})
		require.NoError(t, err)
		c := l.Columns()[0]
		var value []byte
		for _, run := range c.Runs {
			value = append(value, u.Bytes(run.Block)...)
		}
		out = append(out, fmt.Sprintf("%v %v %v %v %d %x", c.Column.Kind, c.Column.DType, c.Column.Shape, c.Column.Codecs, c.Column.Rows, value))
		l.Release()
	}
	return out
}

func samplesTo(n int) (out []schema.Sample) {
	for i := range n {
		out = append(out, sample(i))
	}
	return out
}

// write puts columns whose bytes all are fill; the rows become those of samples.
func write(t *testing.T, u *unit.Unit, fill byte, samples []schema.Sample, columns ...schema.Column) {
	t.Helper()
	tx, err := u.Stage("p", columns)
	require.NoError(t, err)
	for _, b := range tx.Blocks() {
		for i := range u.Bytes(b) {
			u.Bytes(b)[i] = fill
		}
	}
	require.NoError(t, store.Prepare(t.Context(), tx))
	tx.Commit(samples)
	require.NoError(t, store.Confirm(tx))
}

// emptyColumns are columns some or all of whose rows have no bytes, by field.
func emptyColumns() map[string]schema.Column {
	uint8s := schema.Column{Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1}
	uniform, varying, shared := column("uniform", 4, 0), uint8s, column("shared", 2, 0)
	varying.Field, varying.Rows, varying.Form, varying.Shape = "varying", 4, schema.Varying, []int64{0}
	varying.Lengths = []int64{0, 600, 0, 0}
	free := uint8s
	free.Field, free.Rows, free.Form = "free", 4, schema.Free
	free.NDims, free.Dims = []uint8{1, 3, 1, 2}, []int64{0, 2, 0, 3, 700, 5, 0}
	objects := schema.Column{
		Field: "objects", Kind: schema.Object, Rows: 4, Form: schema.Objects,
		Codecs: []schema.Codec{1, 2, 1, 2}, Sizes: []int64{0, 0, 900, 0},
	}
	shared.Share = []uint32{0, 1, 0, 0}
	out := map[string]schema.Column{}
	for _, c := range []schema.Column{uniform, varying, free, objects, shared} {
		out[c.Field] = c
	}
	return out
}

// What has no bytes survives the end of the process, as what lies on disk does, and a power loss when the unit is strict.
func TestValuesWithoutBytesSurvive(t *testing.T) {
	for name, after := range map[string]struct {
		how  disktier.Durability
		left func(*vfs.Mem) *vfs.Mem
	}{
		"relaxed": {disktier.Relaxed, (*vfs.Mem).Killed},
		"strict":  {disktier.Strict, func(m *vfs.Mem) *vfs.Mem { return m.Crash(rand.New(rand.NewPCG(1, 2))) }},
	} {
		for field, c := range emptyColumns() {
			t.Run(name+" "+field, func(t *testing.T) {
				dir, disk := t.TempDir(), vfs.NewMem(0)
				u, err := open(dir, after.how, disk)
				require.NoError(t, err)
				require.NoError(t, u.Own("s"))
				all := samplesTo(4)
				require.NoError(t, c.Validate())
				write(t, u, 7, all, c)
				want, before := rowsOf(t, u, field, all...), u.Counters()
				require.EqualValues(t, 4, before.DiskCells)
				left := after.left(disk)
				require.NoError(t, u.Discard("s"))
				require.NoError(t, u.Close())

				u, err = open(dir, after.how, left)
				require.NoError(t, err)
				require.Equal(t, want, rowsOf(t, u, field, all...))
				now := u.Counters()
				require.Equal(t, before.DiskCells, now.DiskCells)
				require.Equal(t, before.DiskLogical, now.DiskLogical)
				require.Equal(t, c.Bytes(), u.Stats().DiskUsed)
				require.Zero(t, u.Stats().MemoryUsed)
				require.NoError(t, u.Own("s"))
				require.NoError(t, u.Discard("s"))
				require.Zero(t, u.Stats().Cells)
				require.NoError(t, u.Close())
			})
		}
	}
}

// A value without bytes takes the place of another and gives its own up like any other, also after the process has ended.
func TestValuesWithoutBytesAreReplacedAndCleared(t *testing.T) {
	dir, disk := t.TempDir(), vfs.NewMem(0)
	u, err := open(dir, disktier.Relaxed, disk)
	require.NoError(t, err)
	require.NoError(t, u.Own("s"))
	for i := range 5 {
		put(t, u, "x", i, []int64{0, 0, rowBytes, 0, 10}[i])
	}
	put(t, u, "x", 0, rowBytes)
	put(t, u, "x", 1, 10) // in memory only
	put(t, u, "x", 2, 0)
	put(t, u, "x", 4, 0)
	u.Delete("p", nil, []schema.Sample{sample(3)})
	for range 2 {
		disk = disk.Killed()
		require.NoError(t, u.Close())
		u, err = open(dir, disktier.Relaxed, disk)
		require.NoError(t, err)
		require.EqualValues(t, 3, u.Stats().Cells)
		requireValue(t, u, "x", 0, rowBytes)
		requireValue(t, u, "x", 2, 0)
		requireValue(t, u, "x", 4, 0)
		require.EqualValues(t, rowBytes, u.Stats().DiskUsed)
	}
	require.NoError(t, u.Discard("s"))
	require.NoError(t, u.Close())
}

// A unit whose files end with its process keeps them in memory, where they cost nothing.
func TestScratchHasNothingOfValuesWithoutBytes(t *testing.T) {
	d := durable(t.TempDir(), disktier.None, nil)
	d.Run, d.Unit = "run", "u"
	u, err := unit.New(unit.Options{Name: "u", Disk: d})
	require.NoError(t, err)
	put(t, u, "x", 1, 0)
	requireValue(t, u, "x", 1, 0)
	require.Zero(t, u.Counters().DiskCells)
	u.Delete("p", nil, []schema.Sample{sample(1)})
	require.NoError(t, u.Close())
}
