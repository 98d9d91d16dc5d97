/* What happens to the numbers of one column: norms, rotation, activation, sums; rounded after
   every step. */

#ifndef MARS_ELEMENTWISE_H
#define MARS_ELEMENTWISE_H

#include <math.h>

#include "kernels.h"

/* RMS norm. Sums run through 32 lanes in a fixed order. */
static void normalise(scalar *y, const scalar *x, const scalar *weight, int64_t width,
                      float epsilon) {
    vec even = {0}, odd = {0};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        const struct two v = load2(x + d);
        even = fma16(v.a, v.a, even);
        odd = fma16(v.b, v.b, odd);
    }
    even += odd;
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += even[i];
    for (int64_t i = d; i < width; i++) sum += to_float(x[i]) * to_float(x[i]);
    const float factor = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (d = 0; d + 2 * LANES <= width; d += 2 * LANES) {
        const struct two v = load2(x + d), w = load2(weight + d);
        store2(y + d, rounded(v.a * factor) * w.a, rounded(v.b * factor) * w.b);
    }
    for (; d < width; d++)
        y[d] = to_scalar(to_float(to_scalar(to_float(x[d]) * factor)) * to_float(weight[d]));
}

/* Rotate the halves of one head against each other. */
static void rotate(scalar *y, const scalar *x, const scalar *cosine, const scalar *sine,
                   int64_t width) {
    const int64_t half = width / 2;
    int64_t d = 0;
    for (; d + 2 * LANES <= half; d += 2 * LANES) {
        const struct two a = load2(x + d), b = load2(x + half + d);
        const struct two c0 = load2(cosine + d), c1 = load2(cosine + half + d);
        const struct two s0 = load2(sine + d), s1 = load2(sine + half + d);
        store2(y + d, rounded(a.a * c0.a) - rounded(b.a * s0.a),
               rounded(a.b * c0.b) - rounded(b.b * s0.b));
        store2(y + half + d, rounded(b.a * c1.a) + rounded(a.a * s1.a),
               rounded(b.b * c1.b) + rounded(a.b * s1.b));
    }
    for (; d < half; d++) {
        const float a = to_float(x[d]), b = to_float(x[half + d]);
        const float ac = to_float(to_scalar(a * to_float(cosine[d])));
        const float bs = to_float(to_scalar(b * to_float(sine[d])));
        const float bc = to_float(to_scalar(b * to_float(cosine[half + d])));
        const float as = to_float(to_scalar(a * to_float(sine[half + d])));
        y[d] = to_scalar(ac - bs);
        y[half + d] = to_scalar(bc + as);
    }
}

/* y = silu(y) * up */
static void gate(scalar *y, const scalar *up, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const struct two v = load2(y + i), other = load2(up + i);
        vec halves[2] = {v.a, v.b};
        for (int h = 0; h < 2; h++) {
            const vec x = halves[h], e = exp16(-(vec)((uvec)x & 0x7fffffffu)); /* of -|x| */
            const vec z = choose(less(x, splat(0)), e, splat(1.0f));
            halves[h] = rounded(x * z / (e + 1.0f));
        }
        store2(y + i, halves[0] * other.a, halves[1] * other.b);
    }
}

/* y += x, rounded; where the last vector would go too far, number by number. */
static void add(scalar *y, const scalar *x, int64_t count) {
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const struct two a = load2(y + i), b = load2(x + i);
        store2(y + i, a.a + b.a, a.b + b.b);
    }
    for (; i < count; i++) y[i] = to_scalar(to_float(y[i]) + to_float(x[i]));
}

#endif
