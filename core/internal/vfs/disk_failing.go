package vfs

import (
	"io"
	"sync"
)

// FailingDisk passes calls on and makes one of them fail. Run a workload with At: i for i = 0, 1, 2 … until Failed says that
// there was no i-th call.
type FailingDisk struct {
	Disk
	At  int   // number of the call that fails, from 0
	Err error // what it returns
	// Forever makes every call after the failing one fail too, as when a disk has gone.
	Forever bool
	// Before is told of every call that counts, before it is made, without any lock.
	Before func(call int)
	// Only limits what counts to calls of this name ("write", "sync", …). Empty: all.
	Only string

	mu     sync.Mutex
	calls  int
	failed bool
}

// Failed reports whether the call came that had to fail.
func (f *FailingDisk) Failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

// Heal lets all further calls pass.
func (f *FailingDisk) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.At, f.Forever = -1, false
}

// FailNext makes the n-th call from now fail, counted from 0.
func (f *FailingDisk) FailNext(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.At, f.failed = f.calls+n, false
}

func (f *FailingDisk) next(call string) error {
	if f.Only != "" && f.Only != call {
		return nil
	}
	f.mu.Lock()
	n := f.calls
	f.calls++
	f.mu.Unlock()
	if f.Before != nil {
		f.Before(n)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n == f.At || f.Forever && n > f.At {
		f.failed = true
		return fail(call, "the failing call", f.Err)
	}
	return nil
}

// Create implements Disk.
func (f *FailingDisk) Create(name string) (DiskFile, error) {
	if err := f.next("create"); err != nil {
		return nil, err
	}
	return f.wrap(f.Disk.Create(name))
}

// Open implements Disk.
func (f *FailingDisk) Open(name string) (DiskFile, error) {
	if err := f.next("open"); err != nil {
		return nil, err
	}
	return f.wrap(f.Disk.Open(name))
}

func (f *FailingDisk) wrap(file DiskFile, err error) (DiskFile, error) {
	if err != nil {
		return nil, err
	}
	return &failingDiskFile{file, f}, nil
}

// Remove implements Disk.
func (f *FailingDisk) Remove(name string) error {
	if err := f.next("remove"); err != nil {
		return err
	}
	return f.Disk.Remove(name)
}

// Rename implements Disk.
func (f *FailingDisk) Rename(from, to string) error {
	if err := f.next("rename"); err != nil {
		return err
	}
	return f.Disk.Rename(from, to)
}

// List implements Disk.
func (f *FailingDisk) List(dir string) ([]string, error) {
	if err := f.next("list"); err != nil {
		return nil, err
	}
	return f.Disk.List(dir)
}

// Mkdir implements Disk.
func (f *FailingDisk) Mkdir(dir string) error {
	if err := f.next("mkdir"); err != nil {
		return err
	}
	return f.Disk.Mkdir(dir)
}

// SyncDir implements Disk.
func (f *FailingDisk) SyncDir(dir string) error {
	if err := f.next("syncdir"); err != nil {
		return err
	}
	return f.Disk.SyncDir(dir)
}

// LockFile implements Disk.
func (f *FailingDisk) LockFile(name string) (io.Closer, error) {
	if err := f.next("lock"); err != nil {
		return nil, err
	}
	return f.Disk.LockFile(name)
}

type failingDiskFile struct {
	DiskFile
	f *FailingDisk
}

// ReadAt of a failing call has read half.
func (o *failingDiskFile) ReadAt(p []byte, off int64) (int, error) {
	if err := o.f.next("read"); err != nil {
		n, _ := o.DiskFile.ReadAt(p[:len(p)/2], off)
		return n, err
	}
	return o.DiskFile.ReadAt(p, off)
}

// WriteAt of a failing call has written half, as a full disk does.
func (o *failingDiskFile) WriteAt(p []byte, off int64) (int, error) {
	if err := o.f.next("write"); err != nil {
		n, _ := o.DiskFile.WriteAt(p[:len(p)/2], off)
		return n, err
	}
	return o.DiskFile.WriteAt(p, off)
}

// Size implements DiskFile.
func (o *failingDiskFile) Size() (int64, error) {
	if err := o.f.next("size"); err != nil {
		return 0, err
	}
	return o.DiskFile.Size()
}

// Truncate implements DiskFile.
func (o *failingDiskFile) Truncate(size int64) error {
	if err := o.f.next("truncate"); err != nil {
		return err
	}
	return o.DiskFile.Truncate(size)
}

// Allocate implements DiskFile.
func (o *failingDiskFile) Allocate(off, size int64) error {
	if err := o.f.next("allocate"); err != nil {
		return err
	}
	return o.DiskFile.Allocate(off, size)
}

// Punch implements DiskFile.
func (o *failingDiskFile) Punch(off, size int64) error {
	if err := o.f.next("punch"); err != nil {
		return err
	}
	return o.DiskFile.Punch(off, size)
}

// Sync implements DiskFile.
func (o *failingDiskFile) Sync() error {
	if err := o.f.next("sync"); err != nil {
		return err
	}
	return o.DiskFile.Sync()
}

// Close closes the file also when it fails, as the kernel does.
func (o *failingDiskFile) Close() error {
	err := o.f.next("close")
	if own := o.DiskFile.Close(); err == nil {
		err = own
	}
	return err
}
