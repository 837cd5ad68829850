package snapshot

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
)

// example is a small state with everything in it, and the values that belong to it.
func example() (*catalog.State, []Rows, [][]byte) {
	samples := []schema.Sample{{Index: 3, Generation: 2}, {Index: 5, Generation: 1}}
	x := schema.Column{Field: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Rows: 2, Form: schema.Uniform, Shape: []int64{2}}
	y := schema.Column{
		Field: "y", Kind: schema.Tensor, DType: schema.Int16, Ragged: 1, Rows: 1, Form: schema.Varying, Shape: []int64{0}, Lengths: []int64{3},
	}
	o := schema.Column{Field: "o", Kind: schema.Object, Rows: 2, Form: schema.Objects, Sizes: []int64{0, 5}, Codecs: []schema.Codec{1, 2}}
	s := &catalog.State{
		Lineage: 0x1122334455667788,
		Used:    []catalog.UsedRun{{From: 0, Count: 5, Generation: 4}, {From: 5, Count: 2, Generation: 1}},
		Partitions: []catalog.PartitionState{
			{
				Name: "p", Complete: true, Births: []int64{5, 6, 0, 3, 4, 1}, Samples: samples, Reserved: []schema.Sample{{Index: 6, Generation: 1}},
				Keyed: []int64{5, 3}, Keys: []string{"b", "a"}, Tagged: []int64{3}, Tags: [][]byte{{0x81, 0xa1, 'n', 7}},
				Fields: []catalog.FieldState{
					{Name: "x", Kind: schema.Tensor, DType: schema.Int64, Ragged: 1, Holders: []int64{3, 5}, Shapes: x},
					{Name: "y", Kind: schema.Tensor, DType: schema.Int16, Ragged: 1, Holders: []int64{5}, Shapes: y},
					{Name: "o", Kind: schema.Object, Holders: []int64{3, 5}},
					{Name: "gone"},
				},
				Tasks: []catalog.TaskState{{Name: "train", Consumed: []int64{5}}},
			},
			{Name: "empty"},
		},
	}
	rows := []Rows{
		{Partition: "p", Samples: samples, Columns: []schema.Column{x, o}},
		{Partition: "p", Samples: samples[1:], Columns: []schema.Column{y}},
	}
	var numbers []byte
	for _, v := range []int64{1, -1, 1 << 40, 9} {
		numbers = binary.LittleEndian.AppendUint64(numbers, uint64(v))
	}
	return s, rows, [][]byte{append(numbers, "bytes"...), {1, 0, 2, 0, 3, 0}}
}

// writeValues writes rows to a folder, one part for each.
func writeValues(t *testing.T, dir string, cut Cut, rows []Rows, data [][]byte) {
	v, err := NewValues(vfs.OS{}, dir, cut)
	require.NoError(t, err)
	for k := range rows {
		require.NoError(t, v.WritePart(func(p *Part) error {
			return p.Rows(&rows[k], func(put func([]byte) error) error { return put(data[k]) })
		}))
	}
	require.NoError(t, v.Finish())
}

// readValues reads a folder back, filling small places.
func readValues(fs vfs.FS, dir string) (rows []Rows, data [][]byte, err error) {
	stored, err := OpenValues(fs, dir)
	if err != nil {
		return nil, nil, err
	}
	filled := 0
	for k := range stored.Parts() {
		err := stored.ReadPart(context.Background(), k, func(r *Rows) (place Place, err error) {
			all := make([]byte, r.Bytes())
			rows, data = append(rows, *r), append(data, all)
			for from := 0; from < len(all); from += 7 {
				place.Pieces = append(place.Pieces, all[from:min(from+7, len(all))])
			}
			place.Pieces = append(place.Pieces, nil)
			place.Filled = func() error { filled++; return nil }
			return place, nil
		})
		if err != nil {
			return nil, nil, err
		}
	}
	if filled != len(rows) {
		return nil, nil, errors.New("not everything that was filled was told")
	}
	return rows, data, nil
}

// eachFile calls fn for every file of a folder.
func eachFile(t *testing.T, dir string, fn func(path string, content []byte)) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		fn(path, content)
		return err
	}))
}

func requireSame(t *testing.T, want, got []byte) {
	t.Helper()
	require.True(t, bytes.Equal(want, got), "%d bytes of %d are the same", sameBytes(want, got), len(want))
}

func sameBytes(a, b []byte) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}
