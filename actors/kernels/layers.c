/* Between a layer's products: root mean square norm, and gates. Rows are contiguous float32. */
#include "vector.h"

/* out (n, width) = x (n, width) over its root mean square, times scale (width). */
void normed(int64_t n, int64_t width, float epsilon, const float *restrict x, const float *restrict scale,
            float *restrict out) {
    for (int64_t row = 0; row < n; row++, x += width, out += width) {
        float power = 0.0f;
        for (int64_t i = 0; i < width; i++) power += x[i] * x[i];
        const float rate = 1.0f / sqrtf(power / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * rate * scale[i];
    }
}

/* out (n, width) = silu(gate) * up, where a row of both (n, 2 width) is its gates, then what they let through. */
void gated(int64_t n, int64_t width, const float *restrict both, float *restrict out) {
    for (int64_t row = 0; row < n; row++, both += 2 * width, out += width)
        for (int64_t i = 0; i < width; i++) out[i] = both[i] / (1.0f + exponential(-both[i])) * both[width + i];
}
