// Package vfs is the file system as the formats of this project use it: every call goes through the interface FS, so that
// tests can make the i-th call fail for every i. OS is the real one; Failing wraps another and fails.
package vfs

import (
	"errors"
	"io"
	"io/fs"

	"transferqueue/core/tqerr"
)

// FS is what programs do with files and folders. Errors are those of package os, so errors.Is(err, fs.ErrNotExist) works.
// Methods may be called from any goroutine.
type FS interface {
	// Create makes a file that does not exist, for writing.
	Create(name string) (File, error)
	// Open opens a file for reading.
	Open(name string) (File, error)
	Mkdir(name string) error
	// MkdirAll makes a folder and those above it; one that is there already is fine.
	MkdirAll(name string) error
	ReadDir(name string) ([]fs.DirEntry, error)
	Stat(name string) (fs.FileInfo, error)
	Lstat(name string) (fs.FileInfo, error)
	// Resolve returns a path without symbolic links that names the same, which must exist.
	Resolve(name string) (string, error)
	// Rename gives a file or folder a name that nothing has. It fails with fs.ErrExist when something has it.
	Rename(from, to string) error
	// Exchange swaps two names that exist, at once: there is no moment without either. errors.ErrUnsupported says that the
	// file system cannot do that.
	Exchange(a, b string) error
	RemoveAll(name string) error
	// SyncDir makes the entries of a folder survive a power loss.
	SyncDir(name string) error
	// Lock takes the lock of a folder, which ends with Close or with the process. ErrLocked says that somebody has it.
	Lock(name string) (io.Closer, error)
}

// File is an open file.
type File interface {
	io.Reader
	io.Writer
	io.Closer
	Stat() (fs.FileInfo, error)
	// Sync makes what was written survive a power loss.
	Sync() error
}

// ErrLocked says that somebody else holds a lock.
var ErrLocked = errors.New("somebody holds the lock")

// Wrap gives an error of a file call the code that names its kind, and leaves one that has a code as it is.
func Wrap(err error) error {
	var known *tqerr.Error
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errors.Is(err, fs.ErrNotExist):
		return tqerr.Wrap(tqerr.FileNotFound, err, "no such file")
	case errors.Is(err, fs.ErrExist):
		return tqerr.Wrap(tqerr.FileExists, err, "there already")
	default:
		return tqerr.Wrap(tqerr.IO, err, "file system")
	}
}
