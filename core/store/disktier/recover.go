package disktier

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/tqerr"
)

var errExist = fs.ErrExist

const newSuffix = ".new"

// folder is what lies in the folder of a tier.
type folder struct {
	values, index []uint32
	unfinished    []string
	reserve       bool
}

// kindOf says which file of a tier has a name: 0 for one that is unfinished.
func kindOf(name string) (kind uint16, number uint32, known bool) {
	rest, isIndex := strings.CutPrefix(name, "index-")
	rest, isValues := strings.CutPrefix(rest, "values-")
	rest, unfinished := strings.CutSuffix(rest, newSuffix)
	n, err := strconv.ParseUint(rest, 10, 32)
	switch {
	case err != nil || isIndex == isValues || (unfinished && isValues):
		return 0, 0, false
	case unfinished:
		return 0, uint32(n), true
	case isIndex:
		return indexKind, uint32(n), true
	default:
		return valuesKind, uint32(n), true
	}
}

// look lists the folder and refuses what it does not know. The headers are looked at too, so that nothing of somebody else is
// ever removed.
func (t *Tier) look() (f folder, err error) {
	names, err := t.fs.List(t.opts.Dir)
	if err != nil {
		return f, t.failed(err, "list the folder")
	}
	for _, name := range names {
		kind, number, known := kindOf(name)
		switch {
		case name == lockName:
		case name == reserveName:
			f.reserve = true
		case !known:
			return f, tqerr.New(tqerr.AlreadyExists, "unit disk: %s holds %q, which is not of a disk tier; use another folder", t.opts.Dir, name)
		case kind == valuesKind:
			f.values = append(f.values, number)
		case kind == indexKind:
			f.index = append(f.index, number)
		default:
			f.unfinished = append(f.unfinished, name)
		}
	}
	slices.Sort(f.values)
	slices.Sort(f.index)
	return f, nil
}

func (t *Tier) valuesPath(number uint32) string {
	return filepath.Join(t.opts.Dir, fmt.Sprintf("values-%08d", number))
}

func (t *Tier) indexPath(number uint32) string {
	return filepath.Join(t.opts.Dir, fmt.Sprintf("index-%08d", number))
}

// openChecked opens a file and reads its header. empty says that the file has none yet: what is there is the beginning of the
// header that it would get, or zeros.
func (t *Tier) openChecked(path string, kind uint16, number uint32) (f vfs.DiskFile, h header, size int64, empty bool, err error) {
	if f, err = t.fs.Open(path); err != nil {
		return nil, h, 0, false, t.failed(err, "open")
	}
	b := make([]byte, headerBytes)
	if size, err = f.Size(); err == nil && size > 0 {
		_, err = f.ReadAt(b[:min(size, headerBytes)], 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, h, 0, false, t.failed(err, "read "+path)
	}
	if torn(b, (header{kind, number, t.identity}).encode()) {
		return f, h, size, true, nil
	}
	if h, err = decodeHeader(b); err == nil && (h.kind != kind || h.number != number) {
		err = tqerr.New(tqerr.Corruption, "its header is of kind %d and number %d", h.kind, h.number)
	}
	if err != nil {
		_ = f.Close()
		return nil, h, 0, false, tqerr.Wrap(tqerr.CodeOf(err), err, "unit disk: %s", path)
	}
	return f, h, size, false, nil
}

// torn reports whether of a header only some bytes were written.
func torn(got, whole []byte) bool {
	missing := false
	for i := range got {
		if got[i] != whole[i] {
			missing = true
			if got[i] != 0 {
				return false
			}
		}
	}
	return missing
}

// wipe empties a folder of scratch. Every file is looked at before the first is removed.
func (t *Tier) wipe(found folder) error {
	var paths []string
	check := func(path string, kind uint16, number uint32) error {
		f, _, _, _, err := t.openChecked(path, kind, number)
		if err == nil {
			_ = f.Close()
			paths = append(paths, path)
		}
		return err
	}
	for _, n := range found.values {
		if err := check(t.valuesPath(n), valuesKind, n); err != nil {
			return err
		}
	}
	if len(found.index) > 0 {
		return tqerr.New(tqerr.AlreadyExists, "unit disk: %s holds values that a durable unit has left; durability none would remove them", t.opts.Dir)
	}
	for _, path := range paths {
		if err := t.fs.Remove(path); err != nil {
			return t.failed(err, "remove scratch")
		}
	}
	t.places.next = 1
	return nil
}

// recover reads the index and opens the values files. It changes nothing before everything has been read.
func (t *Tier) recover(found folder) error {
	if len(found.index) == 0 {
		return t.begin(found)
	}
	number := found.index[len(found.index)-1]
	cells, garbage, err := t.readIndex(number)
	if err != nil {
		return err
	}
	live := cells.entries()
	all := slices.Clone(live)
	for txn, parts := range cells.held {
		for i := range parts {
			t.mu.held[txn] = appendHold(t.mu.held[txn], txn, &parts[i])
		}
		cells.held[txn] = joinShared(parts)
		all = append(all, cells.held[txn]...)
	}
	if err := t.openSegments(found.values, all); err != nil {
		return err
	}
	if err := t.clearTail(garbage); err != nil {
		return err
	}
	for _, old := range found.index[:len(found.index)-1] {
		_ = t.fs.Remove(t.indexPath(old))
	}
	for _, name := range found.unfinished {
		_ = t.fs.Remove(filepath.Join(t.opts.Dir, name))
	}
	t.dropOrphans()
	t.recovered, t.held, t.mu.owner, t.mu.marked = live, cells.held, cells.owner, cells.change
	t.mu.mark = t.mu.marked
	return nil
}

// begin makes the index of a new store.
func (t *Tier) begin(found folder) error {
	for _, n := range found.values {
		f, _, _, empty, err := t.openChecked(t.valuesPath(n), valuesKind, n)
		if err != nil {
			return err
		}
		_ = f.Close()
		if !empty {
			return tqerr.New(tqerr.Corruption, "unit disk: %s holds values without an index; they were scratch, or the index was removed", t.opts.Dir)
		}
	}
	for _, n := range found.values {
		_ = t.fs.Remove(t.valuesPath(n))
	}
	t.places.next = 1
	t.mu.noted = 1
	x, visible, err := t.writeIndex(1, 1, nil)
	if visible {
		t.files.index, t.mu.written, t.mu.durable = x, 1, 1
	}
	return err
}

// readIndex replays an index. garbage is where bytes end that lie behind the last frame that counts.
func (t *Tier) readIndex(number uint32) (cells *replay, garbage int64, err error) {
	path := t.indexPath(number)
	f, h, size, empty, err := t.openChecked(path, indexKind, number)
	if err != nil {
		return nil, 0, err
	}
	if empty {
		_ = f.Close()
		return nil, 0, tqerr.New(tqerr.Corruption, "unit disk: %s is empty", path)
	}
	t.identity = h.store
	x := &indexFile{file: f, number: number, path: path, end: headerBytes, allocated: size}
	t.files.index = x
	data := make([]byte, size-headerBytes)
	if _, err := f.ReadAt(data, headerBytes); err != nil {
		return nil, 0, t.failed(err, "read "+path)
	}
	cells = newReplay()
	last, rest, err := cells.read(data)
	if err != nil {
		return nil, 0, tqerr.Wrap(tqerr.Corruption, err, "unit disk: %s", path)
	}
	x.end = size - int64(len(rest.data))
	x.first = headerBytes + rest.first
	t.mu.noted, t.mu.written, t.mu.durable = last, last, last
	return cells, x.end + int64(withoutZeros(rest.data)), nil
}

// withoutZeros is how long data is without the zeros at its end, which are most of it: space taken in advance.
func withoutZeros(data []byte) int {
	var zeros [pageSize]byte
	n := len(data)
	for n >= pageSize && bytes.Equal(data[n-pageSize:n], zeros[:]) {
		n -= pageSize
	}
	return len(bytes.TrimRight(data[:n], "\x00"))
}

// clearTail overwrites what lies behind the last frame with zeros: a torn frame must not be taken for one later.
func (t *Tier) clearTail(garbage int64) error {
	x := t.files.index
	if garbage <= x.end {
		return nil
	}
	if err := t.writeAll(x.file, make([]byte, garbage-x.end), x.end); err != nil {
		return t.failed(err, "repair the index")
	}
	if t.opts.Durability == Strict {
		if err := x.file.Sync(); err != nil {
			return t.failed(err, "repair the index")
		}
	}
	return nil
}

// openSegments opens all values files, and counts what lives in them. One that is named by cells but is not there makes those
// cells unreadable, not the others.
func (t *Tier) openSegments(numbers []uint32, live []restored) error {
	empties := map[uint32]bool{}
	for _, n := range numbers {
		f, h, size, empty, err := t.openChecked(t.valuesPath(n), valuesKind, n)
		if err != nil {
			return err
		}
		g := &segment{number: n, file: f, path: t.valuesPath(n), end: max(size, valuesStart), full: true}
		t.segments.Store(n, g)
		empties[n] = empty
		if !empty && h.store != t.identity {
			return tqerr.New(tqerr.Corruption, "unit disk: %s belongs to another store", g.path)
		}
		t.places.next = max(t.places.next, n+1)
	}
	t.places.next = max(t.places.next, 1)
	for i := range live {
		b := live[i].block
		if b.Size == 0 {
			continue
		}
		t.places.next = max(t.places.next, b.Segment+1)
		g := t.segment(b.Segment)
		if g == nil {
			g = &segment{number: b.Segment, file: gone{}, path: t.valuesPath(b.Segment), full: true}
			t.segments.Store(b.Segment, g)
		}
		if empties[b.Segment] {
			return tqerr.New(tqerr.Corruption, "unit disk: %s is empty, but field %q of sample %d in partition %q should be there",
				g.path, live[i].column.Field, live[i].samples[0].Index, live[i].partition)
		}
		g.end = max(g.end, b.Offset+b.Size)
		g.account(b.Offset, b.Size, 1)
	}
	return nil
}

// dropOrphans gives back what no cell names.
func (t *Tier) dropOrphans() {
	t.segments.Range(func(_, v any) bool {
		g := v.(*segment)
		if size, err := g.file.Size(); err == nil {
			for int64(len(g.pages))*pageSize < size {
				g.pages = append(g.pages, 0)
			}
		}
		if g.live == 0 {
			g.end = valuesStart + 1 // so that it counts as used
		}
		if t.tidy(g) {
			return true
		}
		for from := 1; from < len(g.pages); from++ {
			if g.pages[from] != 0 {
				continue
			}
			_, to := g.deadAround(from, from)
			g.punch(from, to)
			from = to
		}
		return true
	})
}

// gone stands for a values file that is not there.
type gone struct{ vfs.DiskFile }

func (gone) ReadAt([]byte, int64) (int, error) { return 0, errors.New("the file is not there") }
func (gone) Size() (int64, error)              { return 0, errors.New("the file is not there") }
func (gone) Punch(int64, int64) error          { return errors.New("the file is not there") }
func (gone) Truncate(int64) error              { return nil }
func (gone) Close() error                      { return nil }
