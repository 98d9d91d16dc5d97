/* What decoder.c is given, and what its threads share. N columns, D width, V vocabulary, G key-value
   heads, W head width. */

#ifndef MARS_DECODER_H
#define MARS_DECODER_H

#include "barrier.h"
#include "kernels.h"

enum { QUERY, KEY, VALUE, ATTENTION_OUTPUT, GATE, UP, DOWN, NUM_LINEARS };

struct linear {
    const struct layer *main, *lora_a, *lora_b; /* no LoRA: NULL */
};

struct block {
    struct linear linears[NUM_LINEARS];
    const scalar *attention_norm, *mlp_norm;
    const scalar *query_norm, *key_norm; /* per head, or NULL */
};

struct decoder {
    const struct block *blocks;
    const scalar *embedding, *mask_embedding; /* masks are ordinary tokens: NULL */
    const scalar *final_norm;
    const struct layer *head;
    const scalar *cosine, *sine; /* positions x W */
    int64_t num_blocks, width, heads, kv_heads, head_width, inner;
    int64_t in_units; /* the cache consists of units of slots */
    float epsilon, scale;
};

struct step {
    scalar *const *keys, *const *values; /* per block: rows of the cache x G x slots x W */
    const int64_t *token, *position, *slot, *limit, *first; /* N; a column sees slots < limit and
                                                               those from `first` to its own */
    const int64_t *mask_index;  /* of each mask in the mask embeddings */
    const int64_t *real_start, *mask_start; /* rows + 1: where the columns of a row begin */
    const int64_t *place;       /* rows: where in the cache each is */
    const int64_t *output;      /* columns whose logits are wanted */
    scalar *hidden, *logits;    /* of these: x D, x V */
    int64_t *spent;             /* nanoseconds of each phase, added to; NULL: nobody asks */
    int64_t columns, rows, cache_slots, outputs, threads;
};

/* What lies between the threads of a call. */
struct shared {
    struct barrier barrier;
    scalar *x, *normed, *query, *key, *value, *attended, *gate, *up, *output;
    float *sums;      /* of LoRA: PIECES x ALIKE x rank / BLOCK x masks x BLOCK */
    scalar *inner;    /* threads x ALIKE x N x rank; zeros for real columns */
    uint8_t *visible; /* N x visible_stride */
    int64_t *columns; /* of every row, one row after another */
    int64_t *taken;   /* attention tasks, for every block */
    int64_t visible_stride, num_real, num_masks;
    int64_t rank; /* filled up; 0: no masks, or no layer has LoRA */
};

#endif
