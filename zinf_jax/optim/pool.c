/* A persistent pool of threads.
 *
 * Guarantees
 *   - zinf_parallel returns after every task ran exactly once; the calling thread takes part.
 *   - Tasks are handed out in order by a counter; which thread runs which is not defined, so a task's result must not
 *     depend on it.
 *   - Calls from several threads are serialised; a call that needs one thread only never waits for another.
 *   - Fork: a child starts with no workers and makes its own. A job that runs during the fork goes on in the parent.
 *   - Workers block all signals. Where a worker cannot be created, the call runs with those that exist.
 */
#include <pthread.h>
#include <signal.h>
#include <stddef.h>

#include "host.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
/* All exceptions masked, round to nearest, flush to zero, denormals are zero. */
static unsigned long enter_float_mode(void) {
    unsigned long old = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040);
    return old;
}
static void leave_float_mode(unsigned long old) { _mm_setcsr((unsigned)old); }
#elif defined(__aarch64__)
static unsigned long enter_float_mode(void) {
    unsigned long old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(1UL << 24));
    return old;
}
static void leave_float_mode(unsigned long old) { __asm__ volatile("msr fpcr, %0" : : "r"(old)); }
#else
#error "flush-to-zero is not known for this architecture"
#endif

enum { MAX_WORKERS = 255 };

typedef struct {
    zinf_task task;
    void *context;
    int64_t num_tasks;
    int64_t next; /* atomic */
} job;

static pthread_mutex_t submit_lock = PTHREAD_MUTEX_INITIALIZER; /* held by the caller for a whole job */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;        /* guards everything below */
static pthread_cond_t work_ready = PTHREAD_COND_INITIALIZER;
static pthread_cond_t work_done = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int num_workers;
static int num_wanted;      /* workers with an index below this may take part in the current job */
static int num_running;     /* those that do at the moment */
static uint64_t generation; /* counts jobs, so that a worker sees a new one */
static job *current;        /* NULL once its caller found no task left: a worker that wakes late leaves it alone */

static void run_tasks(job *work) {
    for (;;) {
        int64_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (index >= work->num_tasks) return;
        work->task(work->context, index);
    }
}

static void *worker(void *argument) {
    int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    enter_float_mode();
    pthread_mutex_lock(&lock);
    for (;;) {
        while (generation == seen) pthread_cond_wait(&work_ready, &lock);
        seen = generation;
        job *work = current;
        if (work == NULL || index >= num_wanted) continue;
        num_running++;
        pthread_mutex_unlock(&lock);
        run_tasks(work);
        pthread_mutex_lock(&lock);
        if (--num_running == 0) pthread_cond_signal(&work_done);
    }
    return NULL;
}

static void reset_in_child(void) {
    pthread_mutex_init(&submit_lock, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_ready, NULL);
    pthread_cond_init(&work_done, NULL);
    num_workers = num_wanted = num_running = 0;
    generation = 0;
    current = NULL;
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_in_child); }

/* Called with both locks held. */
static void grow(int wanted) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (num_workers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)num_workers) != 0) break;
        pthread_detach(thread);
        num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void run_in_pool(int wanted, job *work) {
    pthread_once(&once, register_fork_handler);
    pthread_mutex_lock(&submit_lock);
    pthread_mutex_lock(&lock);
    grow(wanted);
    num_wanted = wanted;
    current = work;
    generation++;
    pthread_cond_broadcast(&work_ready);
    pthread_mutex_unlock(&lock);
    run_tasks(work);
    pthread_mutex_lock(&lock);
    current = NULL;
    while (num_running > 0) pthread_cond_wait(&work_done, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&submit_lock);
}

void zinf_parallel(int num_threads, int64_t num_tasks, zinf_task task, void *context) {
    job work = {task, context, num_tasks, 0};
    int64_t wanted = num_threads - 1;
    if (wanted > num_tasks - 1) wanted = num_tasks - 1;
    if (wanted > MAX_WORKERS) wanted = MAX_WORKERS;
    unsigned long mode = enter_float_mode();
    if (wanted <= 0)
        run_tasks(&work);
    else
        run_in_pool((int)wanted, &work);
    leave_float_mode(mode);
}
