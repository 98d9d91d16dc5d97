/* Threads that wait for each other, and a clock. */

#ifndef MARS_BARRIER_H
#define MARS_BARRIER_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#ifdef __unix__
#include <sched.h>
#endif

#ifdef __x86_64__
#define PAUSE __builtin_ia32_pause()
#else
#define PAUSE
#endif
#ifdef __unix__
#define YIELD sched_yield()
#else
#define YIELD PAUSE
#endif

/* Where threads wait for each other. OpenMP's own barrier never lets go of its processor for
   milliseconds; beside another busy process the thread that is waited for may be in line for that very
   processor, 300 times a forward. */
struct barrier {
    _Alignas(64) _Atomic int64_t arrived;
    _Alignas(64) _Atomic int64_t round;
};

enum { SPINS = 500 }; /* 10 to 30 microseconds */

static inline void wait_at(struct barrier *b, int64_t threads) {
    const int64_t round = atomic_load_explicit(&b->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&b->round, round + 1, memory_order_release);
        return;
    }
    for (int64_t i = 0; atomic_load_explicit(&b->round, memory_order_acquire) == round; i++) {
        if (i < SPINS) PAUSE;
        else YIELD;
    }
}

/* Add the nanoseconds since then to `spent`, and return the time; `since` 0: only this. */
static inline int64_t note(int64_t *spent, int64_t since) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    const int64_t nanoseconds = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    if (since) *spent += nanoseconds - since;
    return nanoseconds;
}

#endif
