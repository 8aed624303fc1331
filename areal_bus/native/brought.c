/* Bytes brought to another place and summed up on the way, in one pass (areal_bus/checksum.py says what the sum is). */
#include <stdint.h>
#include <string.h>

enum { CHUNK = 2048 }; /* words: what was just written is read from the nearest cache */

/* Each word to its lane: lane * factor + word, from lane `first` on, round and round. */
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

/* n words of 4 bytes as they are. */
void brought(int64_t n, const uint32_t *source, uint32_t *target, int64_t first, int64_t n_lanes, uint32_t factor,
             uint32_t *lanes) {
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t here = n - at < CHUNK ? n - at : CHUNK;
        memcpy(target + at, source + at, (size_t)here * sizeof *source);
        __asm__ volatile("" ::: "memory"); /* what came is summed up, not the source, which somebody may change */
        fold(here, target + at, (first + at) % n_lanes, n_lanes, factor, lanes);
    }
}

/* 2 n float32 numbers, by their bits, rounded to bfloat16: to the nearest, of two to the even one; NaN stays NaN. */
void brought_rounded(int64_t n, const uint32_t *restrict source, uint16_t *restrict target, int64_t first,
                     int64_t n_lanes, uint32_t factor, uint32_t *lanes) {
    uint32_t words[CHUNK];
    for (int64_t at = 0; at < n; at += CHUNK) {
        const int64_t here = n - at < CHUNK ? n - at : CHUNK;
        const uint32_t *restrict from = source + 2 * at;
        uint16_t *restrict to = target + 2 * at;
        for (int64_t i = 0; i < 2 * here; i++) {
            const uint32_t bits = from[i];
            const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
            to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
        }
        memcpy(words, to, (size_t)here * sizeof *words);
        fold(here, words, (first + at) % n_lanes, n_lanes, factor, lanes);
    }
}
