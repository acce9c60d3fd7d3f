/* The fallback lane: each worker makes one blocking transfer at a time. Also the blocking transfer itself, which the
   rings use for partial blocks and when the kernel takes no request. */
#define _GNU_SOURCE
#include "zaio_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RETRIES = 1000 };

static int64_t transfer_once(zaio_engine *engine, int kind, int fd, char *memory, int64_t num_bytes, int64_t offset) {
    int64_t done = kind == ZAIO_READ ? pread(fd, memory, (size_t)num_bytes, offset)
                                     : pwrite(fd, memory, (size_t)num_bytes, offset);
    if (done < 0) done = -errno;
    if (engine->faults) done = fault_result(engine, kind == ZAIO_READ ? ZAIO_FAULT_READ : ZAIO_FAULT_WRITE, done);
    return done;
}

/* Moves piece bytes [num_done, until) by blocking calls. `memory` is where the piece's first byte is. */
static int transfer(zaio_engine *engine, piece *piece, int fd, char *memory, int64_t until, bool *end_of_file) {
    int retries = 0;
    int kind = piece->op->kind;
    while (piece->num_done < until) {
        int64_t asked = until - piece->num_done;
        int64_t done = transfer_once(engine, kind, fd, memory + piece->num_done, asked, piece->offset + piece->num_done);
        if ((done == -EINTR || done == -EAGAIN) && retries++ < MAX_RETRIES) {
            count(&engine->stats.num_retries);
            continue;
        }
        if (done == -EINVAL && fd != piece->op->file->fd_buffered)
            return finish_buffered(engine, piece, memory, end_of_file);
        if (done < 0) return (int)-done;
        if (done == 0) {
            *end_of_file = kind == ZAIO_READ;
            return kind == ZAIO_READ ? 0 : EIO;
        }
        piece->num_done += done;
        if (done < asked) count(&engine->stats.num_short);
        /* A direct descriptor refuses to go on from inside a block. */
        if (fd != piece->op->file->fd_buffered && piece->num_done % piece->op->file->align) {
            int error = finish_block(engine, piece, memory, end_of_file);
            if (error || *end_of_file) return error;
        }
    }
    return 0;
}

/* After a transfer that stopped inside a block: the rest of that block, through the page cache. */
int finish_block(zaio_engine *engine, piece *piece, char *memory, bool *end_of_file) {
    const zaio_file *file = piece->op->file;
    int64_t until = piece->num_done + file->align - piece->num_done % file->align;
    if (until > piece->num_bytes) until = piece->num_bytes;
    return transfer(engine, piece, file->fd_buffered, memory, until, end_of_file);
}

/* After EINVAL on an aligned direct request. A limit inside a block does that (RLIMIT_FSIZE cuts the request to a length
   that direct I/O refuses), as does a file system that is direct for some extents alone. The page cache tells which:
   it finishes, or gives the real error. */
int finish_buffered(zaio_engine *engine, piece *piece, char *memory, bool *end_of_file) {
    count(&engine->stats.num_fallbacks);
    return transfer(engine, piece, piece->op->file->fd_buffered, memory, piece->num_bytes, end_of_file);
}

int sync_piece(zaio_engine *engine, piece *piece, char **bounce, bool *end_of_file) {
    zaio_op *op = piece->op;
    if (piece->mode != PIECE_BOUNCED) {
        int fd = piece->mode == PIECE_PARTIAL ? op->file->fd_buffered : op->file->fd;
        return transfer(engine, piece, fd, piece->memory, piece->num_bytes, end_of_file);
    }
    if (!*bounce && !(*bounce = bounce_alloc(engine))) return ENOMEM;
    if (op->kind == ZAIO_WRITE) memcpy(*bounce, piece->memory, (size_t)piece->num_bytes);
    int error = transfer(engine, piece, op->file->fd, *bounce, piece->num_bytes, end_of_file);
    if (op->kind == ZAIO_READ) memcpy(piece->memory, *bounce, (size_t)piece->num_done);
    return error;
}

static void *worker_main(void *arg) {
    worker *worker = arg;
    zaio_engine *engine = worker->engine;
    for (;;) {
        piece piece;
        pthread_mutex_lock(&engine->mutex);
        bool taken;
        while (!(taken = !fault_gated(engine) && take_piece(engine, worker, &piece)) && !engine->stopping) {
            worker->hungry = true; /* cleared by who signals: as many flags as sleepers that no signal is meant for */
            pthread_cond_wait(&engine->work, &engine->mutex);
        }
        pthread_mutex_unlock(&engine->mutex);
        if (!taken) return NULL;
        bool end_of_file = false;
        int error = sync_piece(engine, &piece, &worker->bounce, &end_of_file);
        zaio_op *unsummed = finish_piece(engine, &piece, error, end_of_file);
        if (unsummed) finish_checksum(unsummed);
    }
}

int threads_start(zaio_engine *engine) {
    lane *lane = &engine->lanes[LANE_THREADS];
    int wanted = engine->options.num_workers;
    worker *workers = calloc((size_t)wanted, sizeof *workers);
    if (!workers) return -ENOMEM;
    pthread_mutex_lock(&engine->mutex);
    bool mine = !lane->workers && !engine->stopping;
    if (mine) lane->workers = workers;
    pthread_mutex_unlock(&engine->mutex);
    if (!mine) {
        free(workers);
        return 0;
    }
    int rc = 0;
    for (int i = 0; i < wanted && !rc; i++) {
        workers[i] = (worker){.engine = engine, .lane = lane, .index = i, .event_fd = -1};
        rc = start_thread(&workers[i], worker_main);
        pthread_mutex_lock(&engine->mutex);
        lane->num_workers += !rc;
        pthread_mutex_unlock(&engine->mutex);
    }
    return lane->num_workers ? 0 : rc; /* fewer threads than asked are enough */
}
