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
constexpr int SCORE_STRIDE = CHUNK + PAGE, WEIGHT_STRIDE = CHUNK + 2 * PAGE;
static_assert(TILE_ROWS % ROWS == 0 && (int)PAGE == ROWS, "rows are computed in whole tiles");

// Rows of a tile are computed in groups of 16. Tiles 0, 1: scores of a group and two pages, from rows and columns of whole
// depth, 4 and 5. Tiles 2, 3: outputs of a group and 32 dims, from rows and columns of half depth, 6 and 7. The tiles of rows
// are always full: what lies behind the last row is multiplied and left.
inline void configure(Tiles &tiles) {
    Shapes shapes;
    for (int t = 0; t < 6; t++) shapes.set(t, ROWS, 64);
    shapes.set(6, ROWS, 32), shapes.set(7, ROWS / 2, 64);
    tiles.configure(shapes);
}

// Memory for one group.
struct Group {
    alignas(64) float score[ROWS * SCORE_STRIDE];
    alignas(64) bf16 weight[ROWS * WEIGHT_STRIDE];
    RowSums sums;
};

// Adds rows times one or two operands of 16 columns, `second` if it is not null, to tiles C and C + 1.
template <int C, int A, int B>
inline void multiply(Tiles &tiles, const bf16 *rows, long stride, const uint32_t *first, const uint32_t *second,
                     long column_stride) {
    tiles.load<A>(rows, stride * 2), tiles.load<B>(first, column_stride * 4), tiles.dot<C, A, B>();
    if (second) tiles.load<B>(second, column_stride * 4), tiles.dot<C + 1, A, B>();
}

// Computes the scores of a group for a piece, two pages in a step.
struct Scores {
    const Piece *piece;
    const bf16 *queries;  // [16, dims]
    float *to;
    int dims, page, count;
    bool fetch;  // the next pages, for all groups

    int steps() const { return (count + 1) / 2; }
    void step(Tiles &tiles) {
        const uint32_t *const *keys = piece->keys + page;
        bool both = page + 1 < count;
        tiles.zero<0>(), tiles.zero<1>();
        for (int dim = 0; dim < dims; dim += DEPTH) {
            long at = dim / 2 * PAGE;
            const uint32_t *second = both ? keys[1] + at : nullptr;
            if (fetch)
                for (int line = dim / 2; line < dim / 2 + ROWS && line < dims / 2; line++)
                    for (int p = 2; p < 4; p++) _mm_prefetch((const char *)(keys[p] + line * PAGE), _MM_HINT_T0);
            if (dim + DEPTH <= dims) multiply<0, 4, 5>(tiles, queries + dim, dims, keys[0] + at, second, PAGE);
            else multiply<0, 6, 7>(tiles, queries + dim, dims, keys[0] + at, second, PAGE);
        }
        tiles.store<0>(to + page * PAGE, SCORE_STRIDE * 4);
        if (both) tiles.store<1>(to + (page + 1) * PAGE, SCORE_STRIDE * 4);
        page += 2;
    }
};

// Computes the weighted values of a group for the pages of a piece that are seen: one page and 32 dims in a step.
struct Outputs {
    const Piece *piece;
    const bf16 *weights;
    float *to;  // [16, dims]
    int dims, begin, count, dim, page;
    bool fetch;

    int steps() const { return (count - begin) * ((dims + 2 * ROWS - 1) / (2 * ROWS)); }
    void step(Tiles &tiles) {
        const uint32_t *values = piece->values[page] + dim, *next = piece->values[page + 2] + dim;
        bool both = dim + ROWS < dims;
        if (page == begin) tiles.zero<2>(), tiles.zero<3>();
        if (fetch)
            for (int pair = 0; pair < PAGE / 2; pair++)
                for (int half = 0; half <= both; half++)
                    _mm_prefetch((const char *)(next + pair * dims + half * ROWS), _MM_HINT_T0);
        multiply<2, 6, 7>(tiles, weights + page * PAGE, WEIGHT_STRIDE, values, both ? values + ROWS : nullptr, dims);
        if (++page < count) return;
        tiles.store<2>(to + dim, dims * 4);
        if (both) tiles.store<3>(to + dim + ROWS, dims * 4);
        page = begin, dim += 2 * ROWS;
    }
};

// What the tiles do while a group's scores become weights, a part after each of its rows.
struct Meanwhile {
    Tiles &tiles;
    Outputs *outputs;
    Scores *scores;
    int done, of_outputs, all;

    Meanwhile(Tiles &tiles, Outputs *outputs, Scores *scores)
        : tiles(tiles), outputs(outputs), scores(scores), done(0), of_outputs(outputs ? outputs->steps() : 0),
          all(of_outputs + (scores ? scores->steps() : 0)) {}
    void upto(int due) {
        for (; done < due; done++)
            if (done < of_outputs) outputs->step(tiles);
            else scores->step(tiles);
    }
    void operator()(int row) { upto(all * (row + 1) / ROWS); }
};

// Replaces values of slots that no row of a tile sees by zeros, in copies. Returns the range of pages that some row sees.
struct Seen {
    int begin, end;
};
inline Seen hide_unseen(const Tile<Tiled> &tile, Piece &piece, uint32_t *copies) {
    Seen seen = {piece.count, 0};
    for (int page = 0; page < piece.count; page++) {
        int low = tile.low - piece.position[page], high = tile.high - piece.position[page];
        if (high > piece.filled[page]) high = piece.filled[page];
        if (low >= PAGE || high <= 0) continue;
        if (page < seen.begin) seen.begin = page;
        seen.end = page + 1;
        if (low <= 0 && high >= PAGE) continue;
        piece.values[page] = masked_values<Tiled>(piece.values[page], tile.dims, low, high, copies);
        copies += PAGE / 2 * tile.dims;
    }
    return seen;
}

// Memory for a tile.
struct Scratch {
    Group groups[2];
    alignas(64) float out[ROWS * MAX_DIMS];
    alignas(64) uint32_t copies[MAX_SEGMENT * PAGE / 2 * MAX_DIMS];
};

// Computes all rows of a tile for one piece. While the scores of a group become weights, the tiles multiply for the groups
// before and behind it.
SEPARATE void attend_groups(Tile<Tiled> &tile, Piece &piece, Scaling scaling) {
    Scratch scratch;
    int dims = tile.dims, count = (tile.rows + ROWS - 1) / ROWS;
    Seen seen = hide_unseen(tile, piece, scratch.copies);
    auto scores_of = [&](int g) {
        return Scores{&piece, tile.queries + g * ROWS * dims, scratch.groups[g & 1].score, dims, 0, piece.count, g == 0};
    };
    auto outputs_of = [&](int g) {
        return Outputs{&piece, scratch.groups[g & 1].weight, scratch.out, dims, seen.begin, seen.end, 0, seen.begin, g == 0};
    };
    auto rows_of = [&](int g) { return tile.rows - g * ROWS < ROWS ? tile.rows - g * ROWS : ROWS; };
    auto join_group = [&](int g) { join_rows(tile, g * ROWS, rows_of(g), scratch.out, scratch.groups[g & 1].sums); };
    Scores scores = scores_of(0);
    Outputs outputs{};
    Meanwhile(tile.tiles, nullptr, &scores).upto(scores.steps());
    for (int g = 0; g < count; g++) {
        Group &own = scratch.groups[g & 1];
        if (g + 1 < count) scores = scores_of(g + 1);
        Meanwhile meanwhile(tile.tiles, g > 0 ? &outputs : nullptr, g + 1 < count ? &scores : nullptr);
        soften(tile, g * ROWS, rows_of(g), piece, scaling, own.score, SCORE_STRIDE, own.weight, WEIGHT_STRIDE, own.sums, meanwhile);
        if (g > 0) join_group(g - 1);
        outputs = outputs_of(g);
    }
    Meanwhile(tile.tiles, &outputs, nullptr).upto(outputs.steps());
    join_group(count - 1);
}

}  // namespace
}  // namespace amx

namespace {

// See attention_tile.h.
inline void attend_all_rows(Tile<Tiled> &tile, Piece &piece, Scaling scaling) { amx::attend_groups(tile, piece, scaling); }
inline void begin_items(Tile<Tiled> &tile) { amx::configure(tile.tiles); }
inline void end_items(Tile<Tiled> &tile) { tile.tiles.release(); }

}  // namespace

#endif
