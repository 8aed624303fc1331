/* Decode steps of a whole model of the Llama family: of each row's last token the logits of the next.

   Everything is float32. A layer's norms, rotations, gates and attention are those of layer_kernels.c and paged_attention.c. */
#include "gemv.h"
#include "kernels.h"
#include "gemm.h"
#include "transpose.h"

typedef struct {
    int64_t n_in, n_out;
    const float *panels, *weight, *bias; /* the weight in panels, or else as it lies, (n_out, n_in); bias (n_out), or none */
} Product;

typedef struct {
    const float *first, *second;           /* (width) scales of the norms before attention and before the gates */
    const float *query_norm, *key_norm;    /* (head width), or none */
    Product qkv, out, gate_up, down;
    const float *far_keys, *far_values;
    float *near_keys, *near_values;
} LayerParts;

typedef struct {
    int64_t n_layers, width, n_gates, head_width;
    float epsilon;
    const float *embedding, *norm; /* (vocabulary, width), (width) */
    Product head;
    const LayerParts *layers;
} Model;

/* What Python has to know of sizes (4). */
void sizes(int64_t *found) { found[0] = PANEL, found[1] = CHUNK, found[2] = P, found[3] = WIDEST; }

/* A weight (n_out, n_in), its columns by scale (n_in) where there is one, in panels. */
void panelled(int64_t n_out, int64_t n_in, const float *weight, const float *scale, float *panels) {
    const int64_t inputs = n_in / 16 * 16;
    for (int64_t first = 0; first < n_out; first += PANEL, panels += PANEL * n_in, weight += PANEL * n_in) {
        const int64_t here = n_out - first < PANEL ? n_out - first : PANEL, outputs = here / 16 * 16;
        if (here < PANEL) memset(panels, 0, PANEL * n_in * sizeof(float));
        for (int64_t o = 0; o < outputs; o += 16)
            for (int64_t i = 0; i < inputs; i += 16)
                transpose_square(weight + o * n_in + i, n_in, panels + i * PANEL + o, PANEL);
        for (int64_t o = 0; o < here; o++)
            for (int64_t i = o < outputs ? inputs : 0; i < n_in; i++) panels[i * PANEL + o] = weight[o * n_in + i];
        for (int64_t i = 0; scale && i < n_in; i++)
            for (int64_t o = 0; o < PANEL; o++) panels[i * PANEL + o] *= scale[i];
    }
}

/* out (n, n_out), or nothing where it is new, plus x (n, n_in) by the weight, and its bias. */
static void product(const Product *weight, int64_t n, const float *x, float *out, int is_new) {
    if (weight->panels)
        multiplied(n, weight->n_in, weight->n_out, x, weight->panels, out, is_new, NONE);
    else
        dotted(n, weight->n_in, weight->n_out, x, weight->weight, out, is_new);
    if (weight->bias)
        for (int64_t row = 0; row < n; row++)
            for (int64_t o = 0; o < weight->n_out; o++) out[row * weight->n_out + o] += weight->bias[o];
}

/* Some heads of each row of x (n, stride), in place. */
static void heads_normed(int64_t n, int64_t stride, int64_t n_heads, int64_t width, float epsilon, const float *scale,
                         float *x) {
    float head[WIDEST];
    for (int64_t row = 0; row < n; row++, x += stride)
        for (int64_t h = 0; h < n_heads; h++) {
            memcpy(head, x + h * width, width * sizeof(float));
            normed(1, width, epsilon, head, scale, x + h * width);
        }
}

/* The rotations of the rows' positions: (n, width) of a table (positions, width). */
static void angles(int64_t n, int64_t width, const int64_t *at, const float *table, float *out) {
    for (int64_t row = 0; row < n; row++) memcpy(out + row * width, table + at[row] * width, width * sizeof(float));
}

/* ids (n) are the rows' last tokens, at the cache's positions; cosine and sine (positions, head width). Of `room` there are
   n times: 2 widths, 2 head widths, (n_query + 2 n_key) heads, n_query heads, 3 n_gates; and (n_query, most P).
   Logits (n, vocabulary). */
void decoded(int64_t n, const Model *model, const Cache *cache, const int64_t *ids, const float *cosine,
             const float *sine, float *room, float *logits) {
    const int64_t width = model->width, head = model->head_width, n_query = cache->n_query, n_key = cache->n_key;
    const int64_t stride = (n_query + 2 * n_key) * head;
    float *h = room, *x = h + n * width, *cos = x + n * width, *sin = cos + n * head, *qkv = sin + n * head;
    float *attn = qkv + n * stride, *both = attn + n * n_query * head, *gated = both + 2 * n * model->n_gates;
    float *score = gated + n * model->n_gates;
    angles(n, head, cache->at, cosine, cos);
    angles(n, head, cache->at, sine, sin);
    for (int64_t row = 0; row < n; row++)
        memcpy(h + row * width, model->embedding + ids[row] * width, width * sizeof(float));
    for (int64_t l = 0; l < model->n_layers; l++) {
        const LayerParts *layer = model->layers + l;
        Cache here = *cache;
        here.far_keys = layer->far_keys, here.far_values = layer->far_values;
        here.near_keys = layer->near_keys, here.near_values = layer->near_values;
        normed(n, width, model->epsilon, h, layer->first, x);
        product(&layer->qkv, n, x, qkv, 1);
        if (layer->query_norm) heads_normed(n, stride, n_query, head, model->epsilon, layer->query_norm, qkv);
        if (layer->key_norm) heads_normed(n, stride, n_key, head, model->epsilon, layer->key_norm, qkv + n_query * head);
        attended(n, head, &here, qkv, cos, sin, score, attn);
        product(&layer->out, n, attn, h, 0);
        normed(n, width, model->epsilon, h, layer->second, x);
        product(&layer->gate_up, n, x, both, 1);
        gate(n, model->n_gates, both, gated);
        product(&layer->down, n, gated, h, 0);
    }
    normed(n, width, model->epsilon, h, model->norm, x);
    product(&model->head, n, x, logits, 1);
}

typedef struct {
    int64_t n_steps, n_stops;
    const int64_t *stops;  /* (n_stops) tokens that end a row */
    const float *rate;     /* (n) */
    const double *uniform; /* (n_steps, n) */
    int64_t *at;           /* (n) positions of the rows' tokens: the cache's own */
    int64_t *token;        /* (n_steps, n) */
    float *logp;           /* (n_steps, n) */
    float *weight, *part;  /* room: (vocabulary), and of its parts, as `sampled` has it */
    int64_t n_done;
} Ahead;

static int ends(const Ahead *a, int64_t n, const int64_t *token) {
    for (int64_t row = 0; row < n; row++) {
        if (token[row] < 0) return 1;
        for (int64_t s = 0; s < a->n_stops; s++)
            if (token[row] == a->stops[s]) return 1;
    }
    return 0;
}

/* Steps with sampling between them (see `sampled`), n_steps or until a row ends: one with a stop token, or without numbers. */
void decoded_on(int64_t n, const Model *model, const Cache *cache, const int64_t *ids, const float *cosine, const float *sine,
                float *room, float *logits, Ahead *a) {
    for (int64_t t = 0, is_over = 0; t < a->n_steps && !is_over; t++) {
        int64_t *token = a->token + t * n;
        decoded(n, model, cache, t ? token - n : ids, cosine, sine, room, logits);
        sampled(n, model->head.n_out, logits, a->rate, a->uniform + t * n, a->weight, a->part, token, a->logp + t * n);
        for (int64_t row = 0; row < n; row++) a->at[row]++;
        is_over = ends(a, n, token);
        a->n_done = t + 1;
    }
}
