package vfs

import (
	"io"
	"io/fs"
	"sync"
)

// Failing passes calls on and makes one of them fail. Run a workload with Failing{At: i} for i = 0, 1, 2 … until Failed
// says that there was no i-th call.
type Failing struct {
	FS  FS
	At  int   // number of the call that fails, from 0
	Err error // what it returns
	// Forever makes every call after the failing one fail too, as when a disk has gone.
	Forever bool

	mu     sync.Mutex
	calls  int
	failed bool
}

var _ FS = (*Failing)(nil)

// Failed reports whether the call came that had to fail.
func (f *Failing) Failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

func (f *Failing) next() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.calls
	f.calls++
	if n == f.At || f.Forever && n > f.At {
		f.failed = true
		return f.Err
	}
	return nil
}

// Create implements FS.
func (f *Failing) Create(name string) (File, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.wrap(f.FS.Create(name))
}

// Open implements FS.
func (f *Failing) Open(name string) (File, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.wrap(f.FS.Open(name))
}

func (f *Failing) wrap(file File, err error) (File, error) {
	if err != nil {
		return nil, err
	}
	return &failingFile{file, f}, nil
}

// Mkdir implements FS.
func (f *Failing) Mkdir(name string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.Mkdir(name)
}

// MkdirAll implements FS.
func (f *Failing) MkdirAll(name string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.MkdirAll(name)
}

// ReadDir implements FS.
func (f *Failing) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.FS.ReadDir(name)
}

// Stat implements FS.
func (f *Failing) Stat(name string) (fs.FileInfo, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.FS.Stat(name)
}

// Lstat implements FS.
func (f *Failing) Lstat(name string) (fs.FileInfo, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.FS.Lstat(name)
}

// Resolve implements FS.
func (f *Failing) Resolve(name string) (string, error) {
	if err := f.next(); err != nil {
		return "", err
	}
	return f.FS.Resolve(name)
}

// Rename implements FS.
func (f *Failing) Rename(from, to string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.Rename(from, to)
}

// Exchange implements FS.
func (f *Failing) Exchange(a, b string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.Exchange(a, b)
}

// RemoveAll implements FS.
func (f *Failing) RemoveAll(name string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.RemoveAll(name)
}

// SyncDir implements FS.
func (f *Failing) SyncDir(name string) error {
	if err := f.next(); err != nil {
		return err
	}
	return f.FS.SyncDir(name)
}

// Lock implements FS.
func (f *Failing) Lock(name string) (io.Closer, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.FS.Lock(name)
}

type failingFile struct {
	File
	f *Failing
}

func (o *failingFile) Read(p []byte) (int, error) {
	if err := o.f.next(); err != nil {
		return 0, err
	}
	return o.File.Read(p)
}

// Write of a failing call has written half, as a full disk does.
func (o *failingFile) Write(p []byte) (int, error) {
	if err := o.f.next(); err != nil {
		n, _ := o.File.Write(p[:len(p)/2])
		return n, err
	}
	return o.File.Write(p)
}

func (o *failingFile) Stat() (fs.FileInfo, error) {
	if err := o.f.next(); err != nil {
		return nil, err
	}
	return o.File.Stat()
}

func (o *failingFile) Sync() error {
	if err := o.f.next(); err != nil {
		return err
	}
	return o.File.Sync()
}

// Close closes the file also when it fails, as the kernel does.
func (o *failingFile) Close() error {
	err := o.f.next()
	if own := o.File.Close(); err == nil {
		err = own
	}
	return err
}
