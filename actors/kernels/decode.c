/* Attention of one new token a row to keys and values in blocks of P positions, and these tokens' own written there.

   A pool has keys or values (blocks, key heads, P, width); float32. A row's blocks are first some of the common pool, then
   its own. Rows are independent of each other: what one gives does not depend on who else is there. */
#include "parts.h"
#include "vector.h"

enum {
    LINE = 16, /* floats of a cache line */
    AHEAD = 3, /* key heads */
};

/* A head in its halves, by angles whose halves are alike. */
INLINE void turn(float *restrict x, const float *restrict cosine, const float *restrict sine, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cosine[d] - b * sine[d];
        x[d + half] = b * cosine[d] + a * sine[d];
    }
}

/* Bring what is read soon; where there is nothing to read it does no harm. */
INLINE void ask(const float *next, int64_t width) {
    for (int64_t d = 0; d < width; d += LINE) __builtin_prefetch(next + d);
}

/* Queries by keys of one block: score (n). What is read next is asked for meanwhile. */
INLINE void scored(int64_t n, const float *restrict query, const float *restrict keys, const float *next,
                   float *restrict score, int64_t width) {
    for (int64_t p = 0; p < n; p++) {
        ask(next + p * width, width);
        float sum = 0.0f;
        for (int64_t d = 0; d < width; d++) sum += query[d] * keys[p * width + d];
        score[p] = sum;
    }
}

/* Scores to shares, which add up to 1. */
INLINE void shared(int64_t n, float scale, float *restrict score) {
    const float most = highest(n, score);
    float total = 0.0f;
    for (int64_t p = 0; p < n; p++) {
        score[p] = exponential(scale * (score[p] - most));
        total += score[p];
    }
    const float rate = 1.0f / total;
    for (int64_t p = 0; p < n; p++) score[p] *= rate;
}

/* Shares of one block's values, added to out. */
INLINE void gathered(int64_t n, const float *restrict share, const float *restrict values, const float *next,
                     float *restrict out, int64_t width) {
    float sum[WIDEST];
    for (int64_t d = 0; d < width; d++) sum[d] = out[d];
    for (int64_t p = 0; p < n; p++) {
        ask(next + p * width, width);
        for (int64_t d = 0; d < width; d++) sum[d] += share[p] * values[p * width + d];
    }
    for (int64_t d = 0; d < width; d++) out[d] = sum[d];
}

INLINE const float *block(const Cache *c, int64_t row, int64_t which, const float *far, const float *near,
                          int64_t width) {
    const float *pool = which < c->common[row] ? far : near;
    return pool + c->blocks[row * c->most + which] * c->n_key * P * width;
}

/* What is read AHEAD of this query head's part of a block: a later key head's, or one of the first of another block. */
INLINE const float *following(int64_t h, const Cache *c, const float *here, const float *then, int64_t width) {
    const int64_t ahead = c->n_key < AHEAD ? c->n_key : AHEAD, next = h / (c->n_query / c->n_key) + ahead;
    return next < c->n_key ? here + next * P * width : then + (next - c->n_key) * P * width;
}

INLINE void attend(int64_t n, const Cache *c, float *restrict qkv, const float *restrict cosine,
                   const float *restrict sine, float *restrict score, float *restrict out, int64_t width) {
    const int64_t n_query = c->n_query, n_key = c->n_key, group = n_query / n_key, room = c->most * P, one = P * width;
    for (int64_t row = 0; row < n; row++) {
        float *head = qkv + row * (n_query + 2 * n_key) * width, *sums = out + row * n_query * width;
        for (int64_t h = 0; h < n_query + n_key; h++) turn(head + h * width, cosine + row * width, sine + row * width, width);
        const int64_t at = c->at[row], length = at + 1, n_blocks = (length + P - 1) / P;
        const int64_t cell = c->blocks[row * c->most + at / P] * n_key * P + at % P;
        for (int64_t k = 0; k < n_key; k++) {
            memcpy(c->near_keys + (cell + k * P) * width, head + (n_query + k) * width, width * sizeof(float));
            memcpy(c->near_values + (cell + k * P) * width, head + (n_query + n_key + k) * width, width * sizeof(float));
        }
        for (int64_t b = 0; b < n_blocks; b++) {
            const float *keys = block(c, row, b, c->far_keys, c->near_keys, width);
            const int64_t left = length - b * P, here = left < P ? left : P;
            const float *then = b + 1 < n_blocks ? block(c, row, b + 1, c->far_keys, c->near_keys, width)
                                                 : block(c, row, 0, c->far_values, c->near_values, width);
            for (int64_t h = 0; h < n_query; h++)
                scored(here, head + h * width, keys + h / group * one, following(h, c, keys, then, width),
                       score + h * room + b * P, width);
        }
        for (int64_t h = 0; h < n_query; h++) shared(length, c->scale, score + h * room);
        memset(sums, 0, n_query * width * sizeof(float));
        for (int64_t b = 0; b < n_blocks; b++) {
            const float *values = block(c, row, b, c->far_values, c->near_values, width);
            const int64_t left = length - b * P, here = left < P ? left : P;
            const float *then = b + 1 < n_blocks ? block(c, row, b + 1, c->far_values, c->near_values, width) : values;
            for (int64_t h = 0; h < n_query; h++)
                gathered(here, score + h * room + b * P, values + h / group * one, following(h, c, values, then, width),
                         sums + h * width, width);
        }
    }
}

/* qkv (n, queries + keys + values, width): queries and keys are turned in place, keys and values of the new tokens go to
   their cells, which are in blocks of the row's own; cosine and sine (n, width) of the rows' positions; score
   (queries, most P) is room; out (n, queries, width). */
void attended(int64_t n, int64_t width, const Cache *cache, float *qkv, const float *cosine, const float *sine,
              float *score, float *out) {
    switch (width) {
    case 32: attend(n, cache, qkv, cosine, sine, score, out, 32); break;
    case 64: attend(n, cache, qkv, cosine, sine, score, out, 64); break;
    case 128: attend(n, cache, qkv, cosine, sine, score, out, 128); break;
    default: attend(n, cache, qkv, cosine, sine, score, out, width);
    }
}
