package vfs

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// OS is the file system of this machine.
type OS struct{}

var _ FS = OS{}

// Create implements FS.
func (OS) Create(name string) (File, error) {
	return file(os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666))
}

// Open implements FS. It does not wait for somebody who writes to a pipe.
func (OS) Open(name string) (File, error) {
	return file(os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0))
}

// file keeps a nil pointer from becoming an interface that is not nil.
func file(f *os.File, err error) (File, error) {
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Mkdir implements FS.
func (OS) Mkdir(name string) error { return os.Mkdir(name, 0o777) }

// MkdirAll implements FS.
func (OS) MkdirAll(name string) error { return os.MkdirAll(name, 0o777) }

// ReadDir implements FS.
func (OS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

// Stat implements FS.
func (OS) Stat(name string) (fs.FileInfo, error) { return os.Stat(name) }

// Lstat implements FS.
func (OS) Lstat(name string) (fs.FileInfo, error) { return os.Lstat(name) }

// Resolve implements FS.
func (OS) Resolve(name string) (string, error) { return filepath.EvalSymlinks(name) }

// Rename implements FS. Where the file system has no rename that never replaces, a folder is only renamed onto a name that
// was free a moment before.
func (OS) Rename(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if unsupported(err) {
		if _, taken := os.Lstat(to); taken == nil {
			return &os.LinkError{Op: "rename", Old: from, New: to, Err: unix.EEXIST}
		}
		return os.Rename(from, to)
	}
	return linkError(from, to, err)
}

// Exchange implements FS.
func (OS) Exchange(a, b string) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	if unsupported(err) {
		return errors.ErrUnsupported
	}
	return linkError(a, b, err)
}

func linkError(from, to string, err error) error {
	if err == nil {
		return nil
	}
	return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
}

func unsupported(err error) bool {
	return err == unix.EINVAL || err == unix.ENOSYS || err == unix.ENOTSUP
}

// RemoveAll implements FS.
func (OS) RemoveAll(name string) error { return os.RemoveAll(name) }

// SyncDir implements FS.
func (OS) SyncDir(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Lock implements FS.
func (OS) Lock(name string) (io.Closer, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		return f, nil
	}
	_ = f.Close()
	if err == unix.EWOULDBLOCK {
		return nil, ErrLocked
	}
	return nil, &os.PathError{Op: "flock", Path: name, Err: err}
}
