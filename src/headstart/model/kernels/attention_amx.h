// Attention of many rows to pages on AMX tiles: what attention_tile.h computes in registers.
//
// A page of keys is an operand as it is, [16 pairs of dims][16 slots][2]. Pages of values are two and two behind each other,
// [16 pairs of slots][dims][2], an operand for 16 dims each. The order of sums is that of amx.h: of a score, 32 dims by 32
// dims (the last 16, if dims are not whole ones); of an output, pair by pair of the pages of a segment, counted from its
// begin. So a row's outputs do not depend on the rows that are computed with it.
#pragma once

#include "amx.h"
#include "attention_rows.h"

#if defined(AMX_TILES)

namespace amx {
namespace {

constexpr int SUMS = 4, COLUMNS = SUMS * ROWS;  // tiles of sums, so that no operation waits for the one before it
static_assert(TILE_ROWS % ROWS == 0 && (int)PAGE == ROWS, "rows are computed in whole tiles");

template <int I>
struct Index {
    enum { value = I };
};
template <int N, class Call>
inline void each(Call call) {
    if constexpr (N > 0) each<N - 1>(call), call(Index<N - 1>());
}

// Tiles 0 to 3: sums. Tiles 4, 5: rows and columns of whole depth; 6, 7: of half. The tiles of rows are always full: what
// lies behind the last row is multiplied and left.
inline void configure(Tiles &tiles) {
    Shapes shapes;
    for (int t = 0; t < 6; t++) shapes.set(t, ROWS, 64);
    shapes.set(6, ROWS, 32), shapes.set(7, ROWS / 2, 64);
    tiles.configure(shapes);
}

// The product of 16 rows and four operands of 16 columns.
struct Product {
    const bf16 *rows;
    long row_stride;  // numbers
    const uint32_t *columns[SUMS];
    long column_stride;  // words, from one line of an operand to the next

    // Adds the inputs [depth, depth + 32), or 16 with A = 6.
    template <int A>
    void add(Tiles &tiles, int depth) const {
        tiles.load<A>(rows + depth, row_stride * 2);
        each<SUMS>([&](auto i) {
            tiles.load<A + 1>(columns[i.value] + depth / 2 * column_stride, column_stride * 4);
            tiles.dot<i.value, A, A + 1>();
        });
    }

    // Writes the sums over `depth` inputs to [16, 64].
    void compute(Tiles &tiles, int depth, float *to, long stride) const {
        each<SUMS>([&](auto i) { tiles.zero<i.value>(); });
        int at = 0;
        for (; at + DEPTH <= depth; at += DEPTH) add<4>(tiles, at);
        if (at < depth) add<6>(tiles, at);
        each<SUMS>([&](auto i) { tiles.store<i.value>(to + i.value * ROWS, stride * 4); });
    }
};

// Returns the values of a piece in `pages` pages: where they are, or copied to `to`, with zeros for slots that no row of the
// tile sees and for pages that the piece has not.
inline const uint32_t *values_of(const Tile<Tiled> &tile, const Piece &piece, int pages, uint32_t *to) {
    long words = PAGE / 2 * tile.dims;
    auto low = [&](int page) { return tile.low - piece.position[page]; };
    auto high = [&](int page) {
        int seen = tile.high - piece.position[page];
        return seen < piece.filled[page] ? seen : piece.filled[page];
    };
    bool in_place = tile.dims % COLUMNS == 0 && pages == piece.count && piece.whole && low(0) <= 0 && high(pages - 1) >= PAGE;
    for (int p = 1; in_place && p < pages; p++) in_place = piece.values[p] == piece.values[p - 1] + words;
    if (in_place) return piece.values[0];
    for (int p = 0; p < pages; p++, to += words) {
        int page = p - piece.skip;
        if (page < 0 || page >= piece.count) memset(to, 0, words * 4);
        else if (low(page) <= 0 && high(page) >= PAGE) memcpy(to, piece.values[page], words * 4);
        else masked_values<Tiled>(piece.values[page], tile.dims, low(page), high(page), to);
    }
    return to - pages * words;
}

// Memory for a tile. Operands beside those of the last dims are read and not used.
struct Scratch {
    Group groups[TILE_ROWS / ROWS];
    alignas(64) uint32_t values[MAX_SEGMENT * PAGE / 2 * MAX_DIMS + COLUMNS];
};

// Computes all rows of a tile for one piece, operation by operation: what all groups read stays in the cache, and none waits
// for the results of the one before it.
SEPARATE void attend_piece(Tile<Tiled> &tile, const Piece &piece, Scaling scaling) {
    Scratch scratch;
    int pages = (piece.skip + piece.count + 1) / 2 * 2, dims = tile.dims, wide = ceil_div(dims, COLUMNS) * COLUMNS;
    const uint32_t *values = values_of(tile, piece, pages, scratch.values);
    auto each_group = [&](auto call) {
        for (int row = 0; row < tile.rows; row += ROWS)
            call(row, tile.rows - row < ROWS ? tile.rows - row : ROWS, scratch.groups[row / ROWS]);
    };
    for (int page = 0; page < piece.count; page += SUMS) {
        Product product = {nullptr, dims, {}, PAGE};
        for (int i = 0; i < SUMS; i++) product.columns[i] = piece.keys[page + i];
        each_group([&](int row, int, Group &group) {
            product.rows = tile.queries + row * dims;
            product.compute(tile.tiles, dims, group.score[0] + (piece.skip + page) * PAGE, sizeof group.score[0] / 4);
        });
    }
    each_group([&](int row, int count, Group &group) { soften(tile, row, count, piece, pages, scaling, group); });
    each_group([&](int, int, Group &group) {
        Product product = {group.weight[0], sizeof group.weight[0] / 2, {}, dims};
        for (int dim = 0; dim < dims; dim += COLUMNS) {
            for (int i = 0; i < SUMS; i++) product.columns[i] = values + dim + i * ROWS;
            product.compute(tile.tiles, pages * PAGE, group.out + dim, wide + PAGE);
        }
    });
    each_group([&](int row, int count, Group &group) { join_rows(tile, row, count, group, wide + PAGE); });
}

}  // namespace
}  // namespace amx

namespace {

// See attention_tile.h.
inline void attend_all_rows(Tile<Tiled> &tile, Piece &piece, Scaling scaling) { amx::attend_piece(tile, piece, scaling); }
inline void begin_items(Tile<Tiled> &tile) { amx::configure(tile.tiles); }
inline void end_items(Tile<Tiled> &tile) { tile.tiles.release(); }

}  // namespace

#endif
