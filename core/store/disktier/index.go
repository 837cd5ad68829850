package disktier

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// indexFile is the index that is appended to. Tier.files guards it.
type indexFile struct {
	file      vfs.DiskFile
	number    uint32
	path      string
	end       int64 // of the last frame
	first     int64 // end of the first frame, which holds the state as of then
	allocated int64 // space up to here is taken already
}

// rowEstimate is about the most that a row takes in a frame.
const rowEstimate = 40

// Bind implements table.Disk.
func (t *Tier) Bind(partition string, column *schema.Column, samples []schema.Sample, b store.Block, sums []uint32) {
	if t.opts.Durability == None {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.body = appendBind(t.mu.body, &entry{partition, samples, *column, b, sums})
}

// Drop implements table.Disk.
func (t *Tier) Drop(partition, field string, samples []schema.Sample) {
	if t.opts.Durability == None {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.body = appendSamples(t.mu.body, dropEntry, partition, field, samples)
}

// Hold implements table.Disk.
func (t *Tier) Hold(txn uint64, partition string, column *schema.Column, rows []schema.Sample, b store.Block, sums []uint32) {
	if t.opts.Durability == None {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	e := &entry{partition, rows, *column, b, sums}
	t.mu.body = appendHold(t.mu.body, txn, e)
	t.mu.held[txn] = appendHold(t.mu.held[txn], txn, e)
}

// Release implements table.Disk.
func (t *Tier) Release(txn uint64) {
	if t.opts.Durability == None {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.body = appendRelease(t.mu.body, txn)
	delete(t.mu.held, txn)
}

// End implements table.Disk.
func (t *Tier) End() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.body) > 0 {
		if t.mu.mark != t.mu.marked {
			t.mu.body, t.mu.marked = appendChange(t.mu.body, t.mu.mark), t.mu.mark
		}
		t.frameLocked(t.mu.body)
		t.mu.body = t.mu.body[:0]
	}
	for _, b := range t.mu.fresh {
		t.mu.freed = append(t.mu.freed, freed{b, t.mu.noted})
	}
	t.mu.fresh = t.mu.fresh[:0]
}

// frameLocked makes a body the next frame to be written.
func (t *Tier) frameLocked(body []byte) {
	t.mu.noted++
	if t.mu.journal != nil {
		t.mu.change = t.mu.journal.Last()
	}
	safe := t.mu.written
	if t.opts.Durability == Strict {
		safe = t.mu.durable
	}
	t.mu.pending = appendFrame(t.mu.pending, t.mu.noted, safe, body)
}

// Settle implements table.Disk. An error stays with the index, and is that of the next Prepare and Sync. What the journal does
// not cover yet stays for Sync.
func (t *Tier) Settle() {
	t.mu.Lock()
	_, ahead := t.aheadLocked()
	pending, freed := len(t.mu.pending) > 0 && !ahead, len(t.mu.freed) > 0
	t.mu.Unlock()
	if pending {
		_ = t.flush()
	}
	if freed {
		t.reclaim()
	}
}

// Keep implements table.Disk.
func (t *Tier) Keep() error { return t.flush() }

// Sync returns when all that has happened before is as durable as the tier promises.
func (t *Tier) Sync() error {
	if t.opts.Durability == None {
		t.reclaim()
		return nil
	}
	if err := t.flush(); err != nil {
		return err
	}
	if t.opts.Durability == Strict {
		if err := t.syncIndex(); err != nil {
			return err
		}
	}
	t.reclaim()
	return nil
}

// syncIndex makes the frames that are written durable. Who comes while somebody does that finds it done.
func (t *Tier) syncIndex() error {
	t.mu.Lock()
	want := t.mu.written
	t.mu.Unlock()
	t.files.Lock()
	defer t.files.Unlock()
	t.mu.Lock()
	written, done, broken := t.mu.written, t.mu.durable >= want, t.mu.broken
	t.mu.Unlock()
	switch {
	case broken != nil:
		return broken
	case done:
		return nil
	}
	err := t.files.index.file.Sync()
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.mu.broken = t.failed(err, "fsync of the index")
		return t.mu.broken
	}
	t.mu.durable = written
	return nil
}

// usable fails while the index cannot take frames.
func (t *Tier) usable() error {
	t.mu.Lock()
	broken := t.mu.broken
	t.mu.Unlock()
	if broken == nil {
		return nil
	}
	return t.flush()
}

// flush writes pending frames. A broken or overgrown index is replaced first.
func (t *Tier) flush() error {
	if t.opts.Durability == None {
		return nil
	}
	t.files.Lock()
	defer t.files.Unlock()
	x := t.files.index
	t.mu.Lock()
	broken := t.mu.broken
	t.mu.Unlock()
	if broken != nil {
		if err := t.rewrite(); err != nil {
			return err
		}
	} else if x.end > 2*x.first+t.opts.grow {
		_ = t.rewrite() // the old one is good enough
	}
	return t.append()
}

// append writes pending frames. On a full disk they stay pending. Called with files held.
func (t *Tier) append() error {
	x := t.files.index
	t.lockCovered()
	frames, last, broken := t.mu.pending, t.mu.noted, t.mu.broken
	t.mu.pending = nil
	t.mu.Unlock()
	if len(frames) == 0 {
		return broken
	}
	err := t.writeAll(x.file, frames, x.end)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.mu.pending = append(frames, t.mu.pending...)
		full := errors.Is(err, unix.ENOSPC)
		if err = t.failed(err, "write of the index"); !full {
			t.mu.broken = err
		}
		return err
	}
	x.end += int64(len(frames))
	x.allocated = max(x.allocated, x.end)
	t.mu.written = last
	return nil
}

// reserveIndex takes the disk space that the frames of so many rows will need, and headroom for drops, so that a full disk is
// noticed before a write is committed.
func (t *Tier) reserveIndex(rows int) error {
	if t.opts.Durability == None {
		return nil
	}
	if err := t.usable(); err != nil {
		return err
	}
	t.files.Lock()
	defer t.files.Unlock()
	t.mu.Lock()
	pending := int64(len(t.mu.pending))
	t.mu.Unlock()
	if err := t.allocate(t.files.index, pending+int64(rows)*rowEstimate); err != nil {
		return t.failed(err, "reserve space for the index")
	}
	return nil
}

// allocate makes room for bytes and headroom behind the frames.
func (t *Tier) allocate(x *indexFile, bytes int64) error {
	want := x.end + bytes + t.opts.HeadroomBytes
	if want <= x.allocated {
		return nil
	}
	want += t.opts.HeadroomBytes // so that this is rare
	if err := x.file.Allocate(x.allocated, want-x.allocated); err != nil {
		want -= t.opts.HeadroomBytes
		if err = x.file.Allocate(x.allocated, want-x.allocated); err != nil {
			return err
		}
	}
	x.allocated = want
	return nil
}

// rewrite replaces the index by one that holds the state of the table. Called with files held.
func (t *Tier) rewrite() error {
	var body, taken []byte
	var last, mark uint64
	t.table.EachOnDisk(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		taken, last, mark = t.mu.pending, t.mu.noted, t.mu.mark
		t.mu.pending = nil
		body = appendChange(appendOwner(body, t.mu.owner), mark)
		for _, entries := range t.mu.held {
			body = append(body, entries...)
		}
	}, func(partition string, column *schema.Column, samples []schema.Sample, b store.Block, sums []uint32) {
		body = appendBind(body, &entry{partition, samples, *column, b, sums})
	})
	t.lockCovered()
	t.mu.Unlock()
	x, visible, err := t.writeIndex(t.files.index.number+1, last, body)
	t.mu.Lock()
	defer t.mu.Unlock()
	if !visible {
		t.mu.pending = append(taken, t.mu.pending...)
		return err
	}
	old := t.files.index
	t.files.index, t.mu.written, t.mu.broken = x, last, err
	t.mu.marked = max(t.mu.marked, mark)
	if err == nil && t.opts.Durability == Strict {
		t.mu.durable = last
	}
	_ = old.file.Close()
	if err == nil {
		_ = t.fs.Remove(old.path) // Open does it otherwise
	}
	return err
}

// writeIndex makes a new index under another name and renames it when it is complete. When it is visible, it is the index,
// even if there is an error: of the fsync of the folder.
func (t *Tier) writeIndex(number uint32, last uint64, body []byte) (x *indexFile, visible bool, err error) {
	if int64(len(body)) > maxBody {
		return nil, false, tqerr.New(tqerr.ResourceExhausted, "unit disk: the index would have a frame of %d bytes, want at most %d", len(body), int64(maxBody))
	}
	path := filepath.Join(t.opts.Dir, fmt.Sprintf("index-%08d", number))
	unfinished := path + newSuffix
	_ = t.fs.Remove(unfinished)
	f, err := t.fs.Create(unfinished)
	if err != nil {
		return nil, false, t.failed(err, "create an index")
	}
	data := appendFrame((header{indexKind, number, t.identity}).encode(), last, last, body)
	x = &indexFile{file: f, number: number, path: path, end: int64(len(data)), first: int64(len(data)), allocated: int64(len(data))}
	err = t.writeAll(f, data, 0)
	if err == nil {
		err = t.allocate(x, 0)
	}
	if err == nil && t.opts.Durability == Strict {
		err = f.Sync()
	}
	if err == nil {
		err = t.fs.Rename(unfinished, path)
	}
	if err != nil {
		_ = f.Close()
		_ = t.fs.Remove(unfinished)
		return nil, false, t.failed(err, "write an index")
	}
	if t.opts.Durability == Strict {
		if err = t.fs.SyncDir(t.opts.Dir); err != nil {
			err = t.failed(err, "fsync of the folder")
		}
	}
	return x, true, err
}
