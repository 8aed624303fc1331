/* Attention of one new token a row to keys and values in blocks of P positions, and these tokens' own written there.

   A pool has keys or values (blocks, key heads, P, width); float32. A row's blocks are first some of the common pool, then
   its own. Rows are independent of each other: what one gives does not depend on who else is there. */
#include "kernels.h"
#include "simd.h"

enum {
    LINE = 16,    /* floats of a cache line */
    AHEAD = 4096, /* floats: so far before they are read keys are asked for, and values */
};

/* RoPE of one head, half against half. */
INLINE void rope(float *restrict x, const float *restrict cosine, const float *restrict sine, int64_t width) {
    const int64_t half = width / 2;
    for (int64_t d = 0; d < half; d++) {
        const float a = x[d], b = x[d + half];
        x[d] = a * cosine[d] - b * sine[d];
        x[d + half] = b * cosine[d] + a * sine[d];
    }
}

/* A block that is read later, and how many of its positions. */
typedef struct {
    const float *from;
    int64_t n;
} Later;

/* Bring it to the second cache: the first has too few places for what is on its way from far memory. */
INLINE void ask(const float *from, int64_t n) {
    for (int64_t d = 0; d < n; d += LINE) __builtin_prefetch(from + d, 0, 2);
}

/* Queries by keys of one block: score (n). Meanwhile, as many positions of `later` are asked for. */
INLINE void scored(int64_t n, const float *restrict query, const float *restrict keys, const float *later,
                   float *restrict score, int64_t width) {
    for (int64_t p = 0; p < n; p++) {
        if (later) ask(later + p * width, width);
        float sum = 0.0f;
        for (int64_t d = 0; d < width; d++) sum += query[d] * keys[p * width + d];
        score[p] = sum;
    }
}

/* Softmax. */
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

/* Shares of one block's values, added to out; the same of `later`. */
INLINE void gathered(int64_t n, const float *restrict share, const float *restrict values, const float *later,
                     float *restrict out, int64_t width) {
    float sum[WIDEST];
    for (int64_t d = 0; d < width; d++) sum[d] = out[d];
    for (int64_t p = 0; p < n; p++) {
        if (later) ask(later + p * width, width);
        for (int64_t d = 0; d < width; d++) sum[d] += share[p] * values[p * width + d];
    }
    for (int64_t d = 0; d < width; d++) out[d] = sum[d];
}

INLINE const float *block(const Cache *c, int64_t row, int64_t which, const float *far, const float *near,
                          int64_t width) {
    const float *pool = which < c->common[row] ? far : near;
    return pool + c->blocks[row * c->most + which] * c->n_key * P * width;
}

/* The block that is `ahead` of one of a row's, where one row follows another; none behind the last. */
INLINE Later following(const Cache *c, int64_t n, int64_t row, int64_t which, int64_t ahead, const float *far,
                       const float *near, int64_t width) {
    which += ahead;
    while (row < n && which * P > c->at[row]) which -= c->at[row++] / P + 1;
    if (row == n) return (Later){0, 0};
    const int64_t left = c->at[row] + 1 - which * P;
    return (Later){block(c, row, which, far, near, width), left < P ? left : P};
}

/* A key head's part of it: by the first of the query heads that read there. */
INLINE const float *part(Later later, int64_t h, int64_t group, int64_t one) {
    return later.from && h % group == 0 ? later.from + h / group * one : 0;
}

/* What is left of it behind the first n positions. */
INLINE void ask_for_rest(Later later, int64_t n, int64_t n_key, int64_t width) {
    for (int64_t k = 0; k < n_key && n < later.n; k++) ask(later.from + (k * P + n) * width, (later.n - n) * width);
}

INLINE void attend(int64_t n, const Cache *c, float *restrict qkv, const float *restrict cosine,
                   const float *restrict sine, float *restrict score, float *restrict out, int64_t width) {
    const int64_t n_query = c->n_query, n_key = c->n_key, group = n_query / n_key, room = c->most * P, one = P * width;
    const int64_t ahead = AHEAD / (n_key * one) > 1 ? AHEAD / (n_key * one) : 1;
    for (int64_t row = 0; row < n; row++) {
        float *head = qkv + row * (n_query + 2 * n_key) * width, *sums = out + row * n_query * width;
        for (int64_t h = 0; h < n_query + n_key; h++) rope(head + h * width, cosine + row * width, sine + row * width, width);
        const int64_t at = c->at[row], length = at + 1, n_blocks = (length + P - 1) / P;
        const int64_t cell = c->blocks[row * c->most + at / P] * n_key * P + at % P;
        for (int64_t k = 0; k < n_key; k++) {
            memcpy(c->near_keys + (cell + k * P) * width, head + (n_query + k) * width, width * sizeof(float));
            memcpy(c->near_values + (cell + k * P) * width, head + (n_query + n_key + k) * width, width * sizeof(float));
        }
        for (int64_t b = 0; b < n_blocks; b++) {
            const float *keys = block(c, row, b, c->far_keys, c->near_keys, width);
            const int64_t left = length - b * P, here = left < P ? left : P;
            const Later later = following(c, n, row, b, ahead, c->far_keys, c->near_keys, width);
            for (int64_t h = 0; h < n_query; h++)
                scored(here, head + h * width, keys + h / group * one, part(later, h, group, one),
                       score + h * room + b * P, width);
            ask_for_rest(later, here, n_key, width);
        }
        for (int64_t h = 0; h < n_query; h++) shared(length, c->scale, score + h * room);
        memset(sums, 0, n_query * width * sizeof(float));
        for (int64_t b = 0; b < n_blocks; b++) {
            const float *values = block(c, row, b, c->far_values, c->near_values, width);
            const int64_t left = length - b * P, here = left < P ? left : P;
            const Later later = following(c, n, row, b, ahead, c->far_values, c->near_values, width);
            for (int64_t h = 0; h < n_query; h++)
                gathered(here, score + h * room + b * P, values + h / group * one, part(later, h, group, one),
                         sums + h * width, width);
            ask_for_rest(later, here, n_key, width);
        }
    }
}

/* qkv (n, queries + keys + values, width): RoPE is applied to queries and keys in place, keys and values of the new tokens go to
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
