/* e^x of many numbers at once, within two units of the last place, logarithms, maxima: as vectors of a compiler or, where
   it finds slower ones, in those of AVX-512 or AVX2. */
#ifndef AREAL_BUS_VECTOR_H
#define AREAL_BUS_VECTOR_H

#include "exp.h"
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

/* 2^n times e^r, where x = n ln 2 + r: e^r by the polynomial of Cephes' expf, 2^n by its bits. Below -87 it is near 0
   and not less, above 88 near the highest number; NaN stays. */
INLINE float exponential(float x) {
    float at = x < -87.0f ? -87.0f : x;
    at = at > 88.0f ? 88.0f : at;
    const float n = floorf(at * 1.44269504088896341f + 0.5f);
    const float r = reduced(at, n);
    const float y = PAST_LINE(r) * r * r + r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* Of x > 0, which is neither tiny nor infinite, within three units of the last place: the polynomial of Cephes' logf. */
INLINE float logarithm(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t power = (int32_t)(bits - 0x3f3504f3u) >> 23; /* x = 2^power times what is around 1 */
    bits -= (uint32_t)power << 23;
    float rest;
    memcpy(&rest, &bits, sizeof rest);
    const float r = rest - 1.0f, n = (float)power;
    float y = 7.0376836292e-2f;
    y = y * r - 1.1514610310e-1f;
    y = y * r + 1.1676998740e-1f;
    y = y * r - 1.2420140846e-1f;
    y = y * r + 1.4249322787e-1f;
    y = y * r - 1.6668057665e-1f;
    y = y * r + 2.0000714765e-1f;
    y = y * r - 2.4999993993e-1f;
    y = y * r + 3.3333331174e-1f;
    return n * 0.693147180559945f + (r + r * r * (y * r - 0.5f));
}

#if defined(__AVX512F__)
/* Of sixteen. As instructions, since no compiler finds those for bounds where NaN is to stay: NaN comes second. */
INLINE __m512 exponentials(__m512 x) {
    const __m512 at = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
    const __m512 n = _mm512_floor_ps(at * 1.44269504088896341f + 0.5f);
    const __m512 high = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), at);
    const __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), high);
    const __m512 y = PAST_LINE(r) * r * r + r + 1.0f;
    return _mm512_scalef_ps(y, n);
}

/* The first n lanes, 16 at most. */
INLINE __mmask16 first_lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }

/* to (n) = e^(by from - less); their sum. */
INLINE float raised(int64_t n, float by, float less, const float *from, float *to) {
    __m512 total = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 part = exponentials(by * _mm512_loadu_ps(from + i) - less);
        _mm512_storeu_ps(to + i, part);
        total += part;
    }
    if (i < n) {
        const __mmask16 lanes = first_lanes(n - i);
        const __m512 part = exponentials(by * _mm512_maskz_loadu_ps(lanes, from + i) - less);
        _mm512_mask_storeu_ps(to + i, lanes, part);
        total = _mm512_mask_add_ps(total, lanes, total, part);
    }
    return _mm512_reduce_add_ps(total);
}

/* The highest of n; numbers that are none are passed over. */
INLINE float highest(int64_t n, const float *x) {
    __m512 most = _mm512_set1_ps(-INFINITY), more = most;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        most = _mm512_max_ps(_mm512_loadu_ps(x + i), most);
        more = _mm512_max_ps(_mm512_loadu_ps(x + i + 16), more);
    }
    if (i + 16 <= n) most = _mm512_max_ps(_mm512_loadu_ps(x + i), most), i += 16;
    if (i < n) more = _mm512_max_ps(_mm512_mask_loadu_ps(more, first_lanes(n - i), x + i), more);
    return _mm512_reduce_max_ps(_mm512_max_ps(most, more));
}
#elif defined(__AVX2__) && defined(__FMA__)
/* Of eight; NaN comes second here, too, and stays. */
INLINE __m256 exponentials(__m256 x) {
    const __m256 at = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    const __m256 n = _mm256_floor_ps(at * 1.44269504088896341f + 0.5f);
    const __m256 high = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), at);
    const __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), high);
    const __m256 y = PAST_LINE(r) * r * r + r + 1.0f;
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return y * _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
}

/* The first n lanes, of eight. */
INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The lanes together. */
INLINE float summed(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* to (n) = e^(by from - less); their sum. */
INLINE float raised(int64_t n, float by, float less, const float *from, float *to) {
    __m256 total = _mm256_setzero_ps(), more = total;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m256 one = exponentials(by * _mm256_loadu_ps(from + i) - less);
        const __m256 two = exponentials(by * _mm256_loadu_ps(from + i + 8) - less);
        _mm256_storeu_ps(to + i, one);
        _mm256_storeu_ps(to + i + 8, two);
        total += one, more += two;
    }
    for (; i < n; i += 8) {
        const __m256i lanes = first_lanes(n - i < 8 ? n - i : 8);
        const __m256 part = exponentials(by * _mm256_maskload_ps(from + i, lanes) - less);
        _mm256_maskstore_ps(to + i, lanes, part);
        total += _mm256_and_ps(part, _mm256_castsi256_ps(lanes));
    }
    return summed(total + more);
}

/* The highest of n; numbers that are none are passed over. */
INLINE float highest(int64_t n, const float *x) {
    const __m256 none = _mm256_set1_ps(-INFINITY);
    __m256 most = none, more = none;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        most = _mm256_max_ps(_mm256_loadu_ps(x + i), most);
        more = _mm256_max_ps(_mm256_loadu_ps(x + i + 8), more);
    }
    for (; i < n; i += 8) {
        const __m256i lanes = first_lanes(n - i < 8 ? n - i : 8);
        const __m256 part = _mm256_blendv_ps(none, _mm256_maskload_ps(x + i, lanes), _mm256_castsi256_ps(lanes));
        most = _mm256_max_ps(part, most);
    }
    most = _mm256_max_ps(most, more);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
INLINE float raised(int64_t n, float by, float less, const float *from, float *to) {
    for (int64_t i = 0; i < n; i++) to[i] = exponential(by * from[i] - less);
    float total = 0.0f;
    for (int64_t i = 0; i < n; i++) total += to[i];
    return total;
}

enum { OF_HIGHEST = 16 };

/* The highest of n; numbers that are none are passed over. In lanes, as compilers do not reorder comparisons. */
INLINE float highest(int64_t n, const float *restrict x) {
    float lane[OF_HIGHEST], most = -INFINITY;
    for (int64_t j = 0; j < OF_HIGHEST; j++) lane[j] = -INFINITY;
    int64_t i = 0;
    for (; i + OF_HIGHEST <= n; i += OF_HIGHEST)
        for (int64_t j = 0; j < OF_HIGHEST; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int64_t j = 0; j < OF_HIGHEST; j++) most = lane[j] > most ? lane[j] : most;
    return most;
}
#endif

#endif
