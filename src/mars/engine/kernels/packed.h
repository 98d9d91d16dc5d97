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

/* Steps and bases of half of a group's outputs, for the first and last 8 of them. */
struct scale {
    __m512 step[2], base[2];
};

INLINE struct scale scale_of(int64_t form, int half, const uint8_t *group) {
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    struct scale s = {0};
    if (form != LEVELS_4 && form != LEVELS_8) return s;
    const uint8_t *steps = group + (form == LEVELS_4 ? GROUP / 2 : GROUP) + half * BLOCK;
    const __m512 step = from_half(steps);
    s.step[0] = _mm512_permutexvar_ps(first, step), s.step[1] = _mm512_permutexvar_ps(last, step);
    if (form == LEVELS_8) return s;
    const __m512 base = from_half(steps + 2 * BLOCK);
    s.base[0] = _mm512_permutexvar_ps(first, base), s.base[1] = _mm512_permutexvar_ps(last, base);
    return s;
}

/* Expand some pairs of half of a group's outputs: of 4 bits, all from one eight; `apart`: numbers
   between vectors in `to`. */
INLINE void expand_pairs(int64_t form, struct scale s, int half, int pair, int num, bf16 *to,
                         int64_t apart, const uint8_t *from) {
    const int wide = form == NARROW ? 1 : 2, pairs = form == SHORT ? 8 : 16;
    const uint8_t *eight = from + half * GROUP / 4 + pair / 8 * 128;
    __m512i a = _mm512_setzero_si512(), b = a;
    if (form == LEVELS_4) a = _mm512_loadu_si512(eight), b = _mm512_loadu_si512(eight + 64);
    to += pair * apart;
#pragma GCC unroll 16
    for (int i = 0; i < num; i++, to += apart) {
        const uint8_t *bytes = from + half * GROUP / 2 + (pair + i) * BLOCK;
        const int shift = 4 * ((pair + i) % 8);
        __m512i numbers = _mm512_setzero_si512();
        if (form == LEVELS_8) {
            const __m512 x = _mm512_mul_ps(signed_bytes(bytes), s.step[0]);
            const __m512 y = _mm512_mul_ps(signed_bytes(bytes + 16), s.step[1]);
            numbers = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        } else if (form == LEVELS_4) {
            const __m512 x = lowest(_mm512_srli_epi32(a, shift));
            const __m512 y = lowest(_mm512_srli_epi32(b, shift));
            numbers = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(y, s.step[1], s.base[1]),
                                                   _mm512_fmadd_ps(x, s.step[0], s.base[0]));
        } else if (half < wide && pair + i < pairs)
            numbers = _mm512_loadu_si512(from + ((pair + i) * wide + half) * 64);
        _mm512_store_si512(to, numbers);
    }
}

/* Expand half of a group's outputs. */
INLINE void expand_half(int64_t form, int half, bf16 *to, int64_t apart, const uint8_t *from) {
    const struct scale s = scale_of(form, half, from);
    expand_pairs(form, s, half, 0, 8, to, apart, from);
    expand_pairs(form, s, half, 8, 8, to, apart, from);
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
