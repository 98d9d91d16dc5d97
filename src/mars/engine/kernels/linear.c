/* Linear layers in bf16, row by row the same bits.

   y = x W^T + b with M rows, K inputs and N outputs; sums are fp32 and are rounded once. An output
   is one chain of additions over the inputs in their order, in steps that depend on K alone. So it
   depends on its row and its weights, not on other rows, their number, its place or threads.

   Two paths, each with bits of its own: tiles (AMX), and vectors of dot products of pairs (AVX-512
   BF16). Without the instructions of either there is none, and `mars_linear_path` says so.

   Weights are packed once (packed.h). One is loaded, and expanded if it is not dense, once for all
   the rows of a tile: few rows take the time that the memory needs. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sums.h"

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SMALL_CALL = 1 << 16 };  /* weights of a call that one thread does faster alone */
enum { CHUNK_BYTES = 3 << 18 }; /* of x, to stay in the second-level cache ... */
enum { GROUP_BYTES = 1 << 19 }; /* ... with these of the weights */
enum { MANY = 64 };             /* rows: for more of them expanded weights are kept */

/* The best path that compiler, processor and kernel allow; tiles need the kernel's permission. */
int64_t mars_linear_path(int64_t may_use_tiles) {
#ifdef HAS_TILES
    const int request_permission = 0x1023, tile_data = 18;
    if (may_use_tiles && syscall(SYS_arch_prctl, request_permission, tile_data) == 0) return TILES;
#endif
    (void)may_use_tiles;
#ifdef HAS_VECTORS
    return VECTORS;
#else
    return NO_PATH;
#endif
}

#ifdef HAS_VECTORS

/* Round 32 sums of a row, to even on ties, and write those that exist. */
static inline void store_row(const struct layer *l, bf16 *y, int64_t block, __m512 a, __m512 b) {
    const int64_t left = l->outputs - block * BLOCK;
    const __mmask32 exists = left >= BLOCK ? 0xffffffffu : (1u << left) - 1;
    if (l->bias) {
        const __m512i bias = _mm512_maskz_loadu_epi16(exists, l->bias + block * BLOCK);
        const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bias));
        const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bias, 1));
        a = _mm512_add_ps(a, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
        b = _mm512_add_ps(b, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
    }
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    _mm512_mask_storeu_epi16(y + block * BLOCK, exists, rounded);
}

/* Expand some blocks of weights. */
static void expand_blocks(const struct layer *l, bf16 *to, int64_t block, int64_t end) {
    const int64_t bytes = group_bytes(l->form);
    const uint8_t *from = l->weight + block * block_bytes(l, l->form);
    const uint8_t *last = l->weight + end * block_bytes(l, l->form);
    for (; from < last; from += bytes, to += GROUP) {
        for (int64_t i = 0; i < bytes; i += 64)
            _mm_prefetch((const char *)from + AHEAD + i, _MM_HINT_T0);
        expanded(l->form, to, from);
    }
}

/* One block, from w on, for `num` rows. A pair of inputs is one 32-bit word; an odd last input has
   zero beside. */
static inline __attribute__((always_inline)) void
vector_tile(int num, const struct layer *l, const struct extra *e, const bf16 *w, const bf16 *x,
            int64_t stride, bf16 *y, int64_t y_stride, int64_t row, int64_t block) {
    x += row * stride, y += row * y_stride;
    __m512 sum[12][2];
    for (int r = 0; r < num; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
#define STEP(WORD) \
    for (int r = 0; r < num; r++) { \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(WORD); \
        sum[r][0] = _mm512_dpbf16_ps(sum[r][0], (__m512bh)_mm512_loadu_si512(w), pair); \
        sum[r][1] = _mm512_dpbf16_ps(sum[r][1], (__m512bh)_mm512_loadu_si512(w + LINE), pair); \
    }
    int64_t k = 0;
    for (; k + 1 < l->inputs; k += 2, w += 2 * LINE) {
        _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)(w + LINE) + AHEAD, _MM_HINT_T0);
        STEP(*(const int32_t *)(x + r * stride + k))
    }
    if (k < l->inputs) STEP(x[r * stride + k])
    if (e) {
        const int64_t used = e->layer->form == SHORT ? BLOCK / 2 : round_up(e->layer->inputs, BLOCK);
        w = (const bf16 *)(e->layer->weight + block * block_bytes(e->layer, e->layer->form));
        for (k = 0; k < used; k += 2, w += 2 * LINE)
            STEP(*(const int32_t *)(e->x + (row + r) * e->stride + k))
    }
    for (int r = 0; r < num; r++) store_row(l, y + r * y_stride, block, sum[r][0], sum[r][1]);
}

static void run_vectors(const struct layer *l, const struct extra *e, const bf16 *x, int64_t stride,
                        bf16 *y, int64_t y_stride, int64_t rows, int64_t block, int64_t end) {
    const int64_t tiles = (rows + 11) / 12;
    bf16 *numbers = l->form == DENSE ? NULL : room(block_bytes(l, DENSE));
    for (; block < end; block++) {
        const bf16 *w = (const bf16 *)(l->weight + block * block_bytes(l, DENSE));
        if (numbers) w = numbers, expand_blocks(l, numbers, block, block + 1);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t first = rows * i / tiles;
            switch (rows * (i + 1) / tiles - first) {
#define CASE(n) case n: vector_tile(n, l, e, w, x, stride, y, y_stride, first, block); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
            }
        }
    }
    free(numbers);
}
#endif

#ifdef HAS_TILES
__thread int64_t mars_tile_rows;

/* One block, from w on, for the rows of one tile, or of two (first and second may overlap: same
   bits). `all`: room for its numbers, if they are to be kept. */
static inline __attribute__((always_inline)) void
tile_block(int two, int fetch, int64_t form, const struct layer *l, const struct extra *e,
           const uint8_t *w, const bf16 *x, int64_t stride, bf16 *y, int64_t y_stride,
           int64_t block, int64_t first, int64_t second, int64_t num, bf16 *all) {
    float sum[2][TILE][BLOCK] __attribute__((aligned(64)));
    clear_sums(two);
    add_groups(two, fetch, form, w, x + first * stride, x + second * stride, stride,
               round_up(l->inputs, BLOCK) / BLOCK, all);
    if (e)
        add_groups(two, 0, e->layer->form,
                   e->layer->weight + block * block_bytes(e->layer, e->layer->form),
                   e->x + first * e->stride, e->x + second * e->stride, e->stride,
                   round_up(e->layer->inputs, BLOCK) / BLOCK, NULL);
    _tile_stored(0, sum[0], sizeof sum[0][0]);
    _tile_stored(1, sum[0][0] + TILE, sizeof sum[0][0]);
    if (two) _tile_stored(2, sum[1], sizeof sum[0][0]);
    if (two) _tile_stored(3, sum[1][0] + TILE, sizeof sum[0][0]);
    MEMORY_BARRIER;
    for (int i = 0; i < 1 + two; i++)
        for (int64_t r = 0; r < num; r++) {
            const float *row = sum[i][r];
            store_row(l, y + ((i ? second : first) + r) * y_stride, block, _mm512_load_ps(row),
                      _mm512_load_ps(row + TILE));
        }
}

/* One block for the rows of three or four tiles: first one half of its outputs, then the other. */
static inline __attribute__((always_inline)) void
wide_block(int four, int64_t form, const struct layer *l, const struct extra *e,
           const uint8_t *w, const bf16 *x, int64_t stride, bf16 *y, int64_t y_stride,
           int64_t block, int64_t rows, int64_t num) {
    float sum[4][TILE][BLOCK] __attribute__((aligned(64)));
    const int64_t last = rows - num;
    for (int half = 0; half < 2; half++) {
        clear_sums(1);
        add_half_groups(four, 1, form, half, w, x, num, last * stride, stride,
                        round_up(l->inputs, BLOCK) / BLOCK);
        if (e)
            add_half_groups(four, 0, e->layer->form, half,
                            e->layer->weight + block * block_bytes(e->layer, e->layer->form), e->x,
                            num, last * e->stride, e->stride,
                            round_up(e->layer->inputs, BLOCK) / BLOCK);
        float *to = sum[0][0] + half * TILE;
        _tile_stored(0, to, sizeof sum[0][0]);
        _tile_stored(1, to + TILE * BLOCK, sizeof sum[0][0]);
        _tile_stored(2, to + 2 * TILE * BLOCK, sizeof sum[0][0]);
        if (four) _tile_stored(3, to + 3 * TILE * BLOCK, sizeof sum[0][0]);
        MEMORY_BARRIER;
    }
    for (int i = 0; i < 3 + four; i++)
        for (int64_t r = 0; r < num; r++) {
            const float *row = sum[i][r];
            store_row(l, y + ((i == 2 + four ? last : i * num) + r) * y_stride, block,
                      _mm512_load_ps(row), _mm512_load_ps(row + TILE));
        }
}

static int64_t num_tiles(int64_t rows) { return (rows + TILE - 1) / TILE; }

/* Rows of a tile: as few as will do, since it is faster then. */
static int64_t tile_rows(int64_t rows) { return (rows + num_tiles(rows) - 1) / num_tiles(rows); }

/* One block for up to four tiles of rows. */
static inline __attribute__((always_inline)) void
some_rows(int fetch, int64_t form, const struct layer *l, const struct extra *e, const uint8_t *w,
          const bf16 *x, int64_t stride, bf16 *y, int64_t y_stride, int64_t block, int64_t rows,
          bf16 *all) {
    const int64_t tiles = num_tiles(rows), num = tile_rows(rows);
#define ROWS x, stride, y, y_stride, block
    if (tiles == 1) tile_block(0, fetch, form, l, e, w, ROWS, 0, 0, num, all);
    else if (tiles == 2 || form == DENSE)
        tile_block(1, fetch, form, l, e, w, ROWS, 0, rows - num, num, all);
    else if (tiles == 3) wide_block(0, form, l, e, w, ROWS, rows, num);
    else wide_block(1, form, l, e, w, ROWS, rows, num);
}

static void run_tiles(const struct layer *l, const struct extra *e, const bf16 *x, int64_t stride,
                      bf16 *y, int64_t y_stride, int64_t rows, int64_t block, int64_t end) {
    const int64_t padded = round_up(l->inputs, BLOCK);
    const int64_t new_stride = padded % 512 ? padded : padded + LINE;
    const int is_direct = padded == l->inputs && (rows <= 8 || stride % 512);
    /* Expanding takes longer than the sums of two tiles of rows, and goes on beside those of four;
       for more rows its numbers are kept. */
    const int is_kept = l->form != DENSE && rows > MANY;
    const int64_t at_once = l->form == DENSE || is_kept ? 2 * TILE : 4 * TILE;
    int64_t chunk = CHUNK_BYTES / (padded * sizeof *x) / at_once * at_once;
    if (chunk < at_once) chunk = at_once;
    /* A block stays in the first-level cache for all rows; but where rows of y are many and pages
       apart, writing a few blocks of each row at a time spares the table of pages. */
    int64_t group = GROUP_BYTES / (BLOCK * padded * sizeof *x);
    if (group < 1 || rows <= 128 || l->outputs < 8192) group = 1;
    bf16 *numbers = is_kept ? room(group * block_bytes(l, DENSE)) : NULL;
    /* The numbers of x are in the caches of the threads that have made them: ask for all at once. */
    for (int64_t r = 0; is_direct && rows <= 2 * TILE && r < rows; r++)
        for (int64_t k = 0; k < padded; k += LINE)
            _mm_prefetch((const char *)(x + r * stride + k), _MM_HINT_T0);
    for (int64_t start = 0; start < rows; start += chunk) {
        const int64_t size = rows - start < chunk ? rows - start : chunk;
        const bf16 *from = x + start * stride;
        bf16 *copy = is_direct ? NULL : copy_rows(from, stride, size, l->inputs, new_stride);
        const int64_t step = is_direct ? stride : new_stride;
        const int64_t parts = (size + at_once - 1) / at_once;
        for (int64_t b = block; b < end; b += group) {
            const int64_t next = b + group < end ? b + group : end;
            for (int64_t i = 0; i < parts; i++) {
                const int64_t first = size * i / parts, num = size * (i + 1) / parts - first;
                const bf16 *x0 = (copy ? copy : from) + first * step;
                bf16 *y0 = y + (start + first) * y_stride;
                struct extra some = {0};
                if (e) some = *e, some.x += (start + first) * e->stride;
                const struct extra *f = e ? &some : NULL;
                configure(tile_rows(num));
                for (int64_t c = b; c < next; c++) {
                    const uint8_t *w = l->weight + c * block_bytes(l, l->form);
                    bf16 *all = numbers ? numbers + (c - b) * padded * BLOCK : NULL;
                    if (all && i) w = (const uint8_t *)all;
#define SOME_ROWS(fetch, form) some_rows(fetch, form, l, f, w, x0, step, y0, y_stride, c, num, all)
                    if (i && (all || l->form == DENSE)) SOME_ROWS(0, DENSE);
                    else if (l->form == DENSE) SOME_ROWS(1, DENSE);
                    else if (l->form == LEVELS_8) SOME_ROWS(1, LEVELS_8);
                    else if (l->form == LEVELS_4) SOME_ROWS(1, LEVELS_4);
                    else SOME_ROWS(1, l->form);
                }
            }
        }
        free(copy);
    }
    free(numbers);
}
#endif

#ifdef HAS_VECTORS
/* Divide blocks of outputs and, where that is better, rows among threads. */
static int64_t parts_of_rows(int64_t threads, int64_t blocks, int64_t rows) {
    int64_t best = 1, least = INT64_MAX;
    const int64_t units = (rows + 31) / 32;
    for (int64_t parts = 1; parts <= threads && parts <= units; parts++) {
        const int64_t others = threads / parts < blocks ? threads / parts : blocks;
        const int64_t cost = (blocks + others - 1) / others * ((units + parts - 1) / parts);
        if (cost < least) least = cost, best = parts;
    }
    return best;
}
#endif

void linear_blocks(const struct layer *l, const struct extra *e, const bf16 *x, int64_t stride,
                   bf16 *y, int64_t y_stride, int64_t rows, int64_t block, int64_t end) {
    if (!rows || block >= end) return;
#ifdef HAS_TILES
    if (l->path == TILES) {
        run_tiles(l, e, x, stride, y, y_stride, rows, block, end);
        return;
    }
#endif
#ifdef HAS_VECTORS
    run_vectors(l, e, x, stride, y, y_stride, rows, block, end);
#else
    (void)l, (void)e, (void)x, (void)stride, (void)y, (void)y_stride;
#endif
}

void mars_linear(const struct layer *l, const bf16 *x, int64_t stride, bf16 *y, int64_t rows,
                 int64_t threads) {
#ifdef HAS_VECTORS
    if (!rows) return;
    const int64_t blocks = (l->outputs + BLOCK - 1) / BLOCK, units = (rows + 31) / 32;
    if (l->outputs * l->inputs * units < SMALL_CALL) threads = 1;
    const int64_t row_parts = parts_of_rows(threads, blocks, rows);
    const int64_t parts = threads / row_parts < blocks ? threads / row_parts : blocks;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < row_parts * parts; task++) {
        const int64_t i = task / parts, j = task % parts;
        const int64_t first = units * i / row_parts * 32, end = units * (i + 1) / row_parts * 32;
        const int64_t num = (end < rows ? end : rows) - first;
        linear_blocks(l, NULL, x + first * stride, stride, y + first * l->outputs, l->outputs, num,
                      blocks * j / parts, blocks * (j + 1) / parts);
        release_tiles();
    }
#else
    (void)l, (void)x, (void)stride, (void)y, (void)rows, (void)threads;
#endif
}
