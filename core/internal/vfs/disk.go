package vfs

import (
	"errors"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Disk is what the disk tier does with files: a folder of files that are written at any place, punched and preallocated.
// OSDisk is the real one, Mem keeps everything in memory and can forget what was not synced, FailingDisk makes the i-th call
// of another fail. Errors are those of package os. Methods may be called from any goroutine.
type Disk interface {
	// Create makes a file that does not exist.
	Create(name string) (DiskFile, error)
	// Open opens a file that exists, for reading and writing.
	Open(name string) (DiskFile, error)
	Remove(name string) error
	// Rename replaces what has the new name.
	Rename(from, to string) error
	// List names everything in a folder.
	List(dir string) ([]string, error)
	// Mkdir makes a folder and those above it, private to the user; one that is there already is fine.
	Mkdir(dir string) error
	// SyncDir makes the names in a folder survive a power loss.
	SyncDir(dir string) error
	// LockFile creates a file when needed and locks it until Close, or the end of the process. ErrInUse: somebody has it.
	LockFile(name string) (io.Closer, error)
}

// DiskFile is an open file.
type DiskFile interface {
	// ReadAt and WriteAt move all bytes or return an error.
	io.ReaderAt
	io.WriterAt
	io.Closer
	Size() (int64, error)
	Truncate(size int64) error
	// Allocate takes the space of a range, which is not written, and makes the file that long.
	Allocate(off, size int64) error
	// Punch gives the space of a range back. It reads as zeros afterwards.
	Punch(off, size int64) error
	// Sync makes bytes and length survive a power loss.
	Sync() error
}

// ErrInUse says that somebody else holds the lock of a file.
var ErrInUse = errors.New("somebody else uses it")

// OSDisk is the file system of this machine.
type OSDisk struct{}

var _ Disk = OSDisk{}

// Create implements Disk.
func (OSDisk) Create(name string) (DiskFile, error) {
	return diskFile(os.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600))
}

// Open implements Disk.
func (OSDisk) Open(name string) (DiskFile, error) {
	return diskFile(os.OpenFile(name, os.O_RDWR|unix.O_NOFOLLOW, 0))
}

// Remove implements Disk.
func (OSDisk) Remove(name string) error { return os.Remove(name) }

// Rename implements Disk.
func (OSDisk) Rename(from, to string) error { return os.Rename(from, to) }

// List implements Disk.
func (OSDisk) List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// Mkdir implements Disk.
func (OSDisk) Mkdir(dir string) error { return os.MkdirAll(dir, 0o700) }

// SyncDir implements Disk.
func (OSDisk) SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// LockFile implements Disk.
func (OSDisk) LockFile(name string) (io.Closer, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	switch err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
		return f, nil
	case unix.EWOULDBLOCK:
		err = ErrInUse
	}
	_ = f.Close()
	return nil, &os.PathError{Op: "lock", Path: name, Err: err}
}

// osDiskFile is a file by its descriptor: the runtime's poller has no use for regular files, and fallocate needs the number.
type osDiskFile struct{ *os.File }

func diskFile(f *os.File, err error) (DiskFile, error) {
	if err != nil {
		return nil, err
	}
	return osDiskFile{f}, nil
}

func (f osDiskFile) Size() (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func (f osDiskFile) Allocate(off, size int64) error { return f.fallocate("allocate", 0, off, size) }

func (f osDiskFile) Punch(off, size int64) error {
	return f.fallocate("punch", unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, size)
}

func (f osDiskFile) fallocate(op string, mode uint32, off, size int64) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			if failed = unix.Fallocate(int(fd), mode, off, size); failed != unix.EINTR {
				return
			}
		}
	})
	if err == nil && failed != nil {
		err = &os.PathError{Op: op, Path: filepath.Base(f.Name()), Err: failed}
	}
	return err
}

// Sync of the length too: fdatasync writes what is needed to read the bytes back.
func (f osDiskFile) Sync() error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		for {
			if failed = unix.Fdatasync(int(fd)); failed != unix.EINTR {
				return
			}
		}
	})
	if err == nil && failed != nil {
		err = &os.PathError{Op: "sync", Path: f.Name(), Err: failed}
	}
	return err
}
