package main

// #include "tq.h"
// #include <stdlib.h>
import "C"

import (
	"errors"
	"unsafe"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/jobs"
	"transferqueue/core/schema"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

// describe splits an error into the operation and the text.
func describe(err error) (op, message string) {
	var e *tqerr.Error
	if errors.As(err, &e) && e.Op != "" {
		plain := *e
		plain.Op = ""
		return e.Op, plain.Error()
	}
	return "", err.Error()
}

// rawColumns reads the column structs of a call.
func rawColumns(columns *C.tq_input_column, n C.uint32_t) []foreign.Raw {
	if columns == nil {
		return nil
	}
	out := make([]foreign.Raw, int(n))
	for i, c := range unsafe.Slice(columns, int(n)) {
		out[i] = foreign.Raw{
			Kind: uint8(c.kind), DType: uint8(c.dtype), Ragged: uint8(c.ragged), Form: uint8(c.form), Rank: uint32(c.rank),
			Base: uint64(c.base), Stride: int64(c.row_stride), Dims: uint64(c.dims), Offsets: uint64(c.offsets),
			Pointers: uint64(c.pointers), NDims: uint64(c.ndims), Sizes: uint64(c.sizes), Codecs: uint64(c.codecs),
		}
	}
	return out
}

// carver cuts one malloc'ed block into aligned pieces.
type carver struct {
	base unsafe.Pointer
	at   uintptr
}

func room(n int, size uintptr) uintptr { return (uintptr(n)*size + 7) &^ 7 }

func carve[T any](c *carver, n int) []T {
	var zero T
	if n == 0 {
		return nil
	}
	p := unsafe.Add(c.base, c.at)
	c.at += room(n, unsafe.Sizeof(zero))
	return unsafe.Slice((*T)(p), n)
}

// put copies a list into the block and returns its address, 0 for an empty one.
func put[T any](c *carver, list []T) C.uint64_t {
	out := carve[T](c, len(list))
	copy(out, list)
	return address(out)
}

// putBytes copies bytes into the block, nil for none.
func putBytes(c *carver, data []byte) *C.uint8_t {
	out := carve[C.uint8_t](c, len(data))
	if len(out) == 0 {
		return nil
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&out[0])), len(out)), data)
	return &out[0]
}

func address[T any](list []T) C.uint64_t {
	if len(list) == 0 {
		return 0
	}
	return C.uint64_t(uintptr(unsafe.Pointer(&list[0])))
}

// columnLists are the lists of a result column that lie inside the reply.
type columnLists struct {
	dims    []int64
	ndims   []uint8
	offsets []int64 // of objects only
	codecs  []schema.Codec
}

func listsOf(r *client.ResultColumn) columnLists {
	l := columnLists{dims: r.Dims, codecs: r.Column.Codecs}
	if r.Form == client.Nested {
		l.ndims, l.dims = r.Shapes()
	}
	if r.Form == client.ObjectRows {
		l.offsets = r.Offsets
	}
	return l
}

func (l *columnLists) size() uintptr {
	return room(len(l.dims), 8) + room(len(l.ndims), 1) + room(len(l.offsets), 8) + room(len(l.codecs), 1)
}

func writeColumn(c *carver, out *C.tq_result_column, r *client.ResultColumn, l *columnLists) {
	*out = C.tq_result_column{
		kind: C.uint8_t(r.Column.Kind), dtype: C.uint8_t(r.Column.DType), ragged: C.uint8_t(r.Ragged), form: C.uint8_t(r.Form),
		rank: C.uint32_t(len(l.dims)), base: address(r.Data), size: C.uint64_t(len(r.Data)), token: C.uint64_t(r.Token),
		offsets_token: C.uint64_t(r.OffsetsToken), offsets_id: C.uint64_t(r.OffsetsID),
		min_length: C.int64_t(r.MinLength), max_length: C.int64_t(r.MaxLength),
	}
	out.dims, out.ndims = put(c, l.dims), put(c, l.ndims)
	out.codecs = put(c, l.codecs)
	if r.Form == client.Jagged {
		out.offsets = address(r.Offsets)
	} else {
		out.offsets = put(c, l.offsets)
	}
}

// writeCompletion lays a result out in one block of C memory.
func writeCompletion(out *C.tq_completion, ticket uint64, r *client.Result) {
	body := r.Body
	if r.Err != nil {
		op, message := describe(r.Err)
		body, _ = wire.Marshal(&wire.ErrorBody{Op: op, Msg: message}) // two strings always encode
	}
	lists := make([]columnLists, len(r.Columns))
	size := room(len(body), 1) + room(len(r.Columns), unsafe.Sizeof(C.tq_result_column{}))
	for i := range r.Columns {
		lists[i] = listsOf(&r.Columns[i])
		size += lists[i].size()
	}
	c := &carver{base: C.malloc(C.size_t(max(size, 1)))}
	columns := carve[C.tq_result_column](c, len(r.Columns))
	for i := range columns {
		writeColumn(c, &columns[i], &r.Columns[i], &lists[i])
	}
	*out = C.tq_completion{
		ticket: C.uint64_t(ticket), code: C.int32_t(tqerr.CodeOf(r.Err)), n_columns: C.uint32_t(len(columns)),
		rows: C.uint64_t(r.Rows), body_size: C.uint64_t(len(body)), memory: c.base,
	}
	out.body = putBytes(c, body)
	if len(columns) > 0 {
		out.columns = &columns[0]
	}
}

// writeJob lays a job out in one block of C memory. Its columns point into buffers that stay until the job ends.
func writeJob(out *C.tq_job, job *jobs.Job) error {
	fields := make(wire.Strings, len(job.Columns))
	results := make([]client.ResultColumn, len(job.Columns))
	lists := make([]columnLists, len(job.Columns))
	size := room(len(results), unsafe.Sizeof(C.tq_result_column{})) + room(len(job.Callable), 1)
	for i, data := range job.Columns {
		fields[i] = data.Column.Field
		results[i] = client.RowsResult(data.Column, data.Bytes)
		lists[i] = listsOf(&results[i])
		size += lists[i].size()
	}
	body, err := wire.Marshal(&jobBody{Partition: job.Partition, Fields: fields, Keys: job.Keys, Request: job.Request})
	if err != nil {
		return err
	}
	size += room(len(body), 1)
	c := &carver{base: C.malloc(C.size_t(max(size, 1)))}
	columns := carve[C.tq_result_column](c, len(results))
	for i := range columns {
		writeColumn(c, &columns[i], &results[i], &lists[i])
	}
	*out = C.tq_job{
		job: C.uint64_t(job.ID), kind: C.uint32_t(job.Kind), n_columns: C.uint32_t(len(columns)), rows: C.uint64_t(job.Rows),
		callable_size: C.uint64_t(len(job.Callable)), body_size: C.uint64_t(len(body)), memory: c.base,
	}
	out.callable, out.body = putBytes(c, job.Callable), putBytes(c, body)
	if len(columns) > 0 {
		out.columns = &columns[0]
	}
	return nil
}

// jobBody names what a job is about.
type jobBody struct {
	Partition string
	Fields    wire.Strings
	Keys      wire.Strings
	Request   []byte
}
