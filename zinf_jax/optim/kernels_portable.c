/* Plain C: any CPU, and the definition of what the vector variants must give. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "host.h"

#define W 1
#define VARIANT zinf_portable
typedef float vf;

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline vf v_set(float x) { return x; }
static inline vf v_load(const float *p) { return *p; }
static inline void v_store(float *p, vf x) { *p = x; }
static inline vf v_add(vf a, vf b) { return a + b; }
static inline vf v_mul(vf a, vf b) { return a * b; }
static inline vf v_div(vf a, vf b) { return a / b; }
static inline vf v_sqrt(vf a) { return sqrtf(a); }

/* a * b is exact in fp64; the sum is rounded to odd there (Boldo and Melquiond 2008), then to f32: one rounding in
 * effect. TwoSum gives the error exactly, since no f32 product overflows fp64. */
static inline vf v_fma(vf a, vf b, vf c) {
    double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    double part = sum - product;
    double error = (product - (sum - part)) + (addend - part);
    uint64_t bits;
    memcpy(&bits, &sum, 8);
    if (error != 0.0 && error == error && !(bits & 1)) {
        bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
        memcpy(&sum, &bits, 8);
    }
    return (float)sum;
}

static inline vf v_sign(vf x) {
    if (x != x) return x;
    return x == 0.0f ? copysignf(0.0f, x) : copysignf(1.0f, x);
}

static inline vf v_positive_or_zero(vf x, vf y) { return x > 0.0f ? y : 0.0f; }
static inline vf v_unless_infinite(vf x, vf y) { return x != INFINITY ? y : 0.0f; }

static inline vf v_load_bf16(const uint16_t *p) { return float_of((uint32_t)*p << 16); }

static inline void v_store_bf16(uint16_t *p, vf x) {
    uint32_t bits = bits_of(x);
    if (x != x)
        *p = (uint16_t)(bits >> 16) | 0x40;
    else
        *p = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vf v_load_f16(const uint16_t *p) {
    uint32_t sign = (uint32_t)(*p & 0x8000) << 16, exponent = (*p >> 10) & 31, mantissa = *p & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 0x1p-24f; /* exact: no f16 is a denormal f32 */
    return float_of(sign | bits_of(magnitude));
}

static inline void v_store_f16(uint16_t *p, vf x) {
    uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) {
        *p = sign | 0x7e00 | (uint16_t)(magnitude >> 13 & 0x3ff);
    } else if (magnitude >= 0x477ff000) { /* 65520 and up */
        *p = sign | 0x7c00;
    } else if (magnitude >= 0x38800000) { /* 2^-14: a normal f16 */
        *p = sign | (uint16_t)((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
    } else {
        /* The sum with 0.5 leaves the f16's denormal mantissa, rounded to even, in the lowest bits. */
        *p = sign | (uint16_t)(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000);
    }
}

static inline vf v_join(const uint16_t *weights, const int16_t *remainder) {
    return float_of(((uint32_t)*weights << 16) + (uint32_t)(int32_t)*remainder);
}

static inline void v_split(vf x, uint16_t *weights, int16_t *remainder) {
    uint32_t bits = x != x ? 0x7fc00000 : bits_of(x);
    *weights = (uint16_t)((bits + 0x8000) >> 16);
    *remainder = (int16_t)(uint16_t)bits;
}

typedef struct {
    double lane[ZINF_NORM_LANES];
} vacc;

static inline void vacc_zero(vacc *sums) { memset(sums, 0, sizeof *sums); }

static inline void vacc_add_squares(vacc *sums, const vf *x) {
    for (int k = 0; k < ZINF_NORM_LANES; k++) sums->lane[k] += (double)x[k] * (double)x[k];
}

static inline void vacc_store(const vacc *sums, double *lanes) { memcpy(lanes, sums->lane, sizeof sums->lane); }

#include "kernels.inc.h"
