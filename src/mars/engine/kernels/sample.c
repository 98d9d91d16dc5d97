/* Tokens, sampled: what `mars.decoding.sampling.choose` does for one column.

   Temperature, top-k (ties with the k-th stay), top-p (the fewest likeliest tokens), min-p, in this
   order; then the largest of logit / temperature + noise. The noise is that of `mars.counter`: Gumbel,
   -log(-log(1 - u)) with u the upper 40 bits of splitmix64, one round of it per coordinate. */

#include <math.h>
#include <stdlib.h>

#include "sample.h"

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
    u = choose(less(splat(1.0f - 0x1p-24f), u), splat(1.0f - 0x1p-24f), u);
    /* -log(1 - u): what rounding 1 - u has lost is in u / (1 - rounded). */
    const vec rest = 1.0f - u, lost = 1.0f - rest;
    const ivec is_tiny = at_most(lost, splat(0.0f)); /* it is not negative */
    const vec exact = -log16(rest) * u / choose(is_tiny, splat(1.0f), lost);
    return -log16(choose(is_tiny, u, exact));
}

typedef uint64_t words __attribute__((vector_size(64))); /* 8 */
typedef int64_t integers __attribute__((vector_size(64)));
typedef float half __attribute__((vector_size(32)));

INLINE int any(ivec x) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#else
    int found = 0;
    for (int k = 0; k < LANES; k++) found |= x[k];
    return found;
#endif
}

/* The upper 40 bits of eight hashes, as numbers. */
INLINE half upper_bits8(uint64_t state, integers coordinate) {
    words bits = state + (words)(coordinate + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return __builtin_convertvector((integers)((bits ^ bits >> 31) >> 24), half);
}

INLINE vec upper_bits16(uint64_t state, integers first, integers second) {
    union { half halves[2]; vec all; } bits = {
        {upper_bits8(state, first), upper_bits8(state, second)}};
    return bits.all;
}

static float noise_of_one(uint64_t state, int64_t id) {
    const integers all = (integers){0} + id;
    return noise16(upper_bits16(state, all, all))[0];
}

static int by_value(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->value != y->value) return x->value < y->value ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* How many of the candidates, which fall, the filters keep. `mass`: the sum of exp((value - first) /
   temperature) over all tokens, if these are not all; else 0. */
static int64_t filter(const struct candidate *c, int64_t count, const struct sampling *s, float mass) {
    const float top = c[0].value;
    if (s->top_k > 0 && s->top_k < count) {
        int64_t kept = s->top_k;
        while (kept < count && c[kept].value == c[s->top_k - 1].value) kept++;
        count = kept, mass = 0;
    } else if (s->top_k > 0)
        mass = 0;
    if (s->top_p < 1) {
        if (mass == 0)
            for (int64_t i = 0; i < count; i++) mass += expf((c[i].value - top) / s->temperature);
        float sum = 0;
        int64_t kept = 0;
        while (kept < count && (kept == 0 || sum < s->top_p * mass))
            sum += expf((c[kept++].value - top) / s->temperature);
        count = kept;
    }
    if (s->min_p > 0) {
        const float floor = top / s->temperature + logf(s->min_p);
        while (count > 1 && c[count - 1].value / s->temperature < floor) count--;
    }
    return count;
}

/* Noise is at most MOST_NOISE, and at most -log(u): a token can only win against a score of `bound` if
   u <= exp(logit / temperature - bound). So few tokens need their noise. SLACK is for rounding. */
#define MOST_NOISE 28.5f
#define SLACK 1.001f
static float doubt(float score) { return fabsf(score) * 0x1p-21f; } /* rounding of large ones */

/* Choose among candidates, which fall. */
static int64_t sample_sorted(const struct candidate *c, int64_t count, const struct sampling *s,
                             float mass, int64_t position) {
    const uint64_t state = hash(hash(0, s->seed), position);
    count = filter(c, count, s, mass);
    int64_t best = c[0].id;
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const float value = c[i].value / s->temperature, gap = value - most + doubt(most);
        if (gap < -MOST_NOISE) break;
        const float u = (float)(hash(state, c[i].id) >> 24) * 0x1p-40f;
        if (gap < 0 && u > SLACK * expf(gap)) continue;
        const float score = value + noise_of_one(state, c[i].id);
        if (score > most || (score == most && c[i].id < best)) most = score, best = c[i].id;
    }
    return best;
}

int64_t sample_candidates(struct candidate *c, int64_t count, const struct sampling *s,
                          int64_t position) {
    qsort(c, count, sizeof *c, by_value);
    return sample_sorted(c, count, s, 0, position);
}

/* Without filters: all tokens. */
static int64_t sample_all(const scalar *x, int64_t count, float temperature, uint64_t state) {
    const float inverse = 1.0f / temperature;
    integers lane[2][2]; /* which numbers stand in the lanes of a pair of vectors */
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < LANES; k++) lane[h][k / 8][k % 8] = place_of(h, k);
    vec most[2] = {splat(-INFINITY), splat(-INFINITY)};
    ivec where[2] = {{0}};
    float bound = -INFINITY;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const struct two v = load2(x + i);
        const vec value[2] = {v.a, v.b};
        const float least = bound - doubt(bound);
        for (int h = 0; h < 2; h++) {
            const vec gap = value[h] * inverse - least;
            if (!any(less(splat(-MOST_NOISE), gap))) continue;
            const vec bits = upper_bits16(state, i + lane[h][0], i + lane[h][1]);
            const vec most_u = exp16(choose(less(splat(0.0f), gap), splat(0.0f), gap)) * SLACK;
            if (!any(at_most(bits * 0x1p-40f, most_u))) continue;
            const vec score = value[h] / temperature + noise16(bits);
            const ivec wins = less(most[h], score);
            most[h] = choose(wins, score, most[h]);
            where[h] = (wins & (int32_t)i) | (~wins & where[h]);
            for (int k = 0; k < LANES; k++) bound = most[h][k] > bound ? most[h][k] : bound;
        }
    }
    float best = -INFINITY;
    int64_t token = 0;
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < LANES; k++) {
            const int64_t id = where[h][k] + place_of(h, k);
            if (most[h][k] > best || (most[h][k] == best && id < token)) best = most[h][k], token = id;
        }
    for (; i < count; i++) {
        const float score = to_float(x[i]) / temperature + noise_of_one(state, i);
        if (score > best) best = score, token = i;
    }
    return token;
}

/* Sum of exp((x - top) / temperature). */
static float mass_of(const scalar *x, int64_t count, float top, float temperature) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const struct two v = load2(x + i);
        sum += exp16((v.a - top) / temperature);
        sum += exp16((v.b - top) / temperature);
    }
    float total = 0;
    for (int k = 0; k < LANES; k++) total += sum[k];
    for (; i < count; i++) total += expf((to_float(x[i]) - top) / temperature);
    return total;
}

/* The numbers from `floor` on, in their order; return how many. */
static int64_t find(struct candidate *found, const scalar *x, int64_t count, float floor) {
    int64_t number = 0;
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        if (i + 2 * LANES <= count) {
            const struct two v = load2(x + i);
            if (!any(at_most(splat(floor), v.a) | at_most(splat(floor), v.b))) continue;
        }
        for (int64_t j = i; j < count && j < i + 2 * LANES; j++)
            if (to_float(x[j]) >= floor) found[number++] = (struct candidate){to_float(x[j]), j};
    }
    return number;
}

/* Sort numbers in ascending order of their ids by falling value, with room for as many behind
   them: by eight bits after the other, from the lowest on; equals keep their order. */
static void sort(struct candidate *c, int64_t count) {
    for (int shift = 32 - 8 * (int)sizeof(scalar); shift < 32; shift += 8) {
        const struct candidate *from = shift % 16 ? c + count : c;
        struct candidate *to = shift % 16 ? c : c + count;
        int64_t start[257] = {0};
        for (int pass = 0; pass < 2; pass++) {
            for (int64_t i = 0; i < count; i++) {
                uint32_t bits;
                memcpy(&bits, &from[i].value, sizeof bits);
                const uint32_t key = (bits & 0x80000000u ? bits : ~bits & 0x7fffffffu) >> shift & 255;
                if (pass) to[start[key]++] = from[i];
                else start[key + 1]++;
            }
            for (int k = 1; k < 257 && !pass; k++) start[k] += start[k - 1];
        }
    }
}

int64_t sample(const scalar *x, int64_t count, const struct sampling *s, float top, int64_t position) {
    if (s->top_k <= 0 && s->top_p >= 1 && s->min_p <= 0)
        return sample_all(x, count, s->temperature, hash(hash(0, s->seed), position));
    struct candidate *found = malloc(2 * count * sizeof *found);
    if (!found) abort();
    const float mass = s->top_p < 1 ? mass_of(x, count, top, s->temperature) : 0;
    /* The tokens that matter are few: look for them further and further below the likeliest. */
    int64_t number = 0;
    for (float depth = 2;; depth *= 2) {
        const float floor = depth > 100 ? -INFINITY : top - depth * s->temperature;
        float sum = 0;
        number = find(found, x, count, floor);
        for (int64_t i = 0; i < number && s->top_p < 1; i++)
            sum += expf((found[i].value - top) / s->temperature);
        const int has_top_k = s->top_k > 0 ? number >= s->top_k : 0;
        const int has_top_p = s->top_k <= 0 && s->top_p < 1 && sum >= s->top_p * mass;
        const int has_min_p = s->min_p > 0 && logf(s->min_p) > -depth;
        const int needs_all = s->top_k > 0 || s->top_p < 1;
        if (has_top_k || has_top_p || (has_min_p && !needs_all) || floor == -INFINITY) break;
    }
    sort(found, number);
    const int64_t token = sample_sorted(found, number, s, mass, position);
    free(found);
    return token;
}
