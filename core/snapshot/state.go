package snapshot

import (
	"crypto/rand"
	"slices"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
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
	taskRecord     struct{ Name string }
	consumedRecord struct{ Indexes wire.Ints }
	samplerRecord  struct{ State []byte }
)

// WriteState writes and syncs a state file.
func WriteState(fs vfs.FS, path string, cut Cut, s *catalog.State, sampler []byte) error {
	_, _, err := writeFile(fs, path, StateFile, func(w *writer) error {
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
	})
	return err
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

// ReadState reads a state file and checks every byte of it. Whether the state makes sense is for the catalog to say.
func ReadState(fs vfs.FS, path string) (s *catalog.State, sampler []byte, cut Cut, err error) {
	d := stateReader{state: &catalog.State{}}
	_, _, err = readFile(fs, path, StateFile, d.record)
	return d.state, d.sampler, d.cut, err
}

// readFile hands the records of a file to a function, without the end. It returns what pins the file.
func readFile(fs vfs.FS, path string, kind Kind, take func(r *reader, kind byte, body []byte) error) (size int64, digest uint32, err error) {
	f, err := fs.Open(path)
	if err != nil {
		return 0, 0, vfs.Wrap(err)
	}
	defer func() { _ = f.Close() }() // nothing that was read is lost by it
	info, err := f.Stat()
	if err != nil {
		return 0, 0, vfs.Wrap(err)
	}
	r, err := newReader(path, f, info.Size(), kind)
	if err != nil {
		return 0, 0, err
	}
	defer r.close()
	for first := true; ; first = false {
		kind, body, err := r.next()
		switch {
		case err != nil:
			return 0, 0, err
		case kind == recordEnd:
			return info.Size(), r.digest, nil
		case first != (kind == recordHead):
			return 0, 0, r.bad("the head record is not the first")
		}
		if err := take(r, kind, body); err != nil {
			return 0, 0, err
		}
	}
}

// stateReader puts a state together from records.
type stateReader struct {
	state   *catalog.State
	sampler []byte
	cut     Cut
	builder *schema.Builder // of the shapes of the latest field
}

func (d *stateReader) record(r *reader, kind byte, body []byte) error {
	switch kind {
	case recordHead:
		return d.head(r, body)
	case recordUsed:
		return d.used(r, body)
	case recordSampler:
		var x samplerRecord
		err := r.message(body, &x)
		d.sampler = x.State
		return err
	case recordPartition:
		var x partitionRecord
		err := r.message(body, &x)
		d.state.Partitions = append(d.state.Partitions, catalog.PartitionState{Name: x.Name, Complete: x.Complete})
		return err
	}
	if len(d.state.Partitions) == 0 {
		return r.bad("record %d of type %d before any partition", r.records, kind)
	}
	return d.ofPartition(r, &d.state.Partitions[len(d.state.Partitions)-1], kind, body)
}

func (d *stateReader) head(r *reader, body []byte) error {
	var x headRecord
	if err := r.message(body, &x); err != nil {
		return err
	}
	if len(x.Cut) != len(d.cut) {
		return r.bad("a cut of %d bytes, want %d", len(x.Cut), len(d.cut))
	}
	d.cut, d.state.Lineage = Cut(x.Cut), x.Lineage
	return nil
}

func (d *stateReader) used(r *reader, body []byte) error {
	var x usedRecord
	if err := r.message(body, &x); err != nil {
		return err
	}
	if len(x.From) != len(x.Counts) || len(x.From) != len(x.Generations) {
		return r.bad("record %d: lists of different length", r.records)
	}
	for k := range x.From {
		d.state.Used = append(d.state.Used, catalog.UsedRun{From: x.From[k], Count: x.Counts[k], Generation: uint32(x.Generations[k])})
	}
	return nil
}

func (d *stateReader) ofPartition(r *reader, p *catalog.PartitionState, kind byte, body []byte) error {
	switch kind {
	case recordSamples:
		var x samplesRecord
		if err := r.message(body, &x); err != nil {
			return err
		}
		samples, err := r.samples(x.Indexes, x.Generations)
		if x.Reserved {
			p.Reserved = append(p.Reserved, samples...)
		} else {
			p.Samples = append(p.Samples, samples...)
		}
		return err
	case recordBirths:
		var x birthsRecord
		err := r.message(body, &x)
		p.Births = append(p.Births, x.Triples...)
		return err
	case recordKeys:
		var x keysRecord
		err := r.message(body, &x)
		p.Keyed, p.Keys = append(p.Keyed, x.Indexes...), append(p.Keys, x.Keys...)
		return err
	case recordTags:
		var x tagsRecord
		err := r.message(body, &x)
		p.Tagged, p.Tags = append(p.Tagged, x.Indexes...), append(p.Tags, x.Tags...)
		return err
	case recordField:
		var x fieldRecord
		err := r.message(body, &x)
		p.Fields = append(p.Fields, catalog.FieldState{
			Name: x.Name, Kind: schema.Kind(x.Kind), DType: schema.DType(x.DType), Ragged: x.Ragged,
		})
		d.builder = schema.NewBuilder(x.Name)
		return err
	case recordHolders:
		return d.holders(r, p, body)
	case recordTask:
		var x taskRecord
		err := r.message(body, &x)
		p.Tasks = append(p.Tasks, catalog.TaskState{Name: x.Name})
		return err
	case recordConsumed:
		var x consumedRecord
		err := r.message(body, &x)
		if err == nil && len(p.Tasks) == 0 {
			err = r.bad("record %d: consumption before any task", r.records)
		}
		if err == nil {
			task := &p.Tasks[len(p.Tasks)-1]
			task.Consumed = append(task.Consumed, x.Indexes...)
		}
		return err
	}
	return r.bad("record %d of unknown type %d", r.records, kind)
}

func (r *reader) samples(indexes, generations []int64) ([]schema.Sample, error) {
	if len(indexes) != len(generations) {
		return nil, r.bad("record %d: %d indexes, %d generations", r.records, len(indexes), len(generations))
	}
	out := make([]schema.Sample, len(indexes))
	for k := range out {
		out[k] = schema.Sample{Index: indexes[k], Generation: uint32(generations[k])}
	}
	return out, nil
}

func (d *stateReader) holders(r *reader, p *catalog.PartitionState, body []byte) error {
	var x holdersRecord
	if err := r.message(body, &x); err != nil {
		return err
	}
	if len(p.Fields) == 0 {
		return r.bad("record %d: holders before any field", r.records)
	}
	f := &p.Fields[len(p.Fields)-1]
	f.Holders = append(f.Holders, x.Indexes...)
	if f.Kind != schema.Tensor {
		return nil
	}
	if x.Shapes == nil || x.Shapes.Rows != len(x.Indexes) || x.Shapes.Kind != f.Kind || x.Shapes.DType != f.DType {
		return r.bad("record %d: field %q: shapes do not fit its samples", r.records, f.Name)
	}
	d.builder.Append(schema.Column(*x.Shapes))
	f.Shapes = d.builder.Column()
	return nil
}

// wrongCut is the error for files that were not saved together.
func wrongCut(what string) error {
	return tqerr.New(tqerr.Corruption, "%s is of another save than the rest", what)
}
