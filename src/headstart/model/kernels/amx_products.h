// Products of bf16 on AMX tiles: what tiles.h is for registers, for rows and weights in units of 32 inputs.
//
// Half a unit of a packed tile is an operand as it is: 16 pairs of inputs, 64 bytes of 16 outputs, with stride 128. A pass
// multiplies up to PASS_ROWS rows by 32 outputs over a piece of the inputs. The order of a sum is that of amx.h, unit by
// unit, for every number of rows, so a row's outputs depend neither on other rows nor on how work is divided.
#pragma once

#include "amx.h"
#include "tiles.h"

#if defined(AMX_TILES)

namespace amx {

constexpr long UNIT_BYTES = TILE * DEPTH * sizeof(bf16), ROW_UNIT_BYTES = DEPTH * sizeof(bf16);
constexpr long PASS_ROWS = 2 * ROWS;
constexpr long PIECE = 64;           // units: 128 KiB of weights stay in the L2 cache, beside
constexpr long ROWS_BYTES = 1 << 20;  // of rows, at most
constexpr long FETCH_BYTES = 8192;   // that few rows prefetch ahead
constexpr long SUMS_STRIDE = TILE * sizeof(float);

// Tiles 0, 1: sums of the first 16 rows; 2, 3: of the others; 4, 5: the rows; 6, 7: the weights.
inline void configure(Tiles &tiles, long count) {
    Shapes shapes;
    long first = count < ROWS ? count : ROWS, second = count - first;
    const long rows[8] = {first, first, second, second, first, second, ROWS, ROWS};
    for (int t = 0; t < 8; t++) shapes.set(t, rows[t], 64);
    tiles.configure(shapes);
}

// Adds rows x [rows][stride bytes] times a piece of `units` to `sums` [rows][TILE], or begins them. TWO: more than 16 rows.
// `meanwhile(k, weights)` is called for each unit; it overlaps with the products.
template <bool TWO, class Meanwhile>
inline void pass(Tiles &tiles, const char *x, long stride, const char *weights, long units, float *sums, bool resume,
                 Meanwhile meanwhile) {
    float *second = sums + ROWS * TILE;
    if (resume) {
        tiles.load<0>(sums, SUMS_STRIDE), tiles.load<1>(sums + HALF, SUMS_STRIDE);
        if (TWO) tiles.load<2>(second, SUMS_STRIDE), tiles.load<3>(second + HALF, SUMS_STRIDE);
    } else {
        tiles.zero<0>(), tiles.zero<1>();
        if (TWO) tiles.zero<2>(), tiles.zero<3>();
    }
    for (long k = 0; k < units; k++, x += ROW_UNIT_BYTES, weights += UNIT_BYTES) {
        tiles.load<6>(weights, 2 * 64), tiles.load<4>(x, stride), tiles.dot<0, 4, 6>();
        tiles.load<7>(weights + 64, 2 * 64), tiles.dot<1, 4, 7>();
        if (TWO) tiles.load<5>(x + ROWS * stride, stride), tiles.dot<2, 5, 6>(), tiles.dot<3, 5, 7>();
        meanwhile(k, weights);
    }
    tiles.store<0>(sums, SUMS_STRIDE), tiles.store<1>(sums + HALF, SUMS_STRIDE);
    if (TWO) tiles.store<2>(second, SUMS_STRIDE), tiles.store<3>(second + HALF, SUMS_STRIDE);
}

template <class Meanwhile>
inline void pass_of(Tiles &tiles, long count, const char *x, long stride, const char *weights, long units, float *sums,
                    bool resume, Meanwhile meanwhile) {
    if (count > ROWS) pass<true>(tiles, x, stride, weights, units, sums, resume, meanwhile);
    else pass<false>(tiles, x, stride, weights, units, sums, resume, meanwhile);
}

// The product of some rows by the tiles of a thread.
struct Product {
    const Step &step;
    const PreparedRows &rows;
    long units, begin, end;  // units of inputs; packed tiles
    const char *after;       // weights that are needed next

    const char *tile(long index) const {
        return index < end ? step.linear->weight + index * units * UNIT_BYTES : after;
    }
    long stride() const { return units * ROW_UNIT_BYTES; }
    void finish_row(const float *sums, long index, long row) const {
        finish<bf16>(step, sums, 1.0f, index, rows.first + row);
    }
    // Fetches the line that a row will be stored to. Without it, stores of many rows wait for memory one after the other.
    void want(long index, long row) const {
        const bf16 *y = (const bf16 *)step.y;
        asm volatile("prefetchw %0" ::"m"(y[(rows.first + row) * step.stride + index * step.linear->width()]));
    }
};

// Multiplies at most PASS_ROWS rows: the weights are read once, FETCH_BYTES before their use.
inline void few_rows(Tiles &tiles, const Product &product, float *sums) {
    long tile_bytes = product.units * UNIT_BYTES, count = product.rows.count;
    const char *limit = product.tile(product.begin) + (product.end - product.begin) * tile_bytes;
    configure(tiles, count);
    auto fetch = [&](long, const char *at) {
        const char *next = at + FETCH_BYTES < limit ? at + FETCH_BYTES : product.after + (at + FETCH_BYTES - limit);
#pragma GCC unroll 32
        for (int line = 0; line < UNIT_BYTES / 64; line++) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    };
    for (long index = product.begin; index < product.end; index++) {
        pass_of(tiles, count, product.rows.x, product.stride(), product.tile(index), product.units, sums, false, fetch);
        for (long row = 0; row < count; row++) product.finish_row(sums + row * TILE, index, row);
    }
}

struct Pending {  // rows whose sums are complete
    const float *sums;
    long index, row, count;
    void finish_some(const Product &product, long most) {
        for (; most > 0 && count > 0; most--, count--, row++, sums += TILE) product.finish_row(sums, index, row);
    }
};

// Multiplies more than PASS_ROWS rows: a piece of a packed tile stays in the cache while all rows are multiplied by it, and
// a piece of the rows while GROUP packed tiles are. Each pass meanwhile prefetches its part of the next piece, finishes the
// rows of the pass before it and fetches the lines that its own rows will be stored to. sums: [GROUP][passes][32][TILE].
inline void many_rows(Tiles &tiles, const Product &product, float *sums) {
    long units = product.units, pieces = (units + PIECE - 1) / PIECE, count = product.rows.count;
    long passes = (count + PASS_ROWS - 1) / PASS_ROWS, last = count - (passes - 1) * PASS_ROWS;
    long lines = (UNIT_BYTES / 64 + passes - 1) / passes, group = pieces == 1 ? 1 : GROUP;
    Pending pending{};
    configure(tiles, PASS_ROWS);
    for (long g = product.begin; g < product.end; g += group) {
        long past = g + group < product.end ? g + group : product.end;
        for (long i = 0; i < pieces; i++) {
            long from = units * i / pieces, length = units * (i + 1) / pieces - from;
            long finished = (PASS_ROWS + length - 1) / length;  // rows per unit
            bool ends = i + 1 == pieces;
            for (long t = g; t < past; t++) {
                const char *weights = product.tile(t) + from * UNIT_BYTES;
                const char *then = t + 1 < past ? product.tile(t + 1) + from * UNIT_BYTES
                                   : ends       ? product.tile(past)
                                                : product.tile(g) + (from + length) * UNIT_BYTES;
                for (long p = 0; p < passes; p++) {
                    long here = p + 1 < passes ? PASS_ROWS : last, first = p * PASS_ROWS;
                    const char *x = product.rows.x + first * product.stride() + from * ROW_UNIT_BYTES;
                    const char *next = then + p * length * lines * 64;
                    float *at = sums + ((t - g) * passes + p) * PASS_ROWS * TILE;
                    if (here < PASS_ROWS) configure(tiles, here);
                    pass_of(tiles, here, x, product.stride(), weights, length, at, i > 0, [&](long k, const char *) {
                        for (long line = 0; line < lines; line++) _mm_prefetch(next + (k * lines + line) * 64, _MM_HINT_T1);
                        pending.finish_some(product, finished);
                        for (long row = k * finished; ends && row < (k + 1) * finished && row < here; row++)
                            product.want(t, first + row);
                    });
                    if (ends) pending = {at, t, first, here};
                }
                if (last < PASS_ROWS) configure(tiles, PASS_ROWS);
            }
        }
    }
    pending.finish_some(product, PASS_ROWS);
}

// Returns how many rows are multiplied by a piece of weights: whole passes, whose piece fits the L2 cache.
inline long most_rows(long units) {
    long fit = ROWS_BYTES / ((units < PIECE ? units : PIECE) * ROW_UNIT_BYTES) / PASS_ROWS * PASS_ROWS;
    return fit < MOST_ROWS ? fit : MOST_ROWS;
}

// See Operations.
inline void multiply(const Step &step, const PreparedRows &rows, long begin, long end, const char *after, float *sums) {
    Tiles tiles;
    long units = (step.linear->in_features + DEPTH - 1) / DEPTH, most = most_rows(units);
    long blocks = (rows.count + most - 1) / most, groups = (rows.count + ROWS - 1) / ROWS;
    for (long b = 0; b < blocks; b++) {
        long first = groups * b / blocks * ROWS, past = groups * (b + 1) / blocks * ROWS;
        if (past > rows.count) past = rows.count;
        PreparedRows part{rows.x + first * units * ROW_UNIT_BYTES, nullptr, rows.first + first, past - first};
        const char *next = b + 1 < blocks ? step.linear->weight + begin * units * UNIT_BYTES : after;
        Product product{step, part, units, begin, end, next};
        if (part.count <= PASS_ROWS) few_rows(tiles, product, sums);
        else many_rows(tiles, product, sums);
    }
    tiles.release();
}

}  // namespace amx

#endif
