/* Functions and types that several sources of this library share. */
#ifndef AREAL_BUS_PARTS_H
#define AREAL_BUS_PARTS_H

#include <stdint.h>

enum { P = 16, WIDEST = 512 }; /* positions of a block of keys or values; a head's width at most */

/* Keys and values of rows, in blocks of two pools, and where each row's next token is (see paged_attention.c). */
typedef struct {
    int64_t n_query, n_key, most; /* heads; blocks of a row, at most */
    float scale;
    const int64_t *at;     /* (n) position of each row's token */
    const int32_t *blocks; /* (n, most) */
    const int32_t *common; /* (n) how many of them are of the common pool */
    const float *far_keys, *far_values;
    float *near_keys, *near_values;
} Cache;

void attended(int64_t n, int64_t width, const Cache *cache, float *qkv, const float *cosine, const float *sine,
              float *score, float *out);
void normed(int64_t n, int64_t width, float epsilon, const float *restrict x, const float *restrict scale,
            float *restrict out);
void gate(int64_t n, int64_t width, const float *restrict both, float *restrict gated);
void sampled(int64_t n, int64_t width, const float *restrict logits, const float *restrict rate,
             const double *restrict uniform, float *restrict weight, float *restrict part, int64_t *restrict token,
             float *restrict logp);

#endif
