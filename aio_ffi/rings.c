/*
 * The fast lane: one thread per ring, each with a kernel AIO context of its own.
 *
 * The thread sleeps in one place only, a read of its eventfd. The kernel adds to it at each completion
 * (IOCB_FLAG_RESFD) and zaio_submit adds to it when the ring is hungry, so no wake-up can be lost and no time-out is
 * needed. Only this thread touches the ring's slots.
 *
 * System calls are made directly: the kernel's own header has all that is needed, and libaio's versioned symbols are
 * what breaks on older distributions.
 */
#define _GNU_SOURCE
#include "zaio_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef ZAIO_NO_KERNEL_AIO

int rings_start(zaio_engine *engine) {
    (void)engine;
    return -ENOSYS;
}
void ring_wake(worker *worker) { (void)worker; }
void ring_stop(worker *worker) { (void)worker; }

#else

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RETRIES = 1000 };

typedef struct {
    struct iocb iocb;
    piece piece;
    char *memory; /* where the kernel moves the piece's first byte: the caller's memory, or bounce */
    char *bounce;
    int retries;
    bool in_kernel; /* between the io_submit that took it and its completion */
} slot;

struct ring {
    worker *worker;
    aio_context_t context;
    int depth, in_flight, num_free, num_again;
    bool recheck; /* a slot was freed, or an event consumed, while filling: look at the queue once more */
    bool broken; /* its context is gone: requests are made by blocking calls */
    slot *slots;
    slot **free;  /* stack */
    slot **again; /* to be issued once more: short, EINTR */
    struct iocb **batch;
    struct io_event *events;
    zaio_op *unsummed; /* stack: all their pieces are in; their checksums wait until the device has work again */
    char *bounce;
};

static long sys_io_setup(unsigned depth, aio_context_t *context) {
    int error = fault_setup();
    if (error) return -error;
    return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

static long sys_io_submit(struct ring *ring, long n, struct iocb **iocbs) {
    zaio_engine *engine = ring->worker->engine;
    if (engine->faults) {
        int64_t value;
        if (fault_fires(engine, ZAIO_FAULT_SUBMIT, &value)) return value;
        if (fault_fires(engine, ZAIO_FAULT_ACCEPT, &value) && n > value) n = value;
    }
    long rc = syscall(SYS_io_submit, ring->context, n, iocbs);
    return rc < 0 ? -errno : rc;
}

static long sys_io_getevents(struct ring *ring) {
    zaio_engine *engine = ring->worker->engine;
    int64_t value;
    if (engine->faults && fault_fires(engine, ZAIO_FAULT_GETEVENTS, &value)) return value;
    struct timespec zero = {0, 0};
    long rc = syscall(SYS_io_getevents, ring->context, 0L, (long)ring->depth, ring->events, &zero);
    return rc < 0 ? -errno : rc;
}

static void release(struct ring *ring, slot *slot) {
    ring->free[ring->num_free++] = slot;
    ring->recheck = true;
}

static void finish(struct ring *ring, const piece *piece, int error, bool end_of_file) {
    zaio_op *op = finish_piece(ring->worker->engine, piece, error, end_of_file);
    if (!op) return;
    op->next = ring->unsummed;
    ring->unsummed = op;
}

static void finish_slot(struct ring *ring, slot *slot, int error, bool end_of_file) {
    piece *piece = &slot->piece;
    if (piece->mode == PIECE_BOUNCED && piece->op->kind == ZAIO_READ && piece->num_done)
        memcpy(piece->memory, slot->bounce, (size_t)piece->num_done);
    finish(ring, piece, error, end_of_file);
    release(ring, slot);
}

static void prepare(struct ring *ring, slot *slot) {
    const piece *piece = &slot->piece;
    slot->iocb = (struct iocb){
        .aio_data = (uint64_t)(uintptr_t)slot,
        .aio_lio_opcode = piece->op->kind == ZAIO_READ ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE,
        .aio_fildes = (uint32_t)piece->op->file->fd,
        .aio_buf = (uint64_t)(uintptr_t)(slot->memory + piece->num_done),
        .aio_nbytes = (uint64_t)(piece->num_bytes - piece->num_done),
        .aio_offset = piece->offset + piece->num_done,
        .aio_flags = IOCB_FLAG_RESFD,
        .aio_resfd = (uint32_t)ring->worker->event_fd,
    };
}

/* Compares a completion with its request. `result` is signed: the kernel's field holds negative errnos. */
static void complete(struct ring *ring, slot *slot, int64_t result) {
    zaio_engine *engine = ring->worker->engine;
    piece *piece = &slot->piece;
    bool reads = piece->op->kind == ZAIO_READ;
    slot->in_kernel = false;
    if (engine->faults) result = fault_result(engine, reads ? ZAIO_FAULT_READ : ZAIO_FAULT_WRITE, result);
    if ((result == -EINTR || result == -EAGAIN) && slot->retries++ < MAX_RETRIES) {
        count(&engine->stats.num_retries);
        ring->again[ring->num_again++] = slot;
        return;
    }
    int error = 0;
    bool end_of_file = false;
    if (result == -EINVAL && piece->op->file->direct)
        error = finish_buffered(engine, piece, slot->memory, &end_of_file);
    else if (result < 0) error = (int)-result;
    else if (result == 0) end_of_file = reads, error = reads ? 0 : EIO;
    else piece->num_done += result;
    if (!error && !end_of_file && piece->num_done < piece->num_bytes) {
        count(&engine->stats.num_short);
        if (piece->op->file->direct && piece->num_done % piece->op->file->align)
            error = finish_block(engine, piece, slot->memory, &end_of_file);
    }
    if (error || end_of_file || piece->num_done == piece->num_bytes) finish_slot(ring, slot, error, end_of_file);
    else ring->again[ring->num_again++] = slot;
}

/* The context cannot be used any more. io_destroy returns when none of its requests touches memory. */
static void break_ring(struct ring *ring, int error) {
    ring->broken = true;
    syscall(SYS_io_destroy, ring->context);
    ring->in_flight = 0;
    for (int i = 0; i < ring->depth; i++) {
        slot *slot = &ring->slots[i];
        if (!slot->in_kernel) continue;
        slot->in_kernel = false;
        finish_slot(ring, slot, error, false);
    }
}

static void reap(struct ring *ring) {
    long n;
    do n = sys_io_getevents(ring);
    while (n == -EINTR);
    if (n < 0) {
        break_ring(ring, (int)-n);
        return;
    }
    ring->in_flight -= (int)n;
    int64_t unused;
    zaio_engine *engine = ring->worker->engine;
    bool reverse = engine->faults && fault_fires(engine, ZAIO_FAULT_REVERSE, &unused);
    for (long i = 0; i < n; i++) {
        const struct io_event *event = &ring->events[reverse ? n - 1 - i : i];
        complete(ring, (slot *)(uintptr_t)event->data, (int64_t)event->res);
    }
}

static void sleep_until_event(struct ring *ring) {
    uint64_t count;
    while (read(ring->worker->event_fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

static void transfer_blocking(struct ring *ring, slot *slot) {
    bool end_of_file = false;
    int error = sync_piece(ring->worker->engine, &slot->piece, &slot->bounce, &end_of_file);
    finish(ring, &slot->piece, error, end_of_file);
    release(ring, slot);
}

static slot *slot_of(struct iocb *iocb) { return (slot *)(uintptr_t)iocb->aio_data; }

/* Hands a batch to the kernel. What it does not take is waited for (its queue is full), made by a blocking call (it is
   full of others' requests), or failed; a request is never in the kernel and in a blocking call at once. */
static void submit(struct ring *ring, int n) {
    zaio_engine *engine = ring->worker->engine;
    int at = 0;
    while (at < n) {
        long taken = ring->broken ? 0 : sys_io_submit(ring, engine->options.single_submit ? 1 : n - at, ring->batch + at);
        count(&engine->stats.num_submits);
        if (taken > 0) {
            ring->in_flight += (int)taken;
            for (int until = at + (int)taken; at < until; at++) slot_of(ring->batch[at])->in_kernel = true;
        } else if (taken == -EINTR) {
            continue;
        } else if (taken == 0 || taken == -EAGAIN) {
            if (!ring->broken) count(&engine->stats.num_eagain);
            if (ring->in_flight) {
                sleep_until_event(ring);
                ring->recheck = true;
                reap(ring);
            } else {
                transfer_blocking(ring, slot_of(ring->batch[at++]));
            }
        } else {
            finish_slot(ring, slot_of(ring->batch[at++]), (int)-taken, false);
        }
    }
}

/* Takes this ring's share of the queue. True if there may be more. */
static bool take(struct ring *ring, int *n) {
    zaio_engine *engine = ring->worker->engine;
    lane *lane = ring->worker->lane;
    bool more = false;
    if (engine->faults) fault_gate(engine, ZAIO_GATE_SUBMIT);
    pthread_mutex_lock(&engine->mutex);
    if (engine->options.overlap_events || (!ring->in_flight && !*n)) {
        int64_t share = (lane->num_waiting + lane->num_workers - 1) / (lane->num_workers ? lane->num_workers : 1);
        while (ring->num_free && share-- > 0) {
            slot *slot = ring->free[ring->num_free - 1];
            if (!take_piece(engine, ring->worker, &slot->piece)) break;
            ring->num_free--;
            slot->retries = 0;
            ring->batch[(*n)++] = &slot->iocb;
        }
        more = lane->num_waiting > 0 && ring->num_free && engine->options.overlap_events;
    }
    ring->worker->hungry = !more && ring->num_free;
    pthread_mutex_unlock(&engine->mutex);
    return more;
}

static bool bounce_in(struct ring *ring, slot *slot) {
    slot->memory = slot->piece.memory;
    if (slot->piece.mode != PIECE_BOUNCED) return true;
    if (!slot->bounce && !(slot->bounce = bounce_alloc(ring->worker->engine))) {
        finish_slot(ring, slot, ENOMEM, false);
        return false;
    }
    slot->memory = slot->bounce;
    if (slot->piece.op->kind == ZAIO_WRITE) memcpy(slot->bounce, slot->piece.memory, (size_t)slot->piece.num_bytes);
    return true;
}

static void fill(struct ring *ring) {
    bool more = true;
    while (more || ring->num_again || ring->recheck) {
        ring->recheck = false;
        int n = 0, num_ready = 0;
        while (ring->num_again) {
            slot *slot = ring->again[--ring->num_again];
            prepare(ring, slot);
            ring->batch[n++] = &slot->iocb;
        }
        num_ready = n;
        more = take(ring, &n);
        for (int i = num_ready; i < n; i++) {
            slot *slot = (void *)ring->batch[i]; /* its first member; prepare() has not run yet */
            if (slot->piece.mode == PIECE_PARTIAL) {
                transfer_blocking(ring, slot);
            } else if (bounce_in(ring, slot)) {
                prepare(ring, slot);
                ring->batch[num_ready++] = &slot->iocb;
            }
        }
        submit(ring, num_ready);
    }
}

static void *ring_main(void *arg) {
    worker *worker = arg;
    zaio_engine *engine = worker->engine;
    struct ring *ring = worker->ring;
    for (;;) {
        fill(ring);
        if (ring->unsummed) {
            zaio_op *op = ring->unsummed;
            ring->unsummed = op->next;
            finish_checksum(op);
            if (ring->in_flight) reap(ring); /* one at a time: what completed meanwhile is refilled first */
            continue;
        }
        if (!ring->in_flight) {
            pthread_mutex_lock(&engine->mutex);
            bool stop = engine->stopping && !worker->lane->num_waiting;
            pthread_mutex_unlock(&engine->mutex);
            if (stop) return NULL;
        }
        sleep_until_event(ring);
        if (ring->in_flight) reap(ring);
    }
}

void ring_wake(worker *worker) {
    uint64_t one = 1;
    while (write(worker->event_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

static void ring_free(struct ring *ring, int64_t block_size) {
    if (!ring) return;
    if (ring->context && !ring->broken) syscall(SYS_io_destroy, ring->context);
    for (int i = 0; ring->slots && i < ring->depth; i++)
        if (ring->slots[i].bounce) munmap(ring->slots[i].bounce, (size_t)block_size);
    free(ring->slots);
    free(ring->free);
    free(ring->again);
    free(ring->batch);
    free(ring->events);
    free(ring);
}

void ring_stop(worker *worker) {
    ring_free(worker->ring, worker->engine->options.block_size);
    worker->ring = NULL;
    close(worker->event_fd);
}

static int ring_create(worker *worker, int depth) {
    struct ring *ring = calloc(1, sizeof *ring);
    if (!ring) return -ENOMEM;
    size_t n = (size_t)depth;
    ring->worker = worker;
    ring->depth = ring->num_free = depth;
    ring->slots = calloc(n, sizeof *ring->slots);
    ring->free = calloc(n, sizeof *ring->free);
    ring->again = calloc(n, sizeof *ring->again);
    ring->batch = calloc(n, sizeof *ring->batch);
    ring->events = calloc(n, sizeof *ring->events);
    int rc = ring->slots && ring->free && ring->again && ring->batch && ring->events ? 0 : -ENOMEM;
    if (!rc) rc = (int)sys_io_setup((unsigned)depth, &ring->context);
    if (!rc && (worker->event_fd = eventfd(0, EFD_CLOEXEC)) < 0) rc = -errno;
    if (rc) {
        ring_free(ring, 0);
        return rc;
    }
    for (int i = 0; i < depth; i++) ring->free[i] = &ring->slots[depth - 1 - i];
    worker->ring = ring;
    return 0;
}

/* fs.aio-max-nr is shared by the whole machine: where it is nearly used up, a smaller depth may still be had. */
static int ring_create_any_depth(worker *worker, int depth) {
    int rc;
    while ((rc = ring_create(worker, depth)) == -EAGAIN && depth > 1) depth /= 2;
    return rc < 0 ? rc : depth;
}

int rings_start(zaio_engine *engine) {
    lane *lane = &engine->lanes[LANE_RINGS];
    lane->workers = calloc((size_t)engine->options.num_rings, sizeof *lane->workers);
    if (!lane->workers) return -ENOMEM;
    int depth = engine->options.queue_depth, rc = 0;
    for (int i = 0; i < engine->options.num_rings && rc >= 0; i++) {
        worker *worker = &lane->workers[i];
        *worker = (struct worker){.engine = engine, .lane = lane, .index = i, .event_fd = -1};
        rc = ring_create_any_depth(worker, depth);
        if (rc < 0) break;
        depth = rc;
        int error = start_thread(worker, ring_main);
        if (error) {
            ring_stop(worker);
            rc = error;
            break;
        }
        pthread_mutex_lock(&engine->mutex);
        lane->num_workers++;
        engine->stats.queue_depth = depth;
        engine->stats.num_rings = lane->num_workers;
        pthread_mutex_unlock(&engine->mutex);
    }
    return lane->num_workers ? 0 : rc; /* fewer rings than asked still carry everything */
}

#endif
