/* Products of a few rows with a weight that lies in panels: the rows stay in registers, the weight is read once.

   A panel is PANEL of the weight's outputs, input by input: (inputs, PANEL). The last one is filled up with zeros. */
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
enum { TALL = 6, PANEL = LANES * WIDE }; /* rows and outputs at once: as many sums as there are registers for */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLLED _Pragma("GCC unroll 8")

/* out (rows, PANEL of a row `stride` long) += x (rows, n_in) by a panel. */
static inline __attribute__((always_inline)) void tile(const int rows, int64_t n_in, const float *restrict x,
                                                       const float *restrict panel, float *restrict out,
                                                       int64_t stride) {
    Lanes sum[TALL][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < WIDE; v++) sum[r][v] = *(const Lanes *)(out + r * stride + v * LANES);
    for (int64_t i = 0; i < n_in; i++, panel += PANEL) {
        Lanes weight[WIDE];
        UNROLLED for (int v = 0; v < WIDE; v++) weight[v] = *(const Lanes *)(panel + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            const float by = x[r * n_in + i];
            UNROLLED for (int v = 0; v < WIDE; v++) sum[r][v] += weight[v] * by;
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < WIDE; v++) *(Lanes *)(out + r * stride + v * LANES) = sum[r][v];
}

static void tiled(int rows, int64_t n_in, const float *x, const float *panel, float *out, int64_t stride) {
    switch (rows) {
    case 1: tile(1, n_in, x, panel, out, stride); break;
    case 2: tile(2, n_in, x, panel, out, stride); break;
    case 3: tile(3, n_in, x, panel, out, stride); break;
    case 4: tile(4, n_in, x, panel, out, stride); break;
    case 5: tile(5, n_in, x, panel, out, stride); break;
    default: tile(TALL, n_in, x, panel, out, stride);
    }
}

/* out (n, n_out) += x (n, n_in) by the weight; what a row gets does not depend on the rows beside it. */
static void onto(int64_t n, int64_t n_in, int64_t n_out, const float *x, const float *panels, float *out) {
    const int64_t n_tiles = (n + TALL - 1) / TALL;
    for (int64_t first = 0; first < n_out; first += PANEL, panels += PANEL * n_in) {
        const int64_t here = n_out - first < PANEL ? n_out - first : PANEL;
        for (int64_t t = 0; t < n_tiles; t++) {
            const int64_t row = n * t / n_tiles, rows = n * (t + 1) / n_tiles - row; /* as even as can be */
            float *to = out + row * n_out + first;
            if (here == PANEL) {
                tiled((int)rows, n_in, x + row * n_in, panels, to, n_out);
                continue;
            }
            float part[TALL * PANEL] = {0};
            for (int64_t r = 0; r < rows; r++) memcpy(part + r * PANEL, to + r * n_out, here * sizeof(float));
            tiled((int)rows, n_in, x + row * n_in, panels, part, PANEL);
            for (int64_t r = 0; r < rows; r++) memcpy(to + r * n_out, part + r * PANEL, here * sizeof(float));
        }
    }
}

#endif
