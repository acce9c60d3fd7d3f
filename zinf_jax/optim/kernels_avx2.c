/* AVX2, FMA, F16C. Compiled for those whatever the build machine has; chosen at run time. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
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

static inline __m256i load_u16(const uint16_t *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }

/* Two vectors of 32-bit values below 65536 -> their low halves, one after the other. */
static inline __m256i pack_u16(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

static inline vf v_load_bf16(const uint16_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_u16(p), 16)); }

static inline void v_store_bf16(uint16_t *p, vf x) {
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    rounded = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, _mm256_castps_si256(is_nan(x)));
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(pack_u16(rounded, rounded)));
}

static inline vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

static inline void v_store_f16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vf v_join(const uint16_t *weights, const int16_t *remainder) {
    __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)remainder));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(load_u16(weights), 16), low));
}

static inline void v_split(vf x, uint16_t *weights, int16_t *remainder) {
    vf canonical = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), is_nan(x));
    __m256i bits = _mm256_castps_si256(canonical);
    __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
    __m256i both = pack_u16(high, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
    _mm_storeu_si128((__m128i *)weights, _mm256_castsi256_si128(both));
    _mm_storeu_si128((__m128i *)remainder, _mm256_extracti128_si256(both, 1));
}

typedef struct {
    __m256d part[4];
} vacc;

static inline void vacc_zero(vacc *sums) {
    for (int k = 0; k < 4; k++) sums->part[k] = _mm256_setzero_pd();
}

static inline void vacc_add_squares(vacc *sums, const vf *x) {
    for (int k = 0; k < 4; k++) {
        __m128 half = k % 2 ? _mm256_extractf128_ps(x[k / 2], 1) : _mm256_castps256_ps128(x[k / 2]);
        __m256d wide = _mm256_cvtps_pd(half);
        sums->part[k] = _mm256_fmadd_pd(wide, wide, sums->part[k]);
    }
}

static inline void vacc_store(const vacc *sums, double *lanes) {
    for (int k = 0; k < 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums->part[k]);
}

#include "kernels.inc.h"
#endif
