/* The decoupled loss, its gradient and its statistics, token by token, each in one pass. All is float32; what is summed
   goes to float64 every few hundred tokens. NaN and infinities come out as they do of torch's operations. */
#include "exp.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { SPAN = 256 }; /* tokens to a sum in float32 */

/* e^x within two units of the last place, as in simd.h, but from 0 to infinity as torch's: of 2^n one half goes into
   the exponent's bits, the other is a factor, since either end is beyond what one of them has. `past` becomes
   e^x - 1 - x, near 0 by the polynomial itself: there nothing is lost, however small x is. */
INLINE float exponential_past(float x, float *past) {
    const float at = fabsf(x) > 104.0f ? copysignf(104.0f, x) : x;
    const float n = floorf(at * 1.44269504088896341f + 0.5f);
    const float r = reduced(at, n);
    const float rest = PAST_LINE(r) * r * r, near_1 = rest + r + 1.0f;
    const int32_t twos = (int32_t)n, half = twos >> 1;
    uint32_t bits;
    memcpy(&bits, &near_1, sizeof bits);
    bits += (uint32_t)half << 23;
    const uint32_t other_bits = (uint32_t)(twos - half + 127) << 23;
    float raised, other;
    memcpy(&raised, &bits, sizeof raised);
    memcpy(&other, &other_bits, sizeof other);
    raised *= other;
    *past = n == 0.0f ? rest : raised - 1.0f - x;
    return raised;
}

INLINE float exponential(float x) {
    float past;
    return exponential_past(x, &past);
}

INLINE int64_t shorter(int64_t n, int64_t most) { return n < most ? n : most; }

/* weight (n) = e^d with d = prox - behav; sums: of e^d - 1 - d, and the largest |d|. */
void log_ratio(int64_t n, const float *restrict prox, const float *restrict behav, float *restrict weight,
           float *restrict sums) {
    double kl = 0.0;
    int32_t most = 0; /* as bits: of numbers above 0 they are in order, and NaN's are the highest */
    for (int64_t first = 0; first < n; first += SPAN) {
        const int64_t end = first + shorter(n - first, SPAN);
        float here = 0.0f;
        for (int64_t i = first; i < end; i++) weight[i] = prox[i] - behav[i]; /* by itself: not reordered into a sum */
        for (int64_t i = first; i < end; i++) {
            const float d = weight[i];
            int32_t size;
            memcpy(&size, &d, sizeof size);
            size &= INT32_MAX;
            most = size > most ? size : most;
            float past;
            weight[i] = exponential_past(d, &past);
            here += past;
        }
        kl += (double)here;
    }
    sums[0] = (float)kl;
    memcpy(sums + 1, &most, sizeof most);
}

INLINE void clipped_by(int64_t n, float low, float high, const float *restrict theta, const float *restrict anchor,
                       const float *restrict advantage, const float *restrict weight, float *restrict ratio,
                       float *restrict grad, float *restrict sums) {
    double loss = 0.0, n_free = 0.0;
    for (int64_t first = 0; first < n; first += SPAN) {
        const int64_t end = first + shorter(n - first, SPAN);
        float lost = 0.0f, freed = 0.0f;
        for (int64_t i = first; i < end; i++) {
            float worth = advantage[i];
            if (weight) worth *= weight[i];
            const float u = exponential(theta[i] - anchor[i]);
            const float above = u < low ? low : u, within = above > high ? high : above;
            const float gain = u * worth, bounded = within * worth;
            const float held = bounded < gain ? gain : 0.0f;
            lost -= bounded < gain ? bounded : gain;
            freed += gain <= bounded ? 1.0f : 0.0f;
            ratio[i] = u;
            grad[i] = held - gain; /* not gain times 0 or 1, which gcc takes for 0 where gain is NaN */
        }
        loss += (double)lost;
        n_free += (double)freed;
    }
    sums[0] = (float)loss;
    sums[1] = (float)((double)n - n_free);
}

/* ratio (n) = e^(theta - anchor), worth = advantage, times weight (n) where there is one; sums: of the loss
   -min(ratio worth, bounded ratio worth), and the tokens whose bounded branch is smaller; grad (n) = the loss's. */
void clipped(int64_t n, float low, float high, const float *theta, const float *anchor, const float *advantage,
             const float *weight, float *ratio, float *grad, float *sums) {
    if (weight) clipped_by(n, low, high, theta, anchor, advantage, weight, ratio, grad, sums);
    else clipped_by(n, low, high, theta, anchor, advantage, NULL, ratio, grad, sums);
}

/* sums: of weight (n), and of its squares. */
void weight_sums(int64_t n, const float *restrict weight, double *restrict sums) {
    double all = 0.0, squares = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double exact = (double)weight[i];
        all += exact;
        squares += exact * exact;
    }
    sums[0] = all;
    sums[1] = squares;
}
