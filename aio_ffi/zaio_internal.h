/*
 * What the C files share.
 *
 * One mutex per engine guards the queues, the counters and every op's progress. It is held for a few instructions,
 * never over a system call that can block. Two lanes of workers pull pieces from their queue: rings (one thread and one kernel AIO
 * context each, several requests in flight) and plain threads (one blocking transfer each). A file belongs to one
 * lane. Because workers pull, a long op spreads over all of them, and a slow one takes less.
 */
#ifndef ZAIO_INTERNAL_H
#define ZAIO_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "zaio.h"

enum { LANE_RINGS = 0, LANE_THREADS = 1, NUM_LANES = 2, MAX_WORKERS = 64 /* bits of a wake-up mask */ };

struct zaio_op {
    zaio_engine *engine;
    zaio_file *file;
    zaio_op *next, *prev; /* in its lane's queue while pieces of it are not issued yet; next: then a ring's `unsummed` */
    char *buffer;
    int64_t num_bytes, offset;
    int64_t seed;       /* of its checksum; negative: none */
    int64_t num_issued; /* bytes handed to workers */
    int32_t num_pieces; /* handed out, not finished */
    int32_t kind;
    bool queued, bounced;
    zaio_result result;
    atomic_int done; /* set last: after it the engine never touches the op */
};

struct zaio_file {
    zaio_engine *engine;
    int fd, fd_buffered, lane;
    bool direct;
    int64_t align, mem_align;
    int64_t in_flight; /* ops */
};

typedef enum {
    PIECE_IN_PLACE, /* file->fd and the caller's memory */
    PIECE_BOUNCED,  /* file->fd, through an aligned buffer: the caller's memory is off the alignment */
    PIECE_PARTIAL   /* less than a block of a direct file: through the page cache, which spares the neighbours */
} piece_mode;

typedef struct {
    zaio_op *op;
    char *memory; /* the caller's */
    int64_t offset, num_bytes, num_done;
    piece_mode mode;
} piece;

typedef struct worker worker;

typedef struct {
    zaio_op *head[2], *tail[2]; /* [ZAIO_READ], [ZAIO_WRITE] */
    int64_t num_waiting;        /* pieces, about: block-sized shares of what is not issued */
    worker *workers;
    int num_workers;
} lane;

struct worker {
    zaio_engine *engine;
    lane *lane;
    pthread_t thread;
    int index;
    bool hungry; /* asleep, or about to be, with room for a piece; guarded by the engine's mutex */
    int event_fd; /* rings: completions and wake-ups; threads: -1 */
    struct ring *ring;
    char *bounce; /* threads */
};

typedef struct {
    int64_t seen, after, times, value;
} fault;

typedef struct {
    fault table[ZAIO_NUM_FAULTS];
    bool closed[3];
    int64_t num_at_gate[3];
    pthread_cond_t opened;
    zaio_trace *trace;
    int64_t num_traced;
} faults;

struct zaio_engine {
    pthread_mutex_t mutex;
    pthread_cond_t completed; /* an op is done; waiters of all ops share it */
    pthread_cond_t work;      /* for the thread lane */
    zaio_options options;
    lane lanes[NUM_LANES];
    zaio_statistics stats;
    int64_t busy_since_ns;
    int num_waiters;
    bool stopping, closed;
    faults *faults; /* NULL outside tests */
};

/* For the few counters that workers bump outside the mutex. */
static inline void count(int64_t *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

/* engine.c */
int64_t now_ns(void);
bool take_piece(zaio_engine *engine, worker *worker, piece *out);   /* caller holds the mutex */
/* Returns the op if all its pieces are in and its checksum is due: the caller then owes it finish_checksum. */
zaio_op *finish_piece(zaio_engine *engine, const piece *piece, int error, bool end_of_file);
void finish_checksum(zaio_op *op); /* reads the whole buffer */
int start_thread(worker *worker, void *(*main)(void *));
void *bounce_alloc(zaio_engine *engine);

/* threads.c */
int threads_start(zaio_engine *engine);
int sync_piece(zaio_engine *engine, piece *piece, char **bounce, bool *end_of_file);
int finish_buffered(zaio_engine *engine, piece *piece, char *memory, bool *end_of_file);
int finish_block(zaio_engine *engine, piece *piece, char *memory, bool *end_of_file);

/* rings.c */
int rings_start(zaio_engine *engine);
void ring_wake(worker *worker);
void ring_stop(worker *worker);

/* faults.c */
int64_t fault_result(zaio_engine *engine, int site, int64_t result);
bool fault_fires(zaio_engine *engine, int site, int64_t *value);
void fault_gate(zaio_engine *engine, int gate);
bool fault_gated(zaio_engine *engine); /* the submit gate is closed; caller holds the mutex */
void fault_complete(zaio_engine *engine, const piece *piece, bool failed); /* delay, flip */
void fault_trace(zaio_engine *engine, const worker *worker, const piece *piece);
void faults_free(zaio_engine *engine);
int fault_setup(void);

#endif
