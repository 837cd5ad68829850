package snapshot

import (
	"crypto/rand"
	"io"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/wire"
)

// Cut names one moment of a session: what was saved together has the same.
type Cut [16]byte

// NewCut returns a number that nothing else has.
func NewCut() (c Cut) {
	_, _ = rand.Read(c[:]) // never fails, says crypto/rand
	return c
}

// rowsPerRecord bounds the rows of a record of a state, so that no record comes near the limit of a message.
const rowsPerRecord = 1 << 16

// bytesPerRecord bounds the bytes of keys and tags in a record, but for a single one that is larger.
const bytesPerRecord = 1 << 20

type (
	headRecord struct {
		Cut     []byte
		Lineage uint64
	}
	usedRecord      struct{ From, Counts, Generations wire.Ints }
	partitionRecord struct {
		Name     string
		Complete bool
	}
	birthsRecord  struct{ Triples wire.Ints }
	samplesRecord struct {
		Reserved             bool
		Indexes, Generations wire.Ints
	}
	keysRecord struct {
		Indexes wire.Ints
		Keys    wire.Strings
	}
	tagsRecord struct {
		Indexes wire.Ints
		Tags    wire.List
	}
	fieldRecord struct {
		Name                string
		Kind, DType, Ragged uint8
	}
	holdersRecord struct {
		Indexes wire.Ints
		Shapes  *wire.Column // nil for objects
	}
	lostRecord     struct{ Indexes wire.Ints }
	taskRecord     struct{ Name string }
	consumedRecord struct{ Indexes wire.Ints }
	samplerRecord  struct{ State []byte }
)

// WriteState writes and syncs a state file.
func WriteState(fs vfs.FS, path string, cut Cut, s *catalog.State, sampler []byte) error {
	_, _, err := writeFile(fs, path, StateFile, func(w *writer) error { return w.state(cut, s, sampler) })
	return err
}

// EncodeState writes what a state file holds, without a sampler, to out.
func EncodeState(out io.Writer, s *catalog.State) error {
	w, err := newWriter(out, StateFile)
	if err == nil {
		err = w.state(Cut{}, s, nil)
	}
	if err == nil {
		err = w.finish()
	}
	return err
}

func (w *writer) state(cut Cut, s *catalog.State, sampler []byte) error {
	if err := w.record(recordHead, &headRecord{cut[:], s.Lineage}); err != nil {
		return err
	}
	for part := range slices.Chunk(s.Used, rowsPerRecord) {
		var r usedRecord
		for _, run := range part {
			r.From, r.Counts = append(r.From, run.From), append(r.Counts, run.Count)
			r.Generations = append(r.Generations, int64(run.Generation))
		}
		if err := w.record(recordUsed, &r); err != nil {
			return err
		}
	}
	for k := range s.Partitions {
		if err := w.partition(&s.Partitions[k]); err != nil {
			return err
		}
	}
	return w.record(recordSampler, &samplerRecord{sampler})
}

// writeFile makes a file of records and syncs it. It returns what pins it.
func writeFile(fs vfs.FS, path string, kind Kind, fill func(w *writer) error) (size int64, digest uint32, err error) {
	f, err := fs.Create(path)
	if err != nil {
		return 0, 0, vfs.Wrap(err)
	}
	w, err := newWriter(f, kind)
	if err == nil {
		err = fill(w)
	}
	if err == nil {
		err = w.finish()
	}
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	return w.size, w.digest, vfs.Wrap(err)
}

func (w *writer) partition(p *catalog.PartitionState) error {
	steps := []func(*catalog.PartitionState) error{w.samples, w.births, w.keys, w.tags, w.fields, w.tasks}
	if err := w.record(recordPartition, &partitionRecord{p.Name, p.Complete}); err != nil {
		return err
	}
	for _, step := range steps {
		if err := step(p); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) samples(p *catalog.PartitionState) error {
	for k, list := range [][]schema.Sample{p.Samples, p.Reserved} {
		for part := range slices.Chunk(list, rowsPerRecord) {
			r := samplesRecord{Reserved: k == 1}
			r.Indexes, r.Generations = numbers(part)
			if err := w.record(recordSamples, &r); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *writer) births(p *catalog.PartitionState) error {
	for part := range slices.Chunk(p.Births, 3*rowsPerRecord) {
		if err := w.record(recordBirths, &birthsRecord{part}); err != nil {
			return err
		}
	}
	return nil
}

func numbers(samples []schema.Sample) (indexes, generations wire.Ints) {
	indexes, generations = make(wire.Ints, len(samples)), make(wire.Ints, len(samples))
	for i, s := range samples {
		indexes[i], generations[i] = s.Index, int64(s.Generation)
	}
	return indexes, generations
}

// cuts yields ranges of rows of which each has few bytes.
func cuts(rows int, size func(row int) int) (out [][2]int) {
	for from := 0; from < rows; {
		to, sum := from, 0
		for to < rows && to-from < rowsPerRecord && (to == from || sum+size(to) <= bytesPerRecord) {
			sum += size(to)
			to++
		}
		out = append(out, [2]int{from, to})
		from = to
	}
	return out
}

func (w *writer) keys(p *catalog.PartitionState) error {
	for _, c := range cuts(len(p.Keys), func(i int) int { return len(p.Keys[i]) }) {
		if err := w.record(recordKeys, &keysRecord{p.Keyed[c[0]:c[1]], p.Keys[c[0]:c[1]]}); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) tags(p *catalog.PartitionState) error {
	for _, c := range cuts(len(p.Tags), func(i int) int { return len(p.Tags[i]) }) {
		if err := w.record(recordTags, &tagsRecord{p.Tagged[c[0]:c[1]], p.Tags[c[0]:c[1]]}); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) fields(p *catalog.PartitionState) error {
	for k := range p.Fields {
		f := &p.Fields[k]
		if err := w.record(recordField, &fieldRecord{f.Name, uint8(f.Kind), uint8(f.DType), f.Ragged}); err != nil {
			return err
		}
		for from := 0; from < len(f.Holders); from += rowsPerRecord {
			to := min(from+rowsPerRecord, len(f.Holders))
			r := holdersRecord{Indexes: f.Holders[from:to]}
			if f.Kind == schema.Tensor {
				shapes := wire.Column(f.Shapes.Slice(from, to))
				r.Shapes = &shapes
			}
			if err := w.record(recordHolders, &r); err != nil {
				return err
			}
		}
		for part := range slices.Chunk(f.Lost, rowsPerRecord) {
			if err := w.record(recordLost, &lostRecord{part}); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *writer) tasks(p *catalog.PartitionState) error {
	for _, task := range p.Tasks {
		if err := w.record(recordTask, &taskRecord{task.Name}); err != nil {
			return err
		}
		for part := range slices.Chunk(task.Consumed, rowsPerRecord) {
			if err := w.record(recordConsumed, &consumedRecord{part}); err != nil {
				return err
			}
		}
	}
	return nil
}
