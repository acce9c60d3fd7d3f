/* The kernels, written once. Included by one file per variant, after its vector operations:
 *
 *   vf, W                     a vector of W floats
 *   v_set, v_load, v_store    broadcast, unaligned load and store of f32
 *   v_load_bf16, v_load_f16, v_store_bf16 (to nearest even), v_store_f16
 *   v_add, v_mul, v_div, v_sqrt, v_fma(a, b, c) = a * b + c rounded once, v_sign
 *   v_join, v_split           f32 <-> bf16 weight and 16-bit remainder
 *   v_positive_or_zero(x, y)  y where x > 0, otherwise 0
 *   v_unless_infinite(x, y)   y where x is not +infinity, otherwise 0
 *   vacc, vacc_zero, vacc_add_squares, vacc_store     16 sums in fp64
 *   VARIANT                   name of the exported table
 *
 * The order of operations, and which products are fused with which sum, is what XLA:CPU makes of optax's expressions
 * when update and optax.apply_updates are jitted together on a tree of several leaves: equal bit for bit with jax 0.10.
 * (For a tree of one leaf XLA multiplies by the reciprocals of the bias corrections instead: a few ulp of the update.)
 */
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE vf load_any(const void *base, int64_t i, int dtype) {
    switch (dtype) {
        case ZINF_F32: return v_load((const float *)base + i);
        case ZINF_BF16: return v_load_bf16((const uint16_t *)base + i);
        case ZINF_F16: return v_load_f16((const uint16_t *)base + i);
        default: return v_set(0.0f);
    }
}

INLINE vf load_master(const zinf_range *r, int64_t i, int dtype) {
    if (dtype == ZINF_BF16) return v_join((const uint16_t *)r->weights + i, (const int16_t *)r->master + i);
    return v_load((const float *)(dtype == ZINF_F32 ? r->weights : r->master) + i);
}

INLINE void store_master(const zinf_range *r, int64_t i, int dtype, vf value) {
    if (dtype == ZINF_BF16) {
        v_split(value, (uint16_t *)r->weights + i, (int16_t *)r->master + i);
        return;
    }
    v_store((float *)(dtype == ZINF_F32 ? r->weights : r->master) + i, value);
    if (dtype == ZINF_F16) v_store_f16((uint16_t *)r->weights + i, value);
}

/* Coefficients by rule; [0] holds the flags, [1] the negated learning rate, [2] the weight decay.
 *   adam:    3 b1, 4 1-b1, 5 b2, 6 1-b2, 7 and 8 bias corrections of mu and nu, 9 eps_root, 10 eps,
 *            11 bias correction of the gradient (Nesterov)
 *   lion:    3 b1, 4 1-b1, 5 b2, 6 1-b2
 *   sgd:     3 momentum
 *   adagrad: 3 eps
 */
INLINE vf load_gradient(const zinf_range *r, int64_t i, int dtype, vf scale) {
    return dtype == ZINF_NONE ? v_set(0.0f) : v_mul(load_any(r->gradient, i, dtype), scale);
}

/* An update is made in four stages; the loop runs each on another vector, so that the long chain of a square root, a
 * division and the packing of 16-bit weights does not have to fit in the CPU's window of instructions. */
typedef struct {
    vf numerator, denominator;
} fraction;

/* The coefficients of a loop: those of the rule, and 1 / bias correction and -bias correction of nu. */
enum { RECIPROCAL = ZINF_NUM_COEFFICIENTS, NEGATED, NUM_LOOP_COEFFICIENTS };

/* x / d for x >= 0 and a d that is the same all along: a third of a division's time on Zen 1. One step of correction
 * from the correctly rounded reciprocal gives the correctly rounded quotient (Markstein 1990), as long as the remainder
 * is no denormal: below 2^-100 the last bit may differ from a division's. */
INLINE vf divide_by(vf x, const vf *c) {
    vf q = v_mul(x, c[RECIPROCAL]);
    vf remainder = v_unless_infinite(q, v_fma(q, c[NEGATED], x));
    return v_fma(remainder, c[RECIPROCAL], q);
}

/* First stage: moves the slots on. The update is the numerator, for adam yet to be divided. */
INLINE fraction move_slots(int kernel, int flags, int gradient_dtype, const zinf_range *r, int64_t i, const vf *c,
                           vf scale) {
    vf g = load_gradient(r, i, gradient_dtype, scale);
    fraction u = {g, g};
    if (kernel == ZINF_ADAM) {
        vf m = v_load(r->slots[0] + i), v = v_load(r->slots[1] + i);
        m = v_fma(c[4], g, v_mul(c[3], m));
        v = v_fma(c[6], v_mul(g, g), v_mul(c[5], v));
        v_store(r->slots[0] + i, m);
        v_store(r->slots[1] + i, v);
        u.denominator = v_add(divide_by(v, c), c[9]);
        u.numerator = m;
        if (flags & ZINF_NESTEROV) u.numerator = v_fma(v_div(m, c[7]), c[3], v_mul(v_div(g, c[11]), c[4]));
    } else if (kernel == ZINF_LION) {
        vf m = v_load(r->slots[0] + i);
        u.numerator = v_sign(v_fma(c[4], g, v_mul(c[3], m)));
        v_store(r->slots[0] + i, v_fma(c[6], g, v_mul(c[5], m)));
    } else if (kernel == ZINF_SGD && flags & ZINF_MOMENTUM) {
        vf t = v_fma(c[3], v_load(r->slots[0] + i), g);
        v_store(r->slots[0] + i, t);
        u.numerator = flags & ZINF_NESTEROV ? v_fma(c[3], t, g) : t;
    } else if (kernel == ZINF_ADAGRAD) {
        vf s = v_fma(g, g, v_load(r->slots[0] + i));
        v_store(r->slots[0] + i, s);
        u.numerator = v_mul(v_positive_or_zero(s, v_div(v_set(1.0f), v_sqrt(v_add(s, c[3])))), g);
    }
    return u;
}

/* Second stage. XLA: (m / correction) / d -> m / (correction * d) */
INLINE fraction take_root(int kernel, int flags, fraction u, const vf *c) {
    if (kernel != ZINF_ADAM) return u;
    u.denominator = v_add(v_sqrt(u.denominator), c[10]);
    if (!(flags & ZINF_NESTEROV)) u.denominator = v_mul(c[7], u.denominator);
    return u;
}

/* Third stage. */
INLINE vf divide(int kernel, fraction u) {
    return kernel == ZINF_ADAM ? v_div(u.numerator, u.denominator) : u.numerator;
}

/* Fourth stage: moves the weights. */
INLINE void move_weights(int flags, int weights_dtype, const zinf_range *r, int64_t i, const vf *c, vf u) {
    vf p = load_master(r, i, weights_dtype);
    if (flags & ZINF_DECAY) u = v_fma(c[2], p, u);
    store_master(r, i, weights_dtype, v_fma(c[1], u, p));
}

#if W > 1
/* The last, partial vector of a range: the same operations on a padded copy. */
static __attribute__((noinline)) void update_tail(int kernel, int flags, const zinf_range *r, int64_t i, int64_t end,
                                                  const vf *c, vf scale) {
    _Alignas(64) float weights[W] = {0}, master[W] = {0}, gradient[W] = {0}, slots[ZINF_MAX_SLOTS][W] = {{0}};
    size_t count = (size_t)(end - i);
    size_t weight_size = r->weights_dtype == ZINF_F32 ? 4 : 2, master_size = r->weights_dtype == ZINF_BF16 ? 2 : 4;
    size_t gradient_size = r->gradient_dtype == ZINF_F32 ? 4 : 2;
    zinf_range copy = *r;
    copy.weights = weights;
    copy.master = master;
    copy.gradient = gradient;
    memcpy(weights, (char *)r->weights + (size_t)i * weight_size, count * weight_size);
    if (r->master) memcpy(master, (char *)r->master + (size_t)i * master_size, count * master_size);
    if (r->gradient) memcpy(gradient, (const char *)r->gradient + (size_t)i * gradient_size, count * gradient_size);
    for (int k = 0; k < ZINF_MAX_SLOTS; k++) {
        copy.slots[k] = slots[k];
        if (r->slots[k]) memcpy(slots[k], r->slots[k] + i, count * 4);
    }
    fraction part = move_slots(kernel, flags, r->gradient_dtype, &copy, 0, c, scale);
    vf u = divide(kernel, take_root(kernel, flags, part, c));
    move_weights(flags, r->weights_dtype, &copy, 0, c, u);
    memcpy((char *)r->weights + (size_t)i * weight_size, weights, count * weight_size);
    if (r->master) memcpy((char *)r->master + (size_t)i * master_size, master, count * master_size);
    for (int k = 0; k < ZINF_MAX_SLOTS; k++)
        if (r->slots[k]) memcpy(r->slots[k] + i, slots[k], count * 4);
}
#endif

/* Specialised by its constant arguments: the loop has no branches. */
INLINE void update_loop(int kernel, int flags, int weights_dtype, int gradient_dtype, const zinf_range *range,
                        int64_t begin, int64_t end, float scale) {
    vf c[NUM_LOOP_COEFFICIENTS];
    for (int k = 0; k < ZINF_NUM_COEFFICIENTS; k++) c[k] = v_set(range->coefficients[k]);
    c[RECIPROCAL] = v_set(kernel == ZINF_ADAM ? 1.0f / range->coefficients[8] : 0.0f);
    c[NEGATED] = v_set(-range->coefficients[8]);
    const zinf_range r = *range; /* a copy that no store can alias: the pointers stay in registers */
    const vf s = v_set(scale);
    int64_t i = begin;
#define FIRST(at) move_slots(kernel, flags, gradient_dtype, &r, at, c, s)
#define SECOND(u) take_root(kernel, flags, u, c)
#define LAST(at, u) move_weights(flags, weights_dtype, &r, at, c, u)
    if (end - begin >= 3 * W) {
        vf u = divide(kernel, SECOND(FIRST(i)));
        fraction rooted = SECOND(FIRST(i + W)), moved = FIRST(i + 2 * W);
        for (; i + 4 * W <= end; i += W) {
            fraction next = FIRST(i + 3 * W);
            LAST(i, u);
            u = divide(kernel, rooted);
            rooted = SECOND(moved);
            moved = next;
        }
        LAST(i, u);
        LAST(i + W, divide(kernel, rooted));
        LAST(i + 2 * W, divide(kernel, SECOND(moved)));
        i += 3 * W;
    }
    for (; i + W <= end; i += W) LAST(i, divide(kernel, SECOND(FIRST(i))));
#undef FIRST
#undef SECOND
#undef LAST
#if W > 1
    if (i < end) update_tail(kernel, flags, range, i, end, c, s);
#endif
}

#define CASE(kernel, flags, w, g) \
    case (w) * 4 + (g): update_loop(kernel, flags, w, g, r, begin, end, scale); break;
#define CASES(kernel, flags, w) \
    CASE(kernel, flags, w, ZINF_NONE) CASE(kernel, flags, w, ZINF_F32) CASE(kernel, flags, w, ZINF_BF16) \
    CASE(kernel, flags, w, ZINF_F16)
#define RULE(name, kernel, flags) \
    static __attribute__((noinline)) void name(const zinf_range *r, int64_t begin, int64_t end, float scale) { \
        switch (r->weights_dtype * 4 + r->gradient_dtype) { \
            CASES(kernel, flags, ZINF_F32) CASES(kernel, flags, ZINF_BF16) CASES(kernel, flags, ZINF_F16) \
        } \
    }

RULE(adam, ZINF_ADAM, 0)
RULE(adam_decay, ZINF_ADAM, ZINF_DECAY)
RULE(nadam, ZINF_ADAM, ZINF_NESTEROV)
RULE(nadam_decay, ZINF_ADAM, ZINF_NESTEROV | ZINF_DECAY)
RULE(lion, ZINF_LION, 0)
RULE(lion_decay, ZINF_LION, ZINF_DECAY)
RULE(sgd, ZINF_SGD, 0)
RULE(sgd_momentum, ZINF_SGD, ZINF_MOMENTUM)
RULE(sgd_nesterov, ZINF_SGD, ZINF_MOMENTUM | ZINF_NESTEROV)
RULE(adagrad, ZINF_ADAGRAD, 0)

static void update(int kernel, const zinf_range *r, int64_t begin, int64_t end, float scale) {
    const int flags = (int)r->coefficients[0];
    switch (kernel * 8 + flags) {
        case ZINF_ADAM * 8: adam(r, begin, end, scale); break;
        case ZINF_ADAM * 8 + ZINF_DECAY: adam_decay(r, begin, end, scale); break;
        case ZINF_ADAM * 8 + ZINF_NESTEROV: nadam(r, begin, end, scale); break;
        case ZINF_ADAM * 8 + (ZINF_NESTEROV | ZINF_DECAY): nadam_decay(r, begin, end, scale); break;
        case ZINF_LION * 8: lion(r, begin, end, scale); break;
        case ZINF_LION * 8 + ZINF_DECAY: lion_decay(r, begin, end, scale); break;
        case ZINF_SGD * 8: sgd(r, begin, end, scale); break;
        case ZINF_SGD * 8 + ZINF_MOMENTUM: sgd_momentum(r, begin, end, scale); break;
        case ZINF_SGD * 8 + (ZINF_MOMENTUM | ZINF_NESTEROV): sgd_nesterov(r, begin, end, scale); break;
        case ZINF_ADAGRAD * 8: adagrad(r, begin, end, scale); break;
    }
}

/* Sum of squares of one block: element i goes to lane i % 16, lanes are added as a tree (i + 8, + 4, + 2, + 1). A
 * square of an f32 is exact in fp64, so a fused multiply-add would give the same bits. */
INLINE double square_loop(const void *values, int dtype, int64_t length) {
    enum { GROUP = ZINF_NORM_LANES / W };
    _Alignas(64) double lanes[ZINF_NORM_LANES];
    vacc sums;
    vacc_zero(&sums);
    int64_t i = 0;
    for (; i + ZINF_NORM_LANES <= length; i += ZINF_NORM_LANES) {
        vf x[GROUP];
#pragma GCC unroll 16
        for (int k = 0; k < GROUP; k++) x[k] = load_any(values, i + k * W, dtype);
        vacc_add_squares(&sums, x);
    }
    if (i < length) {
        _Alignas(64) float tail[ZINF_NORM_LANES] = {0};
        size_t size = dtype == ZINF_F32 ? 4 : 2;
        memcpy(tail, (const char *)values + (size_t)i * size, (size_t)(length - i) * size);
        vf x[GROUP];
#pragma GCC unroll 16
        for (int k = 0; k < GROUP; k++) x[k] = load_any(tail, k * W, dtype);
        vacc_add_squares(&sums, x);
    }
    vacc_store(&sums, lanes);
    for (int step = ZINF_NORM_LANES / 2; step > 0; step /= 2)
        for (int k = 0; k < step; k++) lanes[k] += lanes[k + step];
    return lanes[0];
}

static double square_block(const void *values, int dtype, int64_t length) {
    switch (dtype) {
        case ZINF_F32: return square_loop(values, ZINF_F32, length);
        case ZINF_BF16: return square_loop(values, ZINF_BF16, length);
        default: return square_loop(values, ZINF_F16, length);
    }
}

static void split(const float *master, uint16_t *weights, int16_t *remainder, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) v_split(v_load(master + i), weights + i, remainder + i);
#if W > 1
    if (i < end) {
        float source[W] = {0};
        uint16_t high[W];
        int16_t low[W];
        memcpy(source, master + i, (size_t)(end - i) * 4);
        v_split(v_load(source), high, low);
        memcpy(weights + i, high, (size_t)(end - i) * 2);
        memcpy(remainder + i, low, (size_t)(end - i) * 2);
    }
#endif
}

static void join(const uint16_t *weights, const int16_t *remainder, float *master, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) v_store(master + i, v_join(weights + i, remainder + i));
#if W > 1
    if (i < end) {
        float target[W];
        uint16_t high[W] = {0};
        int16_t low[W] = {0};
        memcpy(high, weights + i, (size_t)(end - i) * 2);
        memcpy(low, remainder + i, (size_t)(end - i) * 2);
        v_store(target, v_join(high, low));
        memcpy(master + i, target, (size_t)(end - i) * 4);
    }
#endif
}

INLINE void accumulate_one(void *target, int target_dtype, int64_t t, const void *source, int source_dtype, int64_t s) {
    vf sum = v_add(load_any(target, t, target_dtype), load_any(source, s, source_dtype));
    if (target_dtype == ZINF_F32) v_store((float *)target + t, sum);
    if (target_dtype == ZINF_BF16) v_store_bf16((uint16_t *)target + t, sum);
    if (target_dtype == ZINF_F16) v_store_f16((uint16_t *)target + t, sum);
}

INLINE void accumulate_loop(void *target, int target_dtype, const void *source, int source_dtype, int64_t begin,
                            int64_t end) {
    int64_t i = begin;
    for (; i + W <= end; i += W) accumulate_one(target, target_dtype, i, source, source_dtype, i);
#if W > 1
    if (i < end) {
        _Alignas(64) float a[W] = {0}, b[W] = {0};
        size_t a_size = target_dtype == ZINF_F32 ? 4 : 2, b_size = source_dtype == ZINF_F32 ? 4 : 2;
        memcpy(a, (char *)target + (size_t)i * a_size, (size_t)(end - i) * a_size);
        memcpy(b, (const char *)source + (size_t)i * b_size, (size_t)(end - i) * b_size);
        accumulate_one(a, target_dtype, 0, b, source_dtype, 0);
        memcpy((char *)target + (size_t)i * a_size, a, (size_t)(end - i) * a_size);
    }
#endif
}

#define PAIR(t, s) \
    case (t) * 4 + (s): accumulate_loop(target, t, source, s, begin, end); break;

static void accumulate(void *target, int target_dtype, const void *source, int source_dtype, int64_t begin,
                       int64_t end) {
    switch (target_dtype * 4 + source_dtype) {
        PAIR(ZINF_F32, ZINF_F32)
        PAIR(ZINF_F32, ZINF_BF16)
        PAIR(ZINF_F32, ZINF_F16)
        PAIR(ZINF_BF16, ZINF_BF16)
        PAIR(ZINF_F16, ZINF_F16)
    }
}

const zinf_variant VARIANT = {update, square_block, split, join, accumulate};
