/*
 * The C core under sanitizers, without Python: threads submit transfers of any shape while faults are injected, and
 * compare what they read with what they wrote. Usage: stress FILE-PREFIX SECONDS. Run by scripts/sanitize.sh.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "zaio.h"

enum { NUM_THREADS = 4, REGION = 1 << 19, BATCH = 8 };

typedef struct {
    zaio_engine *engine;
    zaio_file *file;
    int64_t base;
    unsigned seed;
    double until;
} job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void check(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "stress: %s\n", what);
    exit(1);
}

static void finish(zaio_op *op, const char *memory, int64_t length) {
    zaio_result result;
    check(zaio_op_wait(op, -1) == 1, "wait");
    zaio_op_result(op, &result);
    check(result.start_ns > 0 && result.done_ns >= result.start_ns, "times");
    check(!result.error && !result.end_of_file, "a transfer failed");
    check(result.checksum == zaio_crc32c((uint32_t)length, memory, length), "checksum");
    zaio_op_free(op);
}

/* Writes a region in pieces of random length, all in flight at once, then reads it back in other pieces. */
static void pass(job *job, char *written, char *found, int kind) {
    zaio_op *ops[BATCH];
    char *memories[BATCH];
    int64_t lengths[BATCH];
    int n = 0;
    int64_t at = 0;
    while (at < REGION) {
        int64_t length = 1 + rand_r(&job->seed) % (rand_r(&job->seed) % 2 ? 3000 : 150000);
        if (length > REGION - at) length = REGION - at;
        char *memory = (kind == ZAIO_WRITE ? written : found) + at;
        if (n == BATCH) {
            for (int i = 0; i < n; i++) finish(ops[i], memories[i], lengths[i]);
            n = 0;
        }
        int rc = zaio_submit(job->engine, job->file, kind, memory, length, job->base + at, length, &ops[n]);
        memories[n] = memory;
        lengths[n++] = length;
        check(rc == 0, "submit");
        at += length;
    }
    for (int i = 0; i < n; i++) finish(ops[i], memories[i], lengths[i]);
}

static void *work(void *arg) {
    job *job = arg;
    char *written = malloc(REGION + 1), *found = malloc(REGION);
    while (now() < job->until) {
        char *skewed = written + rand_r(&job->seed) % 2;
        for (int i = 0; i < REGION; i++) skewed[i] = (char)rand_r(&job->seed);
        memset(found, 0, REGION);
        pass(job, skewed, found, ZAIO_WRITE);
        pass(job, skewed, found, ZAIO_READ);
        check(!memcmp(skewed, found, REGION), "bytes differ");
    }
    free(written);
    free(found);
    return NULL;
}

static void run(const char *prefix, double seconds, int num_rings, int direct) {
    char path[4096];
    snprintf(path, sizeof path, "%s_%d_%d", prefix, num_rings, direct);
    zaio_options options = {.block_size = 16384, .queue_depth = 4, .num_rings = num_rings, .num_workers = 6,
                            .overlap_events = 1};
    zaio_engine *engine;
    int rc = zaio_engine_create(&options, &engine);
    if (rc == -ENOSYS || rc == -EPERM) {
        fprintf(stderr, "stress: no kernel AIO here, rings are not tested\n");
        return;
    }
    check(rc == 0, "create");
    int buffered = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int fd = direct ? open(path, O_RDWR | O_DIRECT | O_CLOEXEC) : buffered;
    check(fd >= 0 && buffered >= 0, "open");
    zaio_file *file;
    check(zaio_file_create(engine, fd, buffered, direct, 4096, 512, num_rings ? 0 : 1, &file) == 0, "file");
    zaio_testing_fault(engine, ZAIO_FAULT_ACCEPT, 0, 1 << 30, 2);
    zaio_testing_fault(engine, ZAIO_FAULT_SUBMIT, 20, 3, -EAGAIN);
    zaio_testing_fault(engine, ZAIO_FAULT_REVERSE, 0, 1 << 30, 0);
    zaio_testing_fault(engine, ZAIO_FAULT_READ, 50, 100, 4096);
    zaio_testing_fault(engine, ZAIO_FAULT_WRITE, 50, 100, 700);
    zaio_testing_fault(engine, ZAIO_FAULT_GETEVENTS, 100, 3, -EINTR);
    pthread_t threads[NUM_THREADS];
    job jobs[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++) {
        /* Neighbours share a page: the bases are not multiples of one. */
        jobs[i] = (job){engine, file, (int64_t)i * REGION + 100, 7u * (unsigned)i + 1, now() + seconds};
        pthread_create(&threads[i], NULL, work, &jobs[i]);
    }
    for (int i = 0; i < NUM_THREADS; i++) pthread_join(threads[i], NULL);
    check(zaio_file_wait_idle(file, -1) == 1 && zaio_file_sync(file) == 0 && zaio_file_free(file) == 0, "close");
    zaio_statistics stats;
    zaio_engine_statistics(engine, &stats);
    printf("rings %d direct %d: %ld reads, %ld writes, %ld pieces, %ld short, %ld eagain, %ld bounced\n", num_rings,
           direct, (long)stats.num_reads, (long)stats.num_writes, (long)stats.num_pieces, (long)stats.num_short,
           (long)stats.num_eagain, (long)stats.num_bounced);
    zaio_engine_free(engine);
    unlink(path);
}

int main(int argc, char **argv) {
    check(argc == 3, "usage: stress FILE-PREFIX SECONDS");
    double seconds = atof(argv[2]);
    run(argv[1], seconds, 1, 1);
    run(argv[1], seconds, 3, 1);
    run(argv[1], seconds, 0, 1);
    run(argv[1], seconds, 0, 0);
    puts("stress: all equal");
    return 0;
}
