/* AVX2, FMA, F16C. Compiled for those whatever the build machine has; chosen at run time. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "host.h"

#define W 8
#define VARIANT zinf_avx2
typedef __m256 vf;

static inline vf v_set(float x) { return _mm256_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

static inline vf is_nan(vf x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }

static inline vf v_sign(vf x) {
    vf nonzero = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    vf one = _mm256_and_ps(nonzero, _mm256_set1_ps(1.0f));
    vf sign = _mm256_or_ps(one, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_blendv_ps(sign, x, is_nan(x));
}

static inline vf v_positive_or_zero(vf x, vf y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GT_OQ), y);
}

static inline vf v_unless_infinite(vf x, vf y) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(INFINITY), _CMP_NEQ_UQ), y);
}

/* 16-bit data are handled in 128-bit halves: no instruction here crosses lanes, which is slow on Zen 1, and no more
 * operations are needed than with whole vectors. */
static inline vf from_halves(__m128i low, __m128i high) {
    return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

static inline __m128i lower(vf x) { return _mm_castps_si128(_mm256_castps256_ps128(x)); }
static inline __m128i upper(vf x) { return _mm_castps_si128(_mm256_extractf128_ps(x, 1)); }

static inline __m128i load_u16(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
static inline void store_u16(void *p, __m128i x) { _mm_storeu_si128((__m128i *)p, x); }

/* The upper and the lower 16 bits of each element. */
static inline __m128i high_parts(vf x) {
    return _mm_packus_epi32(_mm_srli_epi32(lower(x), 16), _mm_srli_epi32(upper(x), 16));
}
static inline __m128i low_parts(vf x) {
    const __m128i zero = _mm_setzero_si128();
    return _mm_packus_epi32(_mm_blend_epi16(lower(x), zero, 0xaa), _mm_blend_epi16(upper(x), zero, 0xaa));
}

static inline vf v_load_bf16(const uint16_t *p) {
    const __m128i zero = _mm_setzero_si128(), x = load_u16(p);
    return from_halves(_mm_unpacklo_epi16(zero, x), _mm_unpackhi_epi16(zero, x));
}

static inline void v_store_bf16(uint16_t *p, vf x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    store_u16(p, high_parts(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan(x))));
}

static inline vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(load_u16(p)); }

static inline void v_store_f16(uint16_t *p, vf x) { store_u16(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

/* A negative remainder borrows one from the weight; then the halves are put side by side. */
static inline vf v_join(const uint16_t *weights, const int16_t *remainder) {
    __m128i low = load_u16(remainder), high = _mm_add_epi16(load_u16(weights), _mm_srai_epi16(low, 15));
    return from_halves(_mm_unpacklo_epi16(low, high), _mm_unpackhi_epi16(low, high));
}

static inline void v_split(vf x, uint16_t *weights, int16_t *remainder) {
    vf canonical = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan(x));
    __m128i low = low_parts(canonical);
    store_u16(weights, _mm_sub_epi16(high_parts(canonical), _mm_srai_epi16(low, 15)));
    store_u16(remainder, low);
}

typedef struct {
    __m256d part[4];
} vacc;

static inline void vacc_zero(vacc *sums) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) sums->part[k] = _mm256_setzero_pd();
}

static inline void vacc_add_squares(vacc *sums, const vf *x) {
#pragma GCC unroll 4 /* or the sums live in memory */
    for (int k = 0; k < 4; k++) {
        __m128 half = k % 2 ? _mm256_extractf128_ps(x[k / 2], 1) : _mm256_castps256_ps128(x[k / 2]);
        __m256d wide = _mm256_cvtps_pd(half);
        sums->part[k] = _mm256_fmadd_pd(wide, wide, sums->part[k]);
    }
}

static inline void vacc_store(const vacc *sums, double *lanes) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums->part[k]);
}

#include "kernels.inc.h"
#endif
