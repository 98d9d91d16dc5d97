/* What the kernels share: vectors of 16 fp32 numbers, and what one file calls of another.

   They are compiled once for models in bf16 and, with FLOAT32, once for those in fp32. */

#ifndef MARS_KERNELS_H
#define MARS_KERNELS_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && !defined(FLOAT32)
#define HAS_VECTORS 1
#if defined(__AMX_BF16__) && defined(__AVX512DQ__) && defined(__linux__)
#define HAS_TILES 1
#endif
#endif

enum { LANES = 16, SLOTS = 32 }; /* of a vector; of a unit of keys and values */

typedef uint16_t bf16;
#ifdef FLOAT32
typedef float scalar; /* of a model, and of what lies between its layers */
#else
typedef bf16 scalar;
#endif

static inline int64_t round_up(int64_t number, int64_t unit) {
    return (number + unit - 1) / unit * unit;
}
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
/* For loads from anywhere; memcpy would, with some compilers, go in halves through the stack. */
typedef uint32_t anywhere __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* Before a loop over an array of vectors: unrolled early, they stay in registers. */
#define UNROLLED _Pragma("GCC unroll 24")
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (uvec){__VA_ARGS__})
#endif

/* As many numbers as a register of the processor holds. Compilers keep these in registers, and compare
   them at once, where they would do neither with longer vectors. */
#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
typedef float lanes __attribute__((vector_size(4 * WIDTH)));
typedef float lanes_anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t words_anywhere __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
union pieces {
    vec all;
    ivec integers;
    lanes part[LANES / WIDTH];
};

INLINE vec splat(float x) { return x - (vec){0}; } /* x - 0 keeps -0; x + 0 would not */
INLINE vec load(const float *p) { return (vec)*(const anywhere *)p; }
INLINE void store(float *p, vec x) { *(anywhere *)p = (uvec)x; }
INLINE vec choose(ivec where, vec a, vec b) {
    return (vec)((where & (ivec)a) | (~where & (ivec)b));
}

/* Where a < b, and a <= b. */
INLINE ivec less(vec a, vec b) {
    union pieces x = {a}, y = {b};
    for (int i = 0; i < LANES / WIDTH; i++) x.part[i] = (lanes)(x.part[i] < y.part[i]);
    return x.integers;
}
INLINE ivec at_most(vec a, vec b) {
    union pieces x = {a}, y = {b};
    for (int i = 0; i < LANES / WIDTH; i++) x.part[i] = (lanes)(x.part[i] <= y.part[i]);
    return x.integers;
}

/* a * b + c with one rounding, or, where the processor has none such, with two. */
INLINE lanes fma_each(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < WIDTH; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
INLINE lanes fma_lanes(lanes a, float b, lanes c) { return fma_each(a, b - (lanes){0}, c); }
INLINE vec fma16(vec a, vec b, vec c) {
    union pieces x = {a}, y = {b}, z = {c};
    for (int i = 0; i < LANES / WIDTH; i++) z.part[i] = fma_each(x.part[i], y.part[i], z.part[i]);
    return z.all;
}

INLINE lanes load_lanes(const float *p) { return *(const lanes_anywhere *)p; }
INLINE void store_lanes(float *p, lanes x) { *(lanes_anywhere *)p = x; }

/* exp(x) for x <= 0, within 2 units in the last place; below -87 it is 0. */
INLINE vec exp16(vec x) {
    const ivec tiny = less(x, splat(-87.0f));
    x = choose(tiny, splat(-87.0f), x);
    const vec shifted = fma16(x, splat(1.44269504f), splat(12582912.0f)); /* n in the low bits */
    const vec n = shifted - 12582912.0f;
    vec r = fma16(n, splat(-0.693145752f), x);
    r = fma16(n, splat(-1.42860677e-6f), r);
    vec y = splat(1.9875691500e-4f);
    y = fma16(y, r, splat(1.3981999507e-3f));
    y = fma16(y, r, splat(8.3334519073e-3f));
    y = fma16(y, r, splat(4.1665795894e-2f));
    y = fma16(y, r, splat(1.6666665459e-1f));
    y = fma16(y, r, splat(5.0000001201e-1f));
    y = fma16(y, r * r, r) + 1.0f;
    const uvec power = ((uvec)shifted << 23) + 0x3f800000u; /* 2 ** n */
    return choose(tiny, splat(0.0f), y * (vec)power);
}

/* The halves of 16 pairs of bf16 numbers, as fp32. */
INLINE vec low(uvec pairs) { return (vec)(pairs << 16); }
INLINE vec high(uvec pairs) { return (vec)(pairs & 0xffff0000u); }

/* fp32 numbers rounded to bf16, ties to even, in the high halves; a NaN stays one. */
INLINE uvec round16(vec x) {
#ifdef HAS_VECTORS /* numbers below 2 ** -126 become 0 */
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)x);
    return (uvec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
#else
    const uvec bits = (uvec)x, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return (uvec)choose(x == x, (vec)rounded, (vec)(bits | 0x400000u)) & 0xffff0000u;
#endif
}

/* One number of bf16 as fp32, and back. */
INLINE float widen(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE bf16 narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bits >> 16) | 0x40;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

/* 32 numbers as fp32: of bf16 the even ones, then the odd ones; else one half after the other. */
struct two {
    vec a, b;
};
#ifdef FLOAT32
INLINE float to_float(scalar x) { return x; }
INLINE scalar to_scalar(float x) { return x; }
INLINE vec rounded(vec x) { return x; }
INLINE struct two load2(const scalar *p) { return (struct two){load(p), load(p + LANES)}; }
INLINE void store2(scalar *p, vec a, vec b) { store(p, a), store(p + LANES, b); }
INLINE void store16(scalar *p, vec x) { store(p, x); }
INLINE int64_t place_of(int half, int lane) { return half * LANES + lane; }
#else
typedef bf16 numbers16 __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
INLINE float to_float(scalar x) { return widen(x); }
INLINE scalar to_scalar(float x) { return narrow(x); }
INLINE vec rounded(vec x) { return (vec)round16(x); }
INLINE struct two load2(const scalar *p) {
    const uvec pairs = *(const anywhere *)p;
    return (struct two){low(pairs), high(pairs)};
}
INLINE void store2(scalar *p, vec a, vec b) { *(anywhere *)p = (round16(a) >> 16) | round16(b); }
INLINE void store16(scalar *p, vec x) {
    *(numbers16 *)p = __builtin_convertvector(round16(x) >> 16, numbers16);
}
INLINE int64_t place_of(int half, int lane) { return 2 * lane + half; }
#endif

#define SWAP(step, low, high) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & step)) { \
            const uvec a = x[i], b = x[i + step]; \
            x[i] = SHUFFLE(a, b, low); \
            x[i + step] = SHUFFLE(a, b, high); \
        }
#define LIST(...) __VA_ARGS__

#if defined(__AVX__) && !defined(__AVX512F__)
/* Swap places of 8 x 8 numbers that are 16 apart. */
INLINE void transpose8(const float *from, float *to) {
    __m256 x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_ps(from + i * LANES);
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            x[i + 2 * k] = _mm256_shuffle_ps(y[i + k], y[i + k + 2], 0x44);
            x[i + 2 * k + 1] = _mm256_shuffle_ps(y[i + k], y[i + k + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * LANES, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * LANES, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
}

INLINE void transpose(uvec x[LANES]) {
    float from[LANES * LANES];
    memcpy(from, x, sizeof from);
    for (int i = 0; i < LANES; i += 8)
        for (int k = 0; k < LANES; k += 8)
            transpose8(from + i * LANES + k, (float *)x + k * LANES + i);
}
#else
INLINE void transpose(uvec x[LANES]) {
    SWAP(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    SWAP(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}
#endif

/* Ask for up to 32 rows early; sizes in numbers of two bytes. */
INLINE void fetch(const bf16 *p, int64_t stride, int64_t rows, int64_t width) {
    for (int64_t k = 0; k < 32 && k < rows; k++)
        for (int64_t i = 0; i < width; i += 32) __builtin_prefetch(p + k * stride + i);
}

/* Attention: one call for a whole tensor, or for one row of several that differ in length. */
struct call {
    int64_t rows, heads, kv_heads, columns, slots, width, value_width;
    int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[2]; /* elements */
    int64_t is_bf16, has_tiles, threads;
    float scale; /* not negative */
    int64_t in_units; /* keys and values lie as `put_key` and `put_value` write them */
    int64_t ahead;    /* numbers from these keys and values to the next ones that the thread needs, in
                         units; 0: unknown */
};

/* Attend from `num` of a row's queries, from the `first` on, with one of its key-value heads.
   `columns` says where the row's columns lie in `query`, `mask` and `out`; NULL: one after another. */
void attend(const struct call *c, char *out, const char *query, const char *key, const char *value,
            const uint8_t *mask, const int64_t *columns, int64_t row, int64_t kv_head, int64_t first,
            int64_t num);

/* Write a token's key, or value, into its slot of a row and head that lie in units. */
#ifdef FLOAT32
/* A unit of keys is what scores are computed from: slots within dimensions. Values lie as ever. */
INLINE void put_key(float *keys, int64_t slot, const float *key, int64_t width) {
    keys += slot / SLOTS * SLOTS * width + slot % SLOTS;
    for (int64_t d = 0; d < width; d++) keys[d * SLOTS] = key[d];
}
INLINE void put_value(float *values, int64_t slot, const float *value, int64_t width) {
    memcpy(values + slot * width, value, width * sizeof *value);
}
#else
void put_key(bf16 *keys, int64_t slot, const bf16 *key, int64_t width);
void put_value(bf16 *values, int64_t slot, const bf16 *value, int64_t width);
#endif

#ifdef HAS_TILES
/* The same for one row and key-value head, where matrix tiles serve. */
void attend_tiles(const struct call *c, bf16 *out, const bf16 *query, const bf16 *key,
                  const bf16 *value, const uint8_t *mask, const int64_t *columns, int64_t first,
                  int64_t num);
int tiles_fit(const struct call *c);
#endif

/* How many queries of a key-value head a call of `attend` should take, so that all threads work. */
int64_t queries_per_task(int64_t queries, int64_t pairs, int64_t threads);

enum path { NO_PATH, VECTORS, TILES };                      /* which instructions: linear.c */
#ifdef FLOAT32
enum form { FLOATS, UPPER_HALVES }; /* of packed weights: floats.c */
#else
enum form { DENSE, NARROW, SHORT, LEVELS_4, LEVELS_8 }; /* packed.h */
#endif

/* A linear layer. */
struct layer {
    const uint8_t *weight; /* packed */
    const scalar *bias;    /* or NULL */
    int64_t outputs, inputs, path, form;
};

enum { BLOCK = 32 }; /* outputs of a block; numbers of outputs and inputs are filled up to blocks */

/* What a layer, dense or short, adds to the sums of another one before they are rounded: as many
   rows, its own inputs. Rows of zeros change nothing. */
struct extra {
    const struct layer *layer;
    const scalar *x; /* rows of round_up(inputs, BLOCK) numbers, zeros behind the inputs */
    int64_t stride;
};

/* Apply a layer to M rows for some blocks of its outputs, in the thread that calls; strides are in
   numbers between rows. An output has the bits that it has in every other division into calls. */
void linear_blocks(const struct layer *l, const struct extra *e, const scalar *x, int64_t stride,
                   scalar *y, int64_t y_stride, int64_t rows, int64_t block, int64_t end);

/* x: M rows, `stride` apart, of K numbers; y: M rows of N numbers. */
void mars_linear(const struct layer *l, const scalar *x, int64_t stride, scalar *y, int64_t rows,
                 int64_t threads);

/* Add up products of some groups of 32 inputs, from `group` to `end`, for one block of outputs and up
   to 32 rows: `sums` has 32 numbers per row. */
void linear_sums(const struct layer *l, const scalar *x, int64_t stride, float *sums, int64_t rows,
                 int64_t block, int64_t group, int64_t end);

#endif
