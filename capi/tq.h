/* The C contract of the TransferQueue core. Written by hand; the Go files beside it implement it, and
 * python/transfer_queue/_lib.py calls it.
 *
 * Only integers, (pointer, length) pairs and the structs below cross. Handles are numbers from one table and are never
 * pointers. Every function may be called from any thread and holds no lock of the caller; those that may block take a
 * timeout. Every function returns a code of enum tq_code; with an error it fills *err, whose strings the caller frees with
 * tq_error_release. After a panic in the core every call returns TQ_INTERNAL. After a fork a child must not call an
 * inherited library: it loads a private copy (see _lib.py).
 */
#ifndef TQ_H
#define TQ_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TQ_ABI_VERSION 2 /* grows with every change of a signature or a struct */

/* tq_code: generated from core/tqerr/codes.go by `go generate ./core/tqerr`. */
#include "tq_codes.h"

typedef struct tq_error {
    char *op;      /* public operation, or NULL */
    char *message; /* UTF-8, or NULL */
} tq_error;

/* Bytes owned by the library until tq_free. */
typedef struct tq_bytes {
    uint8_t *data;
    uint64_t size;
} tq_bytes;

enum tq_kind { TQ_TENSOR = 1, TQ_OBJECT = 2 };

/* How the rows of an input column lie in the caller's memory, which is borrowed until the call returns. */
enum tq_form {
    TQ_STRIDED = 1,  /* row i at base + i * row_stride, all of shape dims[rank] */
    TQ_OFFSETS = 2,  /* rows packed from base; row i has shape dims[rank] with dims[0] replaced by offsets[i+1] - offsets[i] */
    TQ_POINTERS = 3, /* row i at pointers[i]; shapes: ndims[i] numbers of dims each, one row after another */
    TQ_OBJECTS = 4   /* row i is sizes[i] bytes: packed from base, or at pointers[i] when pointers is not 0 */
};

typedef struct tq_column {
    uint8_t kind;
    uint8_t dtype;  /* number of core/schema.DType, 0 for objects */
    uint8_t ragged; /* torch's _ragged_idx of the column; 1 unless it is a jagged tensor with another; 0 for rank 0, objects */
    uint8_t form;
    uint32_t rank;       /* TQ_STRIDED, TQ_OFFSETS */
    uint64_t base;       /* address */
    int64_t row_stride;  /* bytes */
    uint64_t dims;       /* address of int64[] */
    uint64_t offsets;    /* address of int64[rows + 1], in elements of dimension 0 */
    uint64_t pointers;   /* address of uint64[rows] */
    uint64_t ndims;      /* address of uint8[rows] */
    uint64_t sizes;      /* address of int64[rows] */
    uint64_t codecs;     /* address of uint8[rows] */
} tq_column;

/* How a result column is to be built. */
enum tq_result_form {
    TQ_DENSE = 1,   /* tensor of shape [rows] + dims */
    TQ_JAGGED = 2,  /* values of shape dims, where dims[ragged - 1] is the total; offsets int64[rows + 1] */
    TQ_NESTED = 3,  /* rows of any shape packed in base: ndims[rows], dims one row after another */
    TQ_OBJECT_ROWS = 4 /* row i at base + offsets[i], offsets[i+1] - offsets[i] bytes, codecs[i] */
};

typedef struct tq_result_column {
    uint8_t kind;
    uint8_t dtype;
    uint8_t ragged;
    uint8_t form;
    uint32_t rank;         /* TQ_DENSE, TQ_JAGGED: numbers in dims */
    uint64_t base;         /* address of the bytes; 0 when size is 0 */
    uint64_t size;         /* bytes */
    uint64_t token;        /* what keeps base alive: tq_release it once; 0 when base is 0 or lies in the reply itself */
    uint64_t dims;         /* address of int64[], inside the reply */
    uint64_t offsets;      /* address of int64[rows + 1]; of a jagged column it is kept alive by offsets_token */
    uint64_t offsets_token;
    uint64_t offsets_id;   /* jagged columns of one reply with equal lengths have the same number, and share offsets */
    int64_t min_length;    /* TQ_JAGGED */
    int64_t max_length;
    uint64_t ndims;        /* address of uint8[rows], inside the reply */
    uint64_t codecs;       /* address of uint8[rows], inside the reply */
} tq_result_column;

/* One finished request. Everything it points to is freed with one tq_free(memory). */
typedef struct tq_completion {
    uint64_t ticket;
    int32_t code;
    uint32_t n_columns;
    uint64_t rows;
    uint8_t *body; /* msgpack reply, or msgpack [op, message] when code is not TQ_OK */
    uint64_t body_size;
    tq_result_column *columns;
    void *memory;
} tq_completion;

/* Python work: merge old with new cell by cell, parse the columns of a put, or call a sampler. */
typedef struct tq_job {
    uint64_t job;
    uint32_t kind;      /* 1 merge: columns are the old ones, then the new ones; 2 parse: columns are those of the put;
                         * 3 sample: no columns, the answer is one object of bytes */
    uint32_t n_columns;
    uint64_t rows;
    uint8_t *callable; /* cloudpickle */
    uint64_t callable_size;
    uint8_t *body; /* msgpack [partition, fields, keys or nil, request of a sampler] */
    uint64_t body_size;
    tq_result_column *columns; /* private copies that may be written to, valid until the job is done */
    void *memory;
} tq_job;

/* Read-only input; names of their own, because an export written in Go cannot spell const. */
typedef const uint8_t tq_input_byte;
typedef const tq_column tq_input_column;

uint32_t tq_abi_version(void);
void tq_free(void *memory);
void tq_error_release(tq_error *err);

/* Opens the session of this process: joins a running one or starts one (config is a msgpack map, see core/session). *info
 * is a msgpack map that says which. */
int32_t tq_session_open(tq_input_byte *config, uint64_t size, uint64_t *session, tq_bytes *info, tq_error *err);
/* Makes a tq_session_open that waits give up with TQ_CANCELLED: the one whose config has this number as "key". */
int32_t tq_session_abort(uint64_t key);
/* Ends the session, or leaves it when this process does not own it. */
int32_t tq_session_close(uint64_t session, int64_t timeout_ms, tq_error *err);

/* A completion queue with an eventfd that is readable while completions wait. One per event loop and per waiting thread. */
int32_t tq_queue_open(uint64_t *queue, int32_t *fd, tq_error *err);
int32_t tq_queue_close(uint64_t queue, tq_error *err);

/* Starts a request: op is a number of core/wire.Op, body its msgpack request. The bytes of all columns have been copied when it
 * returns. The completion is at the queue under *ticket when *wait_fd is readable: the queue's eventfd, or with TQ_WAITS,
 * for which the queue must have no other request, a descriptor that is only to be polled. */
int32_t tq_submit(uint64_t session, uint64_t queue, uint32_t op, uint32_t flags, tq_input_byte *body, uint64_t size,
                  tq_input_column *columns, uint32_t n_columns, uint64_t rows, int64_t timeout_ms, uint64_t *ticket,
                  int32_t *wait_fd, tq_error *err);
/* Flags of tq_submit. */
enum tq_flags {
    TQ_VIEWS = 1,        /* results of OpGet are views of unit memory where possible */
    TQ_DENSE_LAYOUT = 2, /* columns of OpGet whose rows have one shape come as TQ_DENSE */
    TQ_WAITS = 4         /* the caller waits for this request and does nothing else meanwhile */
};

/* Ends a request early; its completion arrives with TQ_CANCELLED unless it was finished already. */
int32_t tq_cancel(uint64_t queue, uint64_t ticket, tq_error *err);
/* Takes up to capacity completions without blocking; *n says how many. */
int32_t tq_reap(uint64_t queue, tq_completion *out, uint32_t capacity, uint32_t *n, tq_error *err);
/* Gives back the memory behind a token. Never blocks, allowed in a finalizer. */
int32_t tq_release(uint64_t token);

/* Waits for Python work of this process's units; TQ_DEADLINE_EXCEEDED when there is none, TQ_INVALID_STATE when the session
 * has ended. */
int32_t tq_job_next(uint64_t session, int64_t timeout_ms, tq_job *job, tq_error *err);
int32_t tq_job_done(uint64_t session, uint64_t job, tq_input_column *columns, uint32_t n_columns, uint64_t rows, tq_error *err);
int32_t tq_job_fail(uint64_t session, uint64_t job, int32_t code, tq_input_byte *message, uint64_t size, tq_error *err);

/* Descriptors that a forked child must close: fills fds, *n says how many there are. */
int32_t tq_descriptors(int32_t *fds, uint32_t capacity, uint32_t *n);
/* Counters as a msgpack map, for tests and status. */
int32_t tq_counters(uint64_t session, tq_bytes *out, tq_error *err);
/* Panics on purpose, in the call or on a goroutine, for the test that proves that a panic poisons the library. */
int32_t tq_panic_for_test(uint32_t where, tq_error *err);

#ifdef __cplusplus
}
#endif
#endif
