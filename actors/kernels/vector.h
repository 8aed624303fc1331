/* e^x of many numbers at once: written so that a compiler makes vectors of it, within two units of the last place. */
#ifndef AREAL_BUS_VECTOR_H
#define AREAL_BUS_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* 2^n times e^r, where x = n ln 2 + r: e^r by the polynomial of Cephes' expf, 2^n by its bits. Below -87 it is near 0
   and not less, above 88 near the highest number; NaN stays. */
INLINE float exponential(float x) {
    float at = x < -87.0f ? -87.0f : x;
    at = at > 88.0f ? 88.0f : at;
    const float n = floorf(at * 1.44269504088896341f + 0.5f);
#ifdef __FP_FAST_FMAF /* in two steps whatever the flags say of sums: as one product it would be 60 units off */
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, at));
#elif defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
    const float r = __builtin_assoc_barrier(at - n * 0.693359375f) + n * 2.12194440e-4f;
#else
    const float r = at - n * 0.693359375f + n * 2.12194440e-4f;
#endif
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
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
