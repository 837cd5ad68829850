package vfs_test

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

func write(f vfs.FS, path, text string) error {
	file, err := f.Create(path)
	if err != nil {
		return err
	}
	_, err = io.WriteString(file, text)
	return errors.Join(err, file.Sync(), file.Close())
}

func read(t *testing.T, f vfs.FS, path string) string {
	t.Helper()
	file, err := f.Open(path)
	require.NoError(t, err)
	b, err := io.ReadAll(file)
	require.NoError(t, err)
	require.NoError(t, file.Close())
	return string(b)
}

// workload makes every call once and returns the first error.
func workload(f vfs.FS, dir string) error {
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	lock := func() error {
		l, err := f.Lock(dir)
		if err != nil {
			return err
		}
		return l.Close()
	}
	reading := func() error {
		file, err := f.Open(a)
		if err != nil {
			return err
		}
		_, sized := file.Stat()
		_, got := io.ReadAll(file)
		return errors.Join(sized, got, file.Close())
	}
	for _, step := range []func() error{
		func() error { return f.MkdirAll(filepath.Join(dir, "x", "y")) },
		func() error { return f.Mkdir(filepath.Join(dir, "z")) },
		func() error { return write(f, a, "a") },
		func() error { return write(f, b, "b") },
		func() error { return f.Exchange(a, b) },
		func() error { return f.Rename(b, filepath.Join(dir, "c")) },
		reading, lock,
		func() error { _, err := f.ReadDir(dir); return err },
		func() error { _, err := f.Stat(a); return err },
		func() error { _, err := f.Lstat(a); return err },
		func() error { _, err := f.Resolve(a); return err },
		func() error { return f.SyncDir(dir) },
		func() error { return f.RemoveAll(a) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func TestTheFileSystemOfTheMachine(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, workload(vfs.OS{}, dir))
	require.Equal(t, "a", read(t, vfs.OS{}, filepath.Join(dir, "c")))
	require.NoFileExists(t, filepath.Join(dir, "a"))
}

func TestNothingIsReplaced(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, write(vfs.OS{}, a, "a"))
	require.NoError(t, write(vfs.OS{}, b, "b"))
	require.ErrorIs(t, vfs.OS{}.Rename(a, b), fs.ErrExist)
	require.ErrorIs(t, write(vfs.OS{}, a, "c"), fs.ErrExist)
	require.ErrorIs(t, vfs.OS{}.Exchange(a, filepath.Join(dir, "none")), fs.ErrNotExist)
	require.Equal(t, "a", read(t, vfs.OS{}, a))
	require.Equal(t, "b", read(t, vfs.OS{}, b))
}

func TestALockHasOneHolder(t *testing.T) {
	dir := t.TempDir()
	lock, err := vfs.OS{}.Lock(dir)
	require.NoError(t, err)
	_, err = vfs.OS{}.Lock(dir)
	require.ErrorIs(t, err, vfs.ErrLocked)
	require.NoError(t, lock.Close())
	lock, err = vfs.OS{}.Lock(dir)
	require.NoError(t, err)
	require.NoError(t, lock.Close())
}

// Each call fails once, and its error is what the workload ends with.
func TestEveryCallCanFail(t *testing.T) {
	boom := errors.New("boom")
	for at := 0; ; at++ {
		f := &vfs.Failing{FS: vfs.OS{}, At: at, Err: boom}
		err := workload(f, t.TempDir())
		if !f.Failed() {
			require.NoError(t, err)
			require.Greater(t, at, 20)
			return
		}
		require.ErrorIs(t, err, boom, "call %d", at)
	}
}

func TestAFailingWriteHasWrittenHalf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	f := &vfs.Failing{FS: vfs.OS{}, At: 1, Err: errors.New("full"), Forever: true}
	require.Error(t, write(f, path, "1234"))
	require.Equal(t, "12", read(t, vfs.OS{}, path))
}

func TestErrorsGetACode(t *testing.T) {
	_, missing := os.Stat("/there/is/no/such/file")
	require.Equal(t, tqerr.FileNotFound, tqerr.CodeOf(vfs.Wrap(missing)))
	require.Equal(t, tqerr.FileExists, tqerr.CodeOf(vfs.Wrap(fs.ErrExist)))
	require.Equal(t, tqerr.IO, tqerr.CodeOf(vfs.Wrap(io.ErrShortWrite)))
	known := tqerr.New(tqerr.Corruption, "x")
	require.Equal(t, error(known), vfs.Wrap(known))
	require.NoError(t, vfs.Wrap(nil))
}
