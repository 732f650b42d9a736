// Products of rows and tiles: the innermost loops of a product, and the operations on its sums.
//
// A pass multiplies up to ROWS rows by a piece of a tile, with all their sums in registers. A tile stays in the L2 cache
// while all rows are multiplied by it, and the next tile is prefetched meanwhile, so that memory access and arithmetic
// overlap. If the rows do not fit the L2 cache, a piece of them is multiplied by several tiles before the next piece.
// Pieces are the same for any number of rows, so a row's outputs do not depend on other rows.
#pragma once

#include "dot.h"
#include "lanes.h"
#include "operations.h"
#include "sizes.h"

namespace {

template <class Op>
struct Rows {  // rows in the format of an Op, [count][units]
    const typename Op::Unit *x;
    const float *scales;  // [count] for INT8
    long first, count;    // index of the first row in the step's buffers, number of rows
};

// What a pass prefetches: for each unit of inputs `bytes`, from `at` on, and from unit `turn` on from `then` on.
struct Ahead {
    const char *at;
    long bytes, turn;
    const char *then;
};

// Adds R rows of x [R][stride] times a piece of a tile, or of half a tile, to out [R][TILE].
template <class Op, int R>
void pass(const typename Op::Unit *x, long stride, const char *piece, int half, long units, Ahead ahead, float *out) {
    constexpr int COLUMNS = Op::columns(R);
    typename Op::template Sum<R> sums[R][COLUMNS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c].begin(out + r * TILE + (half + c) * HALF);
    for (long k = 0; k < units; k++, ahead.at += ahead.bytes) {
        if (k == ahead.turn) ahead.at = ahead.then;
        Op::step(sums, piece + k * Op::WEIGHT_BYTES, half, x + k, stride, ahead.at, ahead.bytes);
    }
#pragma GCC unroll 12  // all three loops: a loop that is not unrolled keeps the sums in memory
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS; c++) sums[r][c].end(out + r * TILE + (half + c) * HALF);
}

template <class Op, int R = Op::ROWS>
void pass_of(long rows, const typename Op::Unit *x, long stride, const char *piece, long units, Ahead ahead, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return pass_of<Op, R - 1>(rows, x, stride, piece, units, ahead, out);
    }
    for (int half = 0; half < 2; half += Op::columns(R)) pass<Op, R>(x, stride, piece, half, units, ahead, out);
}

// Stores one row's sums of a tile: scaled, biased, gated, added to the residual, rounded where torch rounds.
void finish(const Step &step, const float *sums, float row_scale, long tile, long row) {
    constexpr int VECS = TILE / LANES;
    const Linear &linear = *step.linear;
    int width = linear.width();
    long at = row * step.stride + tile * width, left = linear.out_features - tile * width;
    bf16 cut[2][TILE] = {{0}};  // residual and outputs of a tile that is not full
    const bf16 *residual = step.residual ? step.residual + at : nullptr;
    bf16 *y = step.y + at;
    if (left < width) {
        if (residual) residual = (const bf16 *)memcpy(cut[0], residual, left * sizeof(bf16));
        y = cut[1];
    }
    vec value[VECS];
    for (int v = 0; v < VECS; v++) {
        value[v] = load(sums + v * LANES);
        if (linear.scales) value[v] = mul(value[v], mul(load(linear.scales + tile * TILE + v * LANES), all(row_scale)));
        if (linear.bias) value[v] = add(value[v], load(linear.bias + tile * TILE + v * LANES));
    }
    if (linear.gated)
        for (int v = 0; v < VECS / 2; v++) value[v] = silu_times(value[v], value[v + VECS / 2]);
    for (int v = 0; v < width / LANES; v++) {
        halves out = rounded(value[v]);
        if (residual) out = rounded(add(widened(out), widened(load(residual + v * LANES))));
        store(y + v * LANES, out);
    }
    if (left < width) memcpy(step.y + at, y, left * sizeof(bf16));
}

// The passes of a number of rows, divided as evenly as possible.
template <class Op>
struct Passes {
    long rows, count;
    explicit Passes(long rows) : rows(rows), count((rows + Op::ROWS - 1) / Op::ROWS) {}
    long begin(long pass) const { return rows * pass / count; }
};

// The pieces of a weight's inputs, in units.
template <class Op>
struct Pieces {
    long units, count;
    explicit Pieces(long units) : units(units), count((units + Op::PIECE - 1) / Op::PIECE) {}
    long begin(long piece) const { return units * piece / count; }
    long length(long piece) const { return begin(piece + 1) - begin(piece); }
};

template <class Op>
long units_of(const Linear &linear) {
    return (linear.in_features + Op::INPUTS - 1) / Op::INPUTS;
}

template <class Op>
const char *tile_of(const Linear &linear, long index) {
    return linear.weight + index * units_of<Op>(linear) * Op::WEIGHT_BYTES;
}

// Returns what a pass prefetches that reads a tile from unit k on, if all rows are in it: the same tile AHEAD_BYTES
// further on, and at its end the beginning of `next`.
template <class Op>
Ahead ahead_of(const char *weights, long units, long k, const char *next) {
    constexpr long BYTES = Op::WEIGHT_BYTES;
    long size = units * BYTES, turn = (size - AHEAD_BYTES + BYTES - 1) / BYTES;
    const char *then = next + turn * BYTES + AHEAD_BYTES - size;
    if (k < turn) return {weights + k * BYTES + AHEAD_BYTES, BYTES, turn - k, then};
    return {then + (k - turn) * BYTES, BYTES, -1, then};
}

// Multiplies all rows by one tile, which stays in the cache; `next` is prefetched meanwhile.
template <class Op>
void through_tile(const Step &step, const Rows<Op> &rows, long tile, const char *next) {
    const Linear &linear = *step.linear;
    const Passes<Op> passes(rows.count);
    const Pieces<Op> pieces(units_of<Op>(linear));
    const char *weights = tile_of<Op>(linear, tile);
    long fetch = (Op::WEIGHT_BYTES + passes.count - 1) / passes.count;
    bool near = AHEAD_BYTES && passes.count == 1 && pieces.units * Op::WEIGHT_BYTES > AHEAD_BYTES;
    for (long p = 0; p < passes.count; p++) {
        long first = passes.begin(p), past = passes.begin(p + 1);
        float sums[Op::ROWS * TILE] = {0};
        for (long i = 0; i < pieces.count; i++) {
            long k = pieces.begin(i);
            Ahead whole{next + (p * pieces.units + k) * fetch, fetch, -1, next};
            pass_of<Op>(past - first, rows.x + first * pieces.units + k, pieces.units, weights + k * Op::WEIGHT_BYTES,
                        pieces.length(i), near ? ahead_of<Op>(weights, pieces.units, k, next) : whole, sums);
        }
        for (long row = first; row < past; row++)
            finish(step, sums + (row - first) * TILE, linear.scales ? rows.scales[row] : 1.0f, tile, rows.first + row);
    }
}

// The same for rows that do not fit the cache: each piece of them is multiplied by all tiles [begin, end), at most
// GROUP, before the next piece. sums: [GROUP][BLOCK][TILE].
template <class Op>
void through_group(const Step &step, const Rows<Op> &rows, long begin, long end, const char *next, float *sums) {
    const Linear &linear = *step.linear;
    const Passes<Op> passes(rows.count);
    const Pieces<Op> pieces(units_of<Op>(linear));
    long fetch = (Op::WEIGHT_BYTES + passes.count - 1) / passes.count;
    memset(sums, 0, (end - begin) * BLOCK * TILE * sizeof(float));
    for (long i = 0; i < pieces.count; i++) {
        for (long tile = begin; tile < end; tile++) {
            long k = pieces.begin(i) * Op::WEIGHT_BYTES, length = pieces.length(i);
            const char *fetched = tile + 1 < end         ? tile_of<Op>(linear, tile + 1) + k
                                  : i + 1 < pieces.count ? tile_of<Op>(linear, begin) + pieces.begin(i + 1) * Op::WEIGHT_BYTES
                                                         : next;
            for (long p = 0; p < passes.count; p++) {
                long first = passes.begin(p);
                pass_of<Op>(passes.begin(p + 1) - first, rows.x + first * pieces.units + pieces.begin(i), pieces.units,
                            tile_of<Op>(linear, tile) + k, length, {fetched + p * length * fetch, fetch, -1, fetched},
                            sums + ((tile - begin) * BLOCK + first) * TILE);
            }
        }
    }
    for (long row = 0; row < rows.count; row++)
        for (long tile = begin; tile < end; tile++)
            finish(step, sums + ((tile - begin) * BLOCK + row) * TILE, linear.scales ? rows.scales[row] : 1.0f, tile,
                   rows.first + row);
}

// See Operations.
template <class Op>
void multiply(const Step &step, const PreparedRows &prepared, long begin, long end, const char *after, float *sums) {
    const Linear &linear = *step.linear;
    const Rows<Op> rows{(const typename Op::Unit *)prepared.x, prepared.scales, prepared.first, prepared.count};
    long group = tiles_together(rows.count, units_of<Op>(linear) * (long)sizeof(typename Op::Unit));
    for (long first = begin; first < end; first += group) {
        long last = first + group < end ? first + group : end;
        const char *next = last < end ? tile_of<Op>(linear, last) : after;
        if (group == 1) through_tile<Op>(step, rows, first, next);
        else through_group<Op>(step, rows, first, last, next, sums);
    }
}

}  // namespace
