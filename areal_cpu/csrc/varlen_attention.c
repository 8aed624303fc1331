/* Causal attention of packed sequences, forward and backward. Sequences may share their first tokens' rows.

   A row of qkv has the queries', the keys' and the values' heads of one token. A sequence is a list of rows; of its
   first tokens, `first` many, an earlier sequence has the queries, so here they are only seen.

   All is made of products of small matrices: ROWS rows, as many columns as registers hold. Keys and values of one head
   of a sequence are copied, and transposed where they are the columns; widths are filled up with zeros to SPAN. */
#include "compiler.h"
#include "transpose.h"
#include "simd.h"

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8, WIDE = 2 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4, WIDE = 3 };
#else
enum { LANES = 4, ROWS = 4, WIDE = 2 };
#endif
enum { SPAN = 16, QUERIES = 32 }; /* SPAN is a multiple of LANES, QUERIES of ROWS; QUERIES go together backward */

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    int64_t n_sequences, n_query, n_key, width; /* heads; of a head */
    float scale;
    const int64_t *lengths, *firsts; /* (n_sequences) */
    const int64_t *rows;             /* of all sequences' tokens */
} Packed;

typedef struct {
    int64_t n, first, n_next, filled; /* tokens, of the next one, too; filled up to SPAN */
    const int64_t *rows;              /* of its tokens; then of the next one's */
    int64_t width, wide;              /* of a head; filled up to SPAN */
    int64_t stride, out_stride;       /* of a row of qkv; of all its query heads */
} One;

static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE One one(const Packed *p, int64_t s, const int64_t *rows, const int64_t width) {
    const int64_t n = p->lengths[s], n_next = s + 1 < p->n_sequences ? p->lengths[s + 1] : 0;
    return (One){
        .n = n, .first = p->firsts[s], .n_next = n_next, .filled = up_to(n, SPAN), .rows = rows,
        .width = width, .wide = up_to(width, SPAN),
        .stride = (p->n_query + 2 * p->n_key) * width, .out_stride = p->n_query * width,
    };
}

/* c (ROWS, columns LANES) = or += a (ROWS, depth) b (depth, columns LANES). */
INLINE void tile(int64_t depth, const float *restrict a, int64_t down, int64_t along, const float *restrict b,
                 int64_t b_row, float *restrict c, int64_t c_row, const int columns, const int onto) {
    Lanes sum[ROWS][WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++)
            sum[i][j] = onto ? *(const Lanes *)(c + i * c_row + j * LANES) : (Lanes){0};
    for (int64_t k = 0; k < depth; k++, a += along, b += b_row) {
        Lanes from[WIDE];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            from[j] = *(const Lanes *)(b + j * LANES);
            if (LANES == 8) HELD(from[j]); /* gcc reads it once more for each row else; of sixteen lanes this was not tried */
        }
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += a[i * down] * from[j];
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) *(Lanes *)(c + i * c_row + j * LANES) = sum[i][j];
}

/* c (ROWS, columns) = or += a (ROWS, depth) b (depth, columns); columns are a multiple of SPAN. */
INLINE void product(int64_t columns, int64_t depth, const float *a, int64_t down, int64_t along, const float *b,
                    int64_t b_row, float *c, int64_t c_row, const int onto) {
    int64_t at = 0;
    for (; WIDE == 3 && columns - at >= 3 * LANES && columns - at != 4 * LANES; at += 3 * LANES)
        tile(depth, a, down, along, b + at, b_row, c + at, c_row, WIDE, onto); /* four are better by twice two */
    for (; at + 2 * LANES <= columns; at += 2 * LANES)
        tile(depth, a, down, along, b + at, b_row, c + at, c_row, 2, onto);
    for (; at < columns; at += LANES) tile(depth, a, down, along, b + at, b_row, c + at, c_row, 1, onto);
}

/* A head times `by`, zeros from width to wide; not by memcpy, whose call costs more than so few numbers do. */
INLINE void copy(int64_t width, int64_t wide, float by, const float *from, float *to) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) *(Lanes *)(to + d) = by * *(const Lanes *)(from + d);
    for (; d < width; d++) to[d] = by * from[d];
    for (; d < wide; d++) to[d] = 0.0f;
}

/* A head of n tokens from `at`: to (room, wide), zeros behind them. */
INLINE void collect(const One *o, int64_t at, int64_t n, int64_t room, float by, int64_t stride, const float *from,
                    float *to) {
    const int64_t width = o->width, wide = o->wide, *rows = o->rows + at;
    for (int64_t i = 0; i < n; i++) copy(width, wide, by, from + rows[i] * stride, to + i * wide);
    for (int64_t i = n * wide; i < room * wide; i++) to[i] = 0.0f;
}

/* (filled, wide) -> (wide, filled) */
INLINE void transpose_head(const One *o, const float *from, float *to) {
    for (int64_t i = 0; i < o->filled; i += SPAN)
        for (int64_t d = 0; d < o->wide; d += SPAN)
            transpose_square(from + i * o->wide + d, o->wide, to + d * o->filled + i, o->filled);
}

/* Prefetch, of the next sequence, the rows [at, at + ROWS), a head's share of each: one head at a time its rows would
   come from far memory one by one, and what is asked for this early is here by then. */
INLINE void ask(const One *o, int64_t at, int64_t head, int64_t n_heads, int64_t stride, const float *from) {
    const int64_t begin = head * stride / n_heads, end = (head + 1) * stride / n_heads;
    for (int64_t i = at; i < at + ROWS && i < o->n_next; i++)
        for (int64_t d = begin; d < end; d += 16) __builtin_prefetch(from + o->rows[o->n + i] * stride + d, 0, 2);
}

/* What is soon written, of rows [at, at + ROWS): a head that begins in this column. */
INLINE void ask_to_write(const One *o, int64_t at, int64_t column, const float *to) {
    for (int64_t i = at; i < at + ROWS && i < o->n; i++)
        for (int64_t d = 0; d < o->width; d += 16) __builtin_prefetch(to + o->rows[i] * o->stride + column + d, 1, 3);
}

/* Zeros from n until `all`, a multiple of SPAN. */
INLINE void clear(int64_t n, int64_t all, float *x) {
    for (; n < all && n % SPAN; n++) x[n] = 0.0f;
    for (; n < all; n += LANES) *(Lanes *)(x + n) = (Lanes){0};
}

/* Dot product of two heads. */
INLINE float along(int64_t width, const float *a, const float *b) {
    Lanes lanes = {0};
    float sum = 0.0f;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) lanes += *(const Lanes *)(a + d) * *(const Lanes *)(b + d);
    for (; d < width; d++) sum += a[d] * b[d];
    for (int j = 0; j < LANES; j++) sum += lanes[j];
    return sum;
}

/* Forward pass of one query head: keys_t (wide, filled), values (filled, wide). */
INLINE void forward(const Packed *p, const One *o, int64_t head, const float *qkv, const float *keys_t,
                    const float *values, float *room, float *out, float *total) {
    const int64_t wide = o->wide, filled = o->filled;
    float *query = room, *sums = query + ROWS * wide, *score = sums + ROWS * wide;
    for (int64_t at = o->first; at < o->n; at += ROWS) {
        const int64_t here = o->n - at < ROWS ? o->n - at : ROWS, all = up_to(at + here, SPAN);
        ask(o, at, head, p->n_query, o->stride, qkv);
        collect(o, at, here, ROWS, p->scale, o->stride, qkv + head * o->width, query);
        product(all, wide, query, wide, 1, keys_t, filled, score, filled, 0);
        float most[ROWS] = {0}, sum[ROWS];
        for (int64_t r = 0; r < ROWS; r++) sum[r] = 1.0f;
        for (int64_t r = 0; r < here; r++) {
            const int64_t n = at + r + 1;
            most[r] = highest(n, score + r * filled);
            sum[r] = raised(n, 1.0f, most[r], score + r * filled, score + r * filled);
            clear(n, all, score + r * filled);
        }
        product(wide, at + here, score, filled, 1, values, wide, sums, wide, 0);
        for (int64_t r = 0; r < ROWS; r++) most[r] += logarithm(sum[r]);
        for (int64_t r = 0; r < here; r++) {
            const int64_t row = o->rows[at + r];
            copy(o->width, 0, 1.0f / sum[r], sums + r * wide, out + row * o->out_stride + head * o->width);
            total[row * p->n_query + head] = most[r];
        }
    }
}

/* Vector length. With 4 lanes the attention of torch is faster. */
void packed_lanes(int64_t *lanes) { *lanes = LANES; }

INLINE void attend(const Packed *p, const int64_t width, const float *qkv, float *room, float *out, float *total) {
    const int64_t *rows = p->rows, group = p->n_query / p->n_key;
    for (int64_t s = 0; s < p->n_sequences; rows += p->lengths[s++]) {
        const One o = one(p, s, rows, width);
        float *values = room, *keys_t = values + o.filled * o.wide, *rest = keys_t + o.filled * o.wide;
        for (int64_t k = 0; k < p->n_key; k++) {
            const float *key = qkv + (p->n_query + k) * width, *value = key + p->n_key * width;
            collect(&o, 0, o.n, o.filled, 1.0f, o.stride, key, values);
            transpose_head(&o, values, keys_t);
            collect(&o, 0, o.n, o.filled, 1.0f, o.stride, value, values);
            for (int64_t g = k * group; g < (k + 1) * group; g++)
                forward(p, &o, g, qkv, keys_t, values, rest, out, total);
        }
    }
}

/* out (rows, query heads, width); total (rows, query heads): log-sum-exp of the scores. */
void packed_attention(const Packed *p, const float *qkv, float *room, float *out, float *total) {
    switch (p->width) { /* constant widths: copies of a head compile to a few instructions */
    case 32: attend(p, 32, qkv, room, out, total); break;
    case 64: attend(p, 64, qkv, room, out, total); break;
    default: attend(p, p->width, qkv, room, out, total);
    }
}

typedef struct {
    const float *qkv, *out, *total, *grad;
    float *keys, *keys_transposed, *values_transposed; /* (filled, wide), twice (wide, filled) */
    float *by_keys, *by_values;                /* (filled, wide), zeros at first */
    float *query, *grad_out, *by_query;         /* (QUERIES, wide) twice, (ROWS, wide) */
    float *share, *by_score;                   /* (QUERIES, filled) */
    float *by_qkv;
} Back;

INLINE void lay_out(const One *o, float *room, Back *b) {
    const int64_t size = o->filled * o->wide;
    b->keys = room, b->keys_transposed = b->keys + size, b->values_transposed = b->keys_transposed + size;
    b->by_keys = b->values_transposed + size, b->by_values = b->by_keys + size, b->query = b->by_values + size;
    b->grad_out = b->query + QUERIES * o->wide, b->by_query = b->grad_out + QUERIES * o->wide;
    b->share = b->by_query + ROWS * o->wide, b->by_score = b->share + QUERIES * o->filled;
}

/* Of one query that sees n: score becomes its share, e^(score - total), by_share its score's grad,
   share (by_share - mean); then zeros until `all`. */
INLINE void share_back(int64_t n, int64_t all, float total, float mean, float *score, float *by_share) {
#if defined(__AVX512F__)
    for (int64_t k = 0; k < all; k += 16) {
        const __mmask16 visible = first_lanes(n - k < 16 ? n > k ? n - k : 0 : 16);
        const __m512 share = _mm512_maskz_mov_ps(visible, exponentials(_mm512_loadu_ps(score + k) - total));
        _mm512_storeu_ps(score + k, share);
        _mm512_storeu_ps(by_share + k, _mm512_maskz_mul_ps(visible, share, _mm512_loadu_ps(by_share + k) - mean));
    }
#elif defined(__AVX2__) && defined(__FMA__)
    int64_t k = 0;
    for (; k + 8 <= n; k += 8) {
        const __m256 share = exponentials(_mm256_loadu_ps(score + k) - total);
        _mm256_storeu_ps(score + k, share);
        _mm256_storeu_ps(by_share + k, share * (_mm256_loadu_ps(by_share + k) - mean));
    }
    for (; k < all; k += 8) {
        const __m256 visible = _mm256_castsi256_ps(first_lanes(n > k ? n - k : 0));
        const __m256 share = _mm256_and_ps(visible, exponentials(_mm256_loadu_ps(score + k) - total));
        _mm256_storeu_ps(score + k, share);
        _mm256_storeu_ps(by_share + k, _mm256_and_ps(visible, share * (_mm256_loadu_ps(by_share + k) - mean)));
    }
#else
    raised(n, 1.0f, total, score, score);
    clear(n, all, score);
    for (int64_t k = 0; k < n; k += LANES)
        *(Lanes *)(by_share + k) = *(const Lanes *)(score + k) * (*(const Lanes *)(by_share + k) - mean);
    clear(n, all, by_share);
#endif
}

/* ROWS queries of one head, from row `to` of the room on: their gradients, their shares and the gradients of their scores. */
INLINE void back_of_rows(const Packed *p, const One *o, int64_t head, const Back *b, int64_t at, int64_t to) {
    const int64_t wide = o->wide, filled = o->filled, left = o->n - at, here = left < ROWS ? left : ROWS;
    const int64_t most = up_to(at + ROWS, SPAN), all = most < filled ? most : filled, column = head * o->width;
    const int64_t key = (p->n_query + head * p->n_key / p->n_query) * o->width;
    float *query = b->query + to * wide, *grad_out = b->grad_out + to * wide;
    float *share = b->share + to * filled, *by_score = b->by_score + to * filled;
    ask(o, at, head, p->n_query, o->stride, b->qkv);
    collect(o, at, here, ROWS, p->scale, o->stride, b->qkv + column, query);
    collect(o, at, here, ROWS, 1.0f, o->out_stride, b->grad + column, grad_out);
    product(all, wide, query, wide, 1, b->keys_transposed, filled, share, filled, 0);
    ask(o, at, head, p->n_query, o->out_stride, b->out); /* between products: as many at once would wait for one another */
    ask(o, at, head, p->n_query, o->out_stride, b->grad);
    product(all, wide, grad_out, wide, 1, b->values_transposed, filled, by_score, filled, 0);
    ask_to_write(o, at, column, b->by_qkv);
    ask_to_write(o, at, key, b->by_qkv);
    ask_to_write(o, at, key + p->n_key * o->width, b->by_qkv);
    for (int64_t r = 0; r < here; r++) {
        const float *out = b->out + o->rows[at + r] * o->out_stride + column;
        const float mean = along(o->width, out, grad_out + r * wide);
        const float total = b->total[o->rows[at + r] * p->n_query + head];
        share_back(at + r + 1, all, total, mean, share + r * filled, by_score + r * filled);
    }
    for (int64_t r = here; r < ROWS; r++) {
        memset(share + r * filled, 0, all * sizeof(float));
        memset(by_score + r * filled, 0, all * sizeof(float));
    }
    product(wide, at + here, by_score, filled, 1, b->keys, wide, b->by_query, wide, 0);
    for (int64_t r = 0; r < here; r++)
        copy(o->width, 0, p->scale, b->by_query + r * wide, b->by_qkv + o->rows[at + r] * o->stride + column);
}

/* Backward pass of one query head: writes gradients of queries, accumulates those of keys and values in scratch. */
INLINE void backward(const Packed *p, const One *o, int64_t head, const Back *b) {
    const int64_t wide = o->wide, filled = o->filled;
    for (int64_t start = o->first; start < o->n; start += QUERIES) {
        const int64_t end = o->n - start < QUERIES ? o->n : start + QUERIES, padded = up_to(end - start, ROWS);
        for (int64_t at = start; at < end; at += ROWS) back_of_rows(p, o, head, b, at, at - start);
        for (int64_t k = 0; k < end; k += ROWS) {
            const int64_t blind = k >= start + ROWS ? (k - start) / ROWS * ROWS : 0; /* queries before these keys */
            const int64_t depth = padded - blind, from = blind * filled + k;
            product(wide, depth, b->by_score + from, 1, filled, b->query + blind * wide, wide, b->by_keys + k * wide,
                    wide, 1);
            product(wide, depth, b->share + from, 1, filled, b->grad_out + blind * wide, wide, b->by_values + k * wide,
                    wide, 1);
        }
    }
}

/* Write the gradients of a key or value head to their rows; rows of a shared prefix are accumulated. */
INLINE void distribute(const One *o, const float *restrict from, float *restrict to) {
    for (int64_t i = 0; i < o->first; i++)
        for (int64_t d = 0; d < o->width; d++) to[o->rows[i] * o->stride + d] += from[i * o->wide + d];
    for (int64_t i = o->first; i < o->n; i++) copy(o->width, 0, 1.0f, from + i * o->wide, to + o->rows[i] * o->stride);
}

INLINE void attend_back(const Packed *p, const int64_t width, float *room, Back b) {
    const int64_t *rows = p->rows, group = p->n_query / p->n_key;
    for (int64_t s = 0; s < p->n_sequences; rows += p->lengths[s++]) {
        const One o = one(p, s, rows, width);
        lay_out(&o, room, &b);
        for (int64_t k = 0; k < p->n_key; k++) {
            const int64_t key = (p->n_query + k) * width, value = key + p->n_key * width;
            collect(&o, 0, o.n, o.filled, 1.0f, o.stride, b.qkv + value, b.keys);
            transpose_head(&o, b.keys, b.values_transposed);
            collect(&o, 0, o.n, o.filled, 1.0f, o.stride, b.qkv + key, b.keys);
            transpose_head(&o, b.keys, b.keys_transposed);
            memset(b.by_keys, 0, 2 * o.filled * o.wide * sizeof(float));
            for (int64_t g = k * group; g < (k + 1) * group; g++) backward(p, &o, g, &b);
            distribute(&o, b.by_keys, b.by_qkv + key);
            distribute(&o, b.by_values, b.by_qkv + value);
        }
    }
}

/* by_qkv (rows, all heads, width): gradient of qkv from grad, the gradient of out. */
void packed_attention_back(const Packed *p, const float *qkv, const float *out, const float *total, const float *grad,
                           float *room, float *by_qkv) {
    const Back b = {.qkv = qkv, .out = out, .total = total, .grad = grad, .by_qkv = by_qkv};
    switch (p->width) {
    case 32: attend_back(p, 32, room, b); break;
    case 64: attend_back(p, 64, room, b); break;
    default: attend_back(p, p->width, room, b);
    }
}
