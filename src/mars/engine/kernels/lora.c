/* LoRA: sums of A x, in pieces of the inputs, and B A x. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "sums.h"

void linear_sums(const struct layer *l, const bf16 *x, int64_t stride, float *sums, int64_t rows,
                 int64_t block, int64_t group, int64_t end) {
#ifdef HAS_VECTORS
    const uint8_t *w = l->weight + block * block_bytes(l, l->form) + group * group_bytes(l->form);
    bf16 *copy = NULL;
    if (l->inputs % BLOCK) {
        const int64_t padded = round_up(l->inputs, BLOCK);
        x = copy = copy_rows(x, stride, rows, l->inputs, padded), stride = padded;
    }
    x += group * BLOCK;
#ifdef HAS_TILES
    if (l->path == TILES) {
        const int64_t num = rows <= TILE ? rows : (rows + 1) / 2, second = rows - num;
        float *other = sums + second * BLOCK;
        configure(num);
        clear_sums(second > 0);
        if (second) add_groups(1, 1, l->form, w, x, x + second * stride, stride, end - group, NULL);
        else add_groups(0, 1, l->form, w, x, x, stride, end - group, NULL);
        _tile_stored(0, sums, BLOCK * sizeof *sums);
        _tile_stored(1, sums + TILE, BLOCK * sizeof *sums);
        if (second) _tile_stored(2, other, BLOCK * sizeof *sums);
        if (second) _tile_stored(3, other + TILE, BLOCK * sizeof *sums);
        MEMORY_BARRIER;
        free(copy);
        return;
    }
#endif
    memset(sums, 0, rows * BLOCK * sizeof *sums);
    for (; group < end; group++, w += group_bytes(l->form), x += BLOCK) {
        bf16 memory[GROUP] __attribute__((aligned(64)));
        const bf16 *numbers = expanded(l->form, memory, w);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t half = 0; half < 2; half++) {
                float *to = sums + r * BLOCK + half * 16;
                __m512 sum = _mm512_loadu_ps(to);
                for (int64_t k = 0; k < BLOCK; k += 2) {
                    const int32_t pair = *(const int32_t *)(x + r * stride + k);
                    const __m512i weights = _mm512_loadu_si512(numbers + k * BLOCK + half * LINE);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
                }
                _mm512_storeu_ps(to, sum);
            }
    }
    free(copy);
#else
    (void)l, (void)x, (void)stride, (void)sums, (void)rows, (void)block, (void)group, (void)end;
#endif
}

/* y += B A x for M rows in each of `batches`: x of K numbers, y of N. Strides between batches and
   between rows, in numbers: of x, then of y. Every step is rounded, as if layer by layer. */
void mars_lora(const struct layer *a, const struct layer *b, const bf16 *x, bf16 *y,
               const int64_t *strides, int64_t batches, int64_t rows) {
#ifdef HAS_VECTORS
    bf16 *inner = malloc(rows * (a->outputs + b->outputs) * sizeof *inner);
    if (!inner) abort();
    bf16 *delta = inner + rows * a->outputs;
    for (int64_t i = 0; i < batches; i++) {
        mars_linear(a, x + i * strides[0], strides[1], inner, rows, 1);
        mars_linear(b, inner, a->outputs, delta, rows, 1);
        for (int64_t m = 0; m < rows; m++) {
            bf16 *to = y + i * strides[2] + m * strides[3];
            const bf16 *from = delta + m * b->outputs;
            for (int64_t n = 0; n < b->outputs; n++) {
                uint32_t bits = (uint32_t)to[n] << 16, other = (uint32_t)from[n] << 16;
                float sum, added;
                memcpy(&sum, &bits, sizeof sum);
                memcpy(&added, &other, sizeof added);
                sum += added;
                memcpy(&bits, &sum, sizeof bits);
                to[n] = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* masks have no NaN */
            }
        }
    }
    free(inner);
#else
    (void)a, (void)b, (void)x, (void)y, (void)strides, (void)batches, (void)rows;
#endif
}
