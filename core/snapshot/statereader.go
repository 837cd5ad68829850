package snapshot

import (
	"bytes"

	"transferqueue/core/catalog"
	"transferqueue/core/internal/vfs"
	"transferqueue/core/schema"
)

// ReadState reads a state file and checks every byte of it. Whether the state makes sense is for the catalog to say.
func ReadState(fs vfs.FS, path string) (s *catalog.State, sampler []byte, cut Cut, err error) {
	d := stateReader{state: &catalog.State{}}
	_, _, err = readFile(fs, path, StateFile, d.record)
	return d.state, d.sampler, d.cut, err
}

// DecodeState reads what EncodeState has written, whose name is for errors.
func DecodeState(name string, data []byte) (*catalog.State, error) {
	d := stateReader{state: &catalog.State{}}
	_, err := readStream(name, bytes.NewReader(data), int64(len(data)), StateFile, d.record)
	return d.state, err
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

func (d *stateReader) head(r *reader, body []byte) (err error) {
	d.state.Lineage, err = r.origin(body, &d.cut)
	return err
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
		return d.samples(r, p, body)
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
	case recordLost:
		return d.lost(r, p, body)
	case recordTask:
		var x taskRecord
		err := r.message(body, &x)
		p.Tasks = append(p.Tasks, catalog.TaskState{Name: x.Name})
		return err
	case recordConsumed:
		return d.consumed(r, p, body)
	}
	return r.bad("record %d of unknown type %d", r.records, kind)
}

func (d *stateReader) samples(r *reader, p *catalog.PartitionState, body []byte) error {
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
}

func (d *stateReader) consumed(r *reader, p *catalog.PartitionState, body []byte) error {
	var x consumedRecord
	if err := r.message(body, &x); err != nil {
		return err
	}
	if len(p.Tasks) == 0 {
		return r.bad("record %d: consumption before any task", r.records)
	}
	task := &p.Tasks[len(p.Tasks)-1]
	task.Consumed = append(task.Consumed, x.Indexes...)
	return nil
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

func (d *stateReader) lost(r *reader, p *catalog.PartitionState, body []byte) error {
	var x lostRecord
	if err := r.message(body, &x); err != nil {
		return err
	}
	if len(p.Fields) == 0 {
		return r.bad("record %d: lost cells before any field", r.records)
	}
	f := &p.Fields[len(p.Fields)-1]
	f.Lost = append(f.Lost, x.Indexes...)
	return nil
}
