/* Host kernels of the fused optimizers: what the C files share.
 *
 * Guarantees
 *   - The same bits from every variant (portable, AVX2, AVX-512), thread count and split into ranges or calls. Each
 *     element's operations are written out once, in kernels.inc.h, in terms of operations that IEEE 754 rounds in
 *     only one way: +, *, /, sqrt and fused multiply-add. The compiler may not contract (-ffp-contract=off). The one
 *     exception is the payload of a NaN.
 *   - Denormal inputs count as zero and denormal results become zero, as in XLA:CPU. The calling thread's floating
 *     point mode is restored before a call returns.
 *   - Nothing here allocates memory that grows with the vectors, except 8 bytes per 65,536 elements in the norm, by
 *     the caller.
 */
#ifndef ZINF_HOST_H
#define ZINF_HOST_H

#include <stdint.h>

enum zinf_dtype { ZINF_NONE = 0, ZINF_F32 = 1, ZINF_BF16 = 2, ZINF_F16 = 3 };

enum zinf_kernel { ZINF_ADAM = 0, ZINF_LION = 1, ZINF_SGD = 2, ZINF_ADAGRAD = 3 };

/* Bits of coefficients[0]: which terms a rule has. A term that is absent is not computed (0 * inf is not 0). */
enum zinf_flags { ZINF_DECAY = 1, ZINF_NESTEROV = 2, ZINF_MOMENTUM = 4 };

enum {
    ZINF_MAX_SLOTS = 2,
    ZINF_NUM_COEFFICIENTS = 12,
    ZINF_NORM_BLOCK = 65536, /* elements per fp64 sum of the squared norm: part of the numbers, never change it */
    ZINF_NORM_LANES = 16,    /* fp64 sums within a block: likewise */
};

/* One leaf's part of a chunk. Lengths in elements. */
typedef struct {
    void *weights;       /* f32, bf16 or f16 */
    void *master;        /* int16 remainder beside bf16, f32 beside f16, NULL beside f32 */
    const void *gradient; /* NULL: zeros */
    float *slots[ZINF_MAX_SLOTS];
    const float *coefficients; /* ZINF_NUM_COEFFICIENTS, see transforms.py */
    int64_t length;
    int32_t weights_dtype;
    int32_t gradient_dtype;
} zinf_range;

/* What each variant provides. All work on elements [begin, end) of their vectors. */
typedef struct {
    void (*update)(int kernel, const zinf_range *range, int64_t begin, int64_t end, float scale);
    double (*square_block)(const void *values, int dtype, int64_t length);
    void (*split)(const float *master, uint16_t *weights, int16_t *remainder, int64_t begin, int64_t end);
    void (*join)(const uint16_t *weights, const int16_t *remainder, float *master, int64_t begin, int64_t end);
    void (*accumulate)(void *target, int target_dtype, const void *source, int source_dtype, int64_t begin, int64_t end);
} zinf_variant;

extern const zinf_variant zinf_portable;
#if defined(__x86_64__)
extern const zinf_variant zinf_avx2;
extern const zinf_variant zinf_avx512;
#endif

/* pool.c */
typedef void (*zinf_task)(void *context, int64_t index);
void zinf_parallel(int num_threads, int64_t num_tasks, zinf_task task, void *context);

/* host.c: the interface to Python */
int zinf_num_variants(void);
int zinf_variant_supported(int variant);
int zinf_variant_get(void);
int zinf_variant_set(int variant);
void zinf_update(int kernel, const zinf_range *ranges, int64_t num_ranges, float scale, int num_threads);
double zinf_squared_norm(const void *values, int dtype, int64_t length, double *sums, int num_threads);
void zinf_split(const void *master, void *weights, void *remainder, int64_t length, int num_threads);
void zinf_join(const void *weights, const void *remainder, void *master, int64_t length, int num_threads);
void zinf_accumulate(void *target, int target_dtype, const void *source, int source_dtype, int64_t length,
                     int num_threads);
void zinf_copy(void *target, const void *source, int64_t num_bytes, int num_threads);
void zinf_zero(void *target, int64_t num_bytes, int num_threads);
void zinf_triad(float *target, const float *a, const float *b, float scale, int64_t length, int nontemporal,
                int num_threads);

#endif
