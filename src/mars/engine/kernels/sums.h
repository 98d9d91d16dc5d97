/* Sums of products with packed weights, in matrix tiles; and what goes with them. */

#ifndef MARS_SUMS_H
#define MARS_SUMS_H

#include <stdlib.h>
#include <string.h>

#include "packed.h"
#include "tiles.h"

enum { AHEAD = 3 << 10 }; /* how far ahead of their use weights are fetched, in bytes */
enum { RING = 8, EARLY = 2 }; /* groups that are expanded one after another; so many before their use */

INLINE bf16 *room(int64_t bytes) {
    bf16 *memory = aligned_alloc(64, round_up(bytes, 64));
    if (!memory) abort();
    return memory;
}

/* Bytes of a block of packed weights. */
INLINE int64_t block_bytes(const struct layer *l, int64_t form) {
    return round_up(l->inputs, BLOCK) / BLOCK * group_bytes(form);
}

/* A copy of rows whose width is filled up with zeros, 16 of which do not compete for cache lines. */
static inline bf16 *copy_rows(const bf16 *x, int64_t stride, int64_t rows, int64_t inputs,
                       int64_t new_stride) {
    bf16 *copy = room(rows * new_stride * sizeof *copy);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(copy + r * new_stride, x + r * stride, inputs * sizeof *copy);
        memset(copy + r * new_stride + inputs, 0, (new_stride - inputs) * sizeof *copy);
    }
    return copy;
}

#ifdef HAS_TILES
enum { TILE = 16 }; /* rows of x, or outputs */

/* Add products of some groups of inputs to the sums in the tiles 0 to 3. Weights that are fetched
   come from memory, else from a near cache. Those that are not dense are expanded on the way, into
   `all` if other rows need them, too. */
static inline __attribute__((always_inline)) void
add_groups(int two, int fetch, int64_t form, const uint8_t *w, const bf16 *x0, const bf16 *x1,
           int64_t stride, int64_t groups, bf16 *all) {
    bf16 ring[RING * GROUP] __attribute__((aligned(64)));
    const int64_t bytes = group_bytes(form);
    for (int64_t g = 0; g < groups; g++, w += bytes, x0 += BLOCK, x1 += BLOCK) {
        for (int64_t i = 0; fetch && i < bytes; i += 64)
            _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
        const bf16 *numbers = expanded(form, all ? all + g * GROUP : ring + g % RING * GROUP, w);
        MEMORY_BARRIER;
        _tile_loadd(4, x0, stride * sizeof *x0);
        _tile_loadd(6, numbers, 2 * LINE * sizeof *numbers);
        _tile_loadd(7, numbers + LINE, 2 * LINE * sizeof *numbers);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_loadd(5, x1, stride * sizeof *x1);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
}

/* The same for half of a block's outputs, which are not dense, and three or four tiles of rows, `num`
   each, the last one from x + `last` on. Later groups are expanded between the sums, so that the units
   of both have work. */
static inline __attribute__((always_inline)) void
add_half_groups(int four, int fetch, int64_t form, int half, const uint8_t *w, const bf16 *x,
                int64_t num, int64_t last, int64_t stride, int64_t groups) {
    bf16 ring[RING][GROUP / 2] __attribute__((aligned(64)));
    const int64_t bytes = group_bytes(form), step = stride * sizeof *x;
    for (int64_t g = 0; g < EARLY && g < groups; g++)
        expand_half(form, half, ring[g], LINE, w + g * bytes);
    for (int64_t g = 0; g < groups; g++, w += bytes, x += BLOCK) {
        /* The next block, evenly over both halves: memory is busy all the time. */
        const char *next = (const char *)w + groups * bytes + (half * groups - g) * bytes / 2;
        for (int64_t i = 0; fetch && i < bytes / 2; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
        const int is_left = g + EARLY < groups;
        const uint8_t *from = is_left ? w + EARLY * bytes : w;
        bf16 *to = ring[(g + EARLY) % RING];
        const struct scale scale = scale_of(form, half, from);
#define EXPAND(pair) \
        if (is_left) expand_pairs(form, scale, half, pair, 4, to, LINE, from); \
        MEMORY_BARRIER;
        MEMORY_BARRIER;
        _tile_loadd(6, ring[g % RING], 2 * LINE);
        _tile_loadd(4, x, step);
        _tile_dpbf16ps(0, 4, 6);
        EXPAND(0)
        _tile_loadd(5, x + num * stride, step);
        _tile_dpbf16ps(1, 5, 6);
        EXPAND(4)
        _tile_loadd(4, x + (four ? 2 * num * stride : last), step);
        _tile_dpbf16ps(2, 4, 6);
        EXPAND(8)
        if (four) _tile_loadd(5, x + last, step);
        if (four) _tile_dpbf16ps(3, 5, 6);
        EXPAND(12)
#undef EXPAND
    }
}

INLINE void clear_sums(int two) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
    MEMORY_BARRIER;
}

#endif
#endif
