/* Inverse transform sampling: the token where the running sum of the weights passes uniform * total. */
#include "kernels.h"
#include "simd.h"

enum { PART = 64 }; /* tokens: sums of a part are rounded as the weights are, those of parts are not */

/* Weights e^(rate (x - most)) of one row, their sums by parts; the sum of all. */
static double weighed(int64_t width, float rate, float most, const float *restrict x, float *restrict weight,
                      float *restrict part) {
    double total = 0.0;
    for (int64_t first = 0; first < width; first += PART) {
        const int64_t end = first + PART < width ? first + PART : width;
        float sum = 0.0f;
        for (int64_t i = first; i < end; i++) {
            const float below = rate * (x[i] - most);
            weight[i] = below < -87.0f ? 0.0f : exponential(below);
            sum += weight[i];
        }
        part[first / PART] = sum;
        total += (double)sum;
    }
    return total;
}

/* The token whose interval holds the target, else the last of weight above 0; never one of weight 0. */
static int64_t passed(int64_t width, double target, const float *restrict weight, const float *restrict part) {
    const int64_t n_parts = (width + PART - 1) / PART;
    double upto = 0.0, before = 0.0;
    int64_t in = 0;
    for (int64_t p = 0; p < n_parts && upto <= target; p++)
        if (part[p] > 0.0f) {
            in = p;
            before = upto;
            upto += (double)part[p];
        }
    const int64_t end = (in + 1) * PART < width ? (in + 1) * PART : width;
    int64_t found = in * PART;
    upto = before;
    for (int64_t i = in * PART; i < end && upto <= target; i++)
        if (weight[i] > 0.0f) {
            found = i;
            upto += (double)weight[i];
        }
    return found;
}

/* Of logits (n, width) a token and its log-prob for each row. rate (n) is one over the temperature, 0 for temperature 0:
   then the likeliest token, with its log-prob at temperature 1. weight (width) and part (width / PART, rounded up) are
   room. A row without numbers gets token -1. */
void sampled(int64_t n, int64_t width, const float *restrict logits, const float *restrict rate,
             const double *restrict uniform, float *restrict weight, float *restrict part, int64_t *restrict token,
             float *restrict logp) {
    for (int64_t row = 0; row < n; row++) {
        const float *x = logits + row * width, at = rate[row] > 0.0f ? rate[row] : 1.0f;
        const float most = highest(width, x);
        const double total = weighed(width, at, most, x, weight, part);
        token[row] = -1;
        logp[row] = 0.0f;
        if (!(total > 0.0 && total <= (double)width * 1.001)) continue; /* each weight is 1 at most, and NaN is not */
        int64_t found = 0;
        if (rate[row] > 0.0f)
            found = passed(width, uniform[row] * total, weight, part);
        else
            while (x[found] < most) found++;
        token[row] = found;
        logp[row] = (float)((double)at * ((double)x[found] - (double)most) - log(total));
    }
}
