/* Matrix products of rows with a weight packed in panels, and the accumulation of weight gradients.

   Sums stay in registers: TALL rows by up to WIDE vectors at once. A panel is PANEL of the weight's outputs, input by
   input: (inputs, PANEL); the last one is filled up. */
#ifndef AREAL_BUS_PRODUCT_H
#define AREAL_BUS_PRODUCT_H

#include "compiler.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, WIDE = 4 };
#elif defined(__AVX__)
enum { LANES = 8, WIDE = 2 };
#else
enum { LANES = 4, WIDE = 4 };
#endif
enum { TALL = 6, PANEL = LANES * WIDE, CHUNK = 96 }; /* CHUNK rows stay in the cache through all products */
enum { LINE = 64 }; /* bytes of a cache line */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define UNROLLED _Pragma("GCC unroll 8")
#define ALWAYS static inline __attribute__((always_inline))

/* The sum over n of left by right: of left a number each of some rows, `beside` apart, of right vectors; one is `left_step`
   behind another, and `right_step`. Meanwhile memory is asked for, so many bytes further each time: `ahead` for the tiles that
   follow, `soon` for what follows all of them. */
typedef struct {
    int64_t n;
    const float *left;
    int64_t beside, left_step;
    const float *right;
    int64_t right_step;
    const char *ahead, *soon;
    int64_t ahead_step, soon_step;
    int is_new; /* out is overwritten, not accumulated */
} Sum;

/* out (rows, vectors) with row length `stride`. */
ALWAYS void tile(const int rows, const int vectors, const Sum of, float *restrict out, int64_t stride) {
    const float *restrict left = of.left, *restrict right = of.right;
    const char *ahead = of.ahead, *soon = of.soon;
    Lanes sum[TALL][WIDE] = {0};
    if (!of.is_new)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int v = 0; v < vectors; v++) sum[r][v] = *(const Lanes *)(out + r * stride + v * LANES);
    for (int64_t i = 0; i < of.n; i++, left += of.left_step, right += of.right_step) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(soon, 1, 2);
        ahead += of.ahead_step, soon += of.soon_step;
        Lanes by[WIDE];
        UNROLLED for (int v = 0; v < vectors; v++) by[v] = *(const Lanes *)(right + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            const float one = left[r * of.beside];
            UNROLLED for (int v = 0; v < vectors; v++) sum[r][v] += by[v] * one;
        }
        if (rows * vectors == 1) HELD(sum[0][0]); /* else a single row would round differently from a row among others */
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int v = 0; v < vectors; v++) *(Lanes *)(out + r * stride + v * LANES) = sum[r][v];
}

#define ROWS(V)                                                                                                        \
    switch (rows) {                                                                                                    \
    case 1: tile(1, V, of, out, stride); break;                                                                        \
    case 2: tile(2, V, of, out, stride); break;                                                                        \
    case 3: tile(3, V, of, out, stride); break;                                                                        \
    case 4: tile(4, V, of, out, stride); break;                                                                        \
    case 5: tile(5, V, of, out, stride); break;                                                                        \
    default: tile(TALL, V, of, out, stride);                                                                           \
    }

/* The same for any number of rows up to TALL and of columns up to PANEL; right has room for whole vectors. */
ALWAYS void tiled(int64_t rows, int64_t columns, const Sum of, float *out, int64_t stride) {
    float part[TALL * PANEL];
    float *const whole = out;
    const int64_t whole_stride = stride, vectors = (columns + LANES - 1) / LANES;
    const int is_torn = columns % LANES != 0; /* the last vector exceeds the row */
    if (is_torn) {
        memset(part, 0, sizeof part);
        for (int64_t r = 0; !of.is_new && r < rows; r++)
            memcpy(part + r * PANEL, whole + r * whole_stride, columns * sizeof(float));
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

/* Memory to prefetch during a product, evenly over its steps. */
typedef struct {
    const void *from;
    int64_t bytes;
} Soon;

static const Soon NONE = {0, 0};

/* A product of so many tiles asks for it; where there is nothing, or nothing more, to ask for, it asks for what it reads itself,
   since memory that is not there is looked for each time anew. */
static void ask_for(Sum *of, int64_t n_tiles, Soon soon) {
    const int64_t steps = n_tiles * of->n, none = soon.bytes == 0 || steps == 0;
    of->soon = none ? (const char *)of->right : soon.from;
    of->soon_step = none ? 0 : (soon.bytes + steps - 1) / steps;
}

/* After a tile. */
static void ask_on(Sum *of, Soon soon) {
    of->soon += of->soon_step * of->n;
    if (of->soon_step && of->soon >= (const char *)soon.from + soon.bytes) {
        of->soon = (const char *)of->right;
        of->soon_step = 0;
    }
}

/* out (n, n_out), or nothing where it is new, plus x (n, n_in) by the weight; what a row gets does not depend on the rows
   beside it. The tiles of a panel ask for the next one, which another process may have driven out of the caches: for all of it
   from 19 rows on, for a part of it before. */
static void multiplied(int64_t n, int64_t n_in, int64_t n_out, const float *x, const float *panels, float *out,
                       int is_new, Soon soon) {
    if (n == 0) return;
    const int64_t n_tiles = (n + TALL - 1) / TALL, whole = PANEL * n_in, share = PANEL * sizeof(float) / n_tiles;
    Sum of = {.n = n_in, .beside = n_in, .left_step = 1, .right = panels, .right_step = PANEL, .is_new = is_new};
    of.ahead_step = share < LINE ? share : LINE;
    ask_for(&of, n_tiles * ((n_out + PANEL - 1) / PANEL), soon);
    for (int64_t first = 0; first < n_out; first += PANEL, of.right += whole) {
        const int64_t here = n_out - first < PANEL ? n_out - first : PANEL;
        of.ahead = (const char *)(here < n_out - first ? of.right + whole : panels); /* at last for the next call's first */
        for (int64_t t = 0; t < n_tiles; t++, of.ahead += of.ahead_step * n_in, ask_on(&of, soon)) {
            const int64_t row = n * t / n_tiles, rows = n * (t + 1) / n_tiles - row; /* as even as can be */
            of.left = x + row * n_in;
            tiled(rows, here, of, out + row * n_out + first, n_out);
        }
    }
}

#endif
