package unit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"transferqueue/core/jobs"
	"transferqueue/core/merge"
	"transferqueue/core/schema"
	"transferqueue/core/store"
	"transferqueue/core/tqerr"
)

// rowsOf gives the bytes of rows of a column that lies in runs.
type rowsOf struct {
	column  *schema.Column
	width   int64   // of each row, when offsets is nil
	offsets []int64 // of the rows in the column
	starts  []int   // first row of each run
	runs    [][]byte
}

func newRowsOf(column *schema.Column) *rowsOf {
	if column.Form == schema.Uniform {
		return &rowsOf{column: column, width: column.RowBytes()}
	}
	return &rowsOf{column: column, offsets: column.Offsets()}
}

func leasedRows(s store.Store, l *store.Leased) *rowsOf {
	r := newRowsOf(&l.Column)
	at := 0
	for _, run := range l.Runs {
		r.starts, r.runs = append(r.starts, at), append(r.runs, s.Bytes(run.Block))
		at += run.Rows
	}
	return r
}

func packedRows(o *Operand) *rowsOf {
	r := newRowsOf(&o.Column)
	r.starts, r.runs = []int{0}, [][]byte{o.Bytes}
	return r
}

func (r *rowsOf) offset(i int) int64 {
	if r.offsets == nil {
		return int64(i) * r.width
	}
	return r.offsets[i]
}

// from returns the bytes of row i and of all rows behind it in the same run, which is a merge.Rows.
func (r *rowsOf) from(i int) []byte {
	k, exact := slices.BinarySearch(r.starts, i)
	if !exact {
		k--
	}
	return r.runs[k][r.offset(i)-r.offset(r.starts[k]):]
}

// Update computes merge(stored, operand) for every cell and stages the results; what is stored stays as it is.
func (u *Unit) Update(ctx context.Context, spec *UpdateSpec) (*Transformed, error) {
	fields := make([]string, len(spec.Operands))
	for i := range spec.Operands {
		fields[i] = spec.Operands[i].Column.Field
	}
	lease, err := u.Read(spec.Partition, fields, spec.Samples)
	var missing *store.MissingError
	if errors.As(err, &missing) {
		return nil, tqerr.New(tqerr.SampleGone, "partition %q: sample %d: field %q is not stored any more", spec.Partition, missing.Sample.Index, missing.Field)
	}
	if err != nil {
		return nil, err
	}
	defer lease.Release()
	if len(spec.Callable) > 0 {
		return u.updateByCallable(ctx, spec, lease.Columns())
	}
	return u.updateNatively(spec, lease.Columns())
}

func (u *Unit) updateNatively(spec *UpdateSpec, old []store.Leased) (*Transformed, error) {
	m, known := merge.Lookup(spec.Merge)
	if !known {
		return nil, tqerr.New(tqerr.InvalidArgument, "merge %q: want \"concat\", \"add\", \"replace\", \"max\", \"min\" or a callable", spec.Merge)
	}
	name := func(i int) string {
		if spec.Keys != nil {
			return spec.Keys[i]
		}
		return fmt.Sprintf("sample %d", spec.Samples[i].Index)
	}
	out := &Transformed{Columns: make([]schema.Column, len(old))}
	for k := range old {
		result, err := m.Plan(&old[k].Column, &spec.Operands[k].Column, name)
		if err != nil {
			return nil, err
		}
		out.Columns[k] = result
	}
	staged, err := spec.Stage(out.Columns)
	if err != nil {
		return nil, err
	}
	out.Staged = staged
	for k, block := range staged.Blocks() {
		stored, operand := leasedRows(u, &old[k]), packedRows(&spec.Operands[k])
		m.Apply(&out.Columns[k], u.Bytes(block), stored.column, stored.from, operand.column, operand.from)
	}
	return out, nil
}

// updateByCallable lets a Python thread merge copies of the stored and the new values.
func (u *Unit) updateByCallable(ctx context.Context, spec *UpdateSpec, old []store.Leased) (*Transformed, error) {
	job := &jobs.Job{Kind: jobs.Merge, Callable: spec.Callable, Partition: spec.Partition, Keys: spec.Keys, Rows: len(spec.Samples)}
	inputs := make([]*rowsOf, 0, 2*len(old))
	for k := range old {
		inputs = append(inputs, leasedRows(u, &old[k]))
	}
	for k := range spec.Operands {
		inputs = append(inputs, packedRows(&spec.Operands[k]))
	}
	results, err := u.runJob(ctx, job, inputs)
	if err != nil {
		return nil, err
	}
	defer u.opts.Jobs.Recycle(results)
	if len(results) != len(old) {
		return nil, tqerr.New(tqerr.Internal, "%d result columns of %d", len(results), len(old))
	}
	for k := range results {
		if err := sameType(&old[k].Column, &results[k].Column); err != nil {
			return nil, err
		}
		results[k].Column.Field = old[k].Column.Field
	}
	return u.stageResults(results, len(spec.Samples), nil, spec.Stage)
}

// sameType repeats the rule that the Python side has checked row by row, so that no bug there can store another type.
func sameType(old, result *schema.Column) error {
	if old.Kind != result.Kind {
		return tqerr.New(tqerr.Failed, "field %q: merge_fn returned a %s, the value must remain %s", old.Field, result.Kind, old.Kind)
	}
	if old.DType != result.DType {
		return tqerr.New(tqerr.Failed, "field %q: merge_fn must keep dtype %s, got %s", old.Field, old.DType, result.DType)
	}
	return nil
}

// Parse runs a data parser over the columns of a put and stages what it returns.
func (u *Unit) Parse(ctx context.Context, spec *ParseSpec) (*Transformed, error) {
	job := &jobs.Job{Kind: jobs.Parse, Callable: spec.Callable, Partition: spec.Partition, Keys: spec.Keys, Rows: spec.Rows}
	inputs := make([]*rowsOf, len(spec.Operands))
	for k := range spec.Operands {
		inputs[k] = packedRows(&spec.Operands[k])
	}
	results, err := u.runJob(ctx, job, inputs)
	if err != nil {
		return nil, err
	}
	defer u.opts.Jobs.Recycle(results)
	if len(results) != len(spec.Operands) {
		return nil, tqerr.New(tqerr.Failed, "data_parser must not change dict keys: %d columns of %d", len(results), len(spec.Operands))
	}
	for k := range results {
		results[k].Column.Field = spec.Operands[k].Column.Field
	}
	return u.stageResults(results, spec.Rows, spec.Dedup, spec.Stage)
}

// runJob gives copies of columns to a Python thread, which may write to them, and waits for its result.
func (u *Unit) runJob(ctx context.Context, job *jobs.Job, inputs []*rowsOf) ([]jobs.Data, error) {
	for _, rows := range inputs {
		buffer, err := u.opts.Jobs.Gather(rows.column.Bytes())
		if err != nil {
			u.opts.Jobs.Recycle(job.Columns)
			return nil, err
		}
		at := 0
		for _, run := range rows.runs {
			at += copy(buffer[at:], run)
		}
		job.Columns = append(job.Columns, jobs.Data{Column: *rows.column, Bytes: buffer})
	}
	return u.opts.Jobs.Run(ctx, job)
}

// stageResults stages what was computed; equal rows of the fields in dedup once.
func (u *Unit) stageResults(
	results []jobs.Data, rows int, dedup []string, stage func([]schema.Column) (store.Staged, error),
) (*Transformed, error) {
	out := &Transformed{}
	columns := make([]schema.Column, len(results))
	pieces := make([][][]byte, len(results))
	for k := range results {
		if results[k].Column.Rows != rows {
			return nil, tqerr.New(tqerr.Internal, "field %q: %d result rows of %d", results[k].Column.Field, results[k].Column.Rows, rows)
		}
		out.Columns = append(out.Columns, results[k].Column)
		columns[k], pieces[k] = results[k].Column, [][]byte{results[k].Bytes}
		if slices.Contains(dedup, results[k].Column.Field) {
			columns[k], pieces[k] = once(&results[k].Column, results[k].Bytes)
		}
	}
	staged, err := stage(columns)
	if err != nil {
		return nil, err
	}
	for k, block := range staged.Blocks() {
		to := u.Bytes(block)
		for _, piece := range pieces[k] {
			to = to[copy(to, piece):]
		}
	}
	out.Staged = staged
	return out, nil
}
