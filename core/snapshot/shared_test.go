package snapshot

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
)

// sharedRows is three samples, of which the first and the last share a row of "x" and none one of "y".
func sharedRows(share ...uint32) ([]Rows, [][]byte) {
	samples := []schema.Sample{{Index: 3, Generation: 2}, {Index: 5, Generation: 1}, {Index: 6, Generation: 1}}
	x := schema.Column{
		Field: "x", Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: 2, Form: schema.Varying, Shape: []int64{0}, Lengths: []int64{2, 3},
		Share: share,
	}
	y := schema.Column{Field: "y", Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: 3, Form: schema.Uniform, Shape: []int64{1}}
	return []Rows{{Partition: "p", Samples: samples, Columns: []schema.Column{x, y}}}, [][]byte{{1, 2, 3, 4, 5, 6, 7, 8}}
}

// Rows that several samples share are in the file once, also in one that an earlier version of this package has written.
func TestSharedRowsComeBackAsTheyWere(t *testing.T) {
	golden := filepath.Join("testdata", "version1-shared")
	rows, data := sharedRows(0, 1, 0)
	if *update {
		require.NoError(t, os.RemoveAll(golden))
		writeValues(t, golden, Cut{1}, rows, data)
	}
	dir := filepath.Join(t.TempDir(), "v")
	writeValues(t, dir, Cut{1}, rows, data)
	for _, dir := range []string{dir, golden} {
		gotRows, gotData, err := readValues(vfs.OS{}, dir)
		require.NoError(t, err)
		require.Equal(t, rows, gotRows)
		require.Equal(t, data, gotData)
	}
}

// A file whose shares make no sense is refused before anything is read from it.
func TestSharesThatMakeNoSenseAreRefused(t *testing.T) {
	for _, share := range [][]uint32{{1, 0, 0}, {0, 0, 0}, {0, 2, 1}, {0, 1}, {0, 1, 0, 0}, {}, {0, 1, 1 << 31}} {
		t.Run(fmt.Sprint(share), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "v")
			rows, data := sharedRows(share...)
			rows[0].Columns[0].Share = share
			writeValues(t, dir, Cut{1}, rows, data)
			_, _, err := readValues(vfs.OS{}, dir)
			requireCode(t, err, tqerr.Corruption, "record 2")
		})
	}
}
