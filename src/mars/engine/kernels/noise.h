/* Gumbel noise by counter, as `mars.counter` defines it: -log(-log(1 - u)) with u the upper 40 bits of
   splitmix64, one round of it per coordinate. A number depends on its own coordinates only. */

#ifndef MARS_NOISE_H
#define MARS_NOISE_H

#include "kernels.h"

/* The hash of one more coordinate. */
INLINE uint64_t hash(uint64_t state, int64_t coordinate) {
    uint64_t bits = state + (uint64_t)(coordinate + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

/* log(x) of normal positive numbers, within 2 units in the last place of numbers around 1: the
   polynomial of Cephes (logf) for a significand between sqrt(1/2) and sqrt(2). */
INLINE vec log16(vec x) {
    const uvec bits = (uvec)x - 0x3f3504f3u; /* sqrt(1/2) */
    const ivec exponent = (ivec)bits >> 23;
    const vec m = (vec)((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    const vec n = __builtin_convertvector(exponent, vec), square = m * m;
    vec y = splat(7.0376836292e-2f);
    y = fma16(y, m, splat(-1.1514610310e-1f));
    y = fma16(y, m, splat(1.1676998740e-1f));
    y = fma16(y, m, splat(-1.2420140846e-1f));
    y = fma16(y, m, splat(1.4249322787e-1f));
    y = fma16(y, m, splat(-1.6668057665e-1f));
    y = fma16(y, m, splat(2.0000714765e-1f));
    y = fma16(y, m, splat(-2.4999993993e-1f));
    y = fma16(y, m, splat(3.3333331174e-1f));
    y = y * m * square;
    y = fma16(n, splat(-2.12194440e-4f), y);
    y = fma16(square, splat(-0.5f), y);
    return fma16(n, splat(0.693359375f), m + y);
}

/* From 40 bits, as numbers, to noise. */
INLINE vec noise16(vec upper_bits) {
    vec u = (upper_bits + 0.5f) * 0x1p-40f;
    u = choose(u > 1.0f - 0x1p-24f, splat(1.0f - 0x1p-24f), u);
    /* -log(1 - u): what rounding 1 - u has lost is in u / (1 - rounded). */
    const vec rest = 1.0f - u, lost = 1.0f - rest;
    const ivec is_tiny = lost == 0.0f;
    const vec exact = -log16(rest) * u / choose(is_tiny, splat(1.0f), lost);
    return -log16(choose(is_tiny, u, exact));
}

typedef uint64_t words __attribute__((vector_size(64))); /* 8 */
typedef int64_t integers __attribute__((vector_size(64)));
typedef float half __attribute__((vector_size(32)));

/* The upper 40 bits of eight hashes, as numbers. */
INLINE half upper_bits8(uint64_t state, integers coordinate) {
    words bits = state + (words)(coordinate + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return __builtin_convertvector((integers)((bits ^ bits >> 31) >> 24), half);
}

/* Noise of 16 ids. */
INLINE vec noise_of(uint64_t state, integers first, integers second) {
    union { half halves[2]; vec all; } bits = {
        {upper_bits8(state, first), upper_bits8(state, second)}};
    return noise16(bits.all);
}

#endif
