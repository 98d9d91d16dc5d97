/* Tokens, sampled: what `mars.decoding.sampling.choose` does for one column.

   Temperature, top-k (ties with the k-th stay), top-p (the fewest likeliest tokens), min-p, in this
   order; then the largest of logit / temperature + noise. */

#include <math.h>
#include <stdlib.h>

#include "noise.h"
#include "sample.h"

/* Noise of tensors: `count` columns with `size` numbers each, for the hashes of their other
   coordinates and for ids, those of every column one after another, or the same for all. */
void mars_gumbel(float *noise, const int64_t *state, const int64_t *ids, int64_t is_shared,
                 int64_t count, int64_t size, int64_t threads) {
    (void)threads;
#pragma omp parallel for num_threads(threads) if (count > 1 && threads > 1)
    for (int64_t c = 0; c < count; c++) {
        const int64_t *id = is_shared ? ids : ids + c * size;
        for (int64_t i = 0; i < size; i += LANES) {
            integers coordinates[2] = {{0}};
            const int64_t here = size - i < LANES ? size - i : LANES;
            memcpy(coordinates, id + i, here * sizeof *id);
            const vec x = noise_of(state[c], coordinates[0], coordinates[1]);
            memcpy(noise + c * size + i, &x, here * sizeof *noise);
        }
    }
}

static float noise_of_one(uint64_t state, int64_t id) {
    const integers all = (integers){0} + id;
    return noise_of(state, all, all)[0];
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

int64_t sample_candidates(struct candidate *c, int64_t count, const struct sampling *s, float mass,
                          int64_t position) {
    const uint64_t state = hash(hash(0, s->seed), position);
    qsort(c, count, sizeof *c, by_value);
    count = filter(c, count, s, mass);
    int64_t best = c[0].id;
    float most = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const float value = c[i].value / s->temperature + noise_of_one(state, c[i].id);
        if (value > most || (value == most && c[i].id < best)) most = value, best = c[i].id;
    }
    return best;
}

/* Without filters: all tokens. */
static int64_t sample_all(const bf16 *x, int64_t count, float temperature, uint64_t state) {
    const vec most_noise = splat(28.5f);
    const integers even = {0, 2, 4, 6, 8, 10, 12, 14};
    vec most[2] = {splat(-INFINITY), splat(-INFINITY)};
    ivec where[2] = {{0}};
    float bound = -INFINITY;
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const uvec pairs = *(const anywhere *)(x + i);
        const vec value[2] = {low(pairs) / temperature, high(pairs) / temperature};
        for (int h = 0; h < 2; h++) {
            const ivec may_win = value[h] + most_noise > bound;
            int any = 0;
            for (int k = 0; k < LANES; k++) any |= may_win[k];
            if (!any) continue;
            const vec score = value[h] + noise_of(state, i + h + even, i + h + even + 16);
            const ivec wins = score > most[h];
            most[h] = choose(wins, score, most[h]);
            where[h] = (wins & (int32_t)i) | (~wins & where[h]);
            for (int k = 0; k < LANES; k++) bound = most[h][k] > bound ? most[h][k] : bound;
        }
    }
    float best = -INFINITY;
    int64_t token = 0;
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < LANES; k++) {
            const int64_t id = where[h][k] + 2 * k + h;
            if (most[h][k] > best || (most[h][k] == best && id < token)) best = most[h][k], token = id;
        }
    for (; i < count; i++) {
        const float score = widen(x[i]) / temperature + noise_of_one(state, i);
        if (score > best) best = score, token = i;
    }
    return token;
}

/* Sum of exp((x - top) / temperature). */
static float mass_of(const bf16 *x, int64_t count, float top, float temperature) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const uvec pairs = *(const anywhere *)(x + i);
        sum += exp16((low(pairs) - top) / temperature);
        sum += exp16((high(pairs) - top) / temperature);
    }
    float total = 0;
    for (int k = 0; k < LANES; k++) total += sum[k];
    for (; i < count; i++) total += expf((widen(x[i]) - top) / temperature);
    return total;
}

int64_t sample(const bf16 *x, int64_t count, const struct sampling *s, float top, int64_t position) {
    if (s->top_k <= 0 && s->top_p >= 1 && s->min_p <= 0)
        return sample_all(x, count, s->temperature, hash(hash(0, s->seed), position));
    struct candidate *found = malloc(count * sizeof *found);
    if (!found) abort();
    const float mass = s->top_p < 1 ? mass_of(x, count, top, s->temperature) : 0;
    /* The tokens that matter are few: look for them further and further below the likeliest. */
    int64_t number = 0;
    for (float depth = 8;; depth *= 2) {
        const float floor = depth > 100 ? -INFINITY : top - depth * s->temperature;
        float sum = 0;
        number = 0;
        for (int64_t i = 0; i < count; i++)
            if (widen(x[i]) >= floor) found[number++] = (struct candidate){widen(x[i]), i};
        for (int64_t i = 0; i < number && s->top_p < 1; i++)
            sum += expf((found[i].value - top) / s->temperature);
        const int has_top_k = s->top_k > 0 ? number >= s->top_k : 0;
        const int has_top_p = s->top_k <= 0 && s->top_p < 1 && sum >= s->top_p * mass;
        const int has_min_p = s->min_p > 0 && logf(s->min_p) > -depth;
        const int needs_all = s->top_k > 0 || s->top_p < 1;
        if (has_top_k || has_top_p || (has_min_p && !needs_all) || floor == -INFINITY) break;
    }
    const int64_t token = sample_candidates(found, number, s, mass, position);
    free(found);
    return token;
}
