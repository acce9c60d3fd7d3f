/* AVX-512F. Compiled for it whatever the build machine has; chosen at run time. */
#if defined(__x86_64__)
#pragma GCC target("avx512f")
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "host.h"

#define W 16
#define VARIANT zinf_avx512
typedef __m512 vf;

static inline vf v_set(float x) { return _mm512_set1_ps(x); }
static inline vf v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

static inline __mmask16 is_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }

static inline vf v_sign(vf x) {
    __mmask16 nonzero = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    __m512i one = _mm512_maskz_set1_epi32(nonzero, 0x3f800000);
    __m512i sign = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000));
    return _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_or_si512(one, sign)), is_nan(x), x);
}

static inline vf v_positive_or_zero(vf x, vf y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ), y);
}

static inline vf v_unless_infinite(vf x, vf y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_NEQ_UQ), y);
}

static inline __m512i load_u16(const uint16_t *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}

static inline void store_u16(void *p, __m512i x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x)); }

static inline vf v_load_bf16(const uint16_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(load_u16(p), 16)); }

static inline void v_store_bf16(uint16_t *p, vf x) {
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    store_u16(p, _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan(x), quiet));
}

static inline vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

static inline void v_store_f16(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vf v_join(const uint16_t *weights, const int16_t *remainder) {
    __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)remainder));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(load_u16(weights), 16), low));
}

static inline void v_split(vf x, uint16_t *weights, int16_t *remainder) {
    __m512i bits = _mm512_mask_set1_epi32(_mm512_castps_si512(x), is_nan(x), 0x7fc00000);
    store_u16(weights, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16));
    store_u16(remainder, bits);
}

typedef struct {
    __m512d low, high;
} vacc;

static inline void vacc_zero(vacc *sums) { sums->low = sums->high = _mm512_setzero_pd(); }

static inline void vacc_add_squares(vacc *sums, const vf *x) {
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x[0]), 1));
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x[0])), high = _mm512_cvtps_pd(upper);
    sums->low = _mm512_fmadd_pd(low, low, sums->low);
    sums->high = _mm512_fmadd_pd(high, high, sums->high);
}

static inline void vacc_store(const vacc *sums, double *lanes) {
    _mm512_storeu_pd(lanes, sums->low);
    _mm512_storeu_pd(lanes + 8, sums->high);
}

#include "kernels.inc.h"
#endif
