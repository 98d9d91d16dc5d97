/* Attention of few queries to many cached slots, row by row the same bits.

   A query's result depends on its own numbers and on the keys and values of the slots it sees, in
   their order; not on other queries, columns, rows, on the size of the cache or on threads. For:
   every score is two chains of fused multiply-adds over the width (even and odd dimensions); the
   maximum is exact; sums over slots run slot by slot, where an invisible slot adds an exact zero.
   Vector lanes never add to each other. All arithmetic is fp32, rounded once at the end.

   Shapes: B rows, T columns, K slots, H query heads, G of them per key-value head, D width of
   queries and keys, W width of values. A task is a row, a key-value head and a stretch of its T * G
   queries, column by column; slots go in units of 32, and a unit that no query of the task sees is
   skipped. Compile with -ffp-contract=off: what is fused is written as such. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tiles.h"

enum { UNIT = 2 * LANES, MAX_QUERIES = 64 };
/* How many queries, and vectors of slots or dimensions, have their sums in registers. */
#ifdef __AVX512F__
enum { SCORES = 4, SCORE_VECTORS = 2, VALUES = 4, VALUE_VECTORS = 4 };
#else
enum { SCORES = 3, SCORE_VECTORS = 2, VALUES = 2, VALUE_VECTORS = 4 };
#endif
/* Queries of a task: at least, and a multiple of which. */
#ifdef FLOAT32
enum { MIN_QUERIES = 2 * SCORES, TOGETHER = SCORES };
#else
enum { MIN_QUERIES = 8, TOGETHER = LANES }; /* tiles */
#endif
enum { SMALL_CALL = 1 << 17 }; /* multiply-adds of a call that one thread does faster alone */

/* 64 bytes: 32 bf16 numbers as pairs, or 16 fp32 ones. What lies beyond `bytes` reads as 0. */
INLINE uvec load_words(const char *p, int64_t bytes) {
    if (bytes >= (int64_t)sizeof(uvec)) return *(const anywhere *)p;
    uvec x = {0};
    if (bytes > 0) memcpy(&x, p, bytes);
    return x;
}

/* Write the keys of 16 slots as columns: kt[d][slot], fp32. Slots from `count` on are 0. */
static void load_keys(float *kt, const char *key, int64_t stride, int64_t count, int64_t width,
                      int64_t is_bf16) {
    const int64_t bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t start = 0; start < bytes; start += sizeof(uvec)) {
        uvec x[LANES];
        if (count >= LANES && bytes - start >= (int64_t)sizeof(uvec))
            for (int i = 0; i < LANES; i++) x[i] = *(const anywhere *)(key + i * stride + start);
        else
            for (int i = 0; i < LANES; i++)
                x[i] = load_words(key + i * stride + start, i < count ? bytes - start : 0);
        transpose(x);
        for (int i = 0; i < LANES; i++, kt += is_bf16 ? 2 * UNIT : UNIT) {
            store(kt, is_bf16 ? low(x[i]) : (vec)x[i]);
            if (is_bf16) store(kt + UNIT, high(x[i]));
        }
    }
}

/* Write a value as fp32; of 32 bf16 numbers first the even ones, then the odd ones. */
INLINE void load_value(float *to, const char *value, int64_t width, int64_t is_bf16) {
    const int64_t bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t start = 0; start < bytes; start += sizeof(uvec)) {
        const uvec x = load_words(value + start, bytes - start);
        store(to, is_bf16 ? low(x) : (vec)x);
        to += LANES;
        if (is_bf16) {
            store(to, high(x));
            to += LANES;
        }
    }
}

/* Divide, round and write what `load_value` has arranged. */
INLINE void store_value(char *to, const float *from, float divisor, int64_t width,
                        int64_t is_bf16) {
    const int64_t bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t start = 0; start < bytes; start += sizeof(uvec)) {
        uvec x = (uvec)(load(from) / divisor);
        from += LANES;
        if (is_bf16) {
            x = (round16((vec)x) >> 16) | round16(load(from) / divisor);
            from += LANES;
        }
        const int64_t left = bytes - start;
        memcpy(to + start, &x, left < (int64_t)sizeof x ? left : (int64_t)sizeof x);
    }
}

/* Scores of `num` queries for some slots of a unit. */
INLINE void score_tile(int num, float *score, int64_t score_stride, const float *query,
                       int64_t query_stride, const float *kt, int64_t width) {
    lanes even[SCORES][SCORE_VECTORS], odd[SCORES][SCORE_VECTORS];
    UNROLLED for (int r = 0; r < num; r++)
        UNROLLED for (int i = 0; i < SCORE_VECTORS; i++) even[r][i] = odd[r][i] = (lanes){0};
    for (int64_t d = 0; d < width; d += 2, kt += 2 * UNIT, query += 2) {
        lanes k[SCORE_VECTORS];
        UNROLLED for (int i = 0; i < SCORE_VECTORS; i++) k[i] = load_lanes(kt + i * WIDTH);
        UNROLLED for (int r = 0; r < num; r++)
            UNROLLED for (int i = 0; i < SCORE_VECTORS; i++)
                even[r][i] = fma_lanes(k[i], query[r * query_stride], even[r][i]);
        UNROLLED for (int i = 0; i < SCORE_VECTORS; i++) k[i] = load_lanes(kt + UNIT + i * WIDTH);
        UNROLLED for (int r = 0; r < num; r++)
            UNROLLED for (int i = 0; i < SCORE_VECTORS; i++)
                odd[r][i] = fma_lanes(k[i], query[r * query_stride + 1], odd[r][i]);
    }
    UNROLLED for (int r = 0; r < num; r++)
        UNROLLED for (int i = 0; i < SCORE_VECTORS; i++)
            store_lanes(score + r * score_stride + i * WIDTH, even[r][i] + odd[r][i]);
}

/* Turn `count` scores of a query into exp(score - maximum), 0 where it does not see. */
static void weigh(float *score, const int32_t *seen, int64_t count, float scale) {
    vec top = splat(-INFINITY);
    for (int64_t k = 0; k < count; k += LANES) {
        const ivec where = (ivec)load((const float *)seen + k);
        const vec x = choose(where, load(score + k) * scale, splat(-INFINITY));
        store(score + k, x);
        top = choose(less(top, x), x, top);
    }
    float maximum = top[0];
    for (int i = 1; i < LANES; i++) maximum = top[i] > maximum ? top[i] : maximum;
    for (int64_t k = 0; k < count; k += LANES) {
        const ivec where = (ivec)load((const float *)seen + k);
        store(score + k, choose(where, exp16(load(score + k) - maximum), splat(0.0f)));
    }
}

/* Add weighted values of a unit of slots to `num` sums of VALUE_VECTORS vectors; with `is_first`, also
   the weights to their totals. */
INLINE void value_tile(int num, int is_first, float *total, float *sum, int64_t sum_stride,
                       const float *weight, int64_t weight_stride, const float *value,
                       int64_t value_stride) {
    float all[VALUES];
    UNROLLED for (int r = 0; r < num; r++) all[r] = total[r];
    lanes out[VALUES][VALUE_VECTORS];
    UNROLLED for (int r = 0; r < num; r++)
        UNROLLED for (int i = 0; i < VALUE_VECTORS; i++)
            out[r][i] = load_lanes(sum + r * sum_stride + i * WIDTH);
    for (int k = 0; k < UNIT; k++, value += value_stride) {
        lanes v[VALUE_VECTORS];
        UNROLLED for (int i = 0; i < VALUE_VECTORS; i++) v[i] = load_lanes(value + i * WIDTH);
        UNROLLED for (int r = 0; r < num; r++) {
            if (is_first) all[r] += weight[r * weight_stride + k];
            UNROLLED for (int i = 0; i < VALUE_VECTORS; i++)
                out[r][i] = fma_lanes(v[i], weight[r * weight_stride + k], out[r][i]);
        }
    }
    UNROLLED for (int r = 0; r < num && is_first; r++) total[r] = all[r];
    UNROLLED for (int r = 0; r < num; r++)
        UNROLLED for (int i = 0; i < VALUE_VECTORS; i++)
            store_lanes(sum + r * sum_stride + i * WIDTH, out[r][i]);
}

/* Constant sizes, so that the sums of a tile stay in registers. */
#define FOR_TILE(left, most, CALL) \
    switch ((left) < (most) ? (left) : (most)) { case 1: CALL(1); break; case 2: CALL(2); break; \
                                                 case 3: CALL(3 < (most) ? 3 : (most)); break; \
                                                 default: CALL(most); }

/* The place of a column among all. */
INLINE int64_t place(const int64_t *columns, int64_t t) { return columns ? columns[t] : t; }

void attend(const struct call *c, char *out, const char *query, const char *key, const char *value,
            const uint8_t *mask, const int64_t *columns, int64_t row, int64_t kv_head, int64_t first,
            int64_t num) {
    const int64_t group = c->heads / c->kv_heads, size = c->is_bf16 ? 2 : 4;
    const int64_t units = (c->slots + UNIT - 1) / UNIT, padded = units * UNIT;
    const int64_t width = round_up(c->width, UNIT);
    const int64_t at_once = VALUE_VECTORS * WIDTH;
    const int64_t value_width = round_up(c->value_width, at_once < UNIT ? UNIT : at_once);
    const int64_t first_column = first / group;
    const int64_t num_columns = (first + num - 1) / group + 1 - first_column;
    const int64_t key_stride = c->key_strides[2] * size, value_stride = c->value_strides[2] * size;
    query += (row * c->query_strides[0] + kv_head * group * c->query_strides[1]) * size;
    key += (row * c->key_strides[0] + kv_head * c->key_strides[1]) * size;
    value += (row * c->value_strides[0] + kv_head * c->value_strides[1]) * size;
    out += (row * c->columns * c->heads + kv_head * group) * c->value_width * size;
    mask += row * c->mask_strides[0];
#ifdef HAS_TILES
    if (tiles_fit(c)) {
        attend_tiles(c, (bf16 *)out, (const bf16 *)query, (const bf16 *)key, (const bf16 *)value, mask,
                     columns, first, num);
        return;
    }
#endif

    /* 1. Scratch: queries, one unit of keys or values, sums, scores, what columns see, units. */
    const int64_t unit_width = width > value_width ? width : value_width;
    const int64_t words = num * (width + value_width + padded + 1) + UNIT * unit_width +
                          (num_columns + 1) * padded + 2 * units;
    float *q = aligned_alloc(64, (words * 4 + 63) / 64 * 64);
    if (!q) abort();
    float *unit = q + num * width, *sum = unit + UNIT * unit_width;
    float *score = sum + num * value_width;
    int32_t *seen = (int32_t *)(score + num * padded);
    int32_t *seen_by_any = seen + num_columns * padded;
    int64_t *unit_of = (int64_t *)(seen_by_any + padded);
    float *total = (float *)(unit_of + units);

    /* 2. The units that any of the columns sees, and what each column sees of them. */
    int64_t used = 0;
    for (int64_t u = 0; u < units; u++) {
        const int64_t left = c->slots - u * UNIT;
        int32_t any = 0, *all = seen_by_any + used * UNIT;
        memset(all, 0, UNIT * sizeof *all);
        for (int64_t t = 0; t < num_columns; t++) {
            uint8_t bytes[UNIT] = {0};
            const int64_t column = place(columns, first_column + t);
            const uint8_t *from = mask + column * c->mask_strides[1] + u * UNIT;
            if (left >= UNIT) memcpy(bytes, from, UNIT);
            else memcpy(bytes, from, left);
            int32_t *to = seen + t * padded + used * UNIT;
            for (int k = 0; k < UNIT; k++) all[k] |= to[k] = -(bytes[k] != 0);
        }
        for (int k = 0; k < UNIT; k++) any |= all[k];
        unit_of[used] = u;
        used += any != 0;
    }

    /* 3. Scores. */
    for (int64_t i = 0; i < num; i++) {
        const int64_t column = place(columns, (first + i) / group), head = (first + i) % group;
        const char *from =
            query + (column * c->query_strides[2] + head * c->query_strides[1]) * size;
        float *to = q + i * width;
        if (c->is_bf16)
            for (int64_t d = 0; d < c->width; d++)
                ((uint32_t *)to)[d] = (uint32_t)((const uint16_t *)from)[d] << 16;
        else
            memcpy(to, from, c->width * sizeof *to);
        memset(to + c->width, 0, (width - c->width) * sizeof *to);
    }
    for (int64_t u = 0; u < used; u++) {
        /* The next keys, and the values that stage 4 is going to need. */
        const int64_t next = u + 1 < used ? u + 1 : u;
        fetch((const bf16 *)(key + unit_of[next] * UNIT * key_stride), key_stride / 2,
              c->slots - unit_of[next] * UNIT, c->width * size / 2);
        fetch((const bf16 *)(value + unit_of[u] * UNIT * value_stride), value_stride / 2,
              c->slots - unit_of[u] * UNIT, c->value_width * size / 2);
        const float *kt = unit;
        if (c->in_units) kt = (const float *)key + unit_of[u] * UNIT * c->width;
        for (int half = 0; half < 2 && !c->in_units; half++) {
            const int64_t slot = unit_of[u] * UNIT + half * LANES;
            load_keys(unit + half * LANES, key + slot * key_stride, key_stride, c->slots - slot,
                      c->width, c->is_bf16);
        }
        for (int64_t i = 0; i < num; i += SCORES)
            for (int64_t slot = 0; slot < UNIT; slot += SCORE_VECTORS * WIDTH) {
#define SCORE(n) score_tile(n, score + i * padded + u * UNIT + slot, padded, q + i * width, width, \
                            kt + slot, c->width)
                FOR_TILE(num - i, SCORES, SCORE)
            }
    }

    /* 4. Weights, their sums and weighted sums of values. */
    for (int64_t i = 0; i < num; i++)
        weigh(score + i * padded, seen + ((first + i) / group - first_column) * padded,
              used * UNIT, c->scale);
    memset(total, 0, num * sizeof *total);
    memset(sum, 0, num * value_width * sizeof *sum);
    memset(unit, 0, UNIT * unit_width * sizeof *unit);
    for (int64_t u = 0; u < used; u++) {
        const char *from = value + unit_of[u] * UNIT * value_stride;
        int all_seen = 1;
        for (int64_t k = 0; k < UNIT; k++) all_seen &= seen_by_any[u * UNIT + k] != 0;
        const int is_direct = all_seen && !c->is_bf16 && c->value_width == value_width;
        for (int64_t k = 0; k < UNIT && !is_direct; k++) {
            float *to = unit + k * value_width; /* zeros where 0 * garbage might be a NaN */
            if (!seen_by_any[u * UNIT + k]) memset(to, 0, value_width * sizeof *to);
            else load_value(to, from + k * value_stride, c->value_width, c->is_bf16);
        }
        const float *values = is_direct ? (const float *)from : unit;
        const int64_t step = is_direct ? value_stride / size : value_width;
        for (int64_t i = 0; i < num; i += VALUES) {
            const float *weight = score + i * padded + u * UNIT;
            float *to = sum + i * value_width;
#define FIRST(n) value_tile(n, 1, total + i, to, value_width, weight, padded, values, step)
            FOR_TILE(num - i, VALUES, FIRST)
            for (int64_t d = at_once; d < value_width; d += at_once) {
#define VALUE(n) value_tile(n, 0, total + i, to + d, value_width, weight, padded, values + d, step)
                FOR_TILE(num - i, VALUES, VALUE)
            }
        }
    }

    /* 5. Divide and round. A query that sees nothing gets zeros. */
    for (int64_t i = 0; i < num; i++) {
        const int64_t column = place(columns, (first + i) / group);
        const int64_t head = column * c->heads + (first + i) % group;
        store_value(out + head * c->value_width * size, sum + i * value_width,
                    total[i] == 0.0f ? 1.0f : total[i], c->value_width, c->is_bf16);
    }
    free(q);
}

int64_t queries_per_task(int64_t queries, int64_t pairs, int64_t threads) {
    int64_t parts = (queries + MAX_QUERIES - 1) / MAX_QUERIES;
    while (pairs * parts < 2 * threads && queries / (parts + 1) >= MIN_QUERIES) parts++;
    return round_up((queries + parts - 1) / parts, TOGETHER);
}

void mars_attention(const struct call *c, char *out, const char *query, const char *key,
                    const char *value, const uint8_t *mask) {
    const int64_t queries = c->heads / c->kv_heads * c->columns, pairs = c->rows * c->kv_heads;
    const int64_t length = queries_per_task(queries, pairs, c->threads);
    const int64_t parts = (queries + length - 1) / length;
#pragma omp parallel for num_threads(c->threads) \
    if (pairs * queries * c->slots * (c->width + c->value_width) > SMALL_CALL)
    for (int64_t task = 0; task < pairs * parts; task++) {
        const int64_t pair = task / parts, first = task % parts * length, left = queries - first;
        attend(c, out, query, key, value, mask, NULL, pair / c->kv_heads, pair % c->kv_heads, first,
               left < length ? left : length);
        release_tiles();
    }
}
