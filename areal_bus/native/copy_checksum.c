/* Copies bytes and computes their checksum in one pass. areal_bus/weights/checksum.py defines the checksum. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum {
    CHUNK = 2048, /* words: the copy is read again from the nearest cache */
    ROWS = 4      /* rows streamed at once: each lane is loaded and stored once for all of them */
};

/* Add words to lanes: lane * factor + word, from lane `first` on, cyclically. */
static void fold(int64_t n, const uint32_t *restrict words, int64_t first, int64_t n_lanes, uint32_t factor,
                 uint32_t *restrict lanes) {
    while (n > 0) {
        const int64_t here = n < n_lanes - first ? n : n_lanes - first;
        uint32_t *restrict lane = lanes + first;
        for (int64_t i = 0; i < here; i++) lane[i] = lane[i] * factor + words[i];
        words += here;
        n -= here;
        first = 0;
    }
}

#if defined(__AVX512F__) || defined(__AVX2__)
enum {
    LINE = 16,   /* words per cache line */
    AHEAD = 512, /* prefetch distance */
    PAGE = 4096  /* bytes */
};

#ifdef __AVX512F__
enum { WIDE = 16 };
#else
enum { WIDE = 8 };
#endif
typedef uint32_t Words __attribute__((vector_size(WIDE * sizeof(uint32_t))));
typedef Words UnalignedWords __attribute__((aligned(sizeof(uint32_t)), may_alias));

INLINE Words load(const uint32_t *from) { return *(const UnalignedWords *)from; }

/* WIDE float32 numbers rounded to bfloat16: to nearest, ties to even; NaN stays NaN. */
INLINE Words round_bf16(const uint32_t *from) {
    const Words bits = load(from), sum = bits + 0x7fff + (bits >> 16 & 1);
    const Words is_nan = (Words)((bits & 0x7fffffff) > 0x7f800000);
    return (sum >> 16 & ~is_nan) | (is_nan & 0x7fc0);
}

/* 2 WIDE numbers, rounded. */
INLINE Words round_pair(const uint32_t *from) {
    const Words first = round_bf16(from), second = round_bf16(from + WIDE);
#ifdef __AVX512F__
    const __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)first));
    return (Words)_mm512_inserti64x4(low, _mm512_cvtepi32_epi16((__m512i)second), 1);
#else /* packs within halves of a vector, then reorders its quarters */
    return (Words)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)first, (__m256i)second), 0xd8);
#endif
}

INLINE void store_streaming(uint32_t *to, Words words) {
#ifdef __AVX512F__
    _mm512_stream_si512((void *)to, (__m512i)words);
#else
    _mm256_stream_si256((__m256i *)to, (__m256i)words);
#endif
}

/* Copy `here` lanes of n_rows rows to an aligned target with streaming stores, which bypass the caches and need no read
   of the target line. Stored and summed values come from the same load.

   4K aliasing: a load whose page offset equals that of a recent store waits until the store has left for memory, ten
   times as long. So all rows, which have equal page offsets, are loaded before one is stored. If the target is shortly
   ahead of the source in page offset, the loop runs towards lower addresses. Rounded numbers are read twice as fast as
   they are written, so the direction does not matter for them. */
INLINE void stream_rows(const int64_t n_rows, int64_t here, int64_t n_lanes, const uint32_t *source, uint32_t *target,
                 uint32_t factor, uint32_t *lanes, int is_rounded) {
    const uintptr_t ahead = ((uintptr_t)target - (uintptr_t)source) % PAGE;
    const int is_down = !is_rounded && ahead < PAGE / 2;
    const int64_t by = is_down ? -WIDE : WIDE;
    int64_t i = is_down ? here - WIDE : 0;
    for (int64_t left = here; left > 0; left -= WIDE, i += by) {
        Words words[ROWS];
        for (int64_t r = 0; r < n_rows; r++) {
            const int64_t at = r * n_lanes + i;
            const uint32_t *const from = source + (is_rounded ? 2 * at : at);
            if (is_rounded)
                for (int64_t j = 0; j < 2 * WIDE; j += LINE) _mm_prefetch((const char *)(from + AHEAD + j), _MM_HINT_T0);
            words[r] = is_rounded ? round_pair(from) : load(from);
        }
        __asm__ volatile("" ::: "memory"); /* load once, before the stores: another process may change the source */
        Words lane = load(lanes + i);
        for (int64_t r = 0; r < n_rows; r++) {
            store_streaming(target + r * n_lanes + i, words[r]);
            lane = lane * factor + words[r];
        }
        *(UnalignedWords *)(lanes + i) = lane;
    }
}

/* Stream whole rows, ROWS at a time, and whole vectors of the last row. Returns the number of words. */
INLINE int64_t stream(int64_t n, const uint32_t *source, uint32_t *target, int64_t n_lanes, uint32_t factor,
                        uint32_t *lanes, int is_rounded) {
    if (n < WIDE || n_lanes % WIDE || (uintptr_t)target % sizeof(Words)) return 0;
    const int64_t of_source = 1 + is_rounded, part = n % n_lanes / WIDE * WIDE;
    int64_t done = 0, left = n / n_lanes;
    for (; left >= ROWS; left -= ROWS, done += ROWS * n_lanes)
        stream_rows(ROWS, n_lanes, n_lanes, source + done * of_source, target + done, factor, lanes, is_rounded);
    for (; left > 0; left--, done += n_lanes)
        stream_rows(1, n_lanes, n_lanes, source + done * of_source, target + done, factor, lanes, is_rounded);
    stream_rows(1, part, n_lanes, source + done * of_source, target + done, factor, lanes, is_rounded);
    _mm_sfence(); /* make the stores visible to others */
    return done + part;
}
#else
INLINE int64_t stream(int64_t n, const uint32_t *source, uint32_t *target, int64_t n_lanes, uint32_t factor,
                        uint32_t *lanes, int is_rounded) {
    (void)n, (void)source, (void)target, (void)n_lanes, (void)factor, (void)lanes, (void)is_rounded;
    return 0;
}
#endif

/* Copy n words through the caches. */
static void copy_cached(int64_t n, const uint32_t *source, uint32_t *target, int64_t first, int64_t n_lanes,
                        uint32_t factor, uint32_t *lanes) {
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t here = n - at < CHUNK ? n - at : CHUNK;
        memcpy(target + at, source + at, (size_t)here * sizeof *source);
        __asm__ volatile("" ::: "memory"); /* sum the copy: another process may change the source */
        fold(here, target + at, (first + at) % n_lanes, n_lanes, factor, lanes);
    }
}

/* The same for 2 n float32 numbers, rounded to n words of two bfloat16 numbers. */
static void copy_cached_rounded(int64_t n, const uint32_t *restrict source, uint16_t *restrict target, int64_t first,
                           int64_t n_lanes, uint32_t factor, uint32_t *lanes) {
    uint32_t words[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t here = n - at < CHUNK ? n - at : CHUNK;
        const uint32_t *restrict from = source + 2 * at;
        uint16_t *restrict to = target + 2 * at;
        for (int64_t i = 0; i < 2 * here; i++) {
            const uint32_t bits = from[i];
            const uint32_t near = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : near);
        }
        memcpy(words, to, (size_t)here * sizeof *words);
        fold(here, words, (first + at) % n_lanes, n_lanes, factor, lanes);
    }
}

/* Copy n words: to the end of the current row, then streamed rows, then the rest. */
void copy_and_sum(int64_t n, const uint32_t *source, uint32_t *target, int64_t first, int64_t n_lanes, uint32_t factor,
                  uint32_t *lanes) {
    const int64_t head = first ? (n < n_lanes - first ? n : n_lanes - first) : 0;
    copy_cached(head, source, target, first, n_lanes, factor, lanes);
    const int64_t rest = head + stream(n - head, source + head, target + head, n_lanes, factor, lanes, 0);
    copy_cached(n - rest, source + rest, target + rest, (first + rest) % n_lanes, n_lanes, factor, lanes);
}

/* Copy 2 n float32 numbers, rounded to n words of two bfloat16 numbers. */
void copy_and_sum_rounded(int64_t n, const uint32_t *source, uint32_t *target, int64_t first, int64_t n_lanes,
                     uint32_t factor, uint32_t *lanes) {
    const int64_t head = first ? (n < n_lanes - first ? n : n_lanes - first) : 0;
    copy_cached_rounded(head, source, (uint16_t *)target, first, n_lanes, factor, lanes);
    const int64_t rest = head + stream(n - head, source + 2 * head, target + head, n_lanes, factor, lanes, 1);
    uint16_t *const halves = (uint16_t *)(target + rest);
    copy_cached_rounded(n - rest, source + 2 * rest, halves, (first + rest) % n_lanes, n_lanes, factor, lanes);
}
