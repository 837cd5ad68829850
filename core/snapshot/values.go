package snapshot

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// Rows is samples of one partition with all their cells, whose bytes follow. Rows of a column that several samples share follow
// once, in the order of the first sample of each.
type Rows struct {
	Partition string
	Samples   []schema.Sample
	Columns   []schema.Column
}

// Bytes is how many bytes follow.
func (r *Rows) Bytes() int64 {
	n := int64(0)
	for k := range r.Columns {
		n += r.Columns[k].Bytes()
	}
	return n
}

type (
	rowsRecord struct {
		Partition            string
		Indexes, Generations wire.Ints
		Columns              []wire.Column
	}
	partRecord struct {
		Name   string
		Size   int64
		Digest uint32
	}
)

const indexName = "index.tq"

func partName(k int) string { return fmt.Sprintf("values-%d.tq", k) }

func isPartName(name string) bool {
	number, found := strings.CutPrefix(name, "values-")
	k, err := strconv.Atoi(strings.TrimSuffix(number, ".tq"))
	return found && err == nil && name == partName(k)
}

// Values writes a folder of values. Its parts may be written at the same time.
type Values struct {
	fs  vfs.FS
	dir string
	cut Cut
	mu  struct {
		sync.Mutex
		parts []partRecord
	}
}

// NewValues makes the folder.
func NewValues(fs vfs.FS, dir string, cut Cut) (*Values, error) {
	return &Values{fs: fs, dir: dir, cut: cut}, vfs.Wrap(fs.Mkdir(dir))
}

// ValuesIn writes to a folder that is there and empty.
func ValuesIn(fs vfs.FS, dir string, cut Cut) *Values { return &Values{fs: fs, dir: dir, cut: cut} }

// Part is one file of values while it is written.
type Part struct{ w *writer }

// WritePart writes and syncs one more file; fill calls Part.Rows.
func (v *Values) WritePart(fill func(p *Part) error) error {
	v.mu.Lock()
	k := len(v.mu.parts)
	v.mu.parts = append(v.mu.parts, partRecord{Name: partName(k)})
	v.mu.Unlock()
	size, digest, err := writeFile(v.fs, filepath.Join(v.dir, partName(k)), ValuesFile, func(w *writer) error {
		if err := w.record(recordHead, &headRecord{Cut: v.cut[:]}); err != nil {
			return err
		}
		return fill(&Part{w})
	})
	v.mu.Lock()
	defer v.mu.Unlock()
	v.mu.parts[k].Size, v.mu.parts[k].Digest = size, digest
	return err
}

// Rows writes rows; bytes hands over their bytes, column by column, which must be as many as the columns say.
func (p *Part) Rows(r *Rows, bytes func(put func([]byte) error) error) error {
	record := rowsRecord{Partition: r.Partition}
	record.Indexes, record.Generations = numbers(r.Samples)
	for _, c := range r.Columns {
		record.Columns = append(record.Columns, wire.Column(c))
	}
	if err := p.w.record(recordRows, &record); err != nil {
		return err
	}
	put := int64(0)
	err := bytes(func(b []byte) error {
		put += int64(len(b))
		return p.w.data(b)
	})
	if err == nil && put != r.Bytes() {
		err = tqerr.New(tqerr.Internal, "%d bytes of values, the columns say %d", put, r.Bytes())
	}
	if err != nil {
		return err
	}
	return p.w.flush()
}

// Finish writes the index, which makes the folder complete.
func (v *Values) Finish() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, _, err := writeFile(v.fs, filepath.Join(v.dir, indexName), IndexFile, func(w *writer) error {
		err := w.record(recordHead, &headRecord{Cut: v.cut[:]})
		for k := range v.mu.parts {
			if err == nil {
				err = w.record(recordPart, &v.mu.parts[k])
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	return vfs.Wrap(v.fs.SyncDir(v.dir))
}

// Parts is the number of files.
func (v *Values) Parts() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.mu.parts)
}

// Stored is a folder of values to read.
type Stored struct {
	cut   Cut
	fs    vfs.FS
	dir   string
	parts []partRecord
}

// SavedWith fails with Corruption when the values are of another save than a state or a row index of that cut.
func (s *Stored) SavedWith(cut Cut) error {
	if s.cut != cut {
		return wrongCut(s.dir)
	}
	return nil
}

// OpenValues reads the index of a folder and checks that its files are there with the right sizes.
func OpenValues(fs vfs.FS, dir string) (*Stored, error) {
	s := &Stored{fs: fs, dir: dir}
	_, _, err := readFile(fs, filepath.Join(dir, indexName), IndexFile, s.indexRecord)
	if err != nil {
		return nil, err
	}
	for k := range s.parts {
		path := filepath.Join(dir, s.parts[k].Name)
		info, err := fs.Stat(path)
		if err != nil {
			return nil, vfs.Wrap(err)
		}
		if !info.Mode().IsRegular() || info.Size() != s.parts[k].Size {
			return nil, tqerr.New(tqerr.Corruption, "%s: %d bytes, want a file of %d", path, info.Size(), s.parts[k].Size)
		}
	}
	return s, nil
}

func (s *Stored) indexRecord(r *reader, kind byte, body []byte) error {
	switch kind {
	case recordHead:
		return r.cut(body, &s.cut)
	case recordPart:
		var x partRecord
		if err := r.message(body, &x); err != nil {
			return err
		}
		if strings.ContainsAny(x.Name, `/\`) || x.Name != partName(len(s.parts)) {
			return r.bad("it names %q where only %q may stand", x.Name, partName(len(s.parts)))
		}
		s.parts = append(s.parts, x)
		return nil
	}
	return r.bad("record %d of unknown type %d", r.records, kind)
}

// wrongCut is the error for files that were not saved together.
func wrongCut(what string) error {
	return tqerr.New(tqerr.Corruption, "%s is of another save than the rest", what)
}

// Parts is the number of files.
func (s *Stored) Parts() int { return len(s.parts) }

// Place is where the bytes of rows go, in the order of the columns: as many as Rows.Bytes, in any number of pieces.
type Place struct {
	Pieces [][]byte
	Filled func() error // is called when the bytes are there; nil: nobody has to know
}

// ReadPart reads one file. For every batch of rows stage says where its bytes go. What was filled is to be trusted only when
// ReadPart returns nil. It ends early with the context's error.
func (s *Stored) ReadPart(ctx context.Context, k int, stage func(rows *Rows) (Place, error)) error {
	var cut Cut
	take := func(r *reader, kind byte, body []byte) error {
		switch kind {
		case recordHead:
			return r.cut(body, &cut)
		case recordRows:
			rows, err := r.rows(body)
			if err != nil {
				return err
			}
			place, err := stage(rows)
			if err == nil {
				err = r.data(ctx, slices.Clone(place.Pieces))
			}
			if err == nil && place.Filled != nil {
				err = place.Filled()
			}
			return err
		}
		return r.bad("record %d of unknown type %d", r.records, kind)
	}
	path := filepath.Join(s.dir, s.parts[k].Name)
	size, digest, err := readFile(s.fs, path, ValuesFile, take)
	switch {
	case err != nil:
		return err
	case size != s.parts[k].Size || digest != s.parts[k].Digest || cut != s.cut:
		return wrongCut(path)
	}
	return nil
}

// inOrder reports whether the rows that several samples share come in the order of the first sample of each.
func inOrder(c *schema.Column) bool {
	next := 0
	for _, row := range c.Share {
		if int(row) > next {
			return false
		}
		next = max(next, int(row)+1)
	}
	return c.Share == nil || next == c.Rows
}

func (r *reader) rows(body []byte) (*Rows, error) {
	var x rowsRecord
	if err := r.message(body, &x); err != nil {
		return nil, err
	}
	samples, err := r.samples(x.Indexes, x.Generations)
	if err != nil {
		return nil, err
	}
	out := &Rows{Partition: x.Partition, Samples: samples, Columns: make([]schema.Column, len(x.Columns))}
	need := int64(0)
	for k := range x.Columns {
		out.Columns[k] = schema.Column(x.Columns[k])
		if c := &out.Columns[k]; c.Samples() != len(samples) || !inOrder(c) {
			return nil, r.bad("record %d: field %q: %d rows for %d samples, want %d", r.records, c.Field, c.Rows, c.Samples(), len(samples))
		}
		// Even well packed, the bytes cannot be more than the data records that the file has room for.
		if need += out.Columns[k].Bytes(); need < 0 || need > (r.left/headSize+1)*blockSize {
			return nil, r.bad("record %d: more bytes than a file of this size can hold", r.records)
		}
	}
	return out, nil
}
