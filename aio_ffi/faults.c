/* Fault injection for tests: every place that handles a failure can be made to meet one, in the real engine. */
#define _GNU_SOURCE
#include "zaio_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_TRACE = 65536 };

static atomic_int setup_error, setup_times;

void zaio_testing_setup_error(int error, int times) {
    atomic_store(&setup_error, error);
    atomic_store(&setup_times, times);
}

int fault_setup(void) {
    if (atomic_load(&setup_times) <= 0) return 0;
    atomic_fetch_sub(&setup_times, 1);
    return atomic_load(&setup_error);
}

static faults *get(zaio_engine *engine) {
    pthread_mutex_lock(&engine->mutex);
    if (!engine->faults) {
        faults *made = calloc(1, sizeof *made);
        if (made) {
            pthread_cond_init(&made->opened, NULL);
            made->trace = calloc(MAX_TRACE, sizeof *made->trace);
            __atomic_store_n(&engine->faults, made, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return engine->faults;
}

void faults_free(zaio_engine *engine) {
    if (!engine->faults) return;
    pthread_cond_destroy(&engine->faults->opened);
    free(engine->faults->trace);
    free(engine->faults);
}

int zaio_testing_fault(zaio_engine *engine, int site, int64_t after, int64_t times, int64_t value) {
    if (site < 0 || site >= ZAIO_NUM_FAULTS) return -EINVAL;
    faults *faults = get(engine);
    if (!faults) return -ENOMEM;
    pthread_mutex_lock(&engine->mutex);
    faults->table[site] = (fault){0, after, times, value};
    pthread_mutex_unlock(&engine->mutex);
    return 0;
}

bool fault_fires(zaio_engine *engine, int site, int64_t *value) {
    pthread_mutex_lock(&engine->mutex);
    fault *fault = &engine->faults->table[site];
    int64_t call = fault->seen++;
    bool fires = call >= fault->after && call - fault->after < fault->times;
    *value = fault->value;
    pthread_mutex_unlock(&engine->mutex);
    return fires;
}

/* A negative value replaces the result; another one caps what was really moved, as a short transfer would. */
int64_t fault_result(zaio_engine *engine, int site, int64_t result) {
    int64_t value;
    if (!fault_fires(engine, site, &value)) return result;
    if (value < 0) return value;
    return result > value ? value : result;
}

/* A slow drive, and one that returns wrong bytes and says that all is well. */
void fault_complete(zaio_engine *engine, const piece *piece, bool failed) {
    int64_t value;
    if (fault_fires(engine, ZAIO_FAULT_DELAY, &value) && value > 0) {
        struct timespec left = {.tv_sec = value / 1000000, .tv_nsec = value % 1000000 * 1000};
        while (nanosleep(&left, &left) < 0 && errno == EINTR) {
        }
    }
    if (failed || piece->op->kind != ZAIO_READ || !fault_fires(engine, ZAIO_FAULT_FLIP, &value)) return;
    uint64_t bit = (uint64_t)value % ((uint64_t)piece->num_bytes * 8);
    piece->memory[bit / 8] = (char)(piece->memory[bit / 8] ^ 1 << bit % 8);
}

void zaio_testing_gate(zaio_engine *engine, int gate, int closed) {
    faults *faults = get(engine);
    if (!faults) return;
    pthread_mutex_lock(&engine->mutex);
    faults->closed[gate] = closed;
    pthread_cond_broadcast(&faults->opened);
    pthread_cond_broadcast(&engine->work);
    pthread_mutex_unlock(&engine->mutex);
}

bool fault_gated(zaio_engine *engine) { return engine->faults && engine->faults->closed[ZAIO_GATE_SUBMIT]; }

void fault_gate(zaio_engine *engine, int gate) {
    pthread_mutex_lock(&engine->mutex);
    faults *faults = engine->faults;
    faults->num_at_gate[gate]++;
    while (faults->closed[gate]) pthread_cond_wait(&faults->opened, &engine->mutex);
    faults->num_at_gate[gate]--;
    pthread_mutex_unlock(&engine->mutex);
}

int64_t zaio_testing_gate_waiters(zaio_engine *engine, int gate) {
    faults *faults = get(engine);
    pthread_mutex_lock(&engine->mutex);
    int64_t n = faults ? faults->num_at_gate[gate] : 0;
    pthread_mutex_unlock(&engine->mutex);
    return n;
}

void fault_trace(zaio_engine *engine, const worker *worker, const piece *piece) {
    faults *faults = engine->faults;
    if (!faults->trace || faults->num_traced == MAX_TRACE) return;
    faults->trace[faults->num_traced++] =
        (zaio_trace){worker->index, piece->op->kind, piece->offset, piece->num_bytes};
}

int64_t zaio_testing_trace(zaio_engine *engine, zaio_trace *out, int64_t capacity) {
    faults *faults = get(engine);
    if (!faults) return 0;
    pthread_mutex_lock(&engine->mutex);
    int64_t n = faults->num_traced < capacity ? faults->num_traced : capacity;
    for (int64_t i = 0; i < n; i++) out[i] = faults->trace[i];
    pthread_mutex_unlock(&engine->mutex);
    return n;
}
