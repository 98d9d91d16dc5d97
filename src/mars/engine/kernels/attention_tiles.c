/* Attention in bf16 with matrix tiles (AMX). What attention.c promises holds here too; only the
   order of additions is another: a score is one chain over pairs of dimensions, an output is one over
   pairs of slots, weights are rounded to bf16 before, and their sum runs through 32 lanes.

   Keys and values come in units of 32 slots, of W dimensions each, whose numbers lie as tiles want
   them (`put_key`, `put_value`), so that a unit is read from one end to the other:

     keys    half of 16 slots x pair of dimensions x slot x 2
     values  stretch of 16 dimensions x pair of slots x dimension x 2

   The cache of decoder.c consists of such units; from others they are copied, task by task. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"

void put_key(bf16 *keys, int64_t slot, const bf16 *key, int64_t width) {
    keys += slot / LANES * LANES * width + slot % LANES * 2;
    for (int64_t d = 0; d < width; d += 2) memcpy(keys + d * LANES, key + d, 2 * sizeof *key);
}

void put_value(bf16 *values, int64_t slot, const bf16 *value, int64_t width) {
    values += slot / SLOTS * SLOTS * width + slot % SLOTS / 2 * 2 * LANES + slot % 2;
    for (int64_t d = 0; d < width; d += LANES, values += LANES * SLOTS)
        for (int i = 0; i < LANES; i++) values[2 * i] = value[d + i];
}

#ifdef HAS_TILES
enum { SIDE = 16 };                       /* rows of a tile, and queries of one */
enum { LINE = 32, TILE = SIDE * LINE };   /* numbers of a cache line, and of a tile */
enum { LINE_BYTES = 64, UNIT = SLOTS };
static const uint32_t ALL = 0xffffffffu; /* all slots of a unit */

/* Scratch of a task. */
struct task {
    int64_t units, rows;        /* units of slots that any query sees; queries of a tile */
    int64_t num_columns;
    int64_t *unit_of;           /* which units */
    const bf16 **key, **value;  /* where they lie, as tiles */
    uint32_t *seen;             /* units x columns: a bit per slot */
    uint32_t *seen_by_any;      /* units */
    bf16 *query;                /* tiles of queries x rows x width */
    float *score;               /* of the queries of two tiles: queries x score_stride */
    bf16 *weight;               /* the same, x weight_stride */
    int64_t score_stride, weight_stride; /* odd numbers of cache lines, that rows do not compete */
    const bf16 *next_key, *next_value;   /* of the task after this one */
    int64_t fetched, wanted, share;      /* numbers of these; `share` at a time */
    bf16 *copy;                 /* units x width x slots x (keys, values), for those not as wanted */
};

/* Which slots every column sees, and which units are worth reading. */
static void look(struct task *t, const struct call *c, const uint8_t *mask, const int64_t *columns,
                 int64_t first_column) {
    const int64_t units = (c->slots + UNIT - 1) / UNIT;
    for (int64_t u = 0; u < units; u++) {
        const int64_t left = c->slots - u * UNIT;
        const __mmask32 exists = left >= UNIT ? 0xffffffffu : (1u << left) - 1;
        uint32_t any = 0;
        for (int64_t i = 0; i < t->num_columns; i++) {
            const int64_t column = columns ? columns[first_column + i] : first_column + i;
            const __m256i bytes =
                _mm256_maskz_loadu_epi8(exists, mask + column * c->mask_strides[1] + u * UNIT);
            any |= t->seen[t->units * t->num_columns + i] = _mm256_test_epi8_mask(bytes, bytes);
        }
        t->unit_of[t->units] = u;
        t->seen_by_any[t->units] = any;
        t->units += any != 0;
    }
}

/* Write the keys of a unit as tiles; those beyond the last slot are 0. */
static void copy_keys(bf16 *to, const bf16 *key, int64_t stride, int64_t width, int64_t left) {
    for (int half = 0; half < 2; half++, key += SIDE * stride, left -= SIDE)
        for (int64_t d = 0; d < width; d += LINE, to += TILE) {
            uvec x[SIDE];
            for (int i = 0; i < SIDE; i++) {
                if (i < left) x[i] = *(const anywhere *)(key + i * stride + d);
                else x[i] = (uvec){0};
            }
            transpose(x);
            for (int i = 0; i < SIDE; i++) *(anywhere *)(to + i * LINE) = x[i];
        }
}

/* Write the values of a unit as tiles; those of slots that nobody sees are 0. */
static void copy_values(bf16 *to, const bf16 *value, int64_t stride, int64_t width, uint32_t seen) {
    const __m512i spread = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
        3, 34, 2, 33, 1, 32, 0);
    const __m512i upper = _mm512_add_epi16(spread, _mm512_set1_epi16(SIDE));
    for (int p = 0; p < UNIT / 2; p++) {
        const __mmask32 first = -(seen >> 2 * p & 1), second = -(seen >> (2 * p + 1) & 1);
        const bf16 *row = value + 2 * p * stride;
        for (int64_t d = 0; d < width; d += LINE) {
            const __m512i a = _mm512_maskz_loadu_epi16(first, row + d);
            const __m512i b = _mm512_maskz_loadu_epi16(second, row + stride + d);
            bf16 *tile = to + d * UNIT + p * LINE;
            _mm512_storeu_si512(tile, _mm512_permutex2var_epi16(a, spread, b));
            _mm512_storeu_si512(tile + TILE, _mm512_permutex2var_epi16(a, upper, b));
        }
    }
}

/* Copy tiles of values, but zeros for slots that nobody sees. */
static void clear_values(bf16 *to, const bf16 *value, int64_t width, uint32_t seen) {
    for (int p = 0; p < UNIT / 2; p++, seen >>= 2) {
        const __mmask32 pair = (seen & 1 ? 0x55555555u : 0) | (seen & 2 ? 0xaaaaaaaau : 0);
        for (int64_t d = 0; d < width; d += SIDE) {
            const int64_t at = d * UNIT + p * LINE;
            _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi16(pair, value + at));
        }
    }
}

/* Where units lie: keys and values in the cache, or a copy of the keys. */
static void find_units(const struct task *t, const struct call *c, const bf16 *key,
                       const bf16 *value) {
    const int64_t stride = c->key_strides[2], size = UNIT * (c->width + c->value_width);
    for (int64_t u = 0; u < t->units; u++) {
        const int64_t slot = t->unit_of[u] * UNIT;
        t->key[u] = key + slot * (c->in_units ? c->width : stride);
        t->value[u] = value + slot * (c->in_units ? c->value_width : c->value_strides[2]);
        if (c->in_units) continue;
        const int64_t next = t->unit_of[u + 1 < t->units ? u + 1 : u] * UNIT;
        fetch(key + next * stride, stride, c->slots - next, c->width);
        copy_keys(t->copy + u * size, t->key[u], stride, c->width, c->slots - slot);
        t->key[u] = t->copy + u * size;
    }
}

/* Slots that nobody sees may hold anything, and 0 * NaN would be NaN: such values go into a copy
   with zeros in their places, as do all those that are no tiles yet. */
static void copy_units(const struct task *t, const struct call *c) {
    const int64_t stride = c->value_strides[2], size = UNIT * (c->width + c->value_width);
    for (int64_t u = 0; u < t->units; u++) {
        bf16 *to = t->copy + u * size + UNIT * c->width;
        const bf16 *from = t->value[u];
        if (c->in_units && t->seen_by_any[u] == ALL) continue;
        t->value[u] = to;
        if (c->in_units) clear_values(to, from, c->value_width, t->seen_by_any[u]);
        else {
            if (u + 1 < t->units)
                fetch(t->value[u + 1], stride, c->slots - t->unit_of[u + 1] * UNIT, c->value_width);
            copy_values(to, from, stride, c->value_width, t->seen_by_any[u]);
        }
    }
}

/* Ask for some of what the next task reads: memory works while this one calculates. */
INLINE void fetch_ahead(struct task *t) {
    const int64_t left = t->wanted - t->fetched, end = t->fetched + (t->share < left ? t->share : left);
    for (; t->fetched < end; t->fetched += LINE) {
        __builtin_prefetch(t->next_key + t->fetched);
        __builtin_prefetch(t->next_value + t->fetched);
    }
}

/* Divide the asking among the steps of the work. */
static void plan_fetching(struct task *t, const struct call *c, const bf16 *key, const bf16 *value,
                          int64_t num) {
    const int64_t pairs = (num + 2 * t->rows - 1) / (2 * t->rows);
    const int64_t passes = c->value_width / (num > t->rows ? LINE : 2 * LINE);
    const int64_t steps = num + pairs * t->units * (1 + passes);
    t->next_key = key + c->ahead, t->next_value = value + c->ahead;
    t->wanted = c->ahead ? round_up(c->slots, UNIT) * c->width : 0;
    t->share = round_up(t->wanted / steps + 1, LINE);
}

/* Scores of the queries of one tile, or two, for a unit. */
INLINE void score_unit(int two, const struct task *t, const bf16 *query, const bf16 *key,
                       float *score, int64_t width) {
    const int64_t bytes = t->score_stride * sizeof *score;
    MEMORY_BARRIER;
    _tile_zero(0);
    _tile_zero(1);
    if (two) _tile_zero(2);
    if (two) _tile_zero(3);
    for (int64_t d = 0; d < width; d += LINE, key += TILE) {
        _tile_loadd(4, query + d, width * sizeof *query);
        _tile_loadd(6, key, LINE_BYTES);
        _tile_loadd(7, key + SIDE * width, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_loadd(5, query + t->rows * width + d, width * sizeof *query);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, score, bytes);
    _tile_stored(1, score + SIDE, bytes);
    if (two) _tile_stored(2, score + t->rows * t->score_stride, bytes);
    if (two) _tile_stored(3, score + t->rows * t->score_stride + SIDE, bytes);
    MEMORY_BARRIER;
}

/* 2 ** x where wanted, else 0; within 3 millionths, far below what rounding to bf16 adds. */
INLINE __m512 power_of_2(__mmask16 wanted, __m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_set1_ps(1.353416769e-2f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.201146104e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.414427566e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.930038345e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.000002593f));
    return _mm512_maskz_scalef_ps(wanted, y, x); /* y * 2 ** floor(x) */
}

/* Turn the scores of a query into weights; return 1 / their sum. */
static float weigh(const struct task *t, const struct call *c, int64_t query, int64_t column) {
    const float *score = t->score + query * t->score_stride;
    bf16 *weight = t->weight + query * t->weight_stride;
    const uint32_t *seen = t->seen + column;
    const float scale = c->scale * 1.44269504f;
    __m512 most = _mm512_set1_ps(-INFINITY), sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t u = 0; u < t->units; u++) {
        const uint32_t bits = seen[u * t->num_columns];
        most = _mm512_mask_max_ps(most, bits, most, _mm512_load_ps(score + u * UNIT));
        most = _mm512_mask_max_ps(most, bits >> SIDE, most, _mm512_load_ps(score + u * UNIT + SIDE));
    }
    float top = _mm512_reduce_max_ps(most);
    if (top == -INFINITY) top = 0.0f; /* sees nothing: all weights are 0 */
    const __m512 factor = _mm512_set1_ps(scale), shift = _mm512_set1_ps(-top * scale);
    for (int64_t u = 0; u < t->units; u++) {
        const uint32_t bits = seen[u * t->num_columns];
        const __m512 x = _mm512_fmadd_ps(_mm512_load_ps(score + u * UNIT), factor, shift);
        const __m512 y = _mm512_fmadd_ps(_mm512_load_ps(score + u * UNIT + SIDE), factor, shift);
        const uvec pairs =
            (uvec)_mm512_cvtne2ps_pbh(power_of_2(bits >> SIDE, y), power_of_2(bits, x));
        *(anywhere *)(weight + u * UNIT) = pairs;
        sums[0] = _mm512_add_ps(sums[0], (__m512)low(pairs));
        sums[1] = _mm512_add_ps(sums[1], (__m512)high(pairs));
    }
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

/* Write 32 dimensions of the outputs of a tile of queries. */
static void write_outputs(bf16 *out, const int64_t *place, const float *factor, int64_t num,
                  float a[SIDE][SIDE], float b[SIDE][SIDE]) {
    for (int64_t i = 0; i < num; i++) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(a[i]), _mm512_set1_ps(factor[i]));
        const __m512 y = _mm512_mul_ps(_mm512_load_ps(b[i]), _mm512_set1_ps(factor[i]));
        _mm512_storeu_si512(out + place[i], (__m512i)_mm512_cvtne2ps_pbh(y, x));
    }
}

/* Weighted values: 32 dimensions of two tiles of queries, or 64 or 32 of one, from `d` on. */
INLINE void weighted_values(int two, int wide, struct task *t, float sums[4][SIDE][SIDE],
                            int64_t d) {
    const int64_t bytes = t->weight_stride * sizeof *t->weight;
    const bf16 *other = t->weight + t->rows * t->weight_stride;
    const int more = two || wide;
    MEMORY_BARRIER;
    _tile_zero(0);
    _tile_zero(1);
    if (more) _tile_zero(2);
    if (more) _tile_zero(3);
    for (int64_t u = 0; u < t->units; u++) {
        const bf16 *value = t->value[u] + d * UNIT;
        _tile_loadd(4, t->weight + u * UNIT, bytes);
        _tile_loadd(6, value, LINE_BYTES);
        _tile_loadd(7, value + TILE, LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) _tile_loadd(5, other + u * UNIT, bytes);
        if (two) _tile_dpbf16ps(2, 5, 6);
        if (two) _tile_dpbf16ps(3, 5, 7);
        if (wide) _tile_loadd(6, value + 2 * TILE, LINE_BYTES);
        if (wide) _tile_loadd(7, value + 3 * TILE, LINE_BYTES);
        if (wide) _tile_dpbf16ps(2, 4, 6);
        if (wide) _tile_dpbf16ps(3, 4, 7);
        fetch_ahead(t);
    }
    _tile_stored(0, sums[0], LINE_BYTES);
    _tile_stored(1, sums[1], LINE_BYTES);
    if (more) _tile_stored(2, sums[2], LINE_BYTES);
    if (more) _tile_stored(3, sums[3], LINE_BYTES);
    MEMORY_BARRIER;
}

/* The queries of one tile, or two, from number `first` of the task on. */
INLINE void attend_tile(int two, struct task *t, const struct call *c, bf16 *out,
                        const int64_t *place, const int64_t *column_of, int64_t first, int64_t num) {
    float sums[4][SIDE][SIDE] __attribute__((aligned(64)));
    float factor[2 * SIDE];
    for (int64_t u = 0; u < t->units; u++) {
        score_unit(two, t, t->query + first * c->width, t->key[u], t->score + u * UNIT, c->width);
        fetch_ahead(t);
    }
    for (int64_t i = 0; i < num; i++) {
        factor[i] = weigh(t, c, i, column_of[first + i]);
        fetch_ahead(t);
    }
    if (!first) copy_units(t, c);
    const int64_t left = num < t->rows ? num : t->rows;
    place += first;
    for (int64_t d = 0; d < c->value_width;) {
        const int is_wide = !two && d + 2 * LINE <= c->value_width;
        if (is_wide) weighted_values(0, 1, t, sums, d);
        else weighted_values(two, 0, t, sums, d);
        write_outputs(out + d, place, factor, left, sums[0], sums[1]);
        if (two) write_outputs(out + d, place + t->rows, factor + t->rows, num - left, sums[2], sums[3]);
        if (is_wide) write_outputs(out + d + LINE, place, factor, left, sums[2], sums[3]);
        d += is_wide ? 2 * LINE : LINE;
    }
}

int tiles_fit(const struct call *c) {
    return c->has_tiles && c->is_bf16 && c->width % LINE == 0 && c->value_width % LINE == 0;
}

void attend_tiles(const struct call *c, bf16 *out, const bf16 *query, const bf16 *key,
                  const bf16 *value, const uint8_t *mask, const int64_t *columns, int64_t first,
                  int64_t num) {
    const int64_t group = c->heads / c->kv_heads, units = (c->slots + UNIT - 1) / UNIT;
    const int64_t first_column = first / group, tiles = (num + SIDE - 1) / SIDE;
    /* 1. Scratch. Tiles of queries are about equally full. */
    struct task t = {.rows = (num + tiles - 1) / tiles};
    t.num_columns = (first + num - 1) / group + 1 - first_column;
    t.score_stride = units * UNIT + LANES, t.weight_stride = (units | 1) * UNIT;
    const int64_t together = tiles > 1 ? 2 * t.rows : t.rows;
    const int64_t sizes[] = {
        tiles * t.rows * c->width * sizeof(bf16), together * t.score_stride * sizeof(float),
        together * t.weight_stride * sizeof(bf16), units * sizeof(int64_t), units * sizeof(bf16 *),
        units * sizeof(bf16 *), units * t.num_columns * sizeof(uint32_t), units * sizeof(uint32_t),
        num * sizeof(int64_t), num * sizeof(int64_t),
        units * UNIT * (c->width + c->value_width) * sizeof(bf16),
    };
    enum { PARTS = sizeof sizes / sizeof *sizes };
    int64_t bytes = 0;
    for (int i = 0; i < PARTS; i++) bytes += round_up(sizes[i], LINE_BYTES);
    char *parts[PARTS], *memory = aligned_alloc(LINE_BYTES, bytes), *next = memory;
    if (!memory) abort();
    for (int i = 0; i < PARTS; next += round_up(sizes[i], LINE_BYTES), i++) parts[i] = next;
    t.query = (bf16 *)parts[0], t.score = (float *)parts[1], t.weight = (bf16 *)parts[2];
    t.unit_of = (int64_t *)parts[3];
    t.key = (const bf16 **)parts[4], t.value = (const bf16 **)parts[5];
    t.seen = (uint32_t *)parts[6], t.seen_by_any = (uint32_t *)parts[7];
    int64_t *column_of = (int64_t *)parts[8], *place = (int64_t *)parts[9];
    t.copy = (bf16 *)parts[10];
    /* 2. What is seen, and by whom. */
    look(&t, c, mask, columns, first_column);
    for (int64_t i = 0, j = first_column, head = first % group; i < num; i++) {
        const int64_t column = columns ? columns[j] : j;
        memcpy(t.query + i * c->width,
               query + head * c->query_strides[1] + column * c->query_strides[2],
               c->width * sizeof *query);
        column_of[i] = j - first_column;
        place[i] = (column * c->heads + head) * c->value_width;
        if (++head == group) j++, head = 0;
    }
    find_units(&t, c, key, value);
    plan_fetching(&t, c, key, value, num);
    /* 3. Two tiles of queries at a time. */
    configure(t.rows);
    for (int64_t i = 0; i < num; i += 2 * t.rows) {
        const int64_t left = num - i < 2 * t.rows ? num - i : 2 * t.rows;
        if (left > t.rows) attend_tile(1, &t, c, out, place, column_of, i, left);
        else attend_tile(0, &t, c, out, place, column_of, i, left);
    }
    free(memory);
}
#endif
