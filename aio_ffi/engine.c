/* The engine: queues, ops and their completion. See zaio_internal.h for who holds what. */
#define _GNU_SOURCE
#include "zaio_internal.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

const char *zaio_build_note(void) {
#ifdef ZAIO_BUILD_NOTE
    return ZAIO_BUILD_NOTE;
#else
    return "";
#endif
}

static void cond_init_monotonic(pthread_cond_t *cond) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
}

int zaio_engine_create(const zaio_options *options, zaio_engine **out) {
    if (options->block_size < 4096 || options->block_size > (1 << 30) || options->block_size % 4096 ||
        options->queue_depth < 1 || options->num_rings < 0 || options->num_rings > MAX_WORKERS ||
        options->num_workers < 1 || options->num_workers > MAX_WORKERS)
        return -EINVAL;
    zaio_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return -ENOMEM;
    engine->options = *options;
    pthread_mutex_init(&engine->mutex, NULL);
    cond_init_monotonic(&engine->completed);
    cond_init_monotonic(&engine->work);
    int rc = options->num_rings ? rings_start(engine) : 0;
    if (rc < 0) {
        zaio_engine_free(engine);
        return rc;
    }
    *out = engine;
    return 0;
}

/* Signals belong to the interpreter's main thread: a worker that took one would only turn it into EINTR. */
int start_thread(worker *worker, void *(*main)(void *)) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 256 << 10);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&worker->thread, &attr, main, worker);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc == 0) pthread_setname_np(worker->thread, "zinf-aio"); /* what top and perf show */
    return -rc;
}

static void stop_lane(zaio_engine *engine, lane *lane) {
    (void)engine;
    for (int i = 0; i < lane->num_workers; i++) {
        if (lane->workers[i].ring) ring_wake(&lane->workers[i]);
    }
    for (int i = 0; i < lane->num_workers; i++) {
        worker *worker = &lane->workers[i];
        pthread_join(worker->thread, NULL);
        if (worker->ring) ring_stop(worker);
        if (worker->bounce) munmap(worker->bounce, (size_t)engine->options.block_size);
    }
    free(lane->workers);
    lane->workers = NULL;
    lane->num_workers = 0;
}

void zaio_engine_close(zaio_engine *engine) {
    pthread_mutex_lock(&engine->mutex);
    bool first = !engine->stopping;
    engine->stopping = true;
    pthread_cond_broadcast(&engine->work);
    while (!first && !engine->closed) pthread_cond_wait(&engine->completed, &engine->mutex);
    pthread_mutex_unlock(&engine->mutex);
    if (!first) return;
    for (int i = 0; i < NUM_LANES; i++) stop_lane(engine, &engine->lanes[i]);
    pthread_mutex_lock(&engine->mutex);
    engine->closed = true;
    pthread_cond_broadcast(&engine->completed);
    pthread_mutex_unlock(&engine->mutex);
}

void zaio_engine_free(zaio_engine *engine) {
    zaio_engine_close(engine);
    faults_free(engine);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->completed);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

void zaio_engine_statistics(zaio_engine *engine, zaio_statistics *out) {
    pthread_mutex_lock(&engine->mutex);
    *out = engine->stats;
    if (engine->stats.in_flight) out->busy_ns += now_ns() - engine->busy_since_ns;
    out->num_workers = engine->lanes[LANE_THREADS].num_workers;
    pthread_mutex_unlock(&engine->mutex);
}

int64_t zaio_engine_num_failed(zaio_engine *engine) {
    pthread_mutex_lock(&engine->mutex); /* an op that is counted here is also seen to be done */
    int64_t num_failed = engine->stats.num_failed;
    pthread_mutex_unlock(&engine->mutex);
    return num_failed;
}

void *bounce_alloc(zaio_engine *engine) {
    size_t size = (size_t)engine->options.block_size;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    pthread_mutex_lock(&engine->mutex);
    engine->stats.bounce_bytes += (int64_t)size;
    pthread_mutex_unlock(&engine->mutex);
    return memory;
}

static int64_t num_blocks(const zaio_engine *engine, int64_t num_bytes) {
    return (num_bytes + engine->options.block_size - 1) / engine->options.block_size;
}

static void enqueue(lane *lane, zaio_op *op) {
    op->queued = true;
    op->prev = lane->tail[op->kind];
    if (op->prev) op->prev->next = op;
    else lane->head[op->kind] = op;
    lane->tail[op->kind] = op;
}

static void dequeue(lane *lane, zaio_op *op) {
    if (op->prev) op->prev->next = op->next;
    else lane->head[op->kind] = op->next;
    if (op->next) op->next->prev = op->prev;
    else lane->tail[op->kind] = op->prev;
    op->next = op->prev = NULL;
    op->queued = false;
}

/* The next piece of an op: whole blocks on the direct descriptor, what is less at either end through the page cache.
   The page cache never shares a block with a direct request, so neither can undo the other's bytes. */
static int64_t next_length(const zaio_engine *engine, const zaio_op *op, piece_mode *mode) {
    const zaio_file *file = op->file;
    int64_t at = op->offset + op->num_issued, left = op->num_bytes - op->num_issued;
    int64_t block = engine->options.block_size;
    *mode = PIECE_IN_PLACE;
    if (!file->direct) return left < block ? left : block;
    int64_t into = at % file->align;
    if (into || left < file->align) {
        *mode = PIECE_PARTIAL;
        int64_t room = file->align - into;
        return left < room ? left : room;
    }
    if ((uintptr_t)(op->buffer + op->num_issued) % (uintptr_t)file->mem_align) *mode = PIECE_BOUNCED;
    return left < block ? left - left % file->align : block;
}

bool take_piece(zaio_engine *engine, worker *worker, piece *out) {
    lane *lane = worker->lane;
    zaio_op *op = lane->head[ZAIO_READ] ? lane->head[ZAIO_READ] : lane->head[ZAIO_WRITE];
    if (!op) return false;
    int64_t before = num_blocks(engine, op->num_bytes - op->num_issued);
    piece_mode mode;
    int64_t length = next_length(engine, op, &mode);
    *out = (piece){op, op->buffer + op->num_issued, op->offset + op->num_issued, length, 0, mode};
    op->num_issued += length;
    op->num_pieces++;
    lane->num_waiting -= before - num_blocks(engine, op->num_bytes - op->num_issued);
    if (op->num_issued == op->num_bytes) dequeue(lane, op);
    engine->stats.num_pieces++;
    if (mode != PIECE_IN_PLACE && !op->bounced) {
        op->bounced = true;
        engine->stats.num_bounced++;
    }
    if (engine->faults) fault_trace(engine, worker, out);
    return true;
}

/* Caller holds the mutex. The store to `done` is the last touch: its owner may free the op at once. */
static void complete_op(zaio_engine *engine, zaio_op *op) {
    if (op->result.error || op->result.end_of_file) engine->stats.num_failed++;
    op->file->in_flight--;
    if (--engine->stats.in_flight == 0) engine->stats.busy_ns += now_ns() - engine->busy_since_ns;
    atomic_store_explicit(&op->done, 1, memory_order_release);
    if (engine->num_waiters) pthread_cond_broadcast(&engine->completed);
}

zaio_op *finish_piece(zaio_engine *engine, const piece *piece, int error, bool end_of_file) {
    if (engine->faults) {
        fault_complete(engine, piece, error || end_of_file);
        fault_gate(engine, ZAIO_GATE_COMPLETE);
    }
    pthread_mutex_lock(&engine->mutex);
    zaio_op *op = piece->op;
    op->result.num_done += piece->num_done;
    if (op->kind == ZAIO_READ) engine->stats.bytes_read += piece->num_done;
    else engine->stats.bytes_written += piece->num_done;
    bool failed = error || end_of_file;
    if (failed && !op->result.error && !op->result.end_of_file) {
        op->result.error = error;
        op->result.end_of_file = end_of_file;
        op->result.error_offset = piece->offset + piece->num_done;
    }
    if (failed && op->queued) { /* the rest of a failed op is not worth sending */
        lane *lane = &engine->lanes[op->file->lane];
        lane->num_waiting -= num_blocks(engine, op->num_bytes - op->num_issued);
        dequeue(lane, op);
    }
    zaio_op *unsummed = NULL;
    if (--op->num_pieces == 0 && !op->queued) {
        op->result.done_ns = now_ns();
        if (op->seed >= 0 && !op->result.error && !op->result.end_of_file) unsummed = op;
        else complete_op(engine, op);
    }
    pthread_mutex_unlock(&engine->mutex);
    return unsummed;
}

/* Outside the mutex: nobody else refers to an op that is in no queue, has no piece out, and is not done. */
void finish_checksum(zaio_op *op) {
    zaio_engine *engine = op->engine;
    op->result.checksum = zaio_crc32c((uint32_t)op->seed, op->buffer, op->num_bytes);
    pthread_mutex_lock(&engine->mutex);
    complete_op(engine, op);
    pthread_mutex_unlock(&engine->mutex);
}

/* Which idle rings to wake: as many as the lane has pieces for. Caller holds the mutex, and wakes them after it let go
   (a woken thread that finds the mutex taken costs two more context switches). */
static uint64_t pick_hungry(lane *lane) {
    uint64_t picked = 0;
    int64_t wanted = lane->num_waiting;
    for (int i = 0; i < lane->num_workers && wanted > 0; i++) {
        worker *worker = &lane->workers[i];
        if (!worker->hungry) continue;
        worker->hungry = false;
        wanted--;
        picked |= 1ull << i;
    }
    return picked;
}

static void wake(zaio_engine *engine, lane *lane, uint64_t picked) {
    for (int i = 0; picked; i++, picked >>= 1) {
        if (!(picked & 1)) continue;
        if (lane->workers[i].ring) ring_wake(&lane->workers[i]);
        else pthread_cond_signal(&engine->work);
    }
}

int zaio_submit(zaio_engine *engine, zaio_file *file, int kind, char *buffer, int64_t num_bytes, int64_t offset,
                int64_t seed, zaio_op **out) {
    if (seed > UINT32_MAX || num_bytes < 0 || offset < 0 || offset > INT64_MAX - num_bytes || (kind != ZAIO_READ && kind != ZAIO_WRITE))
        return -EINVAL;
    zaio_op *op = calloc(1, sizeof *op);
    if (!op) return -ENOMEM;
    op->engine = engine;
    op->file = file;
    op->kind = kind;
    op->buffer = buffer;
    op->num_bytes = num_bytes;
    op->offset = offset;
    op->seed = seed;
    op->result.start_ns = now_ns();
    pthread_mutex_lock(&engine->mutex);
    if (engine->stopping) {
        pthread_mutex_unlock(&engine->mutex);
        free(op);
        return -ESHUTDOWN;
    }
    if (kind == ZAIO_READ) engine->stats.num_reads++;
    else engine->stats.num_writes++;
    if (engine->stats.in_flight++ == 0) engine->busy_since_ns = op->result.start_ns;
    if (engine->stats.in_flight > engine->stats.max_in_flight) engine->stats.max_in_flight = engine->stats.in_flight;
    file->in_flight++;
    lane *lane = &engine->lanes[file->lane];
    uint64_t picked = 0;
    if (num_bytes) {
        enqueue(lane, op);
        lane->num_waiting += num_blocks(engine, num_bytes);
        picked = pick_hungry(lane);
    } else {
        op->result.done_ns = now_ns();
        op->result.checksum = seed < 0 ? 0 : (uint32_t)seed;
        complete_op(engine, op);
    }
    pthread_mutex_unlock(&engine->mutex);
    wake(engine, lane, picked);
    *out = op;
    return 0;
}

int zaio_op_done(zaio_op *op) { return atomic_load_explicit(&op->done, memory_order_acquire); }

static struct timespec deadline(int64_t timeout_ns) {
    int64_t at = now_ns() + timeout_ns;
    return (struct timespec){.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
}

int zaio_op_wait(zaio_op *op, int64_t timeout_ns) {
    if (zaio_op_done(op)) return 1;
    zaio_engine *engine = op->engine;
    struct timespec until = deadline(timeout_ns < 0 ? 0 : timeout_ns);
    int rc = 0;
    pthread_mutex_lock(&engine->mutex);
    engine->num_waiters++;
    while (!zaio_op_done(op) && rc != ETIMEDOUT)
        rc = timeout_ns < 0 ? pthread_cond_wait(&engine->completed, &engine->mutex)
                            : pthread_cond_timedwait(&engine->completed, &engine->mutex, &until);
    engine->num_waiters--;
    pthread_mutex_unlock(&engine->mutex);
    return zaio_op_done(op);
}

void zaio_op_result(zaio_op *op, zaio_result *out) { *out = op->result; }

void zaio_op_free(zaio_op *op) {
    if (zaio_op_done(op)) free(op); /* else leaked on purpose: a worker may still write to it */
}

int zaio_file_wait_idle(zaio_file *file, int64_t timeout_ns) {
    zaio_engine *engine = file->engine;
    struct timespec until = deadline(timeout_ns < 0 ? 0 : timeout_ns);
    int rc = 0;
    pthread_mutex_lock(&engine->mutex);
    engine->num_waiters++;
    while (file->in_flight && rc != ETIMEDOUT)
        rc = timeout_ns < 0 ? pthread_cond_wait(&engine->completed, &engine->mutex)
                            : pthread_cond_timedwait(&engine->completed, &engine->mutex, &until);
    engine->num_waiters--;
    int idle = file->in_flight == 0;
    pthread_mutex_unlock(&engine->mutex);
    return idle;
}
