/*
 * CRC32C (Castagnoli, polynomial 0x1EDC6F41, reflected; RFC 3720 appendix B.4), in several variants with equal results.
 * The fastest of those that the processor has is used, found by a short measurement at first use.
 *
 * portable  Tables of eight bytes at a time (slicing-by-8: Kounavis and Berry, "A Systematic Approach to Building High
 *           Performance Software-Based CRC Generators", 2005).
 * sse42     The processor's CRC32C instruction, eight bytes a step. It answers after some cycles; the next may start
 * armv8     before: so three neighbouring stretches are summed at once, and joined. The sum of a followed by b is the
 *           sum of a, moved on over as many zero bytes as b has, xor that of b. Moving on is linear over GF(2): four
 *           tables of 256 entries do it for one fixed length (M. Adler's crc32c.c works the same way).
 * pclmul    Folding by carry-less multiplication (Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 *           PCLMULQDQ Instruction", 2009), in four lanes of 16 bytes; the CRC32C instruction reduces the last of them.
 * vpclmul   The same in four lanes of 32 bytes.
 *
 * Inside this file a sum is the bare register: zaio_crc32c inverts it on the way in and out.
 */
#include "zaio_internal.h"

#include <string.h>

enum { LONG = 4096, SHORT = 256 }; /* bytes of one of the three stretches; multiples of 8 */
static const uint32_t POLYNOMIAL = 0x82f63b78; /* reflected */

typedef struct {
    const char *name;
    uint32_t (*update)(uint32_t crc, const unsigned char *at, size_t num_bytes);
} variant;

static uint32_t slices[8][256];                     /* [k][b]: byte b followed by k zero bytes */
static uint32_t over_long[4][256], over_short[4][256]; /* [k][b]: byte k of a sum, moved on over that many zero bytes */

/* a * b modulo the polynomial, both reflected: the highest bit is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a & 0x80000000) product ^= b;
        b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* x^exponent modulo the polynomial. */
static uint32_t power_of_x(unsigned exponent) {
    uint32_t power = 0x80000000, square = 0x40000000; /* x^0, x^1 */
    for (; exponent; exponent >>= 1, square = multiply(square, square))
        if (exponent & 1) power = multiply(power, square);
    return power;
}

static void make_shift(uint32_t table[4][256], int num_bytes) {
    uint32_t power = power_of_x(8u * (unsigned)num_bytes);
    for (int k = 0; k < 4; k++)
        for (uint32_t byte = 0; byte < 256; byte++) table[k][byte] = multiply(byte << 8 * k, power);
}

static void make_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) slices[0][byte] = multiply(byte, 0x00800000);
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t crc = slices[k - 1][byte];
            slices[k][byte] = crc >> 8 ^ slices[0][crc & 255];
        }
    make_shift(over_long, LONG);
    make_shift(over_short, SHORT);
}

static uint32_t update_portable(uint32_t crc, const unsigned char *at, size_t num_bytes) {
    for (; num_bytes >= 8; num_bytes -= 8, at += 8) {
        uint32_t low = crc ^ (at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        crc = slices[7][low & 255] ^ slices[6][low >> 8 & 255] ^ slices[5][low >> 16 & 255] ^ slices[4][low >> 24] ^
              slices[3][at[4]] ^ slices[2][at[5]] ^ slices[1][at[6]] ^ slices[0][at[7]];
    }
    while (num_bytes--) crc = crc >> 8 ^ slices[0][(crc ^ *at++) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#define HARDWARE "sse42"
#define TARGET __attribute__((target("sse4.2")))
typedef uint64_t sum; /* the instruction's register: no extension between two of them */
#define STEP_8(crc, word) __builtin_ia32_crc32di(crc, word)
#define STEP_1(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), byte)
static bool have_hardware(void) { return __builtin_cpu_supports("sse4.2"); }

#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__

#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#define HARDWARE "armv8"
typedef uint32_t sum;
#ifdef __clang__
#define TARGET __attribute__((target("crc")))
#define STEP_8(crc, word) __builtin_arm_crc32cd(crc, word)
#define STEP_1(crc, byte) __builtin_arm_crc32cb(crc, byte)
#else
#define TARGET __attribute__((target("+crc")))
#define STEP_8(crc, word) __builtin_aarch64_crc32cx(crc, word)
#define STEP_1(crc, byte) __builtin_aarch64_crc32cb(crc, byte)
#endif
static bool have_hardware(void) { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

#endif

#ifdef HARDWARE

static inline uint64_t load(const unsigned char *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static inline uint32_t move_on(uint32_t table[4][256], sum crc) {
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
}

/* As many groups of three stretches as there are. */
TARGET static inline sum update_three(sum crc, const unsigned char **at, size_t *num_bytes, size_t stretch,
                                      uint32_t table[4][256]) {
    const unsigned char *from = *at;
    for (; *num_bytes >= 3 * stretch; *num_bytes -= 3 * stretch) {
        sum second = 0, third = 0;
        for (const unsigned char *until = from + stretch; from < until; from += 8) {
            crc = STEP_8(crc, load(from));
            second = STEP_8(second, load(from + stretch));
            third = STEP_8(third, load(from + 2 * stretch));
        }
        crc = move_on(table, crc) ^ second;
        crc = move_on(table, crc) ^ third;
        from += 2 * stretch;
    }
    *at = from;
    return crc;
}

TARGET static inline uint32_t update_words(sum crc, const unsigned char *at, size_t num_bytes) {
    for (; num_bytes >= 8; num_bytes -= 8, at += 8) crc = STEP_8(crc, load(at));
    while (num_bytes--) crc = STEP_1(crc, *at++);
    return (uint32_t)crc;
}

TARGET static uint32_t update_hardware(uint32_t start, const unsigned char *at, size_t num_bytes) {
    sum crc = start;
    for (; num_bytes && (uintptr_t)at % 8; num_bytes--) crc = STEP_1(crc, *at++);
    crc = update_three(crc, &at, &num_bytes, LONG, over_long);
    crc = update_three(crc, &at, &num_bytes, SHORT, over_short);
    return update_words(crc, at, num_bytes);
}

#endif

#if defined(__x86_64__) && defined(HARDWARE)
#define FOLDING __attribute__((target("sse4.2,pclmul")))
#define AHEAD(at) _mm_prefetch((const char *)((uintptr_t)(at) + 2048), _MM_HINT_T0) /* a quarter faster from DRAM */

/*
 * A lane holds 128 bits of a message that has the same sum as all that it has taken in: bit i stands for x^(127 - i),
 * so its low half L is the one with the high powers. Moved on by n bytes it is, modulo the polynomial,
 *     L x^(8n + 64) + H x^(8n)
 * and that is added to the 16 bytes which are n bytes further. A power of x is a constant of 32 bits (power_of_x), in
 * whose register bit j stands for x^(31 - j). The instruction adds bit numbers: i of L and j of the constant give bit
 * i + j, which as part of a lane stands for x^(127 - i - j), and should for x^(63 - i) x^(31 - j) = x^(94 - i - j). It
 * is x^33 too much; hence the constants are x^(8n + 31) and x^(8n - 33).
 */
typedef struct { uint64_t low, high; } distance;
static distance by_16, by_32, by_64, by_128; /* bytes */

static distance make_distance(unsigned num_bytes) {
    return (distance){power_of_x(8 * num_bytes + 31), power_of_x(8 * num_bytes - 33)};
}

static void make_distances(void) {
    by_16 = make_distance(16);
    by_32 = make_distance(32);
    by_64 = make_distance(64);
    by_128 = make_distance(128);
}

FOLDING static inline __m128i load_16(const void *at) { return _mm_loadu_si128(at); }

FOLDING static inline __m128i fold(__m128i lane, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(lane, by, 0x00), high = _mm_clmulepi64_si128(lane, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* The sum of a lane, then of what follows it. */
FOLDING static inline uint32_t finish(__m128i lane, const unsigned char *at, size_t num_bytes) {
    uint64_t crc = STEP_8(0, (uint64_t)_mm_cvtsi128_si64(lane));
    return update_words(STEP_8(crc, (uint64_t)_mm_extract_epi64(lane, 1)), at, num_bytes);
}

FOLDING static uint32_t update_pclmul(uint32_t crc, const unsigned char *at, size_t num_bytes) {
    size_t head = -(uintptr_t)at % 16;
    if (num_bytes < head + 128) return update_hardware(crc, at, num_bytes);
    crc = update_words(crc, at, head);
    at += head, num_bytes -= head + 64;
    __m128i a = _mm_xor_si128(load_16(at), _mm_cvtsi32_si128((int)crc)), b = load_16(at + 16);
    __m128i c = load_16(at + 32), d = load_16(at + 48), by = load_16(&by_64);
    for (at += 64; num_bytes >= 64; num_bytes -= 64, at += 64) {
        AHEAD(at);
        a = fold(a, by, load_16(at));
        b = fold(b, by, load_16(at + 16));
        c = fold(c, by, load_16(at + 32));
        d = fold(d, by, load_16(at + 48));
    }
    by = load_16(&by_16);
    return finish(fold(fold(fold(a, by, b), by, c), by, d), at, num_bytes);
}

static bool have_pclmul(void) { return have_hardware() && __builtin_cpu_supports("pclmul"); }

#if __GNUC__ >= 8 || (defined(__clang__) && __clang_major__ >= 7)
#define WIDE __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))

WIDE static inline __m256i load_32(const void *at) { return _mm256_loadu_si256(at); }
WIDE static inline __m256i load_twice(const void *at) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(at)); }

WIDE static inline __m256i fold_wide(__m256i lane, __m256i by, __m256i next) {
    __m256i low = _mm256_clmulepi64_epi128(lane, by, 0x00), high = _mm256_clmulepi64_epi128(lane, by, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

WIDE static uint32_t update_vpclmul(uint32_t crc, const unsigned char *at, size_t num_bytes) {
    size_t head = -(uintptr_t)at % 32;
    if (num_bytes < head + 256) return update_pclmul(crc, at, num_bytes);
    crc = update_words(crc, at, head);
    at += head, num_bytes -= head + 128;
    __m256i a = _mm256_xor_si256(load_32(at), _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, (int)crc)), b = load_32(at + 32);
    __m256i c = load_32(at + 64), d = load_32(at + 96), by = load_twice(&by_128);
    for (at += 128; num_bytes >= 128; num_bytes -= 128, at += 128) {
        AHEAD(at);
        AHEAD(at + 64);
        a = fold_wide(a, by, load_32(at));
        b = fold_wide(b, by, load_32(at + 32));
        c = fold_wide(c, by, load_32(at + 64));
        d = fold_wide(d, by, load_32(at + 96));
    }
    by = load_twice(&by_32);
    a = fold_wide(fold_wide(fold_wide(a, by, b), by, c), by, d);
    __m128i lane = fold(_mm256_castsi256_si128(a), load_16(&by_16), _mm256_extracti128_si256(a, 1));
    return finish(lane, at, num_bytes);
}

static bool have_vpclmul(void) {
    return have_pclmul() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
}
#endif
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static variant found[4]; /* those of this processor; the tables first */
static int num_found;
static const variant *_Atomic chosen;

static void add(const char *name, uint32_t (*update)(uint32_t, const unsigned char *, size_t)) {
    found[num_found++] = (variant){name, update};
}

/* Which one wins may differ from run to run, where two are about as fast; the sums do not. */
static const variant *measure(void) {
    enum { NUM_BYTES = 8192, NUM_ROUNDS = 6 };
    unsigned char sample[NUM_BYTES];
    for (int i = 0; i < NUM_BYTES; i++) sample[i] = (unsigned char)(i * i >> 3);
    uint32_t expected = update_portable(0, sample, NUM_BYTES);
    const variant *best = found;
    int64_t least = INT64_MAX;
    for (int round = 0; round < NUM_ROUNDS; round++)
        for (int i = 0; i < num_found; i++) {
            int64_t start = now_ns();
            bool right = found[i].update(0, sample, NUM_BYTES) == expected;
            int64_t time = now_ns() - start;
            if (right && time < least) least = time, best = &found[i];
        }
    return best;
}

static void setup(void) {
    make_tables();
    add("portable", update_portable);
#ifdef HARDWARE
    if (have_hardware()) add(HARDWARE, update_hardware);
#endif
#ifdef FOLDING
    make_distances();
    if (have_pclmul()) add("pclmul", update_pclmul);
#endif
#ifdef WIDE
    if (have_vpclmul()) add("vpclmul", update_vpclmul);
#endif
    atomic_store(&chosen, measure());
}

uint32_t zaio_crc32c(uint32_t seed, const char *data, int64_t num_bytes) {
    pthread_once(&once, setup);
    const variant *variant = atomic_load_explicit(&chosen, memory_order_relaxed);
    return ~variant->update(~seed, (const unsigned char *)data, (size_t)num_bytes);
}

const char *zaio_crc32c_variant(void) {
    pthread_once(&once, setup);
    return atomic_load(&chosen)->name;
}

const char *zaio_testing_crc32c_name(int index) {
    pthread_once(&once, setup);
    return index >= 0 && index < num_found ? found[index].name : NULL;
}

void zaio_testing_crc32c_use(int index) {
    pthread_once(&once, setup);
    if (index >= 0 && index < num_found) atomic_store(&chosen, &found[index]);
}
