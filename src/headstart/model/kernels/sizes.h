// Sizes of the blocks of rows and groups of tiles that are multiplied together.
#pragma once

#include "linear.h"

constexpr long BLOCK = 128;              // maximum number of rows at a time
constexpr long ROWS_EACH = 64;           // from here on per thread, rows are computed through a chain block by block
// The same for products on AMX tiles: weights that are read for fewer rows take longer to read than to multiply by.
#if defined(AMX_TILES)
constexpr long MOST_ROWS = 512, MOST_EACH = 256;
#else
constexpr long MOST_ROWS = BLOCK, MOST_EACH = ROWS_EACH;
#endif
constexpr long TILED_ROWS = 16;          // from here on, rows are multiplied by weights of less than 16 bits on AMX tiles
constexpr long GROUP = 8;                // tiles that a piece of many rows is multiplied by
constexpr long NON_TEMPORAL_BYTES = 8 << 20;  // larger outputs, which no cache holds, are written by non-temporal stores
constexpr long PANEL_BYTES = 512 << 10;  // maximum size of rows that stay in the L2 cache
constexpr long AHEAD_BYTES = 2048;       // how far ahead of their use weights are prefetched by NEAR_ROWS rows (tiles.h)
constexpr long SUMS_BYTES = GROUP * MOST_ROWS * TILE * sizeof(float);  // memory of one thread for the sums

// Returns the number of tiles that are best computed together.
static inline long tiles_together(long count, long row_bytes, long block = BLOCK, long panel_bytes = PANEL_BYTES) {
    long rows = count < block ? count : block;
    return rows * row_bytes <= panel_bytes ? 1 : GROUP;
}
