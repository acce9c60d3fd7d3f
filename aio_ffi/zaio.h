/*
 * zaio: asynchronous file I/O for large pages. The C interface that Python sees through cffi.
 *
 * Guarantees:
 *   - A call never aborts the process and never blocks on a disk, except those that say so.
 *   - Every completion is compared with its request; what differs is continued or becomes the op's error.
 *   - An op's buffer is touched only between zaio_submit and the moment zaio_op_done says true.
 *   - All functions may be called from any thread. Failures are negative errno values.
 *
 * Lifetime: engine > file > op. An op must be done before it is freed; a file idle before it is freed. After an op
 * is done the engine never touches it, its buffer or (on its behalf) its file again.
 */
#ifndef ZAIO_H
#define ZAIO_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: everything up to "cdef end" is also what cffi parses */
typedef struct zaio_engine zaio_engine;
typedef struct zaio_file zaio_file;
typedef struct zaio_op zaio_op;

typedef struct {
    int64_t block_size;     /* most bytes of one kernel request; a multiple of 4096, at most 1 GiB */
    int32_t queue_depth;    /* kernel requests in flight per ring */
    int32_t num_rings;      /* kernel AIO rings; 0: thread workers only */
    int32_t num_workers;    /* threads of the fallback lane, started when its first file is opened */
    int32_t single_submit;  /* one io_submit per request */
    int32_t overlap_events; /* refill as slots free up; 0: a batch must complete before the next */
} zaio_options;

typedef struct {
    int64_t bytes_read, bytes_written;
    int64_t num_reads, num_writes; /* calls to zaio_submit */
    int64_t num_pieces;            /* kernel requests made for them */
    int64_t num_submits;           /* io_submit calls */
    int64_t num_short;             /* transfers that moved less than asked, and were continued */
    int64_t num_eagain;            /* io_submit found the kernel's queue full */
    int64_t num_retries;           /* completions with EINTR or EAGAIN, issued again */
    int64_t num_fallbacks;         /* direct requests refused with EINVAL that went through the page cache instead */
    int64_t num_bounced;           /* ops whose address, offset or length was off the alignment */
    int64_t bounce_bytes;          /* memory held in bounce buffers */
    int64_t num_failed;
    int64_t in_flight, max_in_flight; /* ops */
    int64_t busy_ns;                  /* time with at least one op in flight */
    int32_t queue_depth;              /* as granted by the kernel */
    int32_t num_rings, num_workers;
} zaio_statistics;

typedef struct {
    int32_t error;         /* 0, or the positive errno of the first piece that failed */
    int32_t end_of_file;   /* a read ran past the end */
    int64_t error_offset;  /* where in the file that was */
    int64_t num_done;      /* bytes moved, all pieces together */
    int64_t start_ns;      /* CLOCK_MONOTONIC, when it was submitted */
    int64_t done_ns;       /* when its last piece completed */
    uint32_t checksum;     /* zaio_crc32c of the buffer, if asked for and nothing failed; else 0 */
} zaio_result;

enum { ZAIO_READ = 0, ZAIO_WRITE = 1 };

/* 0 or negative errno: EAGAIN (aio-max-nr used up even at depth 1), ENOSYS or EPERM (no kernel AIO here). */
int zaio_engine_create(const zaio_options *options, zaio_engine **out);
/* Blocks until nothing is in flight, ends the threads. Further submits give ESHUTDOWN. Idempotent. */
void zaio_engine_close(zaio_engine *engine);
void zaio_engine_free(zaio_engine *engine); /* closes first */
void zaio_engine_statistics(zaio_engine *engine, zaio_statistics *out);
int64_t zaio_engine_num_failed(zaio_engine *engine);
const char *zaio_build_note(void); /* "" or why the build left kernel AIO out */

/* Takes over both descriptors. With direct, fd has O_DIRECT, and whole aligned pieces go through it; the rest goes
   through fd_buffered. lane: 0 rings, 1 threads. */
int zaio_file_create(zaio_engine *engine, int fd, int fd_buffered, int direct, int64_t align, int64_t mem_align,
                     int lane, zaio_file **out);
int zaio_file_wait_idle(zaio_file *file, int64_t timeout_ns); /* 1 idle, 0 timed out; blocks */
int zaio_file_sync(zaio_file *file);                          /* fdatasync; blocks */
int zaio_file_free(zaio_file *file);                          /* closes both; EBUSY while ops are in flight */
int zaio_reserve(int fd, int64_t num_bytes);                  /* fallocate; EOPNOTSUPP where the fs has none; blocks */
int zaio_dio_align(int fd, int64_t *mem_align, int64_t *offset_align); /* what statx says; ENOTSUP: says nothing */

/* seed: of the checksum of the buffer that is made once all pieces are in, before the op is done; negative: none. */
int zaio_submit(zaio_engine *engine, zaio_file *file, int kind, char *buffer, int64_t num_bytes, int64_t offset,
                int64_t seed, zaio_op **out);
int zaio_op_done(zaio_op *op);
int zaio_op_wait(zaio_op *op, int64_t timeout_ns); /* 1 done, 0 timed out; negative timeout: forever; blocks */
void zaio_op_result(zaio_op *op, zaio_result *out);
void zaio_op_free(zaio_op *op);

/* CRC32C. Of nothing it is the seed; zaio_crc32c(zaio_crc32c(0, a), b) is that of a followed by b. */
uint32_t zaio_crc32c(uint32_t seed, const char *data, int64_t num_bytes);
const char *zaio_crc32c_variant(void); /* what this machine uses: see checksum.c */

/* Arena: anonymous memory of exactly num_bytes, its base on a huge page boundary. Flags tell what the kernel granted. */
enum { ZAIO_ARENA_HUGE = 1, ZAIO_ARENA_DONTFORK = 2 };
int zaio_arena_map(int64_t num_bytes, int huge_pages, char **base, int *granted);
int zaio_arena_lock(char *base, int64_t num_bytes); /* mlock as pages are faulted in */
int zaio_arena_touch(char *base, int64_t num_bytes); /* prefault; blocks */
int zaio_arena_unmap(char *base, int64_t num_bytes);

/* Fault injection, for tests alone. A fault fires on calls number [after, after + times) of its site. */
enum {
    ZAIO_FAULT_SUBMIT = 0,     /* io_submit returns value (negative errno or 0) */
    ZAIO_FAULT_ACCEPT = 1,     /* io_submit takes at most value requests */
    ZAIO_FAULT_READ = 2,       /* result of a read piece: negative errno, or at most value bytes */
    ZAIO_FAULT_WRITE = 3,
    ZAIO_FAULT_GETEVENTS = 4,  /* io_getevents returns value */
    ZAIO_FAULT_SYNC = 5,       /* fdatasync returns value */
    ZAIO_FAULT_REVERSE = 6,    /* completions are handled in reverse order */
    ZAIO_FAULT_DELAY = 7,      /* a piece that completed is held back value microseconds, in its completion thread */
    ZAIO_FAULT_FLIP = 8,       /* bit number value, modulo its bits, of a read piece that completed is inverted */
    ZAIO_NUM_FAULTS = 9
};
enum { ZAIO_GATE_SUBMIT = 0, ZAIO_GATE_COMPLETE = 1, ZAIO_GATE_SYNC = 2 };
typedef struct { int32_t worker, kind; int64_t offset, num_bytes; } zaio_trace;
int zaio_testing_fault(zaio_engine *engine, int site, int64_t after, int64_t times, int64_t value);
void zaio_testing_gate(zaio_engine *engine, int gate, int closed);
int64_t zaio_testing_gate_waiters(zaio_engine *engine, int gate);
int64_t zaio_testing_trace(zaio_engine *engine, zaio_trace *out, int64_t capacity);
void zaio_testing_setup_error(int error, int times); /* the next io_setup calls of this process fail */
const char *zaio_testing_crc32c_name(int index); /* of the variants that this processor has; NULL: no more */
void zaio_testing_crc32c_use(int index); /* by the whole process */
/* cdef end */

#endif
