/* Matrix tiles (AMX): what all that use them share. */

#ifndef MARS_TILES_H
#define MARS_TILES_H

#include "kernels.h"

#ifdef HAS_TILES
/* Compilers do not know that tile instructions read and write memory. */
#define MEMORY_BARRIER __asm__ volatile("" ::: "memory")

/* For how many rows the tiles of this thread are configured; 0: not at all. Configuring takes as long
   as 70 multiplications of tiles, so it is done when that changes only. */
extern __thread int64_t mars_tile_rows;

/* Tiles 0 to 3 for sums of up to 16 rows, 4 and 5 for these rows. */
static inline void configure(int64_t rows) {
    if (rows == mars_tile_rows) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = i < 6 ? rows : 16; /* 6 and 7: the other factor */
    }
    MEMORY_BARRIER;
    _tile_loadconfig(&config);
    mars_tile_rows = rows;
}
#endif

/* Give tiles back at the end of a task that was called from outside: others use them, too. */
static inline void release_tiles(void) {
#ifdef HAS_TILES
    if (mars_tile_rows) _tile_release();
    mars_tile_rows = 0;
#endif
}
#endif
