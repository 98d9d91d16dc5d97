/* A decoder of the Llama kind, from token ids to logits, in one call.

   Layer by layer: x += O(attention(rotary(Q K V(norm(x))))); x += Down(silu(Gate(n)) * Up(n)) with
   n = norm(x). Every step rounds where the stock model in PyTorch does. What a column gets
   depends on its token, its position and what it sees; not on other columns, rows or threads.

   Columns of all rows stand one after another, without padding: first the real ones of every row,
   row by row, then the masks of every row. LoRA acts on masks only.

   Threads run through the whole call together and wait for each other after every step. N columns,
   D width, H query heads, G key-value heads, W head width, F inner width of the feed-forward part. */

#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "decoder.h"
#include "elementwise.h"
#include "tiles.h"

enum { LINEAR, ATTENTION, HEAD, OTHER }; /* phases */

/* Numbers between rows of scratch: whole cache lines, that do not compete for places in a cache. */
static int64_t spaced(int64_t width) {
    const int64_t stride = round_up(width, BLOCK);
    return stride % 512 ? stride : stride + BLOCK;
}

static int64_t num_blocks(const struct layer *l) { return round_up(l->outputs, BLOCK) / BLOCK; }

/* Some blocks of a linear layer with its LoRA, for all columns. */
static void apply(const struct linear *l, const scalar *x, int64_t stride, scalar *y,
                  int64_t y_stride, int64_t columns, const scalar *inner, int64_t rank, int64_t block, int64_t end) {
    if (!l->lora_b || !rank) {
        linear_blocks(l->main, NULL, x, stride, y, y_stride, columns, block, end);
        return;
    }
    const struct extra lora = {l->lora_b, inner, rank};
    linear_blocks(l->main, &lora, x, stride, y, y_stride, columns, block, end);
}

enum { MASKS = 32 }; /* that one thread takes through LoRA at once: two tiles */
enum { PIECES = 4 }; /* of the inputs of A */
enum { ALIKE = 3 };  /* most layers with the same x */

/* The share of a thread of `total` things. */
#define SHARE(total, begin, end) \
    const int64_t begin = (total) * thread / threads, end = (total) * (thread + 1) / threads

#define WAIT wait_at(&h->barrier, threads);

/* Wait; what has passed since the last time was for `phase`. Needs `s`, `thread` and `clock`. */
#define WAIT_AFTER(phase) \
    WAIT \
    if (s->spent && !thread) clock = note(s->spent + phase, clock);

/* Where the sums of a piece, layer and block begin. */
static float *sums_of(const struct shared *h, int64_t piece, int64_t layer, int64_t block) {
    return h->sums + ((piece * ALIKE + layer) * h->rank + block * BLOCK) * h->num_masks;
}

/* LoRA of `count` layers with the same x, for the masks: A x, to which B is going to be applied. First
   sums over pieces of the inputs, shared among threads: they are likely to have made theirs. */
static void lora_sums(const struct shared *h, const struct linear *l, int64_t count,
                      const scalar *x, int64_t stride, int64_t thread, int64_t threads) {
    const int64_t parts = (h->num_masks + MASKS - 1) / MASKS;
    x += h->num_real * stride;
    SHARE(PIECES * count * parts, head, tail);
    for (int64_t task = head; task < tail; task++) {
        const int64_t piece = task / (count * parts), i = task / parts % count;
        const int64_t first = task % parts * MASKS, left = h->num_masks - first;
        const struct layer *a = l[i].lora_a;
        const int64_t groups = a ? round_up(a->inputs, BLOCK) / BLOCK : 0;
        for (int64_t block = 0; a && block < num_blocks(a); block++)
            linear_sums(a, x + first * stride, stride, sums_of(h, piece, i, block) + first * BLOCK,
                        left < MASKS ? left : MASKS, block, groups * piece / PIECES,
                        groups * (piece + 1) / PIECES);
    }
}

/* Then every thread adds them up for itself; returns A x of the first layer. */
static scalar *lora_inner(const struct step *s, const struct shared *h, const struct linear *l,
                        int64_t count, int64_t thread) {
    scalar *inner = h->inner + thread * ALIKE * s->columns * h->rank;
    const int64_t apart = ALIKE * h->rank * h->num_masks; /* pieces */
    for (int64_t i = 0; i < count && h->rank; i++)
        for (int64_t block = 0; l[i].lora_a && block < num_blocks(l[i].lora_a); block++)
            for (int64_t n = 0; n < h->num_masks; n++) {
                const float *from = sums_of(h, 0, i, block) + n * BLOCK;
                scalar *to = inner + (i * s->columns + h->num_real + n) * h->rank + block * BLOCK;
                for (int64_t k = 0; k < BLOCK; k += LANES) {
                    vec sum = load(from + k);
                    for (int64_t p = 1; p < PIECES; p++) sum += load(from + p * apart + k);
                    store16(to + k, sum);
                }
            }
    return inner;
}

static int64_t num_columns(const struct step *s, int64_t row) {
    return s->real_start[row + 1] - s->real_start[row] + s->mask_start[row + 1] - s->mask_start[row];
}

/* Start: embed tokens, and note who sees what. */
static void embed(const struct decoder *m, const struct step *s, struct shared *h,
                  int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
        const scalar *from = m->embedding + s->token[n] * m->width;
        if (n >= h->num_real && m->mask_embedding)
            from = m->mask_embedding + s->mask_index[n - h->num_real] * m->width;
        memcpy(h->x + n * m->width, from, m->width * sizeof *from);
        uint8_t *row = h->visible + n * h->visible_stride;
        memset(row, 0, h->visible_stride);
        memset(row, 1, s->limit[n]);
        if (s->slot[n] >= s->first[n]) memset(row + s->first[n], 1, s->slot[n] + 1 - s->first[n]);
    }
}

/* Norm, if there is one, and rotation of a column's query or key. */
static void turn(const struct decoder *m, const struct step *s, scalar *head, const scalar *norm,
                 int64_t column) {
    const int64_t width = m->head_width, from = s->position[column] * width;
    if (norm) normalise(head, head, norm, width, m->epsilon);
    rotate(head, head, m->cosine + from, m->sine + from, width);
}

/* Turn queries and keys; bring keys and values into the cache. The latter of one row and head are one
   thread's: in units, those of neighbouring slots share cache lines. */
static void place_heads(const struct decoder *m, const struct step *s, struct shared *h,
                        int64_t layer, int64_t thread, int64_t threads) {
    const struct block *b = m->blocks + layer;
    const int64_t width = m->head_width, cached = s->cache_slots * width, heads = m->kv_heads;
    SHARE(s->columns * m->heads, begin, end);
    for (int64_t i = begin; i < end; i++)
        turn(m, s, h->query + i * width, b->query_norm, i / m->heads);
    for (int64_t r = 0, start = 0, num; r < s->rows; r++, start += num) {
        num = num_columns(s, r);
        for (int64_t g = (r + thread) % threads; g < 2 * heads; g += threads) {
            const int64_t head = (s->place[r] * heads + g / 2) * cached;
            const int is_key = g % 2;
            scalar *to = (is_key ? s->keys : s->values)[layer] + head;
            for (int64_t i = 0; i < num; i++) {
                const int64_t n = h->columns[start + i], slot = s->slot[n];
                scalar *x = (is_key ? h->key : h->value) + (n * heads + g / 2) * width;
                if (is_key) turn(m, s, x, b->key_norm, n);
                if (!m->in_units) memcpy(to + slot * width, x, width * sizeof *x);
                else if (is_key) put_key(to, slot, x, width);
                else put_value(to, slot, x, width);
            }
        }
    }
}

static int64_t take(int64_t *number) { return __atomic_fetch_add(number, 1, __ATOMIC_RELAXED); }

/* Attention tasks for one thread, until all are taken: rows are not equally long. */
static void attend_share(const struct decoder *m, const struct step *s, struct shared *h,
                         int64_t layer, int64_t threads) {
    const int64_t width = m->head_width, cached = s->cache_slots * width;
    int64_t task = 0, mine = take(h->taken + layer);
    const int64_t *columns = h->columns;
    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t num = num_columns(s, r);
        if (!num) continue;
        const int64_t queries = num * (m->heads / m->kv_heads);
        const int64_t length = queries_per_task(queries, s->rows * m->kv_heads, threads);
        int64_t slots = 0;
        for (int64_t t = 0; t < num; t++)
            slots = s->slot[columns[t]] >= slots ? s->slot[columns[t]] + 1 : slots;
        struct call c = {
            .rows = 1, .heads = m->heads, .kv_heads = m->kv_heads, .columns = num, .slots = slots,
            .width = width, .value_width = width,
            .query_strides = {0, width, m->heads * width}, .key_strides = {0, cached, width},
            .value_strides = {0, cached, width}, .mask_strides = {0, h->visible_stride},
            .is_bf16 = sizeof(scalar) == 2, .has_tiles = m->head->path == TILES, .threads = 1, .scale = m->scale,
            .in_units = m->in_units,
        };
        const int64_t from = s->place[r] * m->kv_heads * cached;
        const int64_t parts = (queries + length - 1) / length;
        for (int64_t i = 0; i < m->kv_heads * parts; i++, task++) {
            if (task != mine) continue;
            mine = take(h->taken + layer);
            const int64_t g = i / parts, first = i % parts * length;
            /* The next head, and row, if all rows have as many parts. */
            const int64_t next = g + (i % parts + threads) / parts, other = r + next / m->kv_heads;
            c.ahead = 0;
            if (m->in_units && other < s->rows)
                c.ahead = (s->place[other] - s->place[r]) * m->kv_heads * cached +
                          (next % m->kv_heads - g) * cached;
            attend(&c, (char *)h->attended, (const char *)h->query,
                   (const char *)(s->keys[layer] + from), (const char *)(s->values[layer] + from),
                   h->visible, columns, 0, g, first,
                   queries - first < length ? queries - first : length);
        }
        columns += num;
    }
}

/* x += layer(input), a share of the outputs. */
static void add_layer(const struct decoder *m, const struct step *s, struct shared *h,
                      const struct block *b, int which, const scalar *input, int64_t stride,
                      int64_t thread, int64_t threads) {
    const struct linear *l = b->linears + which;
    if (h->rank) {
        lora_sums(h, l, 1, input, stride, thread, threads);
        WAIT
    }
    const scalar *inner = lora_inner(s, h, l, 1, thread);
    SHARE(num_blocks(l->main), begin, end);
    apply(l, input, stride, h->output, m->width, s->columns, inner, h->rank, begin, end);
    const int64_t from = begin * BLOCK, to = end * BLOCK < m->width ? end * BLOCK : m->width;
    for (int64_t n = 0; n < s->columns && from < to; n++)
        add(h->x + n * m->width + from, h->output + n * m->width + from, to - from);
}

/* The input of `count` layers: x, normalised, and the sums of their LoRA; a share of it. */
static void prepare(const struct decoder *m, const struct step *s, struct shared *h,
                    const struct linear *l, int64_t count, const scalar *norm, int64_t thread,
                    int64_t threads) {
    const int64_t stride = spaced(m->width);
    SHARE(s->columns, begin, end);
    for (int64_t n = begin; n < end; n++)
        normalise(h->normed + n * stride, h->x + n * m->width, norm, m->width, m->epsilon);
    if (h->rank) {
        WAIT
        lora_sums(h, l, count, h->normed, stride, thread, threads);
    }
}

static int64_t run_block(const struct decoder *m, const struct step *s, struct shared *h,
                         int64_t layer, int64_t thread, int64_t threads, int64_t clock) {
    const struct block *b = m->blocks + layer;
    const struct linear *l = b->linears;
    const int64_t columns = s->columns, stride = spaced(m->width), inner = spaced(m->inner);
    /* 1. Attention. */
    prepare(m, s, h, l + QUERY, 3, b->attention_norm, thread, threads);
    WAIT_AFTER(OTHER)
    scalar *outputs[] = {h->query, h->key, h->value};
    const scalar *low = lora_inner(s, h, l + QUERY, 3, thread);
    int64_t total = 0, before = 0;
    for (int i = QUERY; i <= VALUE; i++) total += num_blocks(l[i].main);
    SHARE(total, first, last);
    for (int i = QUERY; i <= VALUE; i++) {
        const int64_t num = num_blocks(l[i].main), from = first - before, to = last - before;
        apply(l + i, h->normed, stride, outputs[i], l[i].main->outputs, columns,
              low + (i - QUERY) * columns * h->rank, h->rank, from < 0 ? 0 : from,
              to < num ? to : num);
        before += num;
    }
    WAIT_AFTER(LINEAR)
    place_heads(m, s, h, layer, thread, threads);
    WAIT_AFTER(OTHER)
    attend_share(m, s, h, layer, threads);
    WAIT_AFTER(ATTENTION)
    add_layer(m, s, h, b, ATTENTION_OUTPUT, h->attended, m->heads * m->head_width, thread, threads);
    WAIT_AFTER(LINEAR)
    /* 2. Feed forward. */
    prepare(m, s, h, l + GATE, 2, b->mlp_norm, thread, threads);
    WAIT_AFTER(OTHER)
    SHARE(num_blocks(l[GATE].main), head, tail);
    low = lora_inner(s, h, l + GATE, 2, thread);
    apply(l + GATE, h->normed, stride, h->gate, inner, columns, low, h->rank, head, tail);
    low += columns * h->rank;
    apply(l + UP, h->normed, stride, h->up, inner, columns, low, h->rank, head, tail);
    for (int64_t n = 0; n < columns; n++)
        gate(h->gate + n * inner + head * BLOCK, h->up + n * inner + head * BLOCK,
             (tail - head) * BLOCK);
    WAIT_AFTER(LINEAR)
    add_layer(m, s, h, b, DOWN, h->gate, inner, thread, threads);
    WAIT_AFTER(LINEAR)
    return clock;
}

/* The filled-up rank of LoRA; 0: no masks, or no layer has it. */
static int64_t lora_rank(const struct decoder *m, int64_t masks) {
    int64_t most = 0;
    for (int64_t i = 0; i < m->num_blocks && masks; i++)
        for (int j = 0; j < NUM_LINEARS; j++) {
            const struct layer *a = m->blocks[i].linears[j].lora_a;
            if (a && a->outputs > most) most = a->outputs;
        }
    return round_up(most, BLOCK);
}

/* Scratch in one piece, into which the pointers of `h` are set; NULL: there is no memory. */
static void *set_up(const struct decoder *m, const struct step *s, struct shared *h) {
    const int64_t columns = s->columns;
    int64_t slots = 1;
    for (int64_t n = 0; n < columns; n++) {
        slots = s->slot[n] + 1 > slots ? s->slot[n] + 1 : slots;
        slots = s->limit[n] > slots ? s->limit[n] : slots;
    }
    h->visible_stride = round_up(slots, 64);
    const int64_t kv = m->kv_heads * m->head_width, queries = m->heads * m->head_width;
    const int64_t rank = h->rank = lora_rank(m, h->num_masks), wide = spaced(m->inner);
    const int64_t own = s->threads * ALIKE * columns * rank;
    const struct {
        void *pointer;
        int64_t bytes;
    } parts[] = {
        {&h->x, columns * m->width * sizeof *h->x},
        {&h->normed, columns * spaced(m->width) * sizeof *h->normed},
        {&h->query, columns * queries * sizeof *h->query},
        {&h->key, columns * kv * sizeof *h->key},
        {&h->value, columns * kv * sizeof *h->value},
        {&h->attended, columns * queries * sizeof *h->attended},
        {&h->gate, columns * wide * sizeof *h->gate},
        {&h->up, columns * wide * sizeof *h->up},
        {&h->output, columns * m->width * sizeof *h->output},
        {&h->visible, columns * h->visible_stride},
        {&h->columns, columns * sizeof *h->columns},
        {&h->inner, own * sizeof *h->inner},
        {&h->sums, PIECES * ALIKE * rank * h->num_masks * sizeof *h->sums},
        {&h->taken, m->num_blocks * sizeof *h->taken},
    };
    enum { PARTS = sizeof parts / sizeof *parts, LINE = 64 };
    int64_t total = 0;
    for (int i = 0; i < PARTS; i++) total += round_up(parts[i].bytes, LINE) + LINE;
    char *memory = aligned_alloc(LINE, total), *next = memory;
    if (!memory) return NULL;
    for (int i = 0; i < PARTS; i++) {
        memcpy(parts[i].pointer, &next, sizeof next);
        next += round_up(parts[i].bytes, LINE) + LINE;
    }
    memset(h->inner, 0, own * sizeof *h->inner);
    memset(h->taken, 0, m->num_blocks * sizeof *h->taken);
    for (int64_t r = 0, i = 0; r < s->rows; r++) {
        for (int64_t n = s->real_start[r]; n < s->real_start[r + 1]; n++) h->columns[i++] = n;
        for (int64_t n = s->mask_start[r]; n < s->mask_start[r + 1]; n++) h->columns[i++] = n;
    }
    return memory;
}

int64_t mars_decoder(const struct decoder *m, const struct step *s) {
    const int64_t columns = s->columns, num_real = s->real_start[s->rows];
    struct shared all = {.num_real = num_real, .num_masks = columns - num_real}, *h = &all;
    void *memory = set_up(m, s, h);
    if (!memory) return 1;
    /* 1. The layers. */
#pragma omp parallel num_threads(s->threads)
    {
        int64_t thread = 0, threads = 1;
#ifdef _OPENMP
        thread = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
        int64_t clock = s->spent && !thread ? note(NULL, 0) : 0;
        SHARE(columns, begin, end);
        embed(m, s, h, begin, end);
        WAIT_AFTER(OTHER)
        for (int64_t layer = 0; layer < m->num_blocks; layer++)
            clock = run_block(m, s, h, layer, thread, threads, clock);
        /* 2. Logits. */
        SHARE(s->outputs, top, bottom);
        for (int64_t i = top; i < bottom; i++)
            normalise(s->hidden + i * m->width, h->x + s->output[i] * m->width, m->final_norm,
                      m->width, m->epsilon);
        WAIT_AFTER(OTHER)
        SHARE(num_blocks(m->head), first, last);
        linear_blocks(m->head, NULL, s->hidden, m->width, s->logits, m->head->outputs, s->outputs, first,
                      last);
        WAIT_AFTER(HEAD)
        release_tiles();
    }
    free(memory);
    return 0;
}
