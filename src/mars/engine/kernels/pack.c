/* Packing weights for linear.c, once, in the forms of packed.h. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "packed.h"

enum { SMALL = 1 << 16 }; /* weights that one thread packs faster alone */

/* Bytes of a layer's packed weights. */
int64_t mars_packed_bytes(int64_t outputs, int64_t inputs, int64_t form) {
    return round_up(outputs, BLOCK) / BLOCK * (round_up(inputs, BLOCK) / BLOCK) * group_bytes(form);
}

/* Write weights as they are: dense, narrow or short. */
static void pack_plain(bf16 *to, const bf16 *weight, int64_t outputs, int64_t inputs,
                       int64_t stride, int64_t form, int64_t threads) {
    const int64_t padded = round_up(inputs, BLOCK), blocks = round_up(outputs, BLOCK) / BLOCK;
    const int64_t wide = form == NARROW ? LINE / 2 : BLOCK, deep = form == SHORT ? LINE / 2 : BLOCK;
    (void)threads;
#pragma omp parallel for num_threads(threads) if (outputs * inputs > SMALL)
    for (int64_t block = 0; block < blocks; block++) {
        bf16 *first = to + block * (padded / BLOCK) * wide * deep;
        const int64_t left = outputs - block * BLOCK;
        for (int64_t k = 0; k < padded; k += 2)
            for (int64_t n = 0; n < wide && k % BLOCK < deep; n++) {
                const bf16 *pair = weight + (block * BLOCK + n) * stride + k;
                *first++ = n < left && k < inputs ? pair[0] : 0;
                *first++ = n < left && k + 1 < inputs ? pair[1] : 0;
            }
    }
}

#ifdef HAS_VECTORS
enum { BASED, CENTRED, WIDE, NUM_KINDS }; /* Q4_1, Q4_0, Q8_0 */
enum { LARGEST_HALF = 0x7bff };

/* What 32 weights are made of. */
struct fit {
    uint16_t step, base; /* fp16 */
    int8_t level[BLOCK];
};

INLINE float half_as_float(uint16_t bits) {
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(bits)));
}

INLINE uint16_t nearest_half(float x) {
    const int round = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_extract_epi16(_mm512_cvtps_ph(_mm512_set1_ps(x), round), 0);
}

INLINE __m512 upper(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* The most by which rounding to bf16 has changed numbers that are now x. */
INLINE __m512 rounding(__m512 x) {
    const __m512i power = _mm512_and_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x7f800000));
    return _mm512_mul_ps(_mm512_castsi512_ps(power), _mm512_set1_ps(0x1p-8f));
}

INLINE float rounding_of(float x) { return _mm512_cvtss_f32(rounding(_mm512_set1_ps(x))); }

INLINE int is_equal(const __m512 x[2], const __m512 level[2], float step, float base) {
    for (int i = 0; i < 2; i++) {
        const __m512 y = _mm512_fmadd_ps(level[i], _mm512_set1_ps(step), _mm512_set1_ps(base));
        const __m512 rounded = upper((__m256i)_mm512_cvtneps_pbh(y));
        if (_mm512_cmp_ps_mask(rounded, x[i], _CMP_EQ_OQ) != 0xffff) return 0;
    }
    return 1;
}

INLINE __m512 nearest_level(__m512 x, float least, float most) {
    x = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(least)), _mm512_set1_ps(most));
}

/* A base with which levels and step give x: it lies where all the roundings allow it. */
static int find_base(const __m512 x[2], const __m512 level[2], float step, uint16_t *base) {
    float least = -INFINITY, most = INFINITY;
    for (int i = 0; i < 2; i++) {
        const __m512 rest = _mm512_fnmadd_ps(level[i], _mm512_set1_ps(step), x[i]);
        least = fmaxf(least, _mm512_reduce_max_ps(_mm512_sub_ps(rest, rounding(x[i]))));
        most = fminf(most, _mm512_reduce_min_ps(_mm512_add_ps(rest, rounding(x[i]))));
    }
    if (least - most > 0x1p-20f * fabsf(least)) return 0;
    const uint16_t middle = nearest_half((least + most) / 2);
    for (int i = 0; i < 3; i++) { /* at the edge of a rounding it may be a neighbour */
        *base = middle + (i == 2 ? -1 : i);
        if (is_equal(x, level, step, half_as_float(*base))) return 1;
    }
    return 0;
}

/* Find how 32 weights came about; 0: they did not come so. */
static int find_levels(const bf16 *weight, int kind, struct fit *fit) {
    const __m512i bits = _mm512_loadu_si512(weight);
    const __m512 x[2] = {upper(_mm512_castsi512_si256(bits)),
                         upper(_mm512_extracti64x4_epi64(bits, 1))};
    const float low = fminf(_mm512_reduce_min_ps(x[0]), _mm512_reduce_min_ps(x[1]));
    const float high = fmaxf(_mm512_reduce_max_ps(x[0]), _mm512_reduce_max_ps(x[1]));
    if (!(low > -1e30f && high < 1e30f)) return 0;
    const float end = -low > high ? low : high; /* it is level -8, or -127 or 127 */
    const float parts = kind == BASED ? 15 : kind == CENTRED ? -8 : 127;
    const float middle = (kind == BASED ? high - low : end) / parts; /* about the step */
    const float other = kind == BASED ? rounding_of(end == low ? high : low) : 0;
    const float width = (rounding_of(end) + other) / fabsf(parts) * 1.001f; /* how far from it */
    const uint16_t sign = middle < 0 ? 0x8000 : 0;
    const int nearest = nearest_half(fabsf(middle));
    __m512 level[2];
    for (int i = 0, outside = 0; outside < 2; i++) {
        /* From the nearest number of fp16 on, to both sides by turns, till both are too far. */
        const int half = nearest + (i % 2 ? (i + 1) / 2 : -i / 2);
        const float step = half < 0 || half > LARGEST_HALF ? INFINITY : half_as_float(half | sign);
        if (fabsf(step - middle) > width) {
            outside++;
            continue;
        }
        outside = 0;
        fit->step = half | sign, fit->base = nearest_half(kind == CENTRED ? -8 * step : 0);
        if (!half) level[0] = level[1] = _mm512_setzero_ps();
        else
            for (int j = 0; j < 2; j++) {
                const __m512 from = kind == BASED ? _mm512_sub_ps(x[j], _mm512_set1_ps(low)) : x[j];
                const float by = kind == BASED ? middle : step;
                const __m512 number = _mm512_div_ps(from, _mm512_set1_ps(by));
                if (kind == BASED) level[j] = nearest_level(number, 0, 15);
                else if (kind == WIDE) level[j] = nearest_level(number, -127, 127);
                else level[j] = _mm512_add_ps(nearest_level(number, -8, 7), _mm512_set1_ps(8));
            }
        if (kind == BASED ? !find_base(x, level, step, &fit->base)
                          : !is_equal(x, level, step, half_as_float(fit->base))) continue;
        for (int j = 0; j < 2; j++)
            _mm_storeu_si128((__m128i *)fit->level + j,
                             _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(level[j])));
        return 1;
    }
    return 0;
}

/* Write what 32 weights of an output of a group are made of. */
static void put_levels(uint8_t *group, int64_t form, int64_t output, const struct fit *fit) {
    uint8_t *steps = group + (form == LEVELS_8 ? GROUP : GROUP / 2);
    const int64_t half = output / 16, last = output % 16 / 8, lane = output % 8 * 2;
    memcpy(steps + 2 * output, &fit->step, 2);
    if (form == LEVELS_8) {
        for (int64_t k = 0; k < BLOCK; k++)
            group[half * 512 + k / 2 * 32 + last * 16 + lane + k % 2] = fit->level[k];
        return;
    }
    memcpy(steps + 2 * BLOCK + 2 * output, &fit->base, 2);
    for (int64_t eight = 0; eight < 2; eight++)
        for (int64_t odd = 0; odd < 2; odd++) {
            uint32_t word = 0;
            for (int64_t i = 0; i < 8; i++)
                word |= (uint32_t)fit->level[16 * eight + 2 * i + odd] << 4 * i;
            memcpy(group + half * 256 + eight * 128 + last * 64 + 4 * (lane + odd), &word, 4);
        }
}
#endif

/* Write weights as levels; K must be a multiple of 32. */
static int pack_levels(uint8_t *to, const bf16 *weight, int64_t outputs, int64_t inputs,
                       int64_t stride, int64_t form, int64_t threads) {
    int fits = 0;
    (void)threads;
#ifdef HAS_VECTORS
    const int64_t blocks = round_up(outputs, BLOCK) / BLOCK, groups = inputs / BLOCK;
    fits = inputs % BLOCK == 0;
#pragma omp parallel for num_threads(threads) if (outputs * inputs > SMALL)
    for (int64_t block = 0; block < blocks; block++) {
        int kind = form == LEVELS_8 ? WIDE : BASED;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *group = to + (block * groups + g) * group_bytes(form);
            for (int64_t n = 0; n < BLOCK; n++) {
                struct fit fit = {0};
                const int64_t output = block * BLOCK + n;
                int found, still;
#pragma omp atomic read
                still = fits;
                if (!still) break;
                if (output < outputs) {
                    const bf16 *first = weight + output * stride + g * BLOCK;
                    found = find_levels(first, kind, &fit);
                    if (!found && form == LEVELS_4)
                        found = find_levels(first, kind = kind == BASED ? CENTRED : BASED, &fit);
                    if (!found) {
#pragma omp atomic write
                        fits = 0;
                        break;
                    }
                }
                put_levels(group, form, n, &fit);
            }
        }
    }
#else
    (void)to, (void)weight, (void)outputs, (void)inputs, (void)stride, (void)form;
#endif
    return fits;
}

/* Pack weights (N rows, `stride` apart) in a form.

   Returns 0 where it cannot hold them; what has been written means nothing then. */
int64_t mars_pack(void *to, const bf16 *weight, int64_t outputs, int64_t inputs, int64_t stride,
                  int64_t form, int64_t threads) {
    if (form == LEVELS_4 || form == LEVELS_8)
        return pack_levels(to, weight, outputs, inputs, stride, form, threads);
    pack_plain(to, weight, outputs, inputs, stride, form, threads);
    return 1;
}

/* Whether a sample of each layer's weights still equals the packed ones: eight numbers of a row, so
   that few pages of weights that were let go come back. */
int64_t mars_are_packed(const struct layer *const *layers, const bf16 *const *weights,
                        const int64_t *strides, int64_t count) {
#ifdef HAS_VECTORS
    for (int64_t i = 0; i < count; i++) {
        const struct layer *l = layers[i];
        const int64_t n = l->outputs / 2, groups = round_up(l->inputs, BLOCK) / BLOCK;
        const bf16 *row = weights[i] + n * strides[i];
        for (int64_t j = 0; j < 8; j++) {
            const int64_t k = (2 * j + 1) * l->inputs / 16;
            const uint8_t *packed =
                l->weight + (n / BLOCK * groups + k / BLOCK) * group_bytes(l->form);
            bf16 numbers[GROUP] __attribute__((aligned(64)));
            const bf16 *group = expanded(l->form, numbers, packed);
            const bf16 now = group[k % BLOCK / 2 * 2 * BLOCK + n % BLOCK * 2 + k % 2];
            if (now != row[k] && (now | row[k]) & 0x7fff) return 0; /* zeros have lost their signs */
        }
    }
#else
    (void)layers, (void)weights, (void)strides, (void)count;
#endif
    return 1;
}
