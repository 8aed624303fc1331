/* QKV projection and MLP of a Llama decoder layer, forward and backward. A chunk of rows passes all operations before the
   next one, so that it stays in the cache. All is float32. */
#include "kernels.h"
#include "gemm.h"

void norm(int64_t n, int64_t width, float epsilon, const float *restrict x, float *restrict normed,
          float *restrict rstd);
void norm_back(int64_t n, int64_t width, const float *restrict normed, const float *restrict rstd,
               float *restrict grad);
void norm_back_onto(int64_t n, int64_t width, const float *restrict normed, const float *restrict rstd,
                    const float *restrict there, float *restrict grad);
void gate_back(int64_t n, int64_t width, float *restrict both, float *restrict grad);
void rope(int64_t n, int64_t stride, int64_t n_heads, int64_t width, float sign, const float *cosine, const float *sine,
          float *x);

enum { SOME = 8 * TALL }; /* columns copied together */

/* out (n_left, n_right) += left (n, n_left)^T right (n, n_right), for n up to CHUNK. Some columns of left at a time are copied
   side by side, since rows that are a power of two apart drive each other out of the nearest cache. What a tile is added to
   is asked for one tile ahead (but for a group's first): another process may have driven it out of all of them. */
static void grown(int64_t n, int64_t n_left, int64_t n_right, const float *left, const float *right, float *out,
                  Soon soon) {
    float last[CHUNK * PANEL], some[CHUNK * SOME];
    const int64_t whole = n_right / PANEL * PANEL, rest = n_right - whole;
    if (rest) memset(last, 0, sizeof last); /* the last panel of right, which has no room for whole vectors */
    for (int64_t i = 0; rest && i < n; i++) memcpy(last + i * PANEL, right + i * n_right + whole, rest * sizeof(float));
    Sum of = {.n = n, .beside = 1, .left_step = SOME, .right = right};
    ask_for(&of, (n_left + TALL - 1) / TALL * ((n_right + PANEL - 1) / PANEL), soon);
    for (int64_t from = 0; from < n_left; from += SOME) {
        const int64_t here = n_left - from < SOME ? n_left - from : SOME, n_tiles = (here + TALL - 1) / TALL;
        for (int64_t i = 0; i < n; i++) memcpy(some + i * SOME, left + i * n_left + from, here * sizeof(float));
        for (int64_t first = 0; first < n_right; first += PANEL) {
            of.right = first < whole ? right + first : last;
            of.right_step = first < whole ? n_right : PANEL;
            for (int64_t t = 0; t < n_tiles; t++, ask_on(&of, soon)) {
                const int64_t row = here * t / n_tiles, rows = here * (t + 1) / n_tiles - row;
                float *const to = out + (from + row) * n_right + first;
                for (int64_t r = rows; r < rows + TALL; r++)
                    UNROLLED for (int v = 0; v < WIDE; v++) __builtin_prefetch(to + r * n_right + v * LANES, 1);
                of.left = some + row, of.ahead = (const char *)of.left; /* of what is read there is nothing to ask for */
                tiled(rows, first < whole ? PANEL : rest, of, to, n_right);
            }
        }
    }
}

/* Rows of x, `width` long. */
static Soon rows_of(const float *x, int64_t n, int64_t width) {
    return (Soon){x, n * width * (int64_t)sizeof(float)};
}

/* The chunk of x behind its first n rows, where of all that are left some are behind them. */
static Soon behind(const float *x, int64_t n, int64_t width, int64_t left) {
    return rows_of(x + n * width, left - n < CHUNK ? left - n : CHUNK, width);
}

/* out (n) += what is there. */
static void added(int64_t n, const float *restrict there, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] += there[i];
}

/* A weight (n_in, n_out), its columns by scale (n_out) where there is one, in panels: for products with its transpose. */
void panelled_back(int64_t n_in, int64_t n_out, const float *restrict weight, const float *restrict scale,
                   float *restrict panels) {
    for (int64_t first = 0; first < n_out; first += PANEL, panels += PANEL * n_in) {
        const int64_t here = n_out - first < PANEL ? n_out - first : PANEL;
        if (here < PANEL) memset(panels, 0, PANEL * n_in * sizeof(float));
        for (int64_t i = 0; i < n_in; i++) {
            const float *from = weight + i * n_out + first;
            for (int64_t o = 0; o < here; o++) panels[i * PANEL + o] = scale ? from[o] * scale[first + o] : from[o];
        }
    }
}

typedef struct {
    int64_t n, width, n_out, n_rope, head_width; /* rows; channels of them, and of queries, keys and values */
    float epsilon;
} QkvShape;

/* out (n, n_out) = RoPE(RMSNorm(x) W^T + bias), x (n, width). */
void qkv_forward(const QkvShape *s, const float *x, const float *cosine, const float *sine, const float *panels,
               const float *bias, float *normed, float *rstd, float *out) {
    const int64_t width = s->width, n_out = s->n_out, head = s->head_width;
    for (int64_t at = 0; at < s->n; at += CHUNK) {
        const int64_t left = s->n - at, n = left < CHUNK ? left : CHUNK;
        const float *from = x + at * width;
        float *here = normed + at * width, *to = out + at * n_out;
        norm(n, width, s->epsilon, from, here, rstd + at);
        for (int64_t row = 0; bias && row < n; row++) memcpy(to + row * n_out, bias, n_out * sizeof(float));
        multiplied(n, width, n_out, here, panels, to, bias == 0, behind(from, n, width, left));
        rope(n, n_out, s->n_rope, head, 1.0f, cosine + at * head, sine + at * head, to);
    }
}

/* Backward: RoPE of grad (n, n_out) is undone in place. Writes by_x (n, width); adds to by_weight (n_out, width) and, if
   not 0, by_bias (n_out). */
void qkv_backward(const QkvShape *s, float *grad, const float *cosine, const float *sine, const float *normed,
                    const float *rstd, const float *panels, float *by_x, float *by_weight, float *by_bias) {
    const int64_t width = s->width, n_out = s->n_out, head = s->head_width;
    for (int64_t at = 0; at < s->n; at += CHUNK) {
        const int64_t left = s->n - at, n = left < CHUNK ? left : CHUNK;
        const float *z = normed + at * width;
        float *here = grad + at * n_out, *to = by_x + at * width;
        rope(n, n_out, s->n_rope, head, -1.0f, cosine + at * head, sine + at * head, here);
        for (int64_t row = 0; by_bias && row < n; row++) added(n_out, here + row * n_out, by_bias);
        grown(n, n_out, width, here, z, by_weight, behind(z, n, width, left));
        multiplied(n, n_out, width, here, panels, to, 1, behind(here, n, n_out, left));
        norm_back(n, width, z, rstd + at, to);
    }
}

typedef struct {
    int64_t n, width, n_attn, n_gates; /* rows; channels of them, of the attention output */
    float epsilon;
} MlpShape;

/* out (n, width) = h + MLP(RMSNorm(h)), h = x + attn W_out^T. `room` is scratch (CHUNK, n_gates). */
void mlp_forward(const MlpShape *s, const float *x, const float *attn, const float *out_panels, const float *gate_up_panels,
         const float *down_panels, float *normed, float *rstd, float *both, float *room, float *out) {
    const int64_t width = s->width, n_gates = s->n_gates, n_attn = s->n_attn;
    for (int64_t at = 0; at < s->n; at += CHUNK) {
        const int64_t left = s->n - at, n = left < CHUNK ? left : CHUNK;
        const float *from = x + at * width, *here_attn = attn + at * n_attn;
        float *h = out + at * width, *z = normed + at * width, *here = both + at * 2 * n_gates;
        memcpy(h, from, n * width * sizeof(float));
        multiplied(n, n_attn, width, here_attn, out_panels, h, 0, NONE);
        norm(n, width, s->epsilon, h, z, rstd + at);
        multiplied(n, width, 2 * n_gates, z, gate_up_panels, here, 1, behind(from, n, width, left));
        gate(n, n_gates, here, room);
        multiplied(n, n_gates, width, room, down_panels, h, 0, behind(here_attn, n, n_attn, left));
    }
}

typedef struct {
    const float *out, *gate_up, *down;  /* panels of the transposes */
    float *by_out, *by_gate_up, *by_down; /* (width, n_attn), (2 n_gates, width), (width, n_gates): added to */
} MlpWeights;

/* Backward from grad (n, width) of out; overwrites both. Writes by_x (n, width), by_attn (n, n_attn). */
void mlp_backward(const MlpShape *s, const MlpWeights *weights, const float *grad, const float *attn, const float *normed,
              const float *rstd, float *both, float *room, float *by_x, float *by_attn) {
    const int64_t width = s->width, n_gates = s->n_gates, n_attn = s->n_attn;
    for (int64_t at = 0; at < s->n; at += CHUNK) {
        const int64_t left = s->n - at, n = left < CHUNK ? left : CHUNK;
        const float *from = grad + at * width, *z = normed + at * width, *here_attn = attn + at * n_attn;
        float *here = both + at * 2 * n_gates, *h = by_x + at * width;
        multiplied(n, width, n_gates, from, weights->down, room, 1, rows_of(here, n, 2 * n_gates));
        gate_back(n, n_gates, here, room);
        grown(n, width, n_gates, from, room, weights->by_down, rows_of(z, n, width));
        grown(n, 2 * n_gates, width, here, z, weights->by_gate_up, rows_of(here_attn, n, n_attn));
        multiplied(n, 2 * n_gates, width, here, weights->gate_up, h, 1, NONE);
        norm_back_onto(n, width, z, rstd + at, from, h);
        grown(n, width, n_attn, h, here_attn, weights->by_out, behind(from, n, width, left));
        multiplied(n, width, n_attn, h, weights->out, by_attn + at * n_attn, 1, NONE);
    }
}
