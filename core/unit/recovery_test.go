package unit_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/store/disktier"
	"transferqueue/core/tqerr"
	"transferqueue/core/unit"
)

const rowBytes = 600

func durable(dir string, how disktier.Durability, files vfs.Disk) *unit.Disk {
	return unit.Disk{
		Path: dir, Namespace: "ns", Name: "u", Durability: how, Threshold: 500, HighWatermark: 0.9, LowWatermark: 0.7,
		Headroom: 64 << 10,
	}.OnDisk(files)
}

func open(dir string, how disktier.Durability, files vfs.Disk) (*unit.Unit, error) {
	return unit.New(unit.Options{Name: "u", Disk: durable(dir, how, files)})
}

func column(field string, rows int, size int64) schema.Column {
	return schema.Column{Field: field, Kind: schema.Tensor, DType: schema.Uint8, Ragged: 1, Rows: rows, Form: schema.Uniform, Shape: []int64{size}}
}

func sample(i int) schema.Sample { return schema.Sample{Index: int64(i), Generation: 1} }

// put writes a row whose bytes are all i.
func put(t *testing.T, u *unit.Unit, field string, i int, size int64) {
	t.Helper()
	tx, err := u.Stage("p", []schema.Column{column(field, 1, size)})
	require.NoError(t, err)
	for _, b := range tx.Blocks() {
		for k := range u.Bytes(b) {
			u.Bytes(b)[k] = byte(i)
		}
	}
	require.NoError(t, store.Prepare(t.Context(), tx))
	tx.Commit([]schema.Sample{sample(i)})
	require.NoError(t, store.Confirm(tx))
}

func requireValue(t *testing.T, u *unit.Unit, field string, i int, size int64) {
	t.Helper()
	l, err := u.Read("p", []string{field}, []schema.Sample{sample(i)})
	require.NoError(t, err)
	defer l.Release()
	var got []byte
	for _, run := range l.Columns()[0].Runs {
		got = append(got, u.Bytes(run.Block)...)
	}
	require.Len(t, got, int(size))
	for _, b := range got {
		require.Equal(t, byte(i), b)
	}
}

// killed is the disk of a unit with values that was killed.
func killed(t *testing.T, dir string) *vfs.Mem {
	disk := vfs.NewMem(0)
	u, err := open(dir, disktier.Relaxed, disk)
	require.NoError(t, err)
	require.NoError(t, u.Own("s"))
	for i := range 20 {
		put(t, u, "x", i, rowBytes)
		put(t, u, "small", i, 10)
	}
	u.Delete("p", []string{"x"}, []schema.Sample{sample(0), sample(7)})
	left := disk.Killed()
	require.NoError(t, u.Discard("s"))
	require.NoError(t, u.Close())
	return left
}

// A unit whose disk fails while it looks at what is there does not start, and changes nothing; the next has everything.
func TestAFailingRecoveryRefusesAndChangesNothing(t *testing.T) {
	for _, fault := range []error{unix.EIO, unix.ENOSPC, unix.EMFILE} {
		t.Run(fault.Error(), func(t *testing.T) {
			dir := t.TempDir()
			left := killed(t, dir)
			refused := 0
			for call := 0; ; call++ {
				disk := left.Killed()
				failing := &vfs.FailingDisk{Disk: disk, At: call, Err: fault}
				u, err := open(dir, disktier.Relaxed, failing)
				if err == nil { // what failed did not matter, as a file that is removed the next time
					require.NoError(t, u.Discard("other"), "it is not its")
					check(t, u)
					require.NoError(t, u.Close())
				} else {
					refused++
					require.Contains(t, []tqerr.Code{tqerr.IO, tqerr.ResourceExhausted}, tqerr.CodeOf(err), err)
					require.ErrorContains(t, err, "unit disk")
				}
				if !failing.Failed() {
					break
				}
				u, err = open(dir, disktier.Relaxed, disk.Killed())
				require.NoError(t, err, "call %d", call)
				check(t, u)
				require.NoError(t, u.Close())
			}
			require.Greater(t, refused, 3)
		})
	}
}

func check(t *testing.T, u *unit.Unit) {
	t.Helper()
	for i := range 20 {
		if i == 0 || i == 7 {
			require.False(t, u.Has("p", []string{"x"}, []schema.Sample{sample(i)}))
			continue
		}
		requireValue(t, u, "x", i, rowBytes)
	}
	stock := u.Inventory()
	rows := 0
	for _, s := range stock {
		require.Equal(t, "x", s.Column.Field)
		rows += len(s.Samples)
	}
	require.Equal(t, 18, rows)
	require.Equal(t, tqerr.AlreadyExists, tqerr.CodeOf(u.Own("another")))
	require.NoError(t, u.Own("s"))
}

// A unit that closes writes what is in memory to disk; one that is discarded leaves no folder.
func TestClosingKeepsAndDiscardingRemoves(t *testing.T) {
	for _, how := range []disktier.Durability{disktier.Relaxed, disktier.Strict} {
		dir := t.TempDir()
		u, err := open(dir, how, nil)
		require.NoError(t, err)
		require.NoError(t, u.Own("s"))
		for i := range 5 {
			put(t, u, "x", i, rowBytes)
			put(t, u, "small", i, 10)
			put(t, u, "none", i, 0)
		}
		require.NoError(t, u.Close())
		u, err = open(dir, how, nil)
		require.NoError(t, err)
		for i := range 5 {
			requireValue(t, u, "x", i, rowBytes)
			requireValue(t, u, "small", i, 10)
			requireValue(t, u, "none", i, 0)
		}
		require.NoError(t, u.Discard("another"))
		require.EqualValues(t, 15, u.Stats().Cells)
		require.NoError(t, u.Discard("s"))
		require.Zero(t, u.Stats().Cells)
		require.NoError(t, u.Close())
		left, err := filepath.Glob(filepath.Join(dir, "*", "*"))
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// When there is no room on disk for what is in memory, closing says so, and keeps the rest.
func TestClosingSaysWhatItCannotKeep(t *testing.T) {
	dir := t.TempDir()
	d := durable(dir, disktier.Relaxed, nil)
	d.Limit = 3*rowBytes + 25
	u, err := unit.New(unit.Options{Name: "u", Disk: d})
	require.NoError(t, err)
	for i := range 3 {
		put(t, u, "x", i, rowBytes)
	}
	for i := range 5 {
		put(t, u, "small", i, 10)
	}
	err = u.Close()
	require.Equal(t, tqerr.ResourceExhausted, tqerr.CodeOf(err))
	require.ErrorContains(t, err, `unit "u": values that were in memory are lost`)
	u, err = open(dir, disktier.Relaxed, nil)
	require.NoError(t, err)
	require.EqualValues(t, 5, u.Stats().Cells)
	require.NoError(t, u.Close())
}

func TestNamesOfUnitsNameFolders(t *testing.T) {
	dir := t.TempDir()
	var all []*unit.Unit
	names := []string{"a", "A", "a/b", "..", ".", "a b", "%2E", "ä", "a%2Fb"}
	for _, name := range names {
		d := durable(dir, disktier.Relaxed, nil)
		d.Name = name
		u, err := unit.New(unit.Options{Name: name, Disk: d})
		require.NoError(t, err, name)
		all = append(all, u)
	}
	folders, err := os.ReadDir(filepath.Join(dir, "transfer_queue_ssd_offload", "ns.units"))
	require.NoError(t, err)
	require.Len(t, folders, len(names))
	for _, u := range all {
		require.NoError(t, u.Close())
	}
	for _, name := range []string{"", fmt.Sprintf("%0300d", 1)} {
		d := durable(dir, disktier.Relaxed, nil)
		d.Name = name
		_, err := unit.New(unit.Options{Name: name, Disk: d})
		require.Equal(t, tqerr.InvalidArgument, tqerr.CodeOf(err), name)
	}
}
