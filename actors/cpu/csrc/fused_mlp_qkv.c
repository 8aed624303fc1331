/* What a decoder layer of the Llama family does to each row by itself, forward and backward: its products with weights and
   what is between them. CHUNK rows go through all of it before the next, so that they stay in a cache. Helpers take some of
   the rows, where there are helpers; their sums of slopes are added at the end. All is float32. */
#include "worker_threads.h"
#include "kernels.h"
#include "gemm.h"

void norm(int64_t n, int64_t width, float epsilon, const float *restrict x, float *restrict normed,
          float *restrict rate);
void norm_back(int64_t n, int64_t width, const float *restrict normed, const float *restrict rate,
               float *restrict slope);
void norm_back_onto(int64_t n, int64_t width, const float *restrict normed, const float *restrict rate,
                    const float *restrict there, float *restrict slope);
void gate_back(int64_t n, int64_t width, float *restrict both, float *restrict slope);
void turn(int64_t n, int64_t stride, int64_t n_heads, int64_t width, float sign, const float *cosine, const float *sine,
          float *x);

enum { SOME = 8 * TALL }; /* columns that are copied together */
enum { FEW = CHUNK / 4 }; /* rows that one thread takes, at least */

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
    int64_t n, width, n_out, n_turned, head_width; /* rows; channels of them, and of queries, keys and values */
    float epsilon;
} ProjectedShape;

typedef struct {
    const ProjectedShape *s;
    const float *x, *cosine, *sine, *panels, *bias;
    float *normed, *rate, *out;
} Projected;

static void project(void *of, int64_t first, int64_t end, int who, float *room) {
    const Projected *p = of;
    const ProjectedShape *s = p->s;
    const int64_t width = s->width, n_out = s->n_out, head = s->head_width;
    (void)who, (void)room;
    for (int64_t at = first; at < end; at += CHUNK) {
        const int64_t n = end - at < CHUNK ? end - at : CHUNK;
        const float *x = p->x + at * width;
        float *normed = p->normed + at * width, *to = p->out + at * n_out;
        norm(n, width, s->epsilon, x, normed, p->rate + at);
        for (int64_t row = 0; p->bias && row < n; row++) memcpy(to + row * n_out, p->bias, n_out * sizeof(float));
        multiplied(n, width, n_out, normed, p->panels, to, p->bias == 0, behind(x, n, width, end - at));
        turn(n, n_out, s->n_turned, head, 1.0f, p->cosine + at * head, p->sine + at * head, to);
    }
}

/* x (n, width), its norm by a weight, then turned: out (n, n_out). */
void projected(const ProjectedShape *s, const float *x, const float *cosine, const float *sine, const float *panels,
               const float *bias, float *normed, float *rate, float *out) {
    Projected of = {s, x, cosine, sine, panels, bias, normed, rate, out};
    shared_out(s->n, FEW, CHUNK, 0, project, 0, &of);
}

typedef struct {
    const ProjectedShape *s;
    float *slope;
    const float *cosine, *sine, *normed, *rate, *panels;
    float *by_x, *by_weight, *by_bias;
    char has_begun[CREW]; /* a helper, whose room has slopes of weight and bias */
} ProjectedBack;

static void project_back(void *of, int64_t first, int64_t end, int who, float *room) {
    ProjectedBack *p = of;
    const ProjectedShape *s = p->s;
    const int64_t width = s->width, n_out = s->n_out, head = s->head_width;
    float *by_weight = who ? room : p->by_weight, *by_bias = who && p->by_bias ? room + n_out * width : p->by_bias;
    if (who && !p->has_begun[who]) memset(room, 0, n_out * (width + 1) * sizeof(float));
    p->has_begun[who] = 1;
    for (int64_t at = first; at < end; at += CHUNK) {
        const int64_t n = end - at < CHUNK ? end - at : CHUNK;
        const float *normed = p->normed + at * width;
        float *here = p->slope + at * n_out, *by_x = p->by_x + at * width;
        turn(n, n_out, s->n_turned, head, -1.0f, p->cosine + at * head, p->sine + at * head, here);
        for (int64_t row = 0; by_bias && row < n; row++) added(n_out, here + row * n_out, by_bias);
        grown(n, n_out, width, here, normed, by_weight, behind(normed, n, width, end - at));
        multiplied(n, n_out, width, here, p->panels, by_x, 1, behind(here, n, n_out, end - at));
        norm_back(n, width, normed, p->rate + at, by_x);
    }
}

static void gather_projected(void *of, int who, const float *room) {
    const ProjectedBack *p = of;
    const int64_t n_weight = p->s->n_out * p->s->width;
    if (!p->has_begun[who]) return;
    added(n_weight, room, p->by_weight);
    if (p->by_bias) added(p->s->n_out, room + n_weight, p->by_bias);
}

/* slope (n, n_out) by what was turned; it is turned back in place. by_x (n, width); added to by_weight (n_out, width) and,
   where there is one, by_bias (n_out). */
void projected_back(const ProjectedShape *s, float *slope, const float *cosine, const float *sine, const float *normed,
                    const float *rate, const float *panels, float *by_x, float *by_weight, float *by_bias) {
    ProjectedBack of = {s, slope, cosine, sine, normed, rate, panels, by_x, by_weight, by_bias, {0}};
    shared_out(s->n, FEW, CHUNK, s->n_out * (s->width + 1), project_back, gather_projected, &of);
}

typedef struct {
    int64_t n, width, n_seen, n_gates; /* rows; channels of them, of what attention saw */
    float epsilon;
} FedShape;

typedef struct {
    const FedShape *s;
    const float *x, *seen, *out_panels, *gate_up_panels, *down_panels;
    float *normed, *rate, *both, *room, *out;
} Fed;

static void feed(void *of, int64_t first, int64_t end, int who, float *room) {
    const Fed *f = of;
    const int64_t width = f->s->width, n_gates = f->s->n_gates, n_seen = f->s->n_seen;
    float *let = who ? room : f->room;
    for (int64_t at = first; at < end; at += CHUNK) {
        const int64_t n = end - at < CHUNK ? end - at : CHUNK;
        const float *x = f->x + at * width, *seen = f->seen + at * n_seen;
        float *h = f->out + at * width, *normed = f->normed + at * width, *here = f->both + at * 2 * n_gates;
        memcpy(h, x, n * width * sizeof(float));
        multiplied(n, n_seen, width, seen, f->out_panels, h, 0, NONE);
        norm(n, width, f->s->epsilon, h, normed, f->rate + at);
        multiplied(n, width, 2 * n_gates, normed, f->gate_up_panels, here, 1, behind(x, n, width, end - at));
        gate(n, n_gates, here, let);
        multiplied(n, n_gates, width, let, f->down_panels, h, 0, behind(seen, n, n_seen, end - at));
    }
}

/* out (n, width) = h + down of what the gates let through of norm(h), where h = x + out of seen. `room` (CHUNK, n_gates). */
void fed(const FedShape *s, const float *x, const float *seen, const float *out_panels, const float *gate_up_panels,
         const float *down_panels, float *normed, float *rate, float *both, float *room, float *out) {
    Fed of = {s, x, seen, out_panels, gate_up_panels, down_panels, normed, rate, both, room, out};
    shared_out(s->n, FEW, CHUNK, CHUNK * s->n_gates, feed, 0, &of);
}

typedef struct {
    const float *out, *gate_up, *down;  /* panels of the transposes */
    float *by_out, *by_gate_up, *by_down; /* (width, n_seen), (2 n_gates, width), (width, n_gates): added to */
} FedWeights;

typedef struct {
    const FedShape *s;
    const FedWeights *weights;
    const float *slope, *seen, *normed, *rate;
    float *both, *room, *by_x, *by_seen;
    char has_begun[CREW]; /* a helper, whose room has slopes of the weights, one behind the other, and a room */
} FedBack;

static void feed_back(void *of, int64_t first, int64_t end, int who, float *room) {
    FedBack *f = of;
    const FedWeights *weights = f->weights;
    const int64_t width = f->s->width, n_gates = f->s->n_gates, n_seen = f->s->n_seen;
    const int64_t n_out = width * n_seen, n_down = width * n_gates;
    float *by_out = weights->by_out, *by_gate_up = weights->by_gate_up, *by_down = weights->by_down, *let = f->room;
    if (who) {
        by_out = room, by_down = by_out + n_out, by_gate_up = by_down + n_down, let = by_gate_up + 2 * n_down;
        if (!f->has_begun[who]) memset(room, 0, (n_out + 3 * n_down) * sizeof(float));
        f->has_begun[who] = 1;
    }
    for (int64_t at = first; at < end; at += CHUNK) {
        const int64_t n = end - at < CHUNK ? end - at : CHUNK;
        const float *from = f->slope + at * width, *z = f->normed + at * width, *seen = f->seen + at * n_seen;
        float *here = f->both + at * 2 * n_gates, *h = f->by_x + at * width;
        multiplied(n, width, n_gates, from, weights->down, let, 1, rows_of(here, n, 2 * n_gates));
        gate_back(n, n_gates, here, let);
        grown(n, width, n_gates, from, let, by_down, rows_of(z, n, width));
        grown(n, 2 * n_gates, width, here, z, by_gate_up, rows_of(seen, n, n_seen));
        multiplied(n, 2 * n_gates, width, here, weights->gate_up, h, 1, NONE);
        norm_back_onto(n, width, z, f->rate + at, from, h);
        grown(n, width, n_seen, h, seen, by_out, behind(from, n, width, end - at));
        multiplied(n, width, n_seen, h, weights->out, f->by_seen + at * n_seen, 1, NONE);
    }
}

static void gather_fed(void *of, int who, const float *room) {
    const FedBack *f = of;
    const int64_t n_out = f->s->width * f->s->n_seen, n_down = f->s->width * f->s->n_gates;
    if (!f->has_begun[who]) return;
    added(n_out, room, f->weights->by_out);
    added(n_down, room + n_out, f->weights->by_down);
    added(2 * n_down, room + n_out + n_down, f->weights->by_gate_up);
}

/* slope (n, width) by `out`; both is used up. by_x (n, width), by_seen (n, n_seen). */
void fed_back(const FedShape *s, const FedWeights *weights, const float *slope, const float *seen, const float *normed,
              const float *rate, float *both, float *room, float *by_x, float *by_seen) {
    FedBack of = {s, weights, slope, seen, normed, rate, both, room, by_x, by_seen, {0}};
    const int64_t n_out = s->width * s->n_seen, n_down = s->width * s->n_gates;
    shared_out(s->n, FEW, CHUNK, n_out + 3 * n_down + CHUNK * s->n_gates, feed_back, gather_fed, &of);
}
