// Products of rows and tiles: the innermost loops of a product, and the operations on its sums.
//
// A pass multiplies up to ROWS rows by a piece of a tile, with all their sums in registers. A piece stays in the cache
// while all rows are multiplied by it, and the next one is prefetched meanwhile, so that memory access and arithmetic
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

// What the passes over a section of a tile prefetch, an equal part each: what lies `offset` behind the beginning of a tile
// of `size` bytes, and behind its end the beginning of `next`.
struct Fetch {
    const char *tile;
    long size, offset;
    const char *next;
    long bytes;  // for each unit of each pass

    // Returns the part of pass `number`.
    Ahead of(long number, long units) const {
        long at = offset + number * units * bytes, turn = (size - at + bytes - 1) / bytes;
        if (at >= size) return {next + at - size, bytes, -1, next};
        return {tile + at, bytes, turn, next + at + turn * bytes - size};
    }
};

// The part of a piece that a pass computes. A piece is computed in sections if its sums are kept in `paused` meanwhile.
struct Section {
    long units;
    bool first, last;  // of the piece
};

// Adds R rows of x [R][stride] times a section of a tile, or of half a tile, to out [R][TILE]. WHOLE: of a whole piece.
// Not inlined: in one large function GCC 12 keeps sums of some numbers of rows on the stack.
template <class Op, int R, bool WHOLE>
__attribute__((noinline)) void pass(const typename Op::Unit *x, long stride, const char *weights, int half, Section section, Ahead ahead, float *out,
          float *paused) {
    constexpr int COLUMNS = Op::columns(R);
    typename Op::template Sum<R> sums[R][COLUMNS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            long at = r * TILE + (half + c) * HALF;
            if (WHOLE || section.first) sums[r][c].begin(out + at);
            else sums[r][c].resume(paused + at, out + at);
        }
    }
    for (long k = 0; k < section.units; k++, ahead.at += ahead.bytes) {
        if (k == ahead.turn) ahead.at = ahead.then;
        Op::step(sums, weights + k * Op::WEIGHT_BYTES, half, x + k, stride, ahead.at, ahead.bytes);
    }
#pragma GCC unroll 12  // all three loops: a loop that is not unrolled keeps the sums in memory
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            long at = r * TILE + (half + c) * HALF;
            if (WHOLE || section.last) sums[r][c].end(out + at);
            else sums[r][c].pause(paused + at, out + at);
        }
    }
}

// Adds the products of `rows` rows, at most R: of both halves of a tile at once, or one half after the other. `number`
// counts the passes over the section before.
template <class Op, bool WHOLE, int R = Op::ROWS>
void pass_of(long rows, const typename Op::Unit *x, long stride, const char *weights, Section section, const Fetch &fetch,
             long number, float *out, float *paused) {
    if constexpr (R > 1) {
        if (rows < R) return pass_of<Op, WHOLE, R - 1>(rows, x, stride, weights, section, fetch, number, out, paused);
    }
    for (int half = 0; half < 2; half += Op::columns(R))
        pass<Op, R, WHOLE>(x, stride, weights, half, section, fetch.of(number++, section.units), out, paused);
}

// Stores one row's sums of a tile: scaled, biased, gated, added to the residual, rounded where torch rounds.
template <class Element>
void finish(const Step &step, const float *sums, float row_scale, long tile, long row) {
    constexpr int VECS = TILE / LANES;
    const Linear &linear = *step.linear;
    int width = linear.width();
    long at = row * step.stride + tile * width, left = linear.out_features - tile * width;
    Element cut[2][TILE] = {{0}};  // residual and outputs of a tile that is not full
    const Element *residual = step.residual ? (const Element *)step.residual + at : nullptr;
    Element *to = (Element *)step.y + at, *y = to;
    if (left < width) {
        if (residual) residual = (const Element *)memcpy(cut[0], residual, left * sizeof(Element));
        y = cut[1];
    }
    vec value[VECS];
    for (int v = 0; v < VECS; v++) {
        value[v] = load(sums + v * LANES);
        if (linear.scales) value[v] = mul(value[v], mul(load(linear.scales + tile * TILE + v * LANES), all(row_scale)));
        if (linear.bias) value[v] = add(value[v], load(linear.bias + tile * TILE + v * LANES));
    }
    if (linear.gated)
        for (int v = 0; v < VECS / 2; v++) value[v] = silu_times<Element>(value[v], value[v + VECS / 2]);
    for (int v = 0; v < width / LANES; v++) {
        auto out = As<Element>::stored(value[v]);
        if (residual) out = As<Element>::stored(add(widened(out), widened(load(residual + v * LANES))));
        if (step.non_temporal) stream(y + v * LANES, out);
        else store(y + v * LANES, out);
    }
    if (left < width) memcpy(to, y, left * sizeof(Element));
}

// The passes of a number of rows, divided as evenly as possible.
template <class Op>
struct Passes {
    long rows, count;
    explicit Passes(long rows) : rows(rows), count((rows + Op::ROWS - 1) / Op::ROWS) {}
    long begin(long pass) const { return rows * pass / count; }
    // Returns how many passes go through a tile: of some numbers of rows, one for each half.
    long reads() const {
        long sum = 0;
        for (long p = 0; p < count; p++) sum += 2 / Op::columns(begin(p + 1) - begin(p));
        return sum;
    }
};

template <class Op>
long units_of(const Linear &linear) {
    return (linear.in_features + Op::INPUTS - 1) / Op::INPUTS;
}
template <>
inline long units_of<Int8Quads>(const Linear &linear) {
    return (linear.in_features + INT8_INPUTS - 1) / INT8_INPUTS * INT8_INPUTS / Int8Quads::INPUTS;
}

// Pieces of int8 begin with whole operations on AMX tiles, in every variant, so that all give the same bits.
template <class Op>
constexpr long PIECE_STEP = 1;
template <>
constexpr long PIECE_STEP<Int8> = 32;

// The pieces of a weight's inputs, in units.
template <class Op>
struct Pieces {
    long units, count;
    explicit Pieces(long units) : units(units), count((units + Op::PIECE - 1) / Op::PIECE) {}
    explicit Pieces(const Linear &linear) : Pieces(units_of<Op>(linear)) {}
    long begin(long piece) const {
        long at = (units * piece / count + PIECE_STEP<Op> - 1) / PIECE_STEP<Op> * PIECE_STEP<Op>;
        return at < units ? at : units;
    }
    long length(long piece) const { return begin(piece + 1) - begin(piece); }
};
template <>
struct Pieces<Int8Quads> {  // those of Int8
    Pieces<Int8> pairs;
    long units, count;
    explicit Pieces(const Linear &linear)
        : pairs((linear.in_features + 1) / 2), units(units_of<Int8Quads>(linear)), count(pairs.count) {}
    long begin(long piece) const { return piece < count ? pairs.begin(piece) * Int8::INPUTS / Int8Quads::INPUTS : units; }
    long length(long piece) const { return begin(piece + 1) - begin(piece); }
};


template <class Op>
const char *tile_of(const Linear &linear, long index) {
    return linear.weight + index * units_of<Op>(linear) * Op::WEIGHT_BYTES;
}

// Up to so many rows, weights are prefetched AHEAD_BYTES ahead of their use; else a whole tile ahead, as weights that are
// used again. With AVX-512 that pays (8 to 10 % of a product) where nothing but memory is waited for.
#if defined(__AVX512F__)
template <class Op>
constexpr long NEAR_ROWS = 0;
template <>
constexpr long NEAR_ROWS<Bf16> = sizeof(Bf16::Unit) == 4 ? 2 : 1;  // widened numbers take arithmetic as well
template <>
constexpr long NEAR_ROWS<Fp32> = 2;
#else
template <class Op>
constexpr long NEAR_ROWS = BLOCK;
#endif

// Multiplies the rows of one pass by one tile. If it needs two passes, for one half of the tile after the other, both go
// through a section of the tile before the next section. AHEAD_BYTES ahead, the weights are prefetched meanwhile, evenly,
// so that memory is read all the time.
template <class Op>
void by_sections(const Step &step, const Rows<Op> &rows, long reads, long tile, const char *next) {
    constexpr long BYTES = Op::WEIGHT_BYTES, SECTION = AHEAD_BYTES / BYTES > 1 ? AHEAD_BYTES / BYTES : 1;
    const Linear &linear = *step.linear;
    const Pieces<Op> pieces(linear);
    const char *weights = tile_of<Op>(linear, tile);
    float sums[Op::ROWS * TILE] = {0}, paused[Op::ROWS * TILE];
    for (long i = 0; i < pieces.count; i++) {
        long begin = pieces.begin(i), end = begin + pieces.length(i), most = reads == 1 ? end - begin : SECTION;
        for (long k = begin; k < end; k += most) {
            long units = k + most < end ? most : end - k;
            const Fetch ahead{weights, pieces.units * BYTES, k * BYTES + AHEAD_BYTES, next, BYTES / reads};
            const Section section{units, k == begin, k + units == end};
            pass_of<Op, !Op::SECTIONS>(rows.count, rows.x + k, pieces.units, weights + k * BYTES, section, ahead, 0, sums,
                                       paused);
        }
    }
    for (long row = 0; row < rows.count; row++)
        finish<typename Op::Element>(step, sums + row * TILE, linear.scales ? rows.scales[row] : 1.0f, tile, rows.first + row);
}

// Multiplies all rows by tiles [begin, end), at most GROUP: each piece of the rows by all tiles before the next piece.
// The piece that is needed next is prefetched meanwhile, evenly over all passes. sums: [GROUP][BLOCK][TILE].
template <class Op>
void by_pieces(const Step &step, const Rows<Op> &rows, long reads, long begin, long end, const char *next, float *sums) {
    constexpr long BYTES = Op::WEIGHT_BYTES;
    const Linear &linear = *step.linear;
    const Passes<Op> passes(rows.count);
    const Pieces<Op> pieces(linear);
    long fetch = (BYTES + reads - 1) / reads;
    for (long tile = begin; tile < end; tile++)
        memset(sums + (tile - begin) * BLOCK * TILE, 0, rows.count * TILE * sizeof(float));
    for (long i = 0; i < pieces.count; i++) {
        for (long tile = begin; tile < end; tile++) {
            const char *weights = tile_of<Op>(linear, tile);
            long k = pieces.begin(i), number = 0;
            const Section piece{pieces.length(i), true, true};
            const char *fetched = tile + 1 < end         ? tile_of<Op>(linear, tile + 1) + k * BYTES
                                  : i + 1 < pieces.count ? tile_of<Op>(linear, begin) + pieces.begin(i + 1) * BYTES
                                                         : next;
            const Fetch ahead{nullptr, 0, 0, fetched, fetch};
            for (long p = 0; p < passes.count; p++) {
                long first = passes.begin(p), count = passes.begin(p + 1) - first;
                pass_of<Op, true>(count, rows.x + first * pieces.units + k, pieces.units, weights + k * BYTES, piece,
                                  ahead, number, sums + ((tile - begin) * BLOCK + first) * TILE, nullptr);
                number += 2 / Op::columns(count);
            }
        }
    }
    for (long row = 0; row < rows.count; row++)
        for (long tile = begin; tile < end; tile++)
            finish<typename Op::Element>(step, sums + ((tile - begin) * BLOCK + row) * TILE, linear.scales ? rows.scales[row] : 1.0f, tile,
                   rows.first + row);
}

// See Operations.
template <class Op>
void multiply(const Step &step, const PreparedRows &prepared, long begin, long end, const char *after, float *sums) {
    const Linear &linear = *step.linear;
    const Rows<Op> rows{(const typename Op::Unit *)prepared.x, prepared.scales, prepared.first, prepared.count};
    const Passes<Op> passes(rows.count);
    long units = units_of<Op>(linear), reads = passes.reads();
    long group = tiles_together(rows.count, units * (long)sizeof(typename Op::Unit));
    bool is_near = rows.count <= NEAR_ROWS<Op> && group == 1 && units * Op::WEIGHT_BYTES > AHEAD_BYTES;
    bool sections = is_near && passes.count == 1 && (reads == 1 || Op::SECTIONS);
    for (long first = begin; first < end; first += group) {
        long last = first + group < end ? first + group : end;
        const char *next = last < end ? tile_of<Op>(linear, last) : after;
        if (sections) by_sections<Op>(step, rows, reads, first, next);
        else by_pieces<Op>(step, rows, reads, first, last, next, sums);
    }
}

}  // namespace
