/* Linear layers in fp32, row by row the same bits; what linear.c and pack.c are for bf16.

   y = x W^T + b with M rows, K inputs and N outputs. An output is one chain of fused multiply-adds over
   the inputs in their order, so it depends on its row and its weights alone; not on other rows, their
   number, its place or threads.

   Weights are packed once, in columns of 16 outputs, filled up with zeros:

     FLOATS        for each input 16 numbers of fp32;
     UPPER_HALVES  for each pair of inputs 16 words: the upper halves of the first input's number (as
                   the lower half of the word) and of the second's. Only for weights that are numbers of
                   bf16, as those of a model whose file is in bf16: then nothing is lost, and half as
                   much memory is read.

   One is loaded once for as many rows as the registers hold. */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { COLUMN = 16 };            /* outputs */
enum { SMALL_CALL = 1 << 16 };   /* weights that one thread packs or applies faster alone */
enum { CHUNK_BYTES = 1 << 18 };  /* of x, to stay in the second-level cache */
enum { AHEAD = 2 << 10 };        /* how far ahead of their use weights are fetched, in bytes */

/* Registers: ROWS for one column of outputs, FEW_ROWS for both columns of a block. */
#if defined(__AVX512F__)
enum { ROWS = 12, FEW_ROWS = 12 };
#else
enum { ROWS = 6, FEW_ROWS = 2 };
#endif
enum { VECTORS_OF_COLUMN = COLUMN / WIDTH };

/* Where the processor multiplies and adds vectors at once, and else torch. */
int64_t mars_linear_path(int64_t may_use_tiles) {
    (void)may_use_tiles;
#if (defined(__AVX2__) && defined(__FMA__)) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
    return VECTORS;
#else
    return NO_PATH;
#endif
}

/* Bytes of a column of outputs. */
INLINE int64_t column_bytes(int64_t inputs, int64_t form) {
    return form == FLOATS ? inputs * COLUMN * 4 : (inputs + 1) / 2 * COLUMN * 4;
}

int64_t mars_packed_bytes(int64_t outputs, int64_t inputs, int64_t form) {
    return round_up(round_up(outputs, COLUMN) / COLUMN * column_bytes(inputs, form), 64);
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Pack weights (N rows, `stride` apart) in a form; returns 0 where it cannot hold them. */
int64_t mars_pack(void *to, const float *weight, int64_t outputs, int64_t inputs, int64_t stride,
                  int64_t form, int64_t threads) {
    const int64_t columns = round_up(outputs, COLUMN) / COLUMN;
    uint32_t lost = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) reduction(| : lost) if (outputs * inputs > SMALL_CALL)
    for (int64_t column = 0; column < columns; column++) {
        const int64_t left = outputs - column * COLUMN;
        const float *from = weight + column * COLUMN * stride;
        uint32_t *word = (uint32_t *)((char *)to + column * column_bytes(inputs, form));
        const int64_t step = form == FLOATS ? 1 : 2;
        for (int64_t k = 0; k < inputs && !(lost & 0xffff); k += step)
            for (int64_t n = 0; n < COLUMN; n++) {
                const uint32_t first = n < left ? bits_of(from[n * stride + k]) : 0;
                const int has_second = n < left && step == 2 && k + 1 < inputs;
                const uint32_t second = has_second ? bits_of(from[n * stride + k + 1]) : 0;
                if (step == 2) lost |= first | second;
                *word++ = step == 1 ? first : first >> 16 | (second & 0xffff0000u);
            }
    }
    return !(lost & 0xffff);
}

/* A weight of a packed layer. */
static uint32_t packed_bits(const struct layer *l, int64_t output, int64_t input) {
    const uint32_t *column =
        (const uint32_t *)(l->weight + output / COLUMN * column_bytes(l->inputs, l->form));
    if (l->form == FLOATS) return column[input * COLUMN + output % COLUMN];
    const uint32_t word = column[input / 2 * COLUMN + output % COLUMN];
    return input % 2 ? word & 0xffff0000u : word << 16;
}

/* Whether a sample of each layer's weights still equals the packed ones: eight numbers of a row. */
int64_t mars_are_packed(const struct layer *const *layers, const float *const *weights,
                        const int64_t *strides, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const struct layer *l = layers[i];
        for (int64_t j = 0; j < 8; j++) {
            const int64_t n = l->outputs / 2, k = (2 * j + 1) * l->inputs / 16;
            if (packed_bits(l, n, k) != bits_of(weights[i][n * strides[i] + k])) return 0;
        }
    }
    return 1;
}

/* Compilers shall not keep what they have loaded from p, or addresses of it, in registers. */
#define FORGET(p) __asm__("" : "+r"(p))

/* Add products of the inputs from `k` to `end` to sums of some rows, for one or two columns of outputs
   that lie at w. */
INLINE void add_products(int rows, int columns, int64_t form, lanes *sum, const uint8_t *const *w,
                         const float *x, int64_t stride, int64_t k, int64_t end) {
    enum { TOGETHER = 3 }; /* rows with one pointer: there are few registers for these */
    const int vectors = columns * VECTORS_OF_COLUMN;
    const float *base[(ROWS + TOGETHER - 1) / TOGETHER];
    const uint32_t *word[2];
    for (int r = 0; r < rows; r += TOGETHER) base[r / TOGETHER] = x + r * stride + k;
    for (int c = 0; c < columns; c++)
        word[c] = (const uint32_t *)w[c] + (form == FLOATS ? k : k / 2) * COLUMN;
#define WORDS(v) \
    *(const words_anywhere *)(word[(v) / VECTORS_OF_COLUMN] + (v) % VECTORS_OF_COLUMN * WIDTH)
#define ADD(offset, weights) { \
        lanes here[2 * VECTORS_OF_COLUMN]; \
        for (int c = 0; c < columns; c++) FORGET(word[c]); \
        UNROLLED for (int v = 0; v < vectors; v++) here[v] = (lanes)(weights); \
        UNROLLED for (int r = 0; r < rows; r++) { \
            const float value = base[r / TOGETHER][r % TOGETHER * stride + (offset)]; \
            UNROLLED for (int v = 0; v < vectors; v++) \
                sum[r * vectors + v] = fma_lanes(here[v], value, sum[r * vectors + v]); \
        } \
    }
    const int step = form == FLOATS ? 1 : 2;
    for (; k + step <= end; k += step) {
        for (int c = 0; c < columns; c++) __builtin_prefetch((const char *)word[c] + AHEAD);
        if (form == FLOATS) ADD(0, WORDS(v))
        else {
            ADD(0, WORDS(v) << 16)
            ADD(1, WORDS(v) & 0xffff0000u)
        }
        for (int c = 0; c < columns; c++) word[c] += COLUMN;
        for (int r = 0; r < rows; r += TOGETHER) {
            base[r / TOGETHER] += step;
            FORGET(base[r / TOGETHER]);
        }
    }
    if (k < end) ADD(0, WORDS(v) << 16)
#undef ADD
#undef WORDS
}

/* One or two columns of outputs, from number `column` on, for some rows. */
INLINE void tile(int rows, int columns, int64_t form, int64_t extra_form, const struct layer *l,
                 const struct extra *e, const float *x, int64_t stride, float *y, int64_t y_stride,
                 int64_t row, int64_t column) {
    const int vectors = columns * VECTORS_OF_COLUMN;
    lanes sum[ROWS * 2 * VECTORS_OF_COLUMN];
    const uint8_t *w[2], *added[2] = {0};
    for (int c = 0; c < columns; c++) {
        w[c] = l->weight + (column + c) * column_bytes(l->inputs, form);
        if (e) added[c] = e->layer->weight + (column + c) * column_bytes(e->layer->inputs, extra_form);
    }
    UNROLLED for (int i = 0; i < rows * vectors; i++) sum[i] = (lanes){0};
    add_products(rows, columns, form, sum, w, x + row * stride, stride, 0, l->inputs);
    if (e) add_products(rows, columns, extra_form, sum, added, e->x + row * e->stride, e->stride, 0,
                        e->layer->inputs);
    UNROLLED for (int r = 0; r < rows; r++) {
        float *to = y + (row + r) * y_stride + column * COLUMN;
        const int64_t left = l->outputs - column * COLUMN;
        UNROLLED for (int v = 0; v < vectors; v++) {
            lanes result = sum[r * vectors + v];
            const int64_t size = left - v * WIDTH < WIDTH ? left - v * WIDTH : WIDTH;
            if (size <= 0) break;
            if (l->bias) {
                lanes bias = {0};
                memcpy(&bias, l->bias + column * COLUMN + v * WIDTH, size * sizeof *to);
                result += bias;
            }
            if (size == WIDTH) store_lanes(to + v * WIDTH, result);
            else memcpy(to + v * WIDTH, &result, size * sizeof *to);
        }
    }
}

/* Constant sizes, so that sums stay in registers. */
static void run_tile(int rows, int columns, const struct layer *l, const struct extra *e, const float *x,
                     int64_t stride, float *y, int64_t y_stride, int64_t row, int64_t column) {
#define TILE(n, c, f, g) tile(n, c, f, g, l, e, x, stride, y, y_stride, row, column)
#define FORMS(n, c) \
    if (l->form == FLOATS && (!e || e->layer->form == FLOATS)) TILE(n, c, FLOATS, FLOATS); \
    else if (l->form == FLOATS) TILE(n, c, FLOATS, UPPER_HALVES); \
    else if (e && e->layer->form == FLOATS) TILE(n, c, UPPER_HALVES, FLOATS); \
    else TILE(n, c, UPPER_HALVES, UPPER_HALVES);
#define CASE(n) \
    case n: \
        if (columns == 1) { FORMS(n, 1) } \
        else if (n <= FEW_ROWS) { FORMS(n <= FEW_ROWS ? n : 1, 2) } \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

void linear_blocks(const struct layer *l, const struct extra *e, const float *x, int64_t stride,
                   float *y, int64_t y_stride, int64_t rows, int64_t block, int64_t end) {
    enum { COLUMNS = BLOCK / COLUMN };
    const int64_t last = round_up(l->outputs, COLUMN) / COLUMN;
    int64_t chunk = CHUNK_BYTES / (l->inputs * (int64_t)sizeof *x) / ROWS * ROWS;
    if (chunk < ROWS) chunk = ROWS;
    for (int64_t start = 0; start < rows; start += chunk) {
        const int64_t size = rows - start < chunk ? rows - start : chunk;
        const int64_t tiles = (size + ROWS - 1) / ROWS;
        for (int64_t b = block; b < end; b++) {
            const int64_t both = last - b * COLUMNS < COLUMNS ? last - b * COLUMNS : COLUMNS;
            const int64_t width = size <= FEW_ROWS || FEW_ROWS == ROWS ? both : 1;
            for (int64_t c = 0; c < both; c += width)
                for (int64_t i = 0; i < tiles; i++) {
                    const int64_t first = size * i / tiles, num = size * (i + 1) / tiles - first;
                    run_tile(num, width, l, e, x, stride, y, y_stride, start + first, b * COLUMNS + c);
                }
        }
    }
}

void linear_sums(const struct layer *l, const float *x, int64_t stride, float *sums, int64_t rows,
                 int64_t block, int64_t group, int64_t end) {
    const int64_t last = end * BLOCK < l->inputs ? end * BLOCK : l->inputs;
    memset(sums, 0, rows * BLOCK * sizeof *sums);
    for (int64_t c = 0; c < BLOCK && block * BLOCK + c < l->outputs; c += COLUMN) {
        const int64_t column = (block * BLOCK + c) / COLUMN;
        const uint8_t *w[] = {l->weight + column * column_bytes(l->inputs, l->form)};
        for (int64_t r = 0; r < rows; r += 4) {
            const float *row = x + r * stride;
            float *to = sums + r * BLOCK + c;
            const int64_t from = group * BLOCK;
            switch (rows - r < 4 ? rows - r : 4) {
#define SUMS(n) \
    case n: { \
        lanes sum[n * VECTORS_OF_COLUMN] = {{0}}; \
        if (l->form == FLOATS) add_products(n, 1, FLOATS, sum, w, row, stride, from, last); \
        else add_products(n, 1, UPPER_HALVES, sum, w, row, stride, from, last); \
        for (int64_t i = 0; i < n; i++) \
            memcpy(to + i * BLOCK, sum + i * VECTORS_OF_COLUMN, COLUMN * sizeof *to); \
        break; \
    }
                SUMS(1) SUMS(2) SUMS(3) SUMS(4)
            }
        }
    }
}

void mars_linear(const struct layer *l, const float *x, int64_t stride, float *y, int64_t rows,
                 int64_t threads) {
    const int64_t blocks = round_up(l->outputs, BLOCK) / BLOCK;
    if (l->outputs * l->inputs * ((rows + 31) / 32) < SMALL_CALL) threads = 1;
    const int64_t parts = threads < blocks ? threads : blocks;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts; i++)
        linear_blocks(l, NULL, x, stride, y, l->outputs, rows, blocks * i / parts,
                      blocks * (i + 1) / parts);
}
