/* What happens to the numbers of one column: norms, rotation, activation, sums; bf16, rounded after
   every step. */

#ifndef MARS_ELEMENTWISE_H
#define MARS_ELEMENTWISE_H

#include <math.h>

#include "kernels.h"

/* 32 numbers as fp32: the even ones, then the odd ones. */
INLINE uvec load32(const bf16 *p) { return *(const anywhere *)p; }
INLINE void store32(bf16 *p, vec even, vec odd) {
    *(anywhere *)p = (round16(even) >> 16) | round16(odd);
}
typedef bf16 numbers16 __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
INLINE void store16(bf16 *p, vec x) {
    *(numbers16 *)p = __builtin_convertvector(round16(x) >> 16, numbers16);
}
INLINE vec rounded(vec x) { return (vec)round16(x); }

/* RMS norm. Sums run through 32 lanes in a fixed order. */
static void normalise(bf16 *y, const bf16 *x, const bf16 *weight, int64_t width, float epsilon) {
    vec even = {0}, odd = {0};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        const uvec pairs = load32(x + d);
        even = fma16(low(pairs), low(pairs), even);
        odd = fma16(high(pairs), high(pairs), odd);
    }
    even += odd;
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += even[i];
    for (int64_t i = d; i < width; i++) sum += widen(x[i]) * widen(x[i]);
    const float factor = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (d = 0; d + 2 * LANES <= width; d += 2 * LANES) {
        const uvec pairs = load32(x + d), w = load32(weight + d);
        store32(y + d, rounded(low(pairs) * factor) * low(w),
                rounded(high(pairs) * factor) * high(w));
    }
    for (; d < width; d++) y[d] = narrow(widen(narrow(widen(x[d]) * factor)) * widen(weight[d]));
}

/* Rotate the halves of one head against each other. */
static void rotate(bf16 *y, const bf16 *x, const bf16 *cosine, const bf16 *sine, int64_t width) {
    const int64_t half = width / 2;
    int64_t d = 0;
    for (; d + 2 * LANES <= half; d += 2 * LANES) {
        const uvec a = load32(x + d), b = load32(x + half + d);
        const uvec c0 = load32(cosine + d), c1 = load32(cosine + half + d);
        const uvec s0 = load32(sine + d), s1 = load32(sine + half + d);
        store32(y + d, rounded(low(a) * low(c0)) - rounded(low(b) * low(s0)),
                rounded(high(a) * high(c0)) - rounded(high(b) * high(s0)));
        store32(y + half + d, rounded(low(b) * low(c1)) + rounded(low(a) * low(s1)),
                rounded(high(b) * high(c1)) + rounded(high(a) * high(s1)));
    }
    for (; d < half; d++) {
        const float a = widen(x[d]), b = widen(x[half + d]);
        const float ac = widen(narrow(a * widen(cosine[d])));
        const float bs = widen(narrow(b * widen(sine[d])));
        const float bc = widen(narrow(b * widen(cosine[half + d])));
        const float as = widen(narrow(a * widen(sine[half + d])));
        y[d] = narrow(ac - bs);
        y[half + d] = narrow(bc + as);
    }
}

/* y = silu(y) * up */
static void gate(bf16 *y, const bf16 *up, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const uvec pairs = load32(y + i), other = load32(up + i);
        vec halves[2] = {low(pairs), high(pairs)};
        for (int h = 0; h < 2; h++) {
            const vec x = halves[h], e = exp16(-(vec)((uvec)x & 0x7fffffffu)); /* of -|x| */
            const vec z = choose(x < 0, e, splat(1.0f));
            halves[h] = rounded(x * z / (e + 1.0f));
        }
        store32(y + i, halves[0] * low(other), halves[1] * high(other));
    }
}

/* y += x, rounded; where the last vector would go too far, number by number. */
static void add(bf16 *y, const bf16 *x, int64_t count) {
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const uvec a = load32(y + i), b = load32(x + i);
        store32(y + i, low(a) + low(b), high(a) + high(b));
    }
    for (; i < count; i++) y[i] = narrow(widen(y[i]) + widen(x[i]));
}

#endif
