/* Pages of memory: what the system is told about them. */

#include <stdint.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

/* Tell the system something about the whole pages of some memory. */
static void advise(const void *memory, int64_t bytes, uintptr_t page, int advice) {
#ifdef __linux__
    const uintptr_t start = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (advice && end > start) madvise((void *)start, end - start, advice);
#else
    (void)memory, (void)bytes, (void)page, (void)advice;
#endif
}

#ifndef MADV_HUGEPAGE
#define MADV_HUGEPAGE 0
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 0
#endif

/* Ask for large pages before the memory is touched. */
void mars_advise(void *memory, int64_t bytes) { advise(memory, bytes, 1 << 21, MADV_HUGEPAGE); }

/* Let the pages of a mapped file go; they come back when they are read. Changed ones stay. */
void mars_let_go(const void *memory, int64_t bytes) {
    advise(memory, bytes, 1 << 12, MADV_PAGEOUT);
}
