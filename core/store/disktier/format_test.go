package disktier

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
)

var update = flag.Bool("update", false, "write the golden folder anew")

const golden = "testdata/v1"

// goldenColumns has every form of a column.
func goldenColumns() []schema.Column {
	return []schema.Column{
		bytesColumn("u", 3, 5),
		{Field: "v", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: 3, Form: schema.Varying, Shape: []int64{0, 2}, Lengths: []int64{1, 0, 3}},
		{Field: "f", Kind: schema.Tensor, DType: schema.Float32, Ragged: 2, Rows: 3, Form: schema.Free, NDims: []uint8{2, 0, 1}, Dims: []int64{2, 3, 4}},
		{Field: "o", Kind: schema.Object, Rows: 3, Form: schema.Objects, Codecs: []schema.Codec{1, 7, 200}, Sizes: []int64{0, 300, 1}},
	}
}

// goldenBytes are the bytes of a column: 0, 1, 2, … from where its name says.
func goldenBytes(c *schema.Column) []byte {
	out := make([]byte, c.Bytes())
	for i := range out {
		out[i] = c.Field[0] + byte(i)
	}
	return out
}

func writeGolden(t *testing.T, dir string) {
	s, err := OpenStore(Options{Dir: dir, Durability: Relaxed, HeadroomBytes: pageSize}, openArena(t), 0)
	require.NoError(t, err)
	columns := goldenColumns()
	tx, err := s.Stage("part", columns)
	require.NoError(t, err)
	for i, b := range tx.Blocks() {
		copy(s.Bytes(b), goldenBytes(&columns[i]))
	}
	tx.Commit([]schema.Sample{{Index: 4, Generation: 9}, {Index: 3, Generation: 1}, {Index: 1 << 40, Generation: 1<<32 - 1}})
	put(t, s, 0, 2, 100)
	s.Delete("p", nil, samples(0, 1))
	require.NoError(t, s.Close())
	trimGolden(t, dir)
}

// trimGolden removes what has no content.
func trimGolden(t *testing.T, dir string) {
	for _, name := range []string{lockName, reserveName} {
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	path := filepath.Join(dir, "index-00000001")
	change(t, path, func(data []byte) []byte { return bytes.TrimRight(data, "\x00") })
}

// TestGoldenFolder reads a folder that an earlier version of this package has written.
func TestGoldenFolder(t *testing.T) {
	if *update {
		require.NoError(t, os.RemoveAll(golden))
		writeGolden(t, golden)
	}
	dir := filepath.Join(t.TempDir(), "tier")
	require.NoError(t, os.CopyFS(dir, os.DirFS(golden)))
	s, err := OpenStore(Options{Dir: dir, Durability: Strict}, openArena(t), 0)
	require.NoError(t, err)
	all := []schema.Sample{{Index: 4, Generation: 9}, {Index: 3, Generation: 1}, {Index: 1 << 40, Generation: 1<<32 - 1}}
	for _, want := range goldenColumns() {
		l, err := s.Read("part", []string{want.Field}, all)
		require.NoError(t, err)
		want.Normalize()
		require.Equal(t, want, l.Columns()[0].Column)
		require.Equal(t, goldenBytes(&want), append([]byte{}, bytesOf(s, l)...))
		l.Release()
	}
	require.False(t, s.Has("p", []string{"x"}, samples(0, 1)))
	requireValue(t, s, 1, 100)
	require.Equal(t, int64(13), s.Stats().Cells)
	require.NoError(t, s.Close())
}

func TestEntriesSurvive(t *testing.T) {
	var body []byte
	var want []entry
	for _, c := range goldenColumns() {
		e := entry{partition: "p\x00ü", samples: samples(7, 3), column: c, block: store.Block{Segment: 3, Offset: 1 << 40, Size: c.Bytes()}, sums: []uint32{1, 2, 1 << 31}}
		body, want = appendBind(body, &e), append(want, e)
	}
	d := decoder{b: body}
	for _, e := range want {
		got, ok := d.next()
		require.True(t, ok)
		require.Equal(t, e.partition, got.partition)
		require.Equal(t, e.samples, got.samples)
		require.Equal(t, e.block, got.block)
		require.Equal(t, e.sums, got.sums)
		require.Equal(t, goldenBytes(&e.column), goldenBytes(&got.column))
		e.column.Normalize()
		got.column.Normalize()
		require.Equal(t, e.column.Form, got.column.Form)
	}
	require.Empty(t, d.b)
	for n := range len(body) {
		cut := decoder{b: body[:n]}
		for len(cut.b) > 0 {
			cut.next()
		}
		require.NotPanics(t, func() { _ = cut.bad })
	}
}

// FuzzReplay feeds frames to the reader: whatever they say, it neither panics nor takes much memory.
func FuzzReplay(f *testing.F) {
	for _, folder := range []string{golden, goldenHeld} {
		data, err := os.ReadFile(filepath.Join(folder, "index-00000001"))
		require.NoError(f, err)
		f.Add(data[headerBytes:])
		for rest := data[headerBytes:]; len(rest) > 0; {
			h, body, ok := decodeFrame(rest)
			require.True(f, ok)
			f.Add(body)
			rest = rest[frameBytes+h.length:]
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r := newReplay()
		if _, _, err := r.read(data); err == nil {
			r.entries()
		}
		r = newReplay()
		if r.apply(data) == nil { // as a body, so that the checksum keeps nothing out
			for _, e := range r.entries() {
				require.True(t, len(e.samples) == e.column.Rows || e.column.Rows == 1 && len(e.samples) > 1, "%d samples of %d rows", len(e.samples), e.column.Rows)
				require.NoError(t, e.column.Validate())
			}
		}
	})
}

// FuzzOpen opens folders whose index is anything.
func FuzzOpen(f *testing.F) {
	for _, folder := range []string{golden, goldenHeld} {
		index, err := os.ReadFile(filepath.Join(folder, "index-00000001"))
		require.NoError(f, err)
		f.Add(index)
	}
	values, err := os.ReadFile(filepath.Join(golden, "values-00000001"))
	require.NoError(f, err)
	a := memory(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		disk := vfs.NewMem(0)
		require.NoError(t, disk.Mkdir("d"))
		for name, content := range map[string][]byte{"d/index-00000001": data, "d/values-00000001": values} {
			file, err := disk.Create(name)
			require.NoError(t, err)
			_, err = file.WriteAt(content, 0)
			require.NoError(t, err)
		}
		o := testOptions(Relaxed, disk)
		o.Dir = "d"
		s, err := OpenStore(o, a, 0)
		if err != nil {
			return
		}
		require.NoError(t, s.Check())
		for txn := range s.Tier().mu.held {
			_ = s.CommitHeld(txn, samples(0, 1), 1)
			break
		}
		s.DropHeld()
		require.NoError(t, s.Check())
		put(t, s, 0, 1, 10)
		require.NoError(t, s.Close())
	})
}
