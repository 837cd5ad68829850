// Package main is the C face of the core: a shared library with the functions of tq.h. An export recovers, checks its
// arguments, converts them, makes one call into the core, and converts what comes back. Decisions are made in core/.
//
// Memory that C sees is C memory: replies are malloc'ed in one piece and freed by tq_free. Handles are numbers of one
// table. No Go pointer leaves Go.
package main

// #include "tq.h"
// #include <stdlib.h>
// #include <string.h>
import "C"

import (
	"time"
	"unsafe"

	"transferqueue/core/client"
	"transferqueue/core/foreign"
	"transferqueue/core/guard"
	"transferqueue/core/tqerr"
	"transferqueue/core/wire"
)

func main() {}

// fail writes an error for the caller and returns its code.
func fail(out *C.tq_error, err error) C.int32_t {
	if err == nil {
		return C.TQ_OK
	}
	if out != nil {
		op, message := describe(err)
		out.op, out.message = nil, C.CString(message)
		if op != "" {
			out.op = C.CString(op)
		}
	}
	return C.int32_t(tqerr.CodeOf(err))
}

// guarded runs the body of an export: not at all once the library is poisoned, and a panic in it poisons the library.
func guarded(out *C.tq_error, body func() error) (code C.int32_t) {
	err := guard.Poisoned()
	if err == nil {
		func() {
			defer guard.Recover(&err)
			err = body()
		}()
	}
	return fail(out, err)
}

// borrowed views memory of the caller for the length of a call.
func borrowed(data *C.tq_input_byte, size C.uint64_t) []byte {
	if data == nil || size == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(data)), int(size))
}

// copied is borrowed memory that the core keeps.
func copied(data *C.tq_input_byte, size C.uint64_t) []byte {
	return append([]byte(nil), borrowed(data, size)...)
}

//export tq_abi_version
func tq_abi_version() C.uint32_t { return C.TQ_ABI_VERSION }

//export tq_free
func tq_free(memory unsafe.Pointer) { C.free(memory) }

//export tq_error_release
func tq_error_release(e *C.tq_error) {
	if e != nil {
		C.free(unsafe.Pointer(e.op))
		C.free(unsafe.Pointer(e.message))
		e.op, e.message = nil, nil
	}
}

func giveBytes(out *C.tq_bytes, data []byte) {
	out.data = (*C.uint8_t)(C.CBytes(data))
	out.size = C.uint64_t(len(data))
}

//export tq_session_open
func tq_session_open(config *C.tq_input_byte, size C.uint64_t, handle *C.uint64_t, info *C.tq_bytes, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		s, data, err := openSession(borrowed(config, size))
		if err != nil {
			return err
		}
		*handle = C.uint64_t(handles.add(s))
		giveBytes(info, data)
		return nil
	})
}

//export tq_session_abort
func tq_session_abort(key C.uint64_t) C.int32_t {
	return guarded(nil, func() error {
		opening.abort(uint64(key))
		return nil
	})
}

//export tq_session_close
func tq_session_close(handle C.uint64_t, timeoutMS C.int64_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		s, err := take[*openedSession](uint64(handle))
		if err != nil {
			return err
		}
		return s.Close(time.Duration(timeoutMS) * time.Millisecond)
	})
}

//export tq_queue_open
func tq_queue_open(handle *C.uint64_t, fd *C.int32_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		q, err := client.NewCompletions()
		if err != nil {
			return err
		}
		*handle, *fd = C.uint64_t(handles.add(q)), C.int32_t(q.FD())
		return nil
	})
}

//export tq_queue_close
func tq_queue_close(handle C.uint64_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		q, err := take[*client.Completions](uint64(handle))
		if err != nil {
			return err
		}
		return q.Close()
	})
}

//export tq_submit
func tq_submit(sessionHandle, queueHandle C.uint64_t, op, flags C.uint32_t, body *C.tq_input_byte, size C.uint64_t,
	columns *C.tq_input_column, n C.uint32_t, rows C.uint64_t, timeoutMS C.int64_t, ticket *C.uint64_t, waitFD *C.int32_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		s, err := get[*openedSession](uint64(sessionHandle))
		if err != nil {
			return err
		}
		q, err := get[*client.Completions](uint64(queueHandle))
		if err != nil {
			return err
		}
		id, fd, err := q.Submit(s.Client, &client.Request{
			Op: wire.Op(op), Flags: client.Flags(flags &^ C.TQ_WAITS), Waits: flags&C.TQ_WAITS != 0, Body: copied(body, size), Columns: rawColumns(columns, n),
			Rows: int(rows), Timeout: time.Duration(timeoutMS) * time.Millisecond,
		})
		*ticket, *waitFD = C.uint64_t(id), C.int32_t(fd)
		return err
	})
}

//export tq_cancel
func tq_cancel(handle, ticket C.uint64_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		q, err := get[*client.Completions](uint64(handle))
		if err != nil {
			return err
		}
		q.Cancel(uint64(ticket))
		return nil
	})
}

//export tq_reap
func tq_reap(handle C.uint64_t, out *C.tq_completion, capacity C.uint32_t, n *C.uint32_t, e *C.tq_error) C.int32_t {
	*n = 0
	return guarded(e, func() error {
		q, err := get[*client.Completions](uint64(handle))
		if err != nil {
			return err
		}
		slots := unsafe.Slice(out, int(capacity))
		for i, done := range q.Take(int(capacity)) {
			writeCompletion(&slots[i], done.Ticket, done.Result)
			*n++
		}
		return nil
	})
}

//export tq_release
func tq_release(token C.uint64_t) C.int32_t {
	return guarded(nil, func() error {
		client.Release(uint64(token))
		return nil
	})
}

//export tq_job_next
func tq_job_next(handle C.uint64_t, timeoutMS C.int64_t, out *C.tq_job, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		queue, err := jobsOf(uint64(handle))
		if err != nil {
			return err
		}
		job, err := queue.Next(time.Duration(timeoutMS) * time.Millisecond)
		if err != nil {
			return err
		}
		return writeJob(out, job)
	})
}

//export tq_job_done
func tq_job_done(handle, job C.uint64_t, columns *C.tq_input_column, n C.uint32_t, rows C.uint64_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		queue, err := jobsOf(uint64(handle))
		if err != nil {
			return err
		}
		inputs := make([]*foreign.Input, 0, n)
		for _, raw := range rawColumns(columns, n) {
			in, err := foreign.New("", int(rows), &raw)
			if err != nil {
				queue.Fail(uint64(job), err)
				return err
			}
			inputs = append(inputs, in)
		}
		return queue.Done(uint64(job), inputs)
	})
}

//export tq_job_fail
func tq_job_fail(handle, job C.uint64_t, code C.int32_t, message *C.tq_input_byte, size C.uint64_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		queue, err := jobsOf(uint64(handle))
		if err != nil {
			return err
		}
		queue.Fail(uint64(job), tqerr.New(tqerr.Code(code), "%s", borrowed(message, size)))
		return nil
	})
}

//export tq_descriptors
func tq_descriptors(fds *C.int32_t, capacity C.uint32_t, n *C.uint32_t) C.int32_t {
	*n = 0
	return guarded(nil, func() error {
		slots := unsafe.Slice(fds, int(capacity))
		for _, fd := range descriptors() {
			if *n < capacity {
				slots[*n] = C.int32_t(fd)
			}
			*n++
		}
		return nil
	})
}

//export tq_counters
func tq_counters(handle C.uint64_t, out *C.tq_bytes, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		data, err := counters(uint64(handle))
		if err == nil {
			giveBytes(out, data)
		}
		return err
	})
}

//export tq_panic_for_test
func tq_panic_for_test(where C.uint32_t, e *C.tq_error) C.int32_t {
	return guarded(e, func() error {
		if where == 0 {
			panic("forced by tq_panic_for_test")
		}
		done := make(chan struct{})
		guard.Go("forced panic", func() {
			defer close(done)
			panic("forced by tq_panic_for_test")
		})
		<-done
		return nil
	})
}
