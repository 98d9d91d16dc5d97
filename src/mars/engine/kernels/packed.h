/* Packed weights: pairs of bf16 numbers, less of them, or levels.

   Blocks of 32 outputs consist of groups of 32 inputs. Numbers of outputs and inputs are filled up
   with zeros. A group lies in memory in one of these forms, and expands to the first:

     DENSE     for each pair of inputs two vectors of 16 outputs, of their first and second inputs by
               turns;
     NARROW    the same without the second vectors: at most 16 outputs have weights;
     SHORT     the same without the last 8 pairs: at most 16 inputs have weights;
     LEVELS_4  numbers of levels, of 4 bits;
     LEVELS_8  numbers of levels, of 8 bits.

   Levels are those of a quantised model that was written out in bf16. Quantisation leaves, for every
   32 inputs of an output, a few evenly spaced ones. Expanded weights are the model's own, bit for bit
   (a zero may lose its sign, which no sum notices); a layer with one that would not be is dense. A
   weight is bf16(base + step * level), with one rounding. 4 bits hold 0 to 15 (GGUF's Q4_1, and Q4_0
   with a base of -8 steps), 8 bits -127 to 127, with base 0 (Q8_0). Levels come first,

     4 bits: for each half of the outputs, for each eight pairs, two vectors of 16 words, for the
             half's first and last 8 outputs; a word has an output's first or second inputs of the
             eight pairs, the lowest bits first;
     8 bits: for each half, for each pair, in the order of the expanded numbers;

   then 32 steps and, with 4 bits, 32 bases, in fp16. */

#ifndef MARS_PACKED_H
#define MARS_PACKED_H

#include "kernels.h"

enum { GROUP = BLOCK * BLOCK, LINE = 32 }; /* weights; numbers of a cache line */

INLINE int64_t group_bytes(int64_t form) {
    return form == LEVELS_4 ? GROUP / 2 + 4 * BLOCK
           : form == LEVELS_8 ? GROUP + 2 * BLOCK
           : form == DENSE ? 2 * GROUP : GROUP;
}

#ifdef HAS_VECTORS

INLINE __m512 from_half(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* The levels of a vector of words, which are in their lowest four bits. */
INLINE __m512 lowest(__m512i words) {
    const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(words, levels);
}

INLINE __m512 signed_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* Expand half of a group's outputs; `apart`: numbers between vectors in `to`. */
INLINE void expand_half(int64_t form, int half, bf16 *to, int64_t apart, const uint8_t *from) {
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    if (form == LEVELS_8) {
        const __m512 step = from_half(from + GROUP + half * BLOCK);
        const __m512 step0 = _mm512_permutexvar_ps(first, step);
        const __m512 step1 = _mm512_permutexvar_ps(last, step);
        from += half * GROUP / 2;
#pragma GCC unroll 16
        for (int pair = 0; pair < 16; pair++, from += BLOCK) {
            const __m512 a = _mm512_mul_ps(signed_bytes(from), step0);
            const __m512 b = _mm512_mul_ps(signed_bytes(from + 16), step1);
            _mm512_store_si512(to + pair * apart, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        }
    } else if (form == LEVELS_4) {
        const __m512 step = from_half(from + GROUP / 2 + half * BLOCK);
        const __m512 step0 = _mm512_permutexvar_ps(first, step);
        const __m512 step1 = _mm512_permutexvar_ps(last, step);
        const __m512 base = from_half(from + GROUP / 2 + 2 * BLOCK + half * BLOCK);
        const __m512 base0 = _mm512_permutexvar_ps(first, base);
        const __m512 base1 = _mm512_permutexvar_ps(last, base);
        from += half * GROUP / 4;
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++, from += 128) {
            const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const __m512 x = lowest(_mm512_srli_epi32(a, 4 * i));
                const __m512 y = lowest(_mm512_srli_epi32(b, 4 * i));
                const __m512bh numbers = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(y, step1, base1),
                                                             _mm512_fmadd_ps(x, step0, base0));
                _mm512_store_si512(to + (eight * 8 + i) * apart, (__m512i)numbers);
            }
        }
    } else {
        const int wide = form == NARROW ? 1 : 2, pairs = form == SHORT ? 8 : 16;
        for (int pair = 0; pair < 16; pair++) {
            __m512i numbers = _mm512_setzero_si512();
            if (half < wide && pair < pairs)
                numbers = _mm512_loadu_si512(from + (pair * wide + half) * 64);
            _mm512_store_si512(to + pair * apart, numbers);
        }
    }
}

/* A group in the dense form: where it lies, or expanded into `memory`, in lines. */
INLINE const bf16 *expanded(int64_t form, bf16 *memory, const uint8_t *group) {
    if (form == DENSE) return (const bf16 *)group;
    expand_half(form, 0, memory, 2 * LINE, group);
    expand_half(form, 1, memory + LINE, 2 * LINE, group);
    return memory;
}
#endif
#endif
