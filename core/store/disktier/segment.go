package disktier

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

const (
	pageSize    = 4096
	valuesStart = pageSize
	pageAlign   = 64 << 10 // blocks from here on start on a page
	smallAlign  = 8
	punchPages  = 16 // so many dead pages in a row are punched at once
	punched     = 0xffff
	// From aheadFrom bytes on a segment takes space for what will be appended: an eighth of what is there, at most aheadMost.
	aheadFrom = 8 << 20
	aheadMost = 8 << 20
)

// segment is one values file. Fields but file are guarded by Tier.places.
type segment struct {
	number uint32
	file   vfs.DiskFile
	path   string
	end    int64 // where the next block goes
	taken  int64 // space up to here is taken already, when it is beyond end
	live   int64
	pages  []uint16 // live bytes of each page, or punched; page 0 is the header
	holes  int      // pages that are punched
	full   bool     // nothing is appended any more
	broken bool     // an fsync failed

	sync sync.Mutex // held over fsync
}

// account counts bytes as live (sign 1) or dead (sign -1).
func (g *segment) account(off, size int64, sign int) {
	g.live += int64(sign) * size
	for size > 0 {
		page := off / pageSize
		n := min(size, pageSize-off%pageSize)
		for int64(len(g.pages)) <= page {
			g.pages = append(g.pages, 0)
		}
		g.pages[page] += uint16(int(n) * sign)
		off, size = off+n, size-n
	}
}

// resident is the space of the pages that may hold values.
func (g *segment) resident() int64 { return int64(max(0, len(g.pages)-1-g.holes)) * pageSize }

// punch gives pages back.
func (g *segment) punch(from, to int) {
	if g.file.Punch(int64(from)*pageSize, int64(to-from)*pageSize) != nil {
		return // it only costs space
	}
	for i := from; i < to; i++ {
		g.pages[i] = punched
	}
	g.holes += to - from
}

// deadAround returns the pages that are dead and not punched around a range of pages that are dead.
func (g *segment) deadAround(from, to int) (int, int) {
	for from > 1 && g.pages[from-1] == 0 {
		from--
	}
	for to < len(g.pages) && g.pages[to] == 0 {
		to++
	}
	return from, to
}

// Alloc implements table.Disk.
func (t *Tier) Alloc(size int64) (store.Block, error) {
	if err := t.usable(); err != nil {
		return store.Block{}, err
	}
	if size == 0 {
		return store.Block{Offset: valuesStart}, nil // in no segment
	}
	t.places.Lock()
	defer t.places.Unlock()
	g := t.places.open
	at := int64(0)
	if g != nil {
		at = place(g.end, size)
	}
	if g == nil || g.broken || (at+size > t.opts.SegmentBytes && g.end > valuesStart) {
		var err error
		if g, err = t.newSegment(); err != nil {
			return store.Block{}, err
		}
		if old := t.places.open; old != nil {
			t.retire(old)
		}
		t.places.open, at = g, place(g.end, size)
	}
	if at+size >= t.opts.ahead {
		g.take(at + size)
	}
	g.end = at + size
	g.account(at, size, 1)
	return store.Block{Segment: g.number, Offset: at, Size: size}, nil
}

// take takes the space up to a new end and some ahead of it, in one step: a file system that has to find space block by block
// while it is written spends as long on that as on copying. Without success the write takes it, or fails.
func (g *segment) take(end int64) {
	if end <= g.taken {
		return
	}
	from, to := max(g.taken, g.end), (end+min(aheadMost, end/8)+pageSize-1)&^(pageSize-1)
	if g.file.Allocate(from, to-from) == nil {
		g.taken = to
		return
	}
	g.giveBack(from) // some may have been taken
}

// giveBack gives back the space that was taken from some place on, which nothing has been written to.
func (g *segment) giveBack(from int64) {
	if g.file.Truncate(from) == nil {
		g.taken = from
	}
}

// ahead is the space that was taken and has no block yet.
func (g *segment) ahead() int64 { return max(0, g.taken-g.end) }

// retire ends appending to a segment, and reports whether that is gone. Called with places held.
func (t *Tier) retire(g *segment) (gone bool) {
	g.full = true
	if t.tidy(g) {
		return true
	}
	if g.ahead() > 0 {
		g.giveBack(g.end)
	}
	return false
}

// place is where a block goes in a segment that ends at end.
func place(end, size int64) int64 {
	align := int64(smallAlign)
	if size >= pageAlign {
		align = pageSize
	}
	return (end + align - 1) / align * align
}

// newSegment creates a values file. Called with places held.
func (t *Tier) newSegment() (*segment, error) {
	number := t.places.next
	path := filepath.Join(t.opts.Dir, fmt.Sprintf("values-%08d", number))
	f, err := t.fs.Create(path)
	if err != nil {
		return nil, t.failed(err, "new segment")
	}
	t.places.next++
	err = t.writeAll(f, (header{valuesKind, number, t.identity}).encode(), 0)
	if err == nil && t.opts.Durability == Strict {
		err = t.fs.SyncDir(t.opts.Dir)
	}
	if err != nil {
		_ = f.Close()
		t.discard(path)
		return nil, t.failed(err, "new segment")
	}
	g := &segment{number: number, file: f, path: path, end: valuesStart}
	t.segments.Store(number, g)
	return g, nil
}

// failed gives an error of a file call its code: ResourceExhausted for a full disk, else IO.
func (t *Tier) failed(err error, doing string) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return tqerr.Wrap(tqerr.ResourceExhausted, err, "unit disk: %s: no space in %s; clear samples or free disk space", doing, t.opts.Dir)
	}
	return tqerr.Wrap(tqerr.IO, err, "unit disk: %s in %s", doing, t.opts.Dir)
}

func (t *Tier) writeAll(f vfs.DiskFile, data []byte, off int64) error {
	_, err := f.WriteAt(data, off)
	return err
}

func (t *Tier) segment(number uint32) *segment {
	g, _ := t.segments.Load(number)
	if g == nil {
		return nil
	}
	return g.(*segment)
}

// Write implements table.Disk.
func (t *Tier) Write(b store.Block, from []byte) error {
	if b.Size == 0 {
		return nil
	}
	g := t.segment(b.Segment)
	err := t.writeAll(g.file, from, b.Offset)
	if errors.Is(err, unix.ENOSPC) && t.reclaim() {
		err = t.writeAll(g.file, from, b.Offset)
	}
	if err != nil {
		return t.failed(err, "write of a value")
	}
	return nil
}

// Read implements table.Disk.
func (t *Tier) Read(b store.Block, to []byte) error {
	if b.Size == 0 {
		return nil
	}
	g := t.segment(b.Segment)
	if g == nil {
		return fmt.Errorf("values-%08d is not there", b.Segment)
	}
	if _, err := g.file.ReadAt(to, b.Offset); err != nil {
		return fmt.Errorf("%s: %w", filepath.Base(g.path), err)
	}
	return nil
}

// Secure implements table.Disk.
func (t *Tier) Secure(blocks []store.Block, rows int) error {
	if t.opts.Durability != Strict {
		return t.reserveIndex(rows)
	}
	ends := map[uint32]int64{}
	for _, b := range blocks {
		if b.Size > 0 {
			ends[b.Segment] = max(ends[b.Segment], b.Offset+b.Size)
		}
	}
	for number := range ends {
		if err := t.syncSegment(t.segment(number)); err != nil {
			return err
		}
	}
	return t.reserveIndex(rows)
}

// syncSegment makes all that was written to a segment durable. What fails once is not tried again: the kernel may have
// dropped the pages that it could not write, and call the next attempt a success.
func (t *Tier) syncSegment(g *segment) error {
	g.sync.Lock()
	defer g.sync.Unlock()
	t.places.Lock()
	broken := g.broken
	t.places.Unlock()
	if broken {
		return tqerr.New(tqerr.IO, "unit disk: %s is sealed, because an earlier fsync of it failed", g.path)
	}
	err := g.file.Sync()
	if err != nil {
		t.places.Lock()
		g.broken = true
		t.places.Unlock()
		return t.failed(err, "fsync of a segment")
	}
	return nil
}

// Free implements table.Disk.
func (t *Tier) Free(b store.Block) {
	if b.Size == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.fresh = append(t.mu.fresh, b)
}

// reclaim gives the space of freed blocks back, as far as the index has been told that they are dead. It reports whether
// there were any. Errors only cost space, until the segment is removed.
func (t *Tier) reclaim() bool {
	t.mu.Lock()
	done := t.mu.written
	if t.opts.Durability == Strict {
		done = t.mu.durable
	}
	var ready, rest []freed
	for _, f := range t.mu.freed {
		if t.opts.Durability == None || f.after <= done {
			ready = append(ready, f)
		} else {
			rest = append(rest, f)
		}
	}
	t.mu.freed = rest
	t.mu.Unlock()
	if len(ready) == 0 {
		return false
	}
	t.places.Lock()
	defer t.places.Unlock()
	t.discard()
	for _, f := range ready {
		g := t.segment(f.block.Segment)
		g.account(f.block.Offset, f.block.Size, -1)
		if !t.tidy(g) {
			t.punchAround(g, f.block)
		}
	}
	return true
}

// tidy removes a segment without live bytes, or empties it when it is the open one. Called with places held.
func (t *Tier) tidy(g *segment) bool {
	switch {
	case g.live > 0 || g.end == valuesStart:
		return false
	case g.full || g.broken:
		_ = g.file.Truncate(0) // clients of the file system may hold it open
		_ = g.file.Close()
		t.discard(g.path)
		t.segments.Delete(g.number)
		if t.places.open == g {
			t.places.open = nil
		}
		return true
	}
	if g.file.Truncate(valuesStart) == nil {
		g.end, g.taken, g.pages, g.holes = valuesStart, 0, nil, 0
	}
	return true
}

// discard removes files, and those that could not be removed before. Called with places held.
func (t *Tier) discard(paths ...string) {
	paths = append(t.places.discarded, paths...)
	t.places.discarded = nil
	for _, path := range paths {
		if err := t.fs.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.places.discarded = append(t.places.discarded, path)
		}
	}
}

// punchAround returns the pages of a freed block to the file system, with dead ones around them. Called with places held.
func (t *Tier) punchAround(g *segment, b store.Block) {
	from, to := int(b.Offset/pageSize), int((b.Offset+b.Size-1)/pageSize)+1
	for from < to && g.pages[from] != 0 {
		from++
	}
	for to > from && g.pages[to-1] != 0 {
		to--
	}
	if from == to {
		return
	}
	if from, to = g.deadAround(from, to); to == len(g.pages) && !g.full {
		to-- // the next block may begin there
	}
	if to-from >= punchPages {
		g.punch(from, to)
	}
}
