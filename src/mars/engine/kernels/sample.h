/* Sampling, as decide.c needs it. */

#ifndef MARS_SAMPLE_H
#define MARS_SAMPLE_H

#include "kernels.h"

/* How a row samples. */
struct sampling {
    float temperature; /* 0: it is greedy, and the rest is not looked at */
    float top_p, min_p;
    int64_t top_k; /* 0: all */
    int64_t seed;
};

struct candidate {
    float value;
    int64_t id;
};

/* Choose the token at a position; `top`: the largest logit. */
int64_t sample(const scalar *logits, int64_t count, const struct sampling *s, float top,
               int64_t position);

/* The same among some tokens, which are reordered. */
int64_t sample_candidates(struct candidate *c, int64_t count, const struct sampling *s,
                          int64_t position);

#endif
