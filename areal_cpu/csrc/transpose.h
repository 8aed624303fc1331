/* Squares of 16 by 16 numbers, transposed in registers where 16 or 8 fit in one. */
#ifndef AREAL_BUS_TRANSPOSE_H
#define AREAL_BUS_TRANSPOSE_H

#include <stdint.h>

#if defined(__AVX512F__) && !defined(__clang__) /* which has another name for the exchange */
typedef float Sixteen __attribute__((vector_size(64), aligned(4)));
typedef int32_t Choice __attribute__((vector_size(64)));

/* Pairs of rows, `s` apart, exchange what is `s` apart in them. */
#define EXCHANGE(s)                                                                                                    \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) if (!(i & s)) {                                              \
        const Sixteen low = row[i], high = row[i + s];                                                                 \
        const Choice to = {EACH(LOW, s)}, other = {EACH(HIGH, s)};                                                     \
        row[i] = __builtin_shuffle(low, high, to);                                                                     \
        row[i + s] = __builtin_shuffle(low, high, other);                                                              \
    }
#define LOW(l, s) ((l) & (s) ? 16 + (l) - (s) : (l))
#define HIGH(l, s) ((l) & (s) ? 16 + (l) : (l) + (s))
#define EACH(f, s)                                                                                                     \
    f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s),      \
        f(12, s), f(13, s), f(14, s), f(15, s)

static inline void transpose_square(const float *from, int64_t from_row, float *to, int64_t to_row) {
    Sixteen row[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) row[i] = *(const Sixteen *)(from + i * from_row);
    EXCHANGE(8)
    EXCHANGE(4)
    EXCHANGE(2)
    EXCHANGE(1)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) *(Sixteen *)(to + i * to_row) = row[i];
}
#elif defined(__AVX__)
#include <immintrin.h>

/* Eight by eight: numbers of two rows in turn, then pairs of four rows, then halves. */
static inline void transpose_eight(const float *from, int64_t from_row, float *to, int64_t to_row) {
    __m256 row[8], two[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_ps(from + i * from_row);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        two[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        two[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 4) {
        row[i] = _mm256_shuffle_ps(two[i], two[i + 2], 0x44);
        row[i + 1] = _mm256_shuffle_ps(two[i], two[i + 2], 0xee);
        row[i + 2] = _mm256_shuffle_ps(two[i + 1], two[i + 3], 0x44);
        row[i + 3] = _mm256_shuffle_ps(two[i + 1], two[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(row[i], row[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(row[i], row[i + 4], 0x31));
    }
}

static inline void transpose_square(const float *from, int64_t from_row, float *to, int64_t to_row) {
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 16; j += 8) transpose_eight(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
}
#else
static inline void transpose_square(const float *restrict from, int64_t from_row, float *restrict to, int64_t to_row) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

#endif
