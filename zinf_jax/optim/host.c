/* Entry points: choose the variant, cut the work into tasks. */
#include "host.h"

#include <stddef.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum {
    TASK_ELEMENTS = 1 << 17, /* large enough that a thread streams for tens of microseconds */
    TASK_BYTES = 1 << 21,
    CUT_ELEMENTS = 64, /* cuts within a range keep vectors aligned as at its start */
};

static const zinf_variant *const variants[] = {
    &zinf_portable,
#if defined(__x86_64__)
    &zinf_avx2,
    &zinf_avx512,
#endif
};

static const zinf_variant *chosen = &zinf_portable;
static int chosen_index;

int zinf_num_variants(void) { return (int)(sizeof variants / sizeof *variants); }

int zinf_variant_supported(int variant) {
    if (variant < 0 || variant >= zinf_num_variants()) return 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (variant == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (variant == 2) return __builtin_cpu_supports("avx512f");
#endif
    return 1;
}

int zinf_variant_get(void) { return chosen_index; }

int zinf_variant_set(int variant) {
    if (!zinf_variant_supported(variant)) return -1;
    chosen = variants[variant];
    chosen_index = variant;
    return 0;
}

static int64_t num_tasks_for(int64_t length, int64_t per_task) { return (length + per_task - 1) / per_task; }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    const zinf_range *ranges;
    int64_t num_ranges;
    int64_t total;
    int kernel;
    float scale;
} update_job;

/* Where a cut at global position `at` falls in a range that starts at `start`. The same for both sides of the cut. */
static int64_t cut_in_range(int64_t at, int64_t start, int64_t length) {
    if (at <= start) return 0;
    if (at - start >= length) return length;
    return (at - start) / CUT_ELEMENTS * CUT_ELEMENTS;
}

static void update_task(void *context, int64_t index) {
    const update_job *job = context;
    int64_t first = index * TASK_ELEMENTS, last = smaller(first + TASK_ELEMENTS, job->total), start = 0;
    for (int64_t k = 0; k < job->num_ranges && start < last; k++) {
        const zinf_range *range = &job->ranges[k];
        int64_t begin = cut_in_range(first, start, range->length), end = cut_in_range(last, start, range->length);
        if (begin < end) chosen->update(job->kernel, range, begin, end, job->scale);
        start += range->length;
    }
}

void zinf_update(int kernel, const zinf_range *ranges, int64_t num_ranges, float scale, int num_threads) {
    update_job job = {ranges, num_ranges, 0, kernel, scale};
    for (int64_t k = 0; k < num_ranges; k++) job.total += ranges[k].length;
    zinf_parallel(num_threads, num_tasks_for(job.total, TASK_ELEMENTS), update_task, &job);
}

typedef struct {
    const void *values;
    int dtype;
    int64_t length;
    double *sums;
} norm_job;

static void norm_task(void *context, int64_t index) {
    const norm_job *job = context;
    int64_t begin = index * ZINF_NORM_BLOCK, size = job->dtype == ZINF_F32 ? 4 : 2;
    const char *block = (const char *)job->values + begin * size;
    job->sums[index] = chosen->square_block(block, job->dtype, smaller(ZINF_NORM_BLOCK, job->length - begin));
}

/* `sums` has one element per block and keeps the blocks' sums. */
double zinf_squared_norm(const void *values, int dtype, int64_t length, double *sums, int num_threads) {
    norm_job job = {values, dtype, length, sums};
    int64_t num_blocks = num_tasks_for(length, ZINF_NORM_BLOCK);
    zinf_parallel(num_threads, num_blocks, norm_task, &job);
    double total = 0.0;
    for (int64_t k = 0; k < num_blocks; k++) total += sums[k];
    return total;
}

typedef struct {
    void *target, *second;
    const void *source, *other;
    int target_dtype, source_dtype;
    float scale;
    int64_t length;
} vector_job;

#define BOUNDS(unit) \
    const vector_job *job = context; \
    int64_t begin = index * (unit), end = smaller(begin + (unit), job->length)

static void split_task(void *context, int64_t index) {
    BOUNDS(TASK_ELEMENTS);
    chosen->split(job->source, job->target, job->second, begin, end);
}

void zinf_split(const void *master, void *weights, void *remainder, int64_t length, int num_threads) {
    vector_job job = {.target = weights, .second = remainder, .source = master, .length = length};
    zinf_parallel(num_threads, num_tasks_for(length, TASK_ELEMENTS), split_task, &job);
}

static void join_task(void *context, int64_t index) {
    BOUNDS(TASK_ELEMENTS);
    chosen->join(job->source, job->other, job->target, begin, end);
}

void zinf_join(const void *weights, const void *remainder, void *master, int64_t length, int num_threads) {
    vector_job job = {.target = master, .source = weights, .other = remainder, .length = length};
    zinf_parallel(num_threads, num_tasks_for(length, TASK_ELEMENTS), join_task, &job);
}

static void accumulate_task(void *context, int64_t index) {
    BOUNDS(TASK_ELEMENTS);
    chosen->accumulate(job->target, job->target_dtype, job->source, job->source_dtype, begin, end);
}

void zinf_accumulate(void *target, int target_dtype, const void *source, int source_dtype, int64_t length,
                     int num_threads) {
    vector_job job = {.target = target, .source = source, .target_dtype = target_dtype, .source_dtype = source_dtype,
                      .length = length};
    zinf_parallel(num_threads, num_tasks_for(length, TASK_ELEMENTS), accumulate_task, &job);
}

static void copy_task(void *context, int64_t index) {
    BOUNDS(TASK_BYTES);
    memcpy((char *)job->target + begin, (const char *)job->source + begin, (size_t)(end - begin));
}

void zinf_copy(void *target, const void *source, int64_t num_bytes, int num_threads) {
    vector_job job = {.target = target, .source = source, .length = num_bytes};
    zinf_parallel(num_threads, num_tasks_for(num_bytes, TASK_BYTES), copy_task, &job);
}

static void zero_task(void *context, int64_t index) {
    BOUNDS(TASK_BYTES);
    memset((char *)job->target + begin, 0, (size_t)(end - begin));
}

void zinf_zero(void *target, int64_t num_bytes, int num_threads) {
    vector_job job = {.target = target, .length = num_bytes};
    zinf_parallel(num_threads, num_tasks_for(num_bytes, TASK_BYTES), zero_task, &job);
}

/* target = a + scale * b: the yardstick of the benchmark, not used in training. */
static void triad_task(void *context, int64_t index) {
    BOUNDS(TASK_ELEMENTS);
    const float *a = job->source, *b = job->other;
    float *target = job->target;
    for (int64_t i = begin; i < end; i++) target[i] = a[i] + job->scale * b[i];
}

#if defined(__x86_64__)
static void triad_nontemporal_task(void *context, int64_t index) {
    BOUNDS(TASK_ELEMENTS);
    const float *a = job->source, *b = job->other;
    float *target = job->target;
    __m128 scale = _mm_set1_ps(job->scale);
    for (int64_t i = begin; i + 4 <= end; i += 4)
        _mm_stream_ps(target + i, _mm_add_ps(_mm_loadu_ps(a + i), _mm_mul_ps(scale, _mm_loadu_ps(b + i))));
    _mm_sfence();
}
#else
#define triad_nontemporal_task triad_task
#endif

/* With `nontemporal`, `target` is aligned to 16 bytes and `length` is a multiple of 4. */
void zinf_triad(float *target, const float *a, const float *b, float scale, int64_t length, int nontemporal,
                int num_threads) {
    vector_job job = {.target = target, .source = a, .other = b, .scale = scale, .length = length};
    zinf_task task = nontemporal ? triad_nontemporal_task : triad_task;
    zinf_parallel(num_threads, num_tasks_for(length, TASK_ELEMENTS), task, &job);
}
