/* What one step says, for rows that ask for nothing but tokens: verify drafts, then read the masks
   that stand behind the last right one. What `mars.decoding.step.decide` does for them.

   O outputs: of every row its last token and its drafts, row by row, then the masks, row by row.
   V vocabulary, D width, H width of the draft head, W masks per group. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "barrier.h"
#include "sample.h"
#ifdef _OPENMP
#include <omp.h>
#endif

enum { CANDIDATES = 32 }; /* among which the draft head chooses */
enum { STRETCH = 128 };   /* of logits, with a maximum of its own */

struct head {
    const float *from_hidden, *bias, *from_token, *output; /* H x D, H, H x D, D x H */
    const scalar *embedding, *logit;                           /* V x D */
    int64_t inner;
};

struct decision {
    const struct head *head; /* or NULL */
    scalar *logits;          /* O x V; overwritten at `forbidden` */
    const scalar *hidden;    /* O x D */
    const int64_t *real_start, *mask_start;   /* rows + 1, into the outputs */
    const int64_t *drafts;                    /* of all rows */
    const int64_t *groups, *group_start, *window; /* accept lengths of all rows; rows + 1; rows */
    const struct sampling *sampling;              /* rows, or NULL: all are greedy */
    const int64_t *length, *uses_head;            /* rows: committed tokens; 0 or 1 */
    int64_t *choice, *accepted, *num_masks, *draft; /* real outputs; rows; rows; rows x most */
    float *probability;                           /* rows x most */
    int64_t rows, vocabulary, width, forbidden, most, threads;
};

/* The larger ones; of a NaN and a number b. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(less(b, a), a, b);
#endif
}

/* Maximum of some numbers, NaN aside. */
static float maximum(const scalar *x, int64_t count) {
    vec top = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const struct two v = load2(x + i);
        top = larger(v.b, larger(v.a, top));
    }
    float most = -INFINITY;
    for (int k = 0; k < LANES; k++) most = top[k] > most ? top[k] : most;
    for (; i < count; i++) most = to_float(x[i]) > most ? to_float(x[i]) : most;
    return most;
}

/* The first of the largest numbers. */
static int64_t argmax(const scalar *x, int64_t count) {
    float most = -INFINITY;
    int64_t best = 0;
    for (int64_t start = 0; start < count; start += STRETCH) {
        const int64_t size = count - start < STRETCH ? count - start : STRETCH;
        const float here = maximum(x + start, size);
        if (here > most) most = here, best = start;
    }
    for (int64_t i = best; i < count && i < best + STRETCH; i++)
        if (to_float(x[i]) == most) return i;
    return best;
}

/* 1 / sum of exp(x - top): the probability of the likeliest. */
static float certainty(const scalar *x, int64_t count, float top) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const struct two v = load2(x + i);
        sum += exp16(v.a - top);
        sum += exp16(v.b - top);
    }
    float total = 0;
    for (int k = 0; k < LANES; k++) total += sum[k];
    for (; i < count; i++) total += expf(to_float(x[i]) - top);
    return 1.0f / total;
}

/* Put a candidate among the largest, which fall; of equals the first comes first. */
static int64_t insert(struct candidate *best, int64_t found, float value, int64_t id) {
    if (found == CANDIDATES && value <= best[found - 1].value) return found;
    int64_t at = found < CANDIDATES ? found : found - 1;
    for (; at > 0 && best[at - 1].value < value; at--) best[at] = best[at - 1];
    best[at] = (struct candidate){value, id};
    return found < CANDIDATES ? found + 1 : found;
}

/* The largest numbers. A stretch whose maximum is below the smallest of those found so far holds
   none; the stretches with the largest maxima are looked at first. */
static int64_t largest(struct candidate *best, const scalar *x, int64_t count) {
    struct candidate first[CANDIDATES];
    const int64_t stretches = (count + STRETCH - 1) / STRETCH;
    float *top = malloc(stretches * sizeof *top);
    if (!top) abort();
    int64_t tops = 0, found = 0;
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t size = count - s * STRETCH < STRETCH ? count - s * STRETCH : STRETCH;
        top[s] = maximum(x + s * STRETCH, size);
        tops = insert(first, tops, top[s], s);
    }
    /* No more than CANDIDATES maxima are larger than this one, so nothing below it is among them. */
    const float least = tops == CANDIDATES ? first[tops - 1].value : -INFINITY;
    for (int64_t s = 0; s < stretches; s++) {
        if (top[s] < least) continue;
        for (int64_t i = s * STRETCH; i < count && i < (s + 1) * STRETCH; i++)
            if (to_float(x[i]) >= least) found = insert(best, found, to_float(x[i]), i);
    }
    free(top);
    return found;
}

/* The row's settings, if it samples. */
static const struct sampling *sampling_of(const struct decision *d, int64_t row) {
    return d->sampling && d->sampling[row].temperature > 0 ? d->sampling + row : NULL;
}

/* What `ar` would say at a real output. */
static int64_t choose_real(const struct decision *d, int64_t output) {
    const scalar *logits = d->logits + output * d->vocabulary;
    const int64_t likeliest = argmax(logits, d->vocabulary);
    int64_t row = 0;
    while (d->real_start[row + 1] <= output) row++;
    const struct sampling *s = sampling_of(d, row);
    if (!s) return likeliest;
    return sample(logits, d->vocabulary, s, to_float(logits[likeliest]),
                  d->length[row] + output - d->real_start[row]);
}

static float dot(const float *a, const float *b, int64_t count) {
    enum { SUMS = 8 };
    lanes sum[SUMS] = {{0}};
    float all[WIDTH];
    int64_t i = 0;
    for (; i + SUMS * WIDTH <= count; i += SUMS * WIDTH)
        UNROLLED for (int k = 0; k < SUMS; k++)
            sum[k] = fma_each(load_lanes(a + i + k * WIDTH), load_lanes(b + i + k * WIDTH), sum[k]);
    for (; i + WIDTH <= count; i += WIDTH)
        sum[0] = fma_each(load_lanes(a + i), load_lanes(b + i), sum[0]);
    for (int step = SUMS / 2; step; step /= 2)
        UNROLLED for (int k = 0; k < step; k++) sum[k] += sum[k + step];
    store_lanes(all, sum[0]);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int k = 0; k < step; k++) all[k] += all[k + step];
    float total = all[0];
    for (; i < count; i++) total += a[i] * b[i];
    return total;
}

static float dot_scalars(const scalar *a, const float *b, int64_t count) {
#ifdef FLOAT32
    return dot(a, b, count);
#else
    float total = 0;
    vec sum[2] = {{0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        /* The numbers as they stand: two halves of 16. */
        vec halves[2];
        for (int k = 0; k < 2; k++) {
            uvec wide;
            for (int j = 0; j < LANES; j++) wide[j] = a[i + k * LANES + j];
            halves[k] = (vec)(wide << 16);
            sum[k] = fma16(halves[k], load(b + i + k * LANES), sum[k]);
        }
    }
    const vec all = sum[0] + sum[1];
    for (int k = 0; k < LANES; k++) total += all[k];
    for (; i < count; i++) total += widen(a[i]) * b[i];
    return total;
#endif
}

/* x / RMS(x), as torch's rms_norm without weight: epsilon is that of fp32. */
static void normalise(float *y, const scalar *x, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) y[i] = to_float(x[i]), sum += y[i] * y[i];
    const float factor = 1.0f / sqrtf(sum / (float)count + 1.1920929e-07f);
    for (int64_t i = 0; i < count; i++) y[i] *= factor;
}

/* A mask that is read: what it says by itself, and with the token before it what the head makes of it. */
struct mask {
    int64_t row, output, number; /* the last counts from the row's first mask that is read */
    int64_t found;
    struct candidate best[CANDIDATES];
};

/* What a mask says for itself: a draft, or candidates for the head. */
static void read_mask(const struct decision *d, struct mask *m) {
    const scalar *logits = d->logits + m->output * d->vocabulary;
    const struct sampling *s = sampling_of(d, m->row);
    if (d->head && d->uses_head[m->row]) {
        m->found = largest(m->best, logits, d->vocabulary);
        return;
    }
    const int64_t likeliest = argmax(logits, d->vocabulary), at = m->row * d->most + m->number;
    const int64_t position = d->sampling ? d->length[m->row] + d->accepted[m->row] + 1 : 0;
    const float top = to_float(logits[likeliest]);
    d->draft[at] = s ? sample(logits, d->vocabulary, s, top, position + m->number) : likeliest;
    d->probability[at] = certainty(logits, d->vocabulary, top);
}

/* The draft of a mask whose last hidden state was corrected. */
static int64_t choose_corrected(const struct decision *d, struct mask *m, const float *corrected,
                                int64_t position) {
    const struct sampling *s = sampling_of(d, m->row);
    float top = -INFINITY, total = 0;
    int64_t chosen = 0;
    for (int64_t i = 0; i < m->found; i++) {
        float *value = &m->best[i].value;
        if (*value != -INFINITY) /* forbidden */
            *value = dot_scalars(d->head->logit + m->best[i].id * d->width, corrected, d->width);
        if (*value > top) top = *value, chosen = i;
    }
    for (int64_t i = 0; i < m->found; i++) total += expf(m->best[i].value - top);
    d->probability[m->row * d->most + m->number] = 1.0f / total;
    return s ? sample_candidates(m->best, m->found, s, position) : m->best[chosen].id;
}

/* Threads that take a share of one row each time, and what lies between them. */
struct team {
    struct barrier barrier;
    float *inner, *corrected;
};

/* Drafts of one row, one after the other: the head sees the token before each. `normed` is the
   thread's own. */
static void draft_in_turn(const struct decision *d, struct mask *masks, int64_t num, struct team *t,
                          float *normed, int64_t thread, int64_t threads) {
    const struct head *h = d->head;
    float *of_token = normed + d->width, *inner = t->inner, *corrected = t->corrected;
    const int64_t width = d->width, row = masks->row;
    const int64_t position = d->sampling ? d->length[row] + d->accepted[row] + 1 : 0;
    int64_t previous = d->choice[d->real_start[row] + d->accepted[row]];
    const int64_t begin = h->inner * thread / threads, end = h->inner * (thread + 1) / threads;
    const int64_t head = width * thread / threads, tail = width * (thread + 1) / threads;
    for (int64_t w = 0; w < num; w++) {
        struct candidate *best = masks[w].best;
        const int64_t found = masks[w].found;
        const scalar *hidden = d->hidden + masks[w].output * width;
        for (int64_t i = 0; i < found && !thread; i++)
            for (int64_t k = 0; k < width; k += 32)
                __builtin_prefetch(h->logit + best[i].id * width + k);
        /* z' = z + W_o silu(W_z z + b + W_e e) */
        normalise(normed, hidden, width);
        normalise(of_token, h->embedding + previous * width, width);
        for (int64_t i = begin; i < end; i++) {
            const float own = h->bias[i] + dot(h->from_hidden + i * width, normed, width);
            const float x = own + dot(h->from_token + i * width, of_token, width);
            inner[i] = x / (1.0f + expf(-x));
        }
        wait_at(&t->barrier, threads);
        for (int64_t i = head; i < tail; i++)
            corrected[i] = to_float(hidden[i]) + dot(h->output + i * h->inner, inner, h->inner);
        wait_at(&t->barrier, threads);
        int64_t *draft = d->draft + row * d->most + w;
        if (!thread) *draft = choose_corrected(d, masks + w, corrected, position + w);
        wait_at(&t->barrier, threads);
        previous = *draft;
    }
}

/* Verify a row's drafts, and find the masks behind the last right one; return their number. */
static int64_t verify(const struct decision *d, int64_t row, struct mask *masks) {
    const int64_t first = d->real_start[row], num = d->real_start[row + 1] - first - 1;
    const int64_t *drafts = d->drafts + first - row; /* one output per row has none */
    int64_t accepted = 0, group = -1;
    while (accepted < num && d->choice[first + accepted] == drafts[accepted]) accepted++;
    for (int64_t g = d->group_start[row]; g < d->group_start[row + 1]; g++)
        if (d->groups[g] == accepted) group = g - d->group_start[row];
    d->accepted[row] = accepted;
    d->num_masks[row] = group < 0 ? 0 : d->window[row];
    for (int64_t w = 0; w < d->num_masks[row]; w++) {
        masks[w].row = row, masks[w].number = w;
        masks[w].output = d->mask_start[row] + group * d->window[row] + w;
    }
    return d->num_masks[row];
}

int64_t mars_decide(const struct decision *d) {
    const int64_t real = d->real_start[d->rows], inner = d->head ? d->head->inner : 0;
    if (d->forbidden >= 0)
        for (int64_t o = 0; o < d->mask_start[d->rows]; o++)
            d->logits[o * d->vocabulary + d->forbidden] = to_scalar(-INFINITY);
#pragma omp parallel for num_threads(d->threads) if (real > (d->sampling ? 1 : 2))
    for (int64_t o = 0; o < real; o++) d->choice[o] = choose_real(d, o);
    const int64_t most = d->rows * d->most, threads = d->threads;
    /* A team of all threads for every row, or one of each thread. */
    const int64_t together = d->rows < threads ? threads : 1, teams = threads / together;
    const int64_t numbers = round_up(inner + d->width + 2 * together * d->width, LANES);
    struct mask *masks = malloc(most * sizeof *masks + 1);
    float *scratch = malloc(teams * numbers * sizeof *scratch + 1);
    struct team *team = aligned_alloc(64, teams * sizeof *team);
    int64_t *first = malloc((d->rows + 1) * sizeof *first), total = 0;
    const int is_short = !masks || !scratch || !team || !first;
    for (int64_t r = 0; r < d->rows && !is_short; r++) {
        first[r] = total;
        total += verify(d, r, masks + total);
        first[r + 1] = total;
    }
    for (int64_t i = 0; i < teams && total; i++) {
        float *start = scratch + i * numbers;
        team[i] = (struct team){.inner = start, .corrected = start + inner};
    }
#pragma omp parallel for num_threads(threads) if (total > 1)
    for (int64_t i = 0; i < total; i++) read_mask(d, masks + i);
#pragma omp parallel num_threads(threads) if (total && d->head)
    {
        int64_t number = 0, all = 1;
#ifdef _OPENMP
        number = omp_get_thread_num(), all = omp_get_num_threads();
#endif
        const int64_t members = together > 1 ? all : 1, mine = number / members;
        const int64_t thread = number % members, rows = total && d->head ? d->rows : 0;
        for (int64_t r = mine; r < rows; r += all / members) {
            float *normed = team[mine].corrected + (1 + 2 * thread) * d->width;
            if (first[r + 1] > first[r] && d->uses_head[r])
                draft_in_turn(d, masks + first[r], first[r + 1] - first[r], team + mine, normed, thread,
                              members);
        }
    }
    free(masks), free(scratch), free(team), free(first);
    return is_short;
}
