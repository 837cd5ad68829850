package disktier

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/store"
	"transferqueue/core/store/table"
	"transferqueue/core/tqerr"
)

// Durability says what survives what.
type Durability uint8

// The kinds of durability.
const (
	None    Durability = iota // nothing: the folder is scratch
	Relaxed                   // the end of the process
	Strict                    // a power loss
)

// Options of a disk tier.
type Options struct {
	// Dir is the folder, which nobody else uses. It is created when missing.
	Dir        string
	Durability Durability
	// SegmentBytes is how large a values file gets, but for a single larger block; 0 means 256 MiB. Each file costs a file
	// descriptor; larger ones wait longer for being removed as a whole.
	SegmentBytes int64
	// HeadroomBytes of disk space are kept for compaction on a full disk, and as much for the index; 0 means 4 MiB. By so much
	// the index may outgrow twice the state that it holds before it is replaced.
	HeadroomBytes int64

	fs    vfs.Disk // nil: that of the system
	grow  int64    // by how much the index outgrows twice its state before it is replaced; 0: HeadroomBytes
	ahead int64    // 0: aheadFrom
}

// OnDisk returns the options with another file system, for tests.
func (o Options) OnDisk(fs vfs.Disk) Options {
	o.fs = fs
	return o
}

// freed is space that may be given back when a frame is durable.
type freed struct {
	block store.Block
	after uint64
}

// Tier is the values files and the index of one folder. It implements table.Disk.
type Tier struct {
	opts     Options
	fs       vfs.Disk
	identity [16]byte
	table    *table.Table
	lock     io.Closer
	segments sync.Map // number -> *segment
	places   struct {
		sync.Mutex
		open      *segment
		next      uint32
		discarded []string // files that could not be removed yet
	}
	files struct {
		sync.Mutex
		index *indexFile // nil with None
	}
	reserve vfs.DiskFile
	mu      struct {
		sync.Mutex
		body    []byte // entries of the frame that is being noted
		pending []byte // frames to be written
		noted   uint64 // number of the last frame
		written uint64 // number of the last frame in the index file
		durable uint64 // number of the last frame that is fsynced there
		fresh   []store.Block
		freed   []freed
		broken  error // of the index; nil: it is whole
		owner   string
		marked  uint64            // the last change of the owner that a frame says is executed
		mark    uint64            // the last change of the owner that is executed
		held    map[uint64][]byte // entries of the writes that are held, by number
		journal Journal           // of the owner; nil: it has none
		change  uint64            // its last change when the last frame was noted
		scrap   bool              // Close removes the folder
	}
	recovered []restored
	held      map[uint64][]restored
}

var _ table.Disk = (*Tier)(nil)

// Open locks and reads a folder. It refuses one that holds anything it does not know, is in use, or cannot be read in full,
// and changes nothing then. Attach comes next.
func Open(o Options) (t *Tier, err error) {
	if o.SegmentBytes <= 0 {
		o.SegmentBytes = 256 << 20
	}
	if o.HeadroomBytes <= 0 {
		o.HeadroomBytes = 4 << 20
	}
	if o.grow == 0 {
		o.grow = o.HeadroomBytes
	}
	if o.ahead == 0 {
		o.ahead = aheadFrom
	}
	t = &Tier{opts: o, fs: o.fs}
	if t.fs == nil {
		t.fs = vfs.OSDisk{}
	}
	_, _ = rand.Read(t.identity[:])
	t.mu.held = map[uint64][]byte{}
	if err := t.fs.Mkdir(o.Dir); err != nil {
		return nil, t.failed(err, "create the folder")
	}
	found, err := t.look()
	if err != nil {
		return nil, err
	}
	if t.lock, err = t.fs.LockFile(filepath.Join(o.Dir, lockName)); err != nil {
		if errors.Is(err, vfs.ErrInUse) {
			return nil, tqerr.Wrap(tqerr.AlreadyExists, err, "unit disk: %s is in use", o.Dir)
		}
		return nil, t.failed(err, "lock the folder")
	}
	defer func() {
		if err != nil {
			t.closeFiles()
			_ = t.lock.Close()
		}
	}()
	if o.Durability == None {
		err = t.wipe(found)
	} else {
		err = t.recover(found)
	}
	if err == nil {
		err = t.openReserve()
	}
	return t, err
}

// Attach gives the tier its table, into which it puts the cells that it has found. Call it once, before anything else.
func (t *Tier) Attach(tb *table.Table) {
	t.table = tb
	for i := range t.recovered {
		r := &t.recovered[i]
		tb.Restore(r.partition, &r.column, r.samples, r.block, r.sums)
	}
	for txn, parts := range t.held {
		for i := range parts {
			p := &parts[i]
			tb.RestoreHeld(txn, p.partition, &p.column, p.samples, p.block, p.sums)
		}
	}
	t.recovered, t.held = nil, nil
}

const (
	lockName    = "lock"
	reserveName = "reserve"
)

func (t *Tier) openReserve() error {
	path := filepath.Join(t.opts.Dir, reserveName)
	f, err := t.fs.Create(path)
	if errors.Is(err, errExist) {
		f, err = t.fs.Open(path)
	}
	if err == nil {
		t.reserve = f
		err = f.Allocate(0, t.opts.HeadroomBytes)
	}
	if err != nil {
		return t.failed(err, "reserve headroom")
	}
	return nil
}

// Close writes what is pending and closes all files. With None, or after Scrap, it removes them and, when it is empty then, the
// folder. The table has been closed.
func (t *Tier) Close() error {
	err := t.Sync()
	t.mu.Lock()
	scrap := t.mu.scrap
	t.mu.Unlock()
	if t.opts.Durability == None || scrap && err == nil {
		err = t.removeAll()
	} else {
		t.reclaim()
		t.places.Lock()
		if g := t.places.open; g != nil {
			t.retire(g)
		}
		t.places.Unlock()
		t.closeFiles()
	}
	return errors.Join(err, t.lock.Close())
}

func (t *Tier) closeFiles() {
	t.segments.Range(func(_, g any) bool {
		_ = g.(*segment).file.Close()
		return true
	})
	if t.files.index != nil {
		_ = t.files.index.file.Close()
	}
	if t.reserve != nil {
		_ = t.reserve.Close()
	}
}

func (t *Tier) removeAll() error {
	t.closeFiles()
	names, err := t.fs.List(t.opts.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // somebody has removed it already
	}
	if err != nil {
		return t.failed(err, "clean up")
	}
	slices.Reverse(names) // values first: without an index nobody would know that none of them is wanted
	for _, name := range names {
		if _, _, known := kindOf(name); known || name == lockName || name == reserveName {
			err = errors.Join(err, t.fs.Remove(filepath.Join(t.opts.Dir, name)))
		}
	}
	if err != nil {
		return t.failed(err, "clean up")
	}
	_ = t.fs.Remove(t.opts.Dir)
	return nil
}

// Owner is whose values lie in the folder; "" for nobody's.
func (t *Tier) Owner() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.owner
}

// Mark implements table.Disk: a change of the owner, whose numbers ascend, is executed with what is noted until the next End. When
// that is nothing, the next frame says so, whatever else it is about.
func (t *Tier) Mark(change uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.mark = change
}

// Marked is the last change that is executed as far as it touches the disk; 0: none.
func (t *Tier) Marked() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.marked
}

// SetOwner says whose values lie in the folder from now on, and returns when that is as durable as a value.
func (t *Tier) SetOwner(owner string) error {
	if t.opts.Durability == None || owner == t.Owner() {
		return nil
	}
	if err := t.usable(); err != nil {
		return err
	}
	t.mu.Lock()
	t.mu.owner, t.mu.marked, t.mu.mark, t.mu.scrap = owner, 0, 0, false
	t.frameLocked(appendText([]byte{ownerEntry}, owner))
	t.mu.Unlock()
	return t.Sync()
}

// Scrap makes nobody the owner, and lets Close remove the folder, unless somebody becomes the owner before. There are no values.
func (t *Tier) Scrap() error {
	if err := t.SetOwner(""); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.scrap = true
	return nil
}

// Usage is the space of a tier.
type Usage struct {
	Live     int64 // bytes of values, staged ones and zombies included
	Physical int64 // bytes of pages that hold some, or may, or were taken for what comes next
	Segments int
}

// Usage counts.
func (t *Tier) Usage() (u Usage) {
	t.places.Lock()
	defer t.places.Unlock()
	t.segments.Range(func(_, v any) bool {
		g := v.(*segment)
		u.Live, u.Physical, u.Segments = u.Live+g.live, u.Physical+g.resident()+g.ahead(), u.Segments+1
		return true
	})
	return u
}
