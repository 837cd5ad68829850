package snapshot

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

var update = flag.Bool("update", false, "write testdata anew; only for a new version of the format")

func TestAStateComesBackAsItWas(t *testing.T) {
	s, _, _ := example()
	path, cut := filepath.Join(t.TempDir(), "s"), NewCut()
	require.NoError(t, WriteState(vfs.OS{}, path, cut, s, []byte("sampler")))
	got, sampler, gotCut, err := ReadState(vfs.OS{}, path)
	require.NoError(t, err)
	require.Equal(t, s, got)
	require.Equal(t, []byte("sampler"), sampler)
	require.Equal(t, cut, gotCut)
}

func TestALargeStateComesBackAsItWas(t *testing.T) {
	const n = 3*rowsPerRecord + 5
	p := catalog.PartitionState{Name: "p"}
	shapes := schema.NewBuilder("x")
	var holders []int64
	for i := range int64(n) {
		p.Samples = append(p.Samples, schema.Sample{Index: i, Generation: uint32(1 + i%3)})
		p.Keyed, p.Keys = append(p.Keyed, i), append(p.Keys, fmt.Sprint("key of sample ", i))
		p.Tagged, p.Tags = append(p.Tagged, i), append(p.Tags, []byte{0x81, 0xa1, 'n', byte(i % 100)})
		shapes.Append(schema.Column{Kind: schema.Tensor, DType: schema.Int8, Rows: 1, Form: schema.Uniform, Shape: []int64{i % 7, 2}, Ragged: 1})
		holders = append(holders, i)
	}
	p.Fields = []catalog.FieldState{{Name: "x", Kind: schema.Tensor, DType: schema.Int8, Ragged: 1, Holders: holders, Shapes: shapes.Column()}}
	p.Tasks = []catalog.TaskState{{Name: "t", Consumed: holders}}
	s := &catalog.State{Partitions: []catalog.PartitionState{p}}
	path := filepath.Join(t.TempDir(), "s")
	require.NoError(t, WriteState(vfs.OS{}, path, NewCut(), s, nil))
	got, _, _, err := ReadState(vfs.OS{}, path)
	require.NoError(t, err)
	require.Equal(t, s, got)
}

// Large values, some of which pack well, come back bit by bit, however they are cut.
func TestValuesComeBackAsTheyWere(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	random := make([]byte, 3*blockSize+77)
	for i := 0; i+8 < len(random); i += 8 {
		binary.LittleEndian.PutUint64(random[i:], rng.Uint64())
	}
	var rows []Rows
	var data [][]byte
	for k, b := range [][]byte{random, make([]byte, 2*blockSize+5), {}, []byte("x"), append(make([]byte, blockSize), random[:blockSize+3]...)} {
		size := int64(len(b))
		o := schema.Column{Field: "o", Kind: schema.Object, Rows: 1, Form: schema.Objects, Sizes: []int64{size}, Codecs: []schema.Codec{0}}
		rows = append(rows, Rows{Partition: "p", Samples: []schema.Sample{{Index: int64(k), Generation: 1}}, Columns: []schema.Column{o}})
		data = append(data, b)
	}
	dir := filepath.Join(t.TempDir(), "v")
	writeValues(t, dir, NewCut(), rows, data)
	gotRows, got, err := readValues(vfs.OS{}, dir)
	require.NoError(t, err)
	require.Equal(t, rows, gotRows)
	for k := range data {
		requireSame(t, data[k], got[k])
	}
	info, err := os.Stat(filepath.Join(dir, partName(0)))
	require.NoError(t, err)
	require.Greater(t, info.Size(), int64(len(random)), "random bytes are stored as they are")
	info, err = os.Stat(filepath.Join(dir, partName(1)))
	require.NoError(t, err)
	require.Less(t, info.Size(), int64(blockSize/100), "zeros are packed")
}

func TestTheRowIndexComesBackAsItWas(t *testing.T) {
	x := &RowIndex{
		Partition: "p", Keys: []string{"b", "a"}, Tags: [][]byte{{0x80}, {0x81, 0xa1, 'n', 7}}, Indexes: []int64{9, 4},
		Sets: [][]string{{"x", "y"}, {"x"}}, SetOf: []int64{1, 0},
	}
	path, cut := filepath.Join(t.TempDir(), "r"), NewCut()
	require.NoError(t, WriteRows(vfs.OS{}, path, cut, x))
	got, gotCut, err := ReadRows(vfs.OS{}, path)
	require.NoError(t, err)
	require.Equal(t, x, got)
	require.Equal(t, cut, gotCut)
}

// readAll reads every file of an example folder.
func readAll(fs vfs.FS, dir string) error {
	_, _, _, err := ReadState(fs, filepath.Join(dir, StateName))
	if err == nil {
		_, _, err = ReadRows(fs, filepath.Join(dir, RowsName))
	}
	if err == nil {
		_, _, err = readValues(fs, filepath.Join(dir, StorageName))
	}
	return err
}

func exampleFolder(t *testing.T, dir string) {
	s, rows, data := example()
	cut := Cut{1, 2, 3}
	require.NoError(t, WriteState(vfs.OS{}, filepath.Join(dir, StateName), cut, s, []byte("sampler")))
	require.NoError(t, WriteRows(vfs.OS{}, filepath.Join(dir, RowsName), cut, &RowIndex{
		Partition: "p", Keys: []string{"a"}, Tags: [][]byte{{0x80}}, Indexes: []int64{3}, Sets: [][]string{{"x"}}, SetOf: []int64{0},
	}))
	writeValues(t, filepath.Join(dir, StorageName), cut, rows, data)
}

func TestAFlippedBitInAnyByteAndAnyMissingByteIsFound(t *testing.T) {
	dir := t.TempDir()
	exampleFolder(t, dir)
	require.NoError(t, readAll(vfs.OS{}, dir))
	eachFile(t, dir, func(path string, content []byte) {
		spoiled := func(b []byte, what string, at int) {
			require.NoError(t, os.WriteFile(path, b, 0o600))
			err := readAll(vfs.OS{}, dir)
			code := tqerr.CodeOf(err)
			require.True(t, code == tqerr.Corruption || code == tqerr.VersionMismatch && at < headerSize, "%s: %s at %d: %v", path, what, at, err)
			require.Contains(t, err.Error(), dir)
		}
		for at := range content {
			content[at] ^= 1 << (at % 8)
			spoiled(content, "bit flipped", at)
			content[at] ^= 1 << (at % 8)
			spoiled(content[:at], "cut off", at)
		}
		spoiled(append(content[:len(content):len(content)], 0), "longer", len(content))
		require.NoError(t, os.Remove(path))
		require.Equal(t, tqerr.FileNotFound, tqerr.CodeOf(readAll(vfs.OS{}, dir)), path)
		require.NoError(t, os.WriteFile(path, content, 0o600))
	})
	require.NoError(t, readAll(vfs.OS{}, dir))
}

// Records that are each fine are not accepted in another place or file.
func TestPartsOfAnotherSaveAreFound(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	exampleFolder(t, a)
	exampleFolder(t, b)
	_, rows, data := example()
	require.NoError(t, os.RemoveAll(filepath.Join(b, StorageName)))
	writeValues(t, filepath.Join(b, StorageName), Cut{7}, rows, data)
	part := filepath.Join(StorageName, partName(0))
	content, err := os.ReadFile(filepath.Join(b, part))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(a, part), content, 0o600))
	requireCode(t, readAll(vfs.OS{}, a), tqerr.Corruption, "another save")
}

func requireCode(t *testing.T, err error, code tqerr.Code, parts ...string) {
	t.Helper()
	require.Error(t, err)
	require.Equal(t, code, tqerr.CodeOf(err), "%v", err)
	for _, part := range parts {
		require.Contains(t, err.Error(), part)
	}
}

func TestForeignNewerAndEscapingFilesAreRefused(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, StateName)
	require.NoError(t, os.WriteFile(path, []byte("\x80\x04\x95 a pickle of somebody else"), 0o600))
	_, _, _, err := ReadState(vfs.OS{}, path)
	requireCode(t, err, tqerr.Corruption, StateName, "not a file of this format")

	newer := binary.LittleEndian.AppendUint16([]byte(magic), version+1)
	require.NoError(t, os.WriteFile(path, append(newer, make([]byte, 100)...), 0o600))
	_, _, _, err = ReadState(vfs.OS{}, path)
	requireCode(t, err, tqerr.VersionMismatch, "version 2", "reads 1")

	for _, name := range []string{"../values-0.tq", "/etc/passwd", "values-1.tq", "sub/values-0.tq", ""} {
		store := t.TempDir()
		_, _, err := writeFile(vfs.OS{}, filepath.Join(store, indexName), IndexFile, func(w *writer) error {
			cut := NewCut()
			return errors.Join(w.record(recordHead, &headRecord{Cut: cut[:]}), w.record(recordPart, &partRecord{Name: name}))
		})
		require.NoError(t, err)
		_, err = OpenValues(vfs.OS{}, store)
		requireCode(t, err, tqerr.Corruption, fmt.Sprintf("%q", name))
	}
}

// Files of the first version stay readable for ever.
func TestGoldenFilesAreReadable(t *testing.T) {
	dir := filepath.Join("testdata", "version1")
	if *update {
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.MkdirAll(dir, 0o777))
		exampleFolder(t, dir)
	}
	wantState, wantRows, wantData := example()
	s, sampler, cut, err := ReadState(vfs.OS{}, filepath.Join(dir, StateName))
	require.NoError(t, err)
	require.Equal(t, wantState, s)
	require.Equal(t, []byte("sampler"), sampler)
	require.Equal(t, Cut{1, 2, 3}, cut)
	rows, data, err := readValues(vfs.OS{}, filepath.Join(dir, StorageName))
	require.NoError(t, err)
	require.Equal(t, wantRows, rows)
	require.Equal(t, wantData, data)
	index, _, err := ReadRows(vfs.OS{}, filepath.Join(dir, RowsName))
	require.NoError(t, err)
	require.Equal(t, []string{"a"}, index.Keys)
}

// Whatever the bytes are, a reader ends with an error or a result, and takes no more memory than the file deserves.
func FuzzReader(f *testing.F) {
	for _, name := range []string{StateName, RowsName, filepath.Join(StorageName, indexName), filepath.Join(StorageName, partName(0))} {
		content, err := os.ReadFile(filepath.Join("testdata", "version1", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(content)
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		fixSums(content)
		path := filepath.Join(t.TempDir(), "f")
		require.NoError(t, os.WriteFile(path, content, 0o600))
		_, _, _, _ = ReadState(vfs.OS{}, path)
		_, _, _ = ReadRows(vfs.OS{}, path)
		s := &Stored{fs: vfs.OS{}, dir: filepath.Dir(path), parts: []partRecord{{Name: "f"}}}
		_ = s.ReadPart(t.Context(), 0, func(rows *Rows) (Place, error) {
			if n := rows.Bytes(); n < 64<<20 {
				return Place{Pieces: [][]byte{make([]byte, n)}}, nil
			}
			return Place{}, errors.New("large")
		})
		_, _, _ = readFile(vfs.OS{}, path, IndexFile, s.indexRecord)
	})
}

func TestLostCellsAreSavedAsSuch(t *testing.T) {
	s, _, _ := example()
	s.Partitions[0].Fields[1].Lost = []int64{3}
	path := filepath.Join(t.TempDir(), "s")
	require.NoError(t, WriteState(vfs.OS{}, path, NewCut(), s, nil))
	got, _, _, err := ReadState(vfs.OS{}, path)
	require.NoError(t, err)
	require.Equal(t, s, got)
}
