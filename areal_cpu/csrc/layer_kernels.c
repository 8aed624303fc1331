/* RMSNorm, RoPE and SwiGLU, forward and backward, each in one pass, and log-probs. All is float32. */
#include "kernels.h"
#include "transpose.h"
#include "simd.h"

/* out (n, width) = x over its root mean square, times scale (width): of a forward alone, which keeps nothing. */
void normed(int64_t n, int64_t width, float epsilon, const float *restrict x, const float *restrict scale,
            float *restrict out) {
    for (int64_t row = 0; row < n; row++, x += width, out += width) {
        float power = 0.0f;
        for (int64_t i = 0; i < width; i++) power += x[i] * x[i];
        const float rstd = 1.0f / sqrtf(power / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * rstd * scale[i];
    }
}

/* normed (n, width) = x / rms(x); rstd (n) = 1 / rms(x). */
void norm(int64_t n, int64_t width, float epsilon, const float *restrict x, float *restrict normed,
          float *restrict rstd) {
    for (int64_t row = 0; row < n; row++, x += width, normed += width) {
        float power = 0.0f;
        for (int64_t i = 0; i < width; i++) power += x[i] * x[i];
        const float by = 1.0f / sqrtf(power / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) normed[i] = x[i] * by;
        rstd[row] = by;
    }
}

/* grad (n, width) of the norm becomes the gradient of x: rstd (grad - normed mean(grad normed)). */
void norm_back(int64_t n, int64_t width, const float *restrict normed, const float *restrict rstd,
               float *restrict grad) {
    for (int64_t row = 0; row < n; row++, grad += width, normed += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += grad[i] * normed[i];
        const float by = rstd[row], mean = sum / (float)width;
        for (int64_t i = 0; i < width; i++) grad[i] = by * (grad[i] - mean * normed[i]);
    }
}

/* The same plus there (n, width). */
void norm_back_onto(int64_t n, int64_t width, const float *restrict normed, const float *restrict rstd,
                    const float *restrict there, float *restrict grad) {
    for (int64_t row = 0; row < n; row++, grad += width, normed += width, there += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += grad[i] * normed[i];
        const float by = rstd[row], mean = sum / (float)width;
        for (int64_t i = 0; i < width; i++) grad[i] = there[i] + by * (grad[i] - mean * normed[i]);
    }
}

enum { PIECE = 512 };

/* 1 / (1 + e^-x) of a chunk. */
INLINE int64_t opened(int64_t left, const float *restrict x, float *restrict share) {
    const int64_t n = left < PIECE ? left : PIECE;
    raised(n, -1.0f, 0.0f, x, share);
    for (int64_t i = 0; i < n; i++) share[i] = 1.0f / (1.0f + share[i]);
    return n;
}

/* gated (n, width) = silu(gate) * up, where a row of both (n, 2 width) is gate, then up. */
void gate(int64_t n, int64_t width, const float *restrict both, float *restrict gated) {
    float share[PIECE];
    for (int64_t row = 0; row < n; row++, both += 2 * width, gated += width)
        for (int64_t at = 0; at < width; at += PIECE) {
            const int64_t here = opened(width - at, both + at, share);
            for (int64_t i = 0; i < here; i++) gated[at + i] = both[at + i] * share[i] * both[width + at + i];
        }
}

/* In place: both becomes its gradient and grad (n, width) becomes the gated values. */
void gate_back(int64_t n, int64_t width, float *restrict both, float *restrict grad) {
    float share[PIECE];
    for (int64_t row = 0; row < n; row++, both += 2 * width, grad += width)
        for (int64_t at = 0; at < width; at += PIECE) {
            const int64_t here = opened(width - at, both + at, share);
            float *restrict gates = both + at, *restrict up = both + width + at, *restrict gated = grad + at;
            for (int64_t i = 0; i < here; i++) {
                const float open = gates[i] * share[i], through = up[i], by = gated[i];
                gates[i] = by * through * (share[i] + open * (1.0f - share[i]));
                up[i] = by * open;
                gated[i] = open * through;
            }
        }
}

/* (n, width) -> (width, n). */
void transpose(int64_t n, int64_t width, const float *from, float *to) {
    const int64_t rows = n / 16 * 16, columns = width / 16 * 16;
    for (int64_t d = 0; d < columns; d += 16)
        for (int64_t i = 0; i < rows; i += 16) transpose_square(from + i * width + d, width, to + d * n + i, n);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = i < rows ? columns : 0; d < width; d++) to[d * n + i] = from[i * width + d];
}

/* Backward of weight * scale (width): grad (n, width) becomes the gradient of the weight; by_scale (width). */
void scale_back(int64_t n, int64_t width, const float *restrict weight, const float *restrict scale,
                float *restrict grad, float *restrict by_scale) {
    memset(by_scale, 0, width * sizeof(float));
    for (int64_t row = 0; row < n; row++, weight += width, grad += width)
        for (int64_t i = 0; i < width; i++) {
            by_scale[i] += grad[i] * weight[i];
            grad[i] *= scale[i];
        }
}

INLINE void rope_heads(int64_t n_heads, float sign, const float *restrict cosine, const float *restrict sine,
                       float *x, int64_t half) {
    for (int64_t head = 0; head < n_heads; head++) {
        float *restrict first = x + head * 2 * half, *restrict second = first + half;
        for (int64_t d = 0; d < half; d++) {
            const float a = first[d], b = second[d], by = sign * sine[d];
            first[d] = a * cosine[d] - b * by;
            second[d] = b * cosine[d] + a * by;
        }
    }
}

/* The first heads of each row of x (n, stride) are turned in place, in halves of a head, by the row's cosine and sine
   (n, width), whose halves are alike; sign -1 turns them back. */
void rope(int64_t n, int64_t stride, int64_t n_heads, int64_t width, float sign, const float *cosine, const float *sine,
          float *x) {
    for (int64_t row = 0; row < n; row++, x += stride, cosine += width, sine += width)
        switch (width) {
        case 32: rope_heads(n_heads, sign, cosine, sine, x, 16); break;
        case 64: rope_heads(n_heads, sign, cosine, sine, x, 32); break;
        case 128: rope_heads(n_heads, sign, cosine, sine, x, 64); break;
        default: rope_heads(n_heads, sign, cosine, sine, x, width / 2);
        }
}

/* Of rows of scores (n, words): the logarithm of the share of each row's target (n), their entropies (n), and all the
   shares (n, words). */
void target_logprobs(int64_t n, int64_t words, const float *restrict score, const int64_t *restrict target,
                float *restrict logp, float *restrict entropy, float *restrict share) {
    for (int64_t row = 0; row < n; row++, score += words, share += words) {
        const float top = highest(words, score);
        double all = 0.0, weighed = 0.0; /* of parts, which are rounded as the shares are */
        for (int64_t first = 0; first < words; first += PIECE) {
            const int64_t end = first + PIECE < words ? first + PIECE : words;
            float mean = 0.0f;
            all += (double)raised(end - first, 1.0f, top, score + first, share + first);
            for (int64_t i = first; i < end; i++) mean += share[i] * (score[i] - top);
            weighed += (double)mean;
        }
        const float mean = (float)weighed, scale = (float)(1.0 / all), log_total = (float)log(all);
        for (int64_t i = 0; i < words; i++) share[i] *= scale;
        logp[row] = score[target[row]] - top - log_total;
        entropy[row] = log_total - mean * scale;
    }
}
