/* Products of rows with a weight that lies in panels, and what rows add to a weight's slope.

   Sums stay in registers: TALL rows by up to WIDE vectors at once. A panel is PANEL of the weight's outputs, input by
   input: (inputs, PANEL); the last one is filled up. */
#ifndef AREAL_BUS_PRODUCT_H
#define AREAL_BUS_PRODUCT_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 4 };
#elif defined(__AVX__)
enum { LANES = 8, WIDE = 2 };
#else
enum { LANES = 4, WIDE = 4 };
#endif
enum { TALL = 6, PANEL = LANES * WIDE, CHUNK = 96 }; /* rows that are passed through all products, and stay in a cache */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLLED _Pragma("GCC unroll 8")
#define ALWAYS static inline __attribute__((always_inline))

/* out (rows, vectors of a row `stride` long) += the sum over n of left, `rows` numbers `beside` apart, by right, vectors;
   one is `left_step` behind another, and `right_step`. */
ALWAYS void tile(const int rows, const int vectors, int64_t n, const float *restrict left, int64_t beside,
                 int64_t left_step, const float *restrict right, int64_t right_step, float *restrict out,
                 int64_t stride) {
    Lanes sum[TALL][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) sum[r][v] = *(const Lanes *)(out + r * stride + v * LANES);
    for (int64_t i = 0; i < n; i++, left += left_step, right += right_step) {
        Lanes by[WIDE];
        UNROLLED for (int v = 0; v < vectors; v++) by[v] = *(const Lanes *)(right + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            const float one = left[r * beside];
            UNROLLED for (int v = 0; v < vectors; v++) sum[r][v] += by[v] * one;
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) *(Lanes *)(out + r * stride + v * LANES) = sum[r][v];
}

#define ROWS(V)                                                                                                        \
    switch (rows) {                                                                                                    \
    case 1: tile(1, V, n, left, beside, left_step, right, right_step, out, stride); break;                             \
    case 2: tile(2, V, n, left, beside, left_step, right, right_step, out, stride); break;                             \
    case 3: tile(3, V, n, left, beside, left_step, right, right_step, out, stride); break;                             \
    case 4: tile(4, V, n, left, beside, left_step, right, right_step, out, stride); break;                             \
    case 5: tile(5, V, n, left, beside, left_step, right, right_step, out, stride); break;                             \
    default: tile(TALL, V, n, left, beside, left_step, right, right_step, out, stride);                                \
    }

/* The same for any number of rows up to TALL and of columns up to PANEL; right has room for whole vectors. */
ALWAYS void tiled(int64_t rows, int64_t columns, int64_t n, const float *left, int64_t beside, int64_t left_step,
                  const float *right, int64_t right_step, float *out, int64_t stride) {
    float part[TALL * PANEL];
    float *const whole = out;
    const int64_t whole_stride = stride, vectors = (columns + LANES - 1) / LANES;
    const int is_torn = columns % LANES != 0; /* the last vector is not all its row's */
    if (is_torn) {
        memset(part, 0, sizeof part);
        for (int64_t r = 0; r < rows; r++) memcpy(part + r * PANEL, whole + r * whole_stride, columns * sizeof(float));
        out = part, stride = PANEL;
    }
    switch (vectors) {
    case 1: ROWS(1) break;
    case 2: ROWS(2) break;
#if defined(__AVX512F__) || !defined(__AVX__)
    case 3: ROWS(3) break;
#endif
    default: ROWS(WIDE)
    }
    for (int64_t r = 0; is_torn && r < rows; r++)
        memcpy(whole + r * whole_stride, part + r * PANEL, columns * sizeof(float));
}

/* out (n, n_out) += x (n, n_in) by the weight; what a row gets does not depend on the rows beside it. */
static void onto(int64_t n, int64_t n_in, int64_t n_out, const float *x, const float *panels, float *out) {
    const int64_t n_tiles = (n + TALL - 1) / TALL;
    for (int64_t first = 0; first < n_out; first += PANEL, panels += PANEL * n_in)
        for (int64_t t = 0; t < n_tiles; t++) {
            const int64_t row = n * t / n_tiles, rows = n * (t + 1) / n_tiles - row; /* as even as can be */
            tiled(rows, n_out - first < PANEL ? n_out - first : PANEL, n_in, x + row * n_in, n_in, 1, panels, PANEL,
                  out + row * n_out + first, n_out);
        }
}

#endif
