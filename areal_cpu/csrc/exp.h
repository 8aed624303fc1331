/* The e^x of all kernels: x = n ln 2 + r, and the polynomial of Cephes' expf for e^r. */
#ifndef AREAL_BUS_EXPONENT_H
#define AREAL_BUS_EXPONENT_H

#include <math.h>

#define INLINE static inline __attribute__((always_inline))

/* (e^r - 1 - r) / r^2 where |r| <= ln 2 / 2; of a float, or of a vector of them. */
#define PAST_LINE(r)                                                                                                   \
    (((((1.9875691500e-4f * (r) + 1.3981999507e-3f) * (r) + 8.3334519073e-3f) * (r) + 4.1665795894e-2f) * (r) +        \
      1.6666665459e-1f) * (r) + 5.0000001201e-1f)

/* r of x and n, with ln 2 in two parts. */
INLINE float reduced(float x, float n) {
#ifdef __FP_FAST_FMAF /* in two steps whatever the flags say of sums: as one product it would be 60 units off */
    return fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
#elif defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(x - n * 0.693359375f) + n * 2.12194440e-4f;
#else
    return x - n * 0.693359375f + n * 2.12194440e-4f;
#endif
}
#endif
