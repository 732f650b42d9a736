// Attention of many rows to pages on AMX tiles: what attention_tile.h computes in registers.
//
// A page of keys is an operand as it is, [16 pairs of dims][16 slots][2]; a page of values one of half depth, for 16 dims
// each. The order of sums is that of amx.h: of a score, 32 dims by 32 dims (the last 16, if dims are not whole ones); of an
// output, page by page of a segment. So a row's outputs do not depend on the rows that are computed with it.
#pragma once

#include "amx.h"
#include "attention_rows.h"

#if defined(AMX_TILES)

namespace amx {
namespace {

// Rows lie so far apart that they do not share a set of the cache.
constexpr int PASS_ROWS = 2 * ROWS, SCORE_STRIDE = CHUNK + PAGE, WEIGHT_STRIDE = CHUNK + 2 * PAGE;
static_assert(TILE_ROWS % ROWS == 0 && (int)PAGE == ROWS, "rows are computed in whole tiles");

// Tiles 0 to 3: sums of 32 rows, 2 x 16 columns. Then rows and columns of whole depth, 4 and 5, and of half depth, 6 and 7.
// The tiles of rows are always full: what lies behind the last row is multiplied and left.
inline void configure(Tiles &tiles) {
    Shapes shapes;
    for (int t = 0; t < 6; t++) shapes.set(t, ROWS, 64);
    shapes.set(6, ROWS, 32), shapes.set(7, ROWS / 2, 64);
    tiles.configure(shapes);
}

// Where the sums of 16 or 32 rows and 16 or 32 columns are.
struct Block {
    float *at;
    long stride;  // of rows, in numbers
    bool both;    // 32 columns
    float *corner(int row, int column) const { return at + row * ROWS * stride + column * ROWS; }
};

template <bool TWO>
inline void clear_sums(Tiles &tiles) {
    tiles.zero<0>(), tiles.zero<1>();
    if (TWO) tiles.zero<2>(), tiles.zero<3>();
}

template <bool TWO>
inline void load_sums(Tiles &tiles, const Block &sums) {
    tiles.load<0>(sums.corner(0, 0), sums.stride * 4);
    if (sums.both) tiles.load<1>(sums.corner(0, 1), sums.stride * 4);
    if (TWO) tiles.load<2>(sums.corner(1, 0), sums.stride * 4);
    if (TWO && sums.both) tiles.load<3>(sums.corner(1, 1), sums.stride * 4);
}

template <bool TWO>
inline void store_sums(const Tiles &tiles, const Block &sums) {
    tiles.store<0>(sums.corner(0, 0), sums.stride * 4);
    if (sums.both) tiles.store<1>(sums.corner(0, 1), sums.stride * 4);
    if (TWO) tiles.store<2>(sums.corner(1, 0), sums.stride * 4);
    if (TWO && sums.both) tiles.store<3>(sums.corner(1, 1), sums.stride * 4);
}

// Multiplies rows by one or two operands of 16 columns, in tiles A and B.
template <int A, int B, bool TWO>
inline void multiply(Tiles &tiles, const bf16 *rows, long stride, const uint32_t *first, const uint32_t *second,
                     long column_stride) {
    tiles.load<B>(first, column_stride * 4), tiles.load<A>(rows, stride * 2), tiles.dot<0, A, B>();
    if (TWO) tiles.load<A>(rows + ROWS * stride, stride * 2), tiles.dot<2, A, B>();
    if (!second) return;
    tiles.load<B>(second, column_stride * 4);
    if (TWO) tiles.dot<3, A, B>(), tiles.load<A>(rows, stride * 2);
    tiles.dot<1, A, B>();
}

// Computes the scores of rows and all pages of a piece.
template <bool TWO>
inline void score(Tiles &tiles, const bf16 *queries, int dims, const Piece &piece, float *scores, bool fetch) {
    for (int page = 0; page < piece.count; page += 2) {
        const uint32_t *first = piece.keys[page], *second = page + 1 < piece.count ? piece.keys[page + 1] : nullptr;
        clear_sums<TWO>(tiles);
        for (int dim = 0; dim < dims; dim += DEPTH) {
            long at = dim / 2 * PAGE;
            const uint32_t *next = second ? second + at : nullptr;
            if (fetch)
                for (int line = dim / 2; line < dim / 2 + ROWS && line < dims / 2; line++)
                    for (int p = 2; p < 4; p++) _mm_prefetch((const char *)(piece.keys[page + p] + line * PAGE), _MM_HINT_T0);
            if (dim + DEPTH <= dims) multiply<4, 5, TWO>(tiles, queries + dim, dims, first + at, next, PAGE);
            else multiply<6, 7, TWO>(tiles, queries + dim, dims, first + at, next, PAGE);
        }
        store_sums<TWO>(tiles, {scores + page * PAGE, SCORE_STRIDE, second != nullptr});
    }
}

// Adds the weighted values of `count` pages to out [rows, dims].
template <bool TWO>
inline void weigh(Tiles &tiles, const bf16 *weights, const uint32_t *const *pages, int count, int dims, float *out,
                  bool fetch) {
    for (int dim = 0; dim < dims; dim += 2 * ROWS) {
        const Block sums{out + dim, dims, dim + ROWS < dims};
        load_sums<TWO>(tiles, sums);
        for (int page = 0; page < count; page++) {
            const uint32_t *values = pages[page] + dim;
            if (fetch)
                for (int pair = 0; pair < PAGE / 2; pair++)
                    for (int half = 0; half <= sums.both; half++)
                        _mm_prefetch((const char *)(pages[page + 2] + dim + pair * dims + half * ROWS), _MM_HINT_T0);
            multiply<6, 7, TWO>(tiles, weights + page * PAGE, WEIGHT_STRIDE, values, sums.both ? values + ROWS : nullptr, dims);
        }
        store_sums<TWO>(tiles, sums);
    }
}

// Memory for the rows that are computed together.
struct Scratch {
    alignas(64) float score[PASS_ROWS * SCORE_STRIDE];
    alignas(64) bf16 weight[PASS_ROWS * WEIGHT_STRIDE];
    alignas(64) float out[PASS_ROWS * MAX_DIMS];
};

// Computes `count` rows of a tile from `first` on for one piece; TWO: more than 16.
template <bool TWO>
SEPARATE void attend_rows(Tile<Tiled> &tile, int first, int count, const Piece &piece, Scaling scaling) {
    Scratch scratch;
    int dims = tile.dims;
    bool fetch = first == 0;  // the first rows of the item prefetch the next pages for all
    score<TWO>(tile.tiles, tile.queries + first * dims, dims, piece, scratch.score, fetch);
    RowSums sums[TWO ? 2 : 1];
    for (int r = 0; r < count; r += ROWS)
        soften(tile, first + r, count - r < ROWS ? count - r : ROWS, piece, scaling, scratch.score + r * SCORE_STRIDE,
               SCORE_STRIDE, scratch.weight + r * WEIGHT_STRIDE, WEIGHT_STRIDE, sums[r / ROWS]);
    memset(scratch.out, 0, sizeof(float) * (TWO ? PASS_ROWS : ROWS) * dims);
    each_run(tile, piece, [&](int begin, const uint32_t *const *pages, int pages_count, bool masked) {
        weigh<TWO>(tile.tiles, scratch.weight + begin * PAGE, pages, pages_count, dims, scratch.out, fetch && !masked);
    });
    for (int r = 0; r < count; r += ROWS)
        join_rows(tile, first + r, count - r < ROWS ? count - r : ROWS, scratch.out + r * dims, sums[r / ROWS]);
}

}  // namespace
}  // namespace amx

namespace {

// See attention_tile.h.
inline void attend_all_rows(Tile<Tiled> &tile, const Piece &piece, Scaling scaling) {
    for (int first = 0, count; first < tile.rows; first += count) {
        count = tile.rows - first < amx::PASS_ROWS ? tile.rows - first : amx::PASS_ROWS;
        if (count > amx::ROWS) amx::attend_rows<true>(tile, first, count, piece, scaling);
        else amx::attend_rows<false>(tile, first, count, piece, scaling);
    }
}
inline void begin_items(Tile<Tiled> &tile) { amx::configure(tile.tiles); }
inline void end_items(Tile<Tiled> &tile) { tile.tiles.release(); }

}  // namespace

#endif
