/* Products of rows with a weight as it lies, (outputs, inputs): nothing is copied, and what is far is read once, in order.

   Sums stay in registers, as vectors along the inputs: TALL rows by ACROSS outputs at once. */
#ifndef AREAL_BUS_DOTS_H
#define AREAL_BUS_DOTS_H

#include "gemm.h"

#if defined(__AVX512F__)
#include <immintrin.h>
enum { ACROSS = 4 };
#else
enum { ACROSS = 2 };
#endif

/* The lanes of a vector together, in one order, however many rows there are: by instructions that have one, or in one place. */
#if defined(__AVX512F__)
ALWAYS float gathered(Lanes sum) { return _mm512_reduce_add_ps((__m512)sum); }
#else
static __attribute__((noinline)) float gathered(Lanes sum) {
    float total = 0.0f;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
}
#endif

/* The first n numbers, fewer than LANES, and zeros. */
ALWAYS Lanes first_of(int64_t n, const float *from) {
    Lanes found = {0};
    memcpy(&found, from, n * sizeof(float));
    return found;
}

/* out (rows, across), of which a row is `stride` long, or nothing where it is new, plus x (rows, n) by weight (across, n).
   Meanwhile the weights behind these are asked for, which at last are those of the product that follows, as a rule. */
ALWAYS void dots(const int rows, const int across, int64_t n, const float *restrict x, const float *restrict weight,
                 float *restrict out, int64_t stride, int is_new) {
    const float *const ahead = weight + across * n;
    Lanes sum[TALL][ACROSS] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Lanes by[ACROSS];
        UNROLLED for (int o = 0; o < across; o++) {
            by[o] = *(const Lanes *)(weight + o * n + i);
            __builtin_prefetch(ahead + o * n + i, 0, 2);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            const Lanes one = *(const Lanes *)(x + r * n + i);
            UNROLLED for (int o = 0; o < across; o++) sum[r][o] += by[o] * one;
        }
        if (rows * across == 1) HELD(sum[0][0]); /* else a row alone would be rounded otherwise than beside others */
    }
    for (int o = 0; i < n && o < across; o++) {
        const Lanes by = first_of(n - i, weight + o * n + i);
        for (int r = 0; r < rows; r++) sum[r][o] += by * first_of(n - i, x + r * n + i);
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < across; o++) {
            const float found = gathered(sum[r][o]);
            out[r * stride + o] = is_new ? found : out[r * stride + o] + found;
        }
}

#define DOTS(A)                                                                                                        \
    switch (rows) {                                                                                                    \
    case 1: dots(1, A, n_in, left, weight, to, n_out, is_new); break;                                                  \
    case 2: dots(2, A, n_in, left, weight, to, n_out, is_new); break;                                                  \
    case 3: dots(3, A, n_in, left, weight, to, n_out, is_new); break;                                                  \
    case 4: dots(4, A, n_in, left, weight, to, n_out, is_new); break;                                                  \
    case 5: dots(5, A, n_in, left, weight, to, n_out, is_new); break;                                                  \
    default: dots(TALL, A, n_in, left, weight, to, n_out, is_new);                                                     \
    }

/* out (n, n_out), or nothing where it is new, plus x (n, n_in) by the weight (n_out, n_in); what a row gets does not depend on
   the rows beside it. */
static void dotted(int64_t n, int64_t n_in, int64_t n_out, const float *x, const float *weight, float *out, int is_new) {
    const int64_t n_tiles = (n + TALL - 1) / TALL;
    for (int64_t o = 0, here; o < n_out; o += here, weight += here * n_in) {
        here = n_out - o < ACROSS ? 1 : ACROSS;
        for (int64_t t = 0; t < n_tiles; t++) {
            const int64_t row = n * t / n_tiles, rows = n * (t + 1) / n_tiles - row; /* as even as can be */
            const float *left = x + row * n_in;
            float *to = out + row * n_out + o;
            if (here == ACROSS) {
                DOTS(ACROSS)
            } else {
                DOTS(1)
            }
        }
    }
}

#endif
