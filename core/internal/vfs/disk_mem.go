package vfs

import (
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// page is the unit in which Mem takes space.
const page = 4096

// untouched is every page that has space and was not written yet: programs take space in advance that they hardly use.
var untouched [page]byte

// Mem is a disk in memory. It has a size, so that it can be full, and knows what was synced, so that it can lose the rest.
type Mem struct {
	mu     sync.Mutex
	size   int64 // bytes it holds, 0: no limit
	used   int64
	dirs   map[string]*memDir
	locked map[string]bool
}

// memDir is a folder: the names in it, and those that survive a power loss.
type memDir struct{ now, synced map[string]*memFile }

// memFile is the bytes of a file, now and as of its last sync.
type memFile struct {
	length, syncedLength int64
	pages, synced        map[int64]*[page]byte
	shared               map[int64]*[page]byte // pages that another disk may have too
}

var _ Disk = (*Mem)(nil)

// NewMem makes an empty disk of so many bytes, 0: as many as needed.
func NewMem(size int64) *Mem {
	return &Mem{size: size, dirs: map[string]*memDir{}, locked: map[string]bool{}}
}

// Used is the space that files take, in bytes.
func (m *Mem) Used() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.used
}

// Resize changes how many bytes the disk holds; what is there stays.
func (m *Mem) Resize(size int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.size = size
}

// Crash returns the disk as it is found after a power loss: what was synced, and of the rest a random part when rnd is not
// nil, nothing otherwise. The other one stays as it is, and is of no further use.
func (m *Mem) Crash(rnd *rand.Rand) *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := NewMem(m.size)
	for name, d := range m.dirs {
		kept := &memDir{now: map[string]*memFile{}}
		for entry, f := range d.synced {
			kept.now[entry] = f.crash(rnd)
		}
		kept.synced = maps.Clone(kept.now)
		out.dirs[name] = kept
		for _, f := range kept.now {
			out.used += int64(len(f.pages)) * page
		}
	}
	return out
}

// Killed returns the disk as it is found after the process was killed: all that was written, and nobody holds a lock.
func (m *Mem) Killed() *Mem {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := NewMem(m.size)
	out.used = m.used
	for name, d := range m.dirs {
		kept := &memDir{now: map[string]*memFile{}, synced: map[string]*memFile{}}
		for entry, f := range d.now {
			kept.now[entry] = f.clone()
		}
		for entry := range d.synced {
			if f := kept.now[entry]; f != nil {
				kept.synced[entry] = f
			}
		}
		out.dirs[name] = kept
	}
	return out
}

func (f *memFile) clone() *memFile {
	f.shared = maps.Clone(f.pages)
	return &memFile{
		length: f.length, syncedLength: f.syncedLength, pages: maps.Clone(f.pages), synced: maps.Clone(f.synced), shared: f.shared,
	}
}

// crash keeps synced pages, and each page that has changed since with even odds; so too the length.
func (f *memFile) crash(rnd *rand.Rand) *memFile {
	f.shared = maps.Clone(f.pages)
	out := &memFile{length: f.syncedLength, pages: maps.Clone(f.synced)}
	coin := func() bool { return rnd != nil && rnd.IntN(2) == 0 }
	if coin() {
		out.length = f.length
	}
	for _, n := range slices.Sorted(maps.Keys(f.pages)) {
		if f.pages[n] != f.synced[n] && coin() {
			out.pages[n] = f.pages[n]
		}
	}
	for _, n := range slices.Sorted(maps.Keys(f.synced)) {
		if f.pages[n] == nil && coin() { // punched since
			delete(out.pages, n)
		}
	}
	for n := range out.pages {
		if n*page >= out.length {
			delete(out.pages, n)
		}
	}
	out.syncedLength, out.synced = out.length, maps.Clone(out.pages)
	return out
}

func (m *Mem) dir(name string) (*memDir, string) {
	return m.dirs[filepath.Dir(name)], filepath.Base(name)
}

func fail(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }

// Create implements Disk.
func (m *Mem) Create(name string) (DiskFile, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, entry := m.dir(name)
	if d == nil {
		return nil, fail("create", name, fs.ErrNotExist)
	}
	if d.now[entry] != nil {
		return nil, fail("create", name, fs.ErrExist)
	}
	f := &memFile{pages: map[int64]*[page]byte{}, synced: map[int64]*[page]byte{}}
	d.now[entry] = f
	return &memHandle{m, f, name}, nil
}

// Open implements Disk.
func (m *Mem) Open(name string) (DiskFile, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, entry := m.dir(name)
	if d == nil || d.now[entry] == nil {
		return nil, fail("open", name, fs.ErrNotExist)
	}
	return &memHandle{m, d.now[entry], name}, nil
}

// Remove implements Disk.
func (m *Mem) Remove(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, entry := m.dir(name)
	if d == nil || d.now[entry] == nil {
		return fail("remove", name, fs.ErrNotExist)
	}
	m.used -= int64(len(d.now[entry].pages)) * page
	delete(d.now, entry)
	return nil
}

// Rename implements Disk.
func (m *Mem) Rename(from, to string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, entry := m.dir(from)
	other, target := m.dir(to)
	if d == nil || other == nil || d.now[entry] == nil {
		return fail("rename", from, fs.ErrNotExist)
	}
	if old := other.now[target]; old != nil {
		m.used -= int64(len(old.pages)) * page
	}
	other.now[target] = d.now[entry]
	delete(d.now, entry)
	return nil
}

// List implements Disk.
func (m *Mem) List(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(dir)]
	if d == nil {
		return nil, fail("list", dir, fs.ErrNotExist)
	}
	out := slices.Collect(maps.Keys(d.now))
	for name := range m.dirs {
		if filepath.Dir(name) == filepath.Clean(dir) && name != filepath.Clean(dir) {
			out = append(out, filepath.Base(name))
		}
	}
	slices.Sort(out)
	return out, nil
}

// Mkdir implements Disk. Folders survive at once.
func (m *Mem) Mkdir(dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := filepath.Clean(dir); m.dirs[name] == nil; name = filepath.Dir(name) {
		m.dirs[name] = &memDir{now: map[string]*memFile{}, synced: map[string]*memFile{}}
		if name == "/" || !strings.Contains(name, "/") {
			break
		}
	}
	return nil
}

// SyncDir implements Disk.
func (m *Mem) SyncDir(dir string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := m.dirs[filepath.Clean(dir)]
	if d == nil {
		return fail("sync", dir, fs.ErrNotExist)
	}
	d.synced = maps.Clone(d.now)
	return nil
}

// LockFile implements Disk.
func (m *Mem) LockFile(name string) (io.Closer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, entry := m.dir(name)
	if d == nil {
		return nil, fail("lock", name, fs.ErrNotExist)
	}
	if m.locked[name] {
		return nil, fail("lock", name, ErrInUse)
	}
	if d.now[entry] == nil {
		d.now[entry] = &memFile{pages: map[int64]*[page]byte{}, synced: map[int64]*[page]byte{}}
	}
	m.locked[name] = true
	return &memLock{m, name}, nil
}

type memLock struct {
	m    *Mem
	name string
}

// Close ends the lock.
func (l *memLock) Close() error {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	delete(l.m.locked, l.name)
	return nil
}

// memHandle is an open file.
type memHandle struct {
	m    *Mem
	f    *memFile
	name string
}

// ReadAt implements DiskFile.
func (h *memHandle) ReadAt(p []byte, off int64) (int, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	n := int(max(0, min(int64(len(p)), h.f.length-off)))
	for done := 0; done < n; {
		at := off + int64(done)
		step := min(n-done, int(page-at%page))
		if from := h.f.pages[at/page]; from != nil {
			copy(p[done:done+step], from[at%page:])
		} else {
			clear(p[done : done+step])
		}
		done += step
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// take takes space for a page that has none.
func (h *memHandle) take(n int64) error {
	if h.f.pages[n] != nil {
		return nil
	}
	if h.m.size > 0 && h.m.used+page > h.m.size {
		return fail("write", h.name, unix.ENOSPC)
	}
	h.m.used += page
	h.f.pages[n] = &untouched
	return nil
}

// own gives a page that nobody shares, and takes space for a new one.
func (h *memHandle) own(n int64) (*[page]byte, error) {
	if err := h.take(n); err != nil {
		return nil, err
	}
	p := h.f.pages[n]
	switch p {
	case &untouched, h.f.synced[n], h.f.shared[n]:
		copied := *p
		p = &copied
		h.f.pages[n] = p
	}
	return p, nil
}

// WriteAt implements DiskFile. On a full disk it writes what fits.
func (h *memHandle) WriteAt(p []byte, off int64) (int, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	for done := 0; done < len(p); {
		at := off + int64(done)
		to, err := h.own(at / page)
		if err != nil {
			return done, err
		}
		done += copy(to[at%page:], p[done:])
		h.f.length = max(h.f.length, off+int64(done))
	}
	return len(p), nil
}

// Size implements DiskFile.
func (h *memHandle) Size() (int64, error) {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	return h.f.length, nil
}

// Truncate implements DiskFile.
func (h *memHandle) Truncate(size int64) error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	for n := range h.f.pages {
		if n*page >= size {
			delete(h.f.pages, n)
			h.m.used -= page
		}
	}
	if size%page != 0 && h.f.pages[size/page] != nil {
		p, _ := h.own(size / page)
		clear(p[size%page:])
	}
	h.f.length = size
	return nil
}

// Allocate implements DiskFile.
func (h *memHandle) Allocate(off, size int64) error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	for n := off / page; n*page < off+size; n++ {
		if err := h.take(n); err != nil {
			return err
		}
	}
	h.f.length = max(h.f.length, off+size)
	return nil
}

// Punch implements DiskFile.
func (h *memHandle) Punch(off, size int64) error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	for n := off / page; n*page < off+size; n++ {
		p := h.f.pages[n]
		if p == nil {
			continue
		}
		from, to := max(off, n*page)-n*page, min(off+size, (n+1)*page)-n*page
		if to-from == page {
			delete(h.f.pages, n)
			h.m.used -= page
			continue
		}
		p, _ = h.own(n)
		clear(p[from:to])
	}
	return nil
}

// Sync implements DiskFile.
func (h *memHandle) Sync() error {
	h.m.mu.Lock()
	defer h.m.mu.Unlock()
	h.f.syncedLength, h.f.synced = h.f.length, maps.Clone(h.f.pages)
	return nil
}

// Close implements DiskFile.
func (h *memHandle) Close() error { return nil }
