/* Attention in bf16 with matrix tiles (AMX). What attention.c promises holds here too; only the
   order of additions is another: a score is one chain over pairs of dimensions, an output and the sum
   of the weights are chains over pairs of slots, and weights are rounded to bf16 before.

   Scores come slot by slot, S = K Q^T, which needs no transposed keys, and are transposed
   themselves; the sum of the weights is a product with ones. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#ifdef HAS_TILES
enum { SIDE = 16 };                     /* rows of a tile, and queries of one */
enum { UNIT = 32, PAIRS = UNIT / 2 };   /* slots that go together */
enum { TILE_BYTES = SIDE * 64, LINE = 32 };

#define MEMORY_BARRIER __asm__ volatile("" ::: "memory")

static void configure(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = SIDE;
    MEMORY_BARRIER;
    _tile_loadconfig(&config);
}

/* Scratch of a task. */
struct task {
    int64_t units, tiles;  /* units of slots that any query sees, tiles of queries */
    int64_t *unit_of;      /* which units */
    uint32_t *seen;        /* units x columns: a bit per slot */
    uint32_t *seen_by_any; /* units */
    bf16 *query;           /* tiles x width / 32 x tile: pairs of dimensions x queries */
    bf16 *value;           /* units x width / 16 x tile: pairs of slots x dimensions */
    float *score;          /* units x queries x slots, of one tile */
    bf16 *weight;          /* units x tile: queries x slots, of one tile */
};

/* Which slots every column sees, and which units are worth reading. */
static void look(struct task *t, const struct call *c, const uint8_t *mask, const int64_t *columns,
                 int64_t first_column, int64_t num_columns) {
    const int64_t units = (c->slots + UNIT - 1) / UNIT;
    for (int64_t u = 0; u < units; u++) {
        const int64_t left = c->slots - u * UNIT;
        const __mmask32 exists = left >= UNIT ? 0xffffffffu : (1u << left) - 1;
        uint32_t any = 0;
        for (int64_t i = 0; i < num_columns; i++) {
            const int64_t column = columns ? columns[first_column + i] : first_column + i;
            const __m256i bytes =
                _mm256_maskz_loadu_epi8(exists, mask + column * c->mask_strides[1] + u * UNIT);
            any |= t->seen[t->units * num_columns + i] = _mm256_test_epi8_mask(bytes, bytes);
        }
        t->unit_of[t->units] = u;
        t->seen_by_any[t->units] = any;
        t->units += any != 0;
    }
}

/* 16 queries as columns: rows are pairs of dimensions. */
static void load_queries(bf16 *to, const struct call *c, const bf16 *query, const int64_t *columns,
                         int64_t first, int64_t num) {
    const int64_t group = c->heads / c->kv_heads;
    for (int64_t d = 0; d < c->width; d += LINE, to += SIDE * LINE) {
        uvec x[SIDE];
        for (int64_t i = 0; i < SIDE; i++) {
            const int64_t t = (first + i) / group, head = (first + i) % group;
            if (i >= num) x[i] = (uvec){0};
            else
                x[i] = *(const anywhere *)(query + d + head * c->query_strides[1] +
                                           (columns ? columns[t] : t) * c->query_strides[2]);
        }
        transpose(x);
        for (int i = 0; i < SIDE; i++) *(anywhere *)(to + i * LINE) = x[i];
    }
}

/* Scores of 16 queries for a unit. Keys beyond the last slot would lie outside of the cache. */
static void score_unit(float *score, const struct call *c, const bf16 *key, const bf16 *query,
                       int64_t left) {
    bf16 copy[UNIT * LINE] __attribute__((aligned(64)));
    float product[UNIT][SIDE] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < c->width; d += LINE, query += SIDE * LINE) {
        const bf16 *from = key + d;
        int64_t stride = c->key_strides[2];
        if (left < UNIT) {
            memset(copy, 0, sizeof copy);
            for (int64_t k = 0; k < left; k++)
                memcpy(copy + k * LINE, from + k * stride, LINE * sizeof *copy);
            from = copy, stride = LINE;
        }
        MEMORY_BARRIER;
        _tile_loadd(4, query, LINE * sizeof *query);
        _tile_loadd(2, from, stride * sizeof *from);
        _tile_loadd(3, from + SIDE * stride, stride * sizeof *from);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, product, sizeof *product);
    _tile_stored(1, product[SIDE], sizeof *product);
    MEMORY_BARRIER;
    for (int half = 0; half < 2; half++) {
        uvec x[SIDE];
        for (int i = 0; i < SIDE; i++) x[i] = (uvec)load(product[half * SIDE + i]);
        transpose(x);
        for (int i = 0; i < SIDE; i++) store(score + i * UNIT + half * SIDE, (vec)x[i]);
    }
}

/* Pairs of slots side by side: rows for the products with weights. Unseen ones are 0, whatever lies
   there: 0 * NaN would be NaN. */
static void load_values(bf16 *to, const struct call *c, const bf16 *value, uint32_t seen) {
    const __m512i spread = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
        3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(spread, _mm512_set1_epi16(SIDE));
    for (int p = 0; p < PAIRS; p++) {
        const __mmask32 first = -(seen >> 2 * p & 1), second = -(seen >> (2 * p + 1) & 1);
        const bf16 *row = value + 2 * p * c->value_strides[2];
        for (int64_t d = 0; d < c->value_width; d += LINE) {
            const __m512i a = _mm512_maskz_loadu_epi16(first, row + d);
            const __m512i b = _mm512_maskz_loadu_epi16(second, row + c->value_strides[2] + d);
            bf16 *tile = to + d / SIDE * SIDE * LINE + p * LINE;
            _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(a, spread, b));
            _mm512_storeu_si512(tile + SIDE * LINE, _mm512_permutex2var_epi16(a, upper, b));
        }
    }
}

/* Turn the scores of a query into weights. */
static void weigh(struct task *t, const struct call *c, int64_t query, int64_t column,
                  int64_t num_columns) {
    const __m512 none = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(c->scale);
    __m512 most = none;
    for (int64_t u = 0; u < t->units; u++) {
        float *score = t->score + (u * SIDE + query) * UNIT;
        const uint32_t seen = t->seen[u * num_columns + column];
        const __m512 a = _mm512_mask_mul_ps(none, seen, _mm512_load_ps(score), scale);
        const __m512 b = _mm512_mask_mul_ps(none, seen >> SIDE, _mm512_load_ps(score + SIDE), scale);
        _mm512_store_ps(score, a);
        _mm512_store_ps(score + SIDE, b);
        most = _mm512_max_ps(most, _mm512_max_ps(a, b));
    }
    float top = _mm512_reduce_max_ps(most);
    if (top == -INFINITY) top = 0.0f; /* sees nothing: all weights are 0 */
    for (int64_t u = 0; u < t->units; u++) {
        const float *score = t->score + (u * SIDE + query) * UNIT;
        const vec a = exp16(load(score) - top), b = exp16(load(score + SIDE) - top);
        _mm512_storeu_si512(t->weight + (u * SIDE + query) * LINE,
                            (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    }
}

/* out = weights * values / sum of the weights, for 16 queries and 32 dimensions from `d` on. */
static void weighted_values(const struct task *t, const struct call *c, bf16 *out,
                            const int64_t *place, int64_t num, int64_t d) {
    float sums[3][SIDE][SIDE] __attribute__((aligned(64)));
    bf16 ones[SIDE * LINE] __attribute__((aligned(64)));
    const int64_t unit = c->value_width / SIDE * SIDE * LINE;
    const bf16 *value = t->value + d / SIDE * SIDE * LINE;
    for (int i = 0; i < SIDE * LINE; i++) ones[i] = 0x3f80;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(5);
    MEMORY_BARRIER;
    _tile_loadd(6, ones, LINE * sizeof *ones);
    for (int64_t u = 0; u < t->units; u++) {
        _tile_loadd(4, t->weight + u * SIDE * LINE, LINE * sizeof *value);
        _tile_loadd(2, value + u * unit, LINE * sizeof *value);
        _tile_loadd(3, value + u * unit + SIDE * LINE, LINE * sizeof *value);
        _tile_dpbf16ps(0, 4, 2);
        _tile_dpbf16ps(1, 4, 3);
        _tile_dpbf16ps(5, 4, 6);
    }
    _tile_stored(0, sums[0], sizeof sums[0][0]);
    _tile_stored(1, sums[1], sizeof sums[0][0]);
    _tile_stored(5, sums[2], sizeof sums[0][0]);
    MEMORY_BARRIER;
    for (int64_t i = 0; i < num; i++) {
        const float total = sums[2][i][0];
        const __m512 divisor = _mm512_set1_ps(total == 0.0f ? 1.0f : total);
        const __m512 a = _mm512_div_ps(_mm512_load_ps(sums[0][i]), divisor);
        const __m512 b = _mm512_div_ps(_mm512_load_ps(sums[1][i]), divisor);
        _mm512_storeu_si512(out + place[i] + d, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
}

int tiles_fit(const struct call *c) {
    return c->has_tiles && c->is_bf16 && c->width % LINE == 0 && c->value_width % LINE == 0;
}

void attend_tiles(const struct call *c, bf16 *out, const bf16 *query, const bf16 *key,
                  const bf16 *value, const uint8_t *mask, const int64_t *columns, int64_t first,
                  int64_t num) {
    const int64_t group = c->heads / c->kv_heads, units = (c->slots + UNIT - 1) / UNIT;
    const int64_t first_column = first / group;
    const int64_t num_columns = (first + num - 1) / group + 1 - first_column;
    /* 1. Scratch. */
    struct task t = {.tiles = (num + SIDE - 1) / SIDE};
    const int64_t sizes[] = {
        t.tiles * SIDE * c->width * sizeof(bf16), units * UNIT * c->value_width * sizeof(bf16),
        units * UNIT * SIDE * sizeof(float), units * UNIT * SIDE * sizeof(bf16),
        units * sizeof(int64_t), units * num_columns * sizeof(uint32_t), units * sizeof(uint32_t),
    };
    enum { PARTS = sizeof sizes / sizeof *sizes };
    int64_t bytes = 0;
    for (int i = 0; i < PARTS; i++) bytes += round_up(sizes[i], 64);
    char *parts[PARTS], *memory = aligned_alloc(64, bytes);
    if (!memory) abort();
    char *next = memory;
    for (int i = 0; i < PARTS; next += round_up(sizes[i], 64), i++) parts[i] = next;
    t.query = (bf16 *)parts[0], t.value = (bf16 *)parts[1];
    t.score = (float *)parts[2], t.weight = (bf16 *)parts[3];
    t.unit_of = (int64_t *)parts[4];
    t.seen = (uint32_t *)parts[5], t.seen_by_any = (uint32_t *)parts[6];
    /* 2. What is seen, and queries as columns. */
    look(&t, c, mask, columns, first_column, num_columns);
    for (int64_t i = 0; i < t.tiles; i++)
        load_queries(t.query + i * SIDE * c->width, c, query, columns, first + i * SIDE,
                     num - i * SIDE);
    /* 3. Tile by tile of queries. */
    configure();
    for (int64_t i = 0; i < t.tiles; i++) {
        const int64_t here = num - i * SIDE < SIDE ? num - i * SIDE : SIDE;
        int64_t column_of[SIDE], place[SIDE];
        for (int64_t q = 0; q < here; q++) {
            const int64_t column = (first + i * SIDE + q) / group;
            column_of[q] = column - first_column;
            place[q] = ((columns ? columns[column] : column) * c->heads +
                        (first + i * SIDE + q) % group) * c->value_width;
        }
        for (int64_t u = 0; u < t.units; u++) {
            const int64_t slot = t.unit_of[u] * UNIT;
            if (!i && u + 1 < t.units) {
                const int64_t ahead = t.unit_of[u + 1] * UNIT;
                fetch(key + ahead * c->key_strides[2], c->key_strides[2], c->slots - ahead, c->width);
            }
            score_unit(t.score + u * UNIT * SIDE, c, key + slot * c->key_strides[2],
                       t.query + i * SIDE * c->width, c->slots - slot);
        }
        for (int64_t q = 0; q < here; q++) weigh(&t, c, q, column_of[q], num_columns);
        for (int64_t u = 0; u < t.units && !i; u++) {
            if (u + 1 < t.units) {
                const int64_t ahead = t.unit_of[u + 1] * UNIT;
                fetch(value + ahead * c->value_strides[2], c->value_strides[2], c->slots - ahead,
                      c->value_width);
            }
            load_values(t.value + u * UNIT * c->value_width, c,
                        value + t.unit_of[u] * UNIT * c->value_strides[2], t.seen_by_any[u]);
        }
        for (int64_t d = 0; d < c->value_width; d += LINE)
            weighted_values(&t, c, out, place, here, d);
    }
    _tile_release();
    free(memory);
}
#endif
