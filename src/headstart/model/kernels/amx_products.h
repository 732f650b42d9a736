// Products of bf16 and of int8 on AMX tiles: what tiles.h is for registers, for rows and weights in units of 64 bytes.
//
// Half a unit of a packed tile is an operand as it is: 16 pairs of bf16 or quadruples of int8, 64 bytes of 16 outputs, with
// stride 128. A pass multiplies some rows by 32 outputs over a piece of the inputs. The order of a sum is that of amx.h,
// unit by unit, for every number of rows, so a row's outputs depend neither on other rows nor on how work is divided.
#pragma once

#include "amx.h"
#include "tiles.h"

#if defined(AMX_TILES)

namespace amx {

constexpr long UNIT_BYTES = TILE * 64, HALF_STRIDE = 2 * 64, SUMS_STRIDE = TILE * sizeof(float);
constexpr long ROWS_BYTES = 1 << 20;  // of rows, at most, in the L2 cache beside a piece of weights
constexpr long FETCH_BYTES = 8192;    // that few rows prefetch ahead

// Tiles 0, 1: sums of the rows in 4; 2, 3: of those in 5; 6, 7: the weights.
inline void configure(Tiles &tiles, long first, long second) {
    Shapes shapes;
    const long rows[8] = {first, first, second, second, first, second, ROWS, ROWS};
    for (int t = 0; t < 8; t++) shapes.set(t, rows[t], 64);
    tiles.configure(shapes);
}

// bf16. Tile 5 has more rows.
struct Floating {
    static constexpr long INPUTS = DEPTH, ROW_BYTES = 64, PASS_ROWS = 2 * ROWS;
    static constexpr long PIECE = 64;    // units, whose 128 KiB of weights stay in the L2 cache
    static constexpr long TOGETHER = 1;  // pieces that all rows are multiplied by before the next ones
    static constexpr bool WHOLE = false;
    static bool two(long count) { return count > ROWS; }
    static void configure(Tiles &tiles, long count) {
        amx::configure(tiles, two(count) ? (long)ROWS : count, two(count) ? count - ROWS : 0);
    }
    static long second(long stride) { return ROWS * stride; }
    static long pieces(long inputs) { return (inputs + PIECE * INPUTS - 1) / (PIECE * INPUTS); }
    static long begin(long inputs, long piece) { return (inputs + INPUTS - 1) / INPUTS * piece / pieces(inputs); }
    template <int C, int A, int B>
    static void dot(Tiles &tiles) {
        tiles.dot<C, A, B>();
    }
};

// int8, and rows of int16: tiles 4 and 5 have the high bytes of the rows and the low ones. Pieces are those of Int8, so
// outputs have the same bits as without tiles.
struct Integers {
    static constexpr long INPUTS = 64, ROW_BYTES = 128, PASS_ROWS = ROWS;
    static constexpr long TOGETHER = 4, PIECE = TOGETHER * INT_PIECE * 2 / INPUTS;
    static constexpr bool WHOLE = true;  // sums are integers, which are added to those of earlier pieces in fp32
    static bool two(long) { return true; }
    static void configure(Tiles &tiles, long count) { amx::configure(tiles, count, count); }
    static long second(long) { return 64; }
    static Pieces<Int8> of(long inputs) { return Pieces<Int8>((inputs + 1) / 2); }
    static long pieces(long inputs) { return of(inputs).count; }
    static long begin(long inputs, long piece) { return (of(inputs).begin(piece) * 2 + INPUTS - 1) / INPUTS; }
    template <int C, int A, int B>
    static void dot(Tiles &tiles) {
        if (A == 4) tiles.dot_bytes<C, A, B, int8_t>();
        else tiles.dot_bytes<C, A, B, uint8_t>();
    }
};

// Adds rows x [rows][stride bytes] times a piece of `units` to `sums` [2][ROWS][TILE], or begins them. TWO: both tiles of rows.
// `meanwhile(k, weights)` is called for each unit; it overlaps with the products.
template <class Form, bool TWO, class Meanwhile>
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
    for (long k = 0; k < units; k++, x += Form::ROW_BYTES, weights += UNIT_BYTES) {
        tiles.load<6>(weights, HALF_STRIDE), tiles.load<4>(x, stride), Form::template dot<0, 4, 6>(tiles);
        tiles.load<7>(weights + 64, HALF_STRIDE), Form::template dot<1, 4, 7>(tiles);
        if (TWO) {
            tiles.load<5>(x + Form::second(stride), stride);
            Form::template dot<2, 5, 6>(tiles), Form::template dot<3, 5, 7>(tiles);
        }
        meanwhile(k, weights);
    }
    tiles.store<0>(sums, SUMS_STRIDE), tiles.store<1>(sums + HALF, SUMS_STRIDE);
    if (TWO) tiles.store<2>(second, SUMS_STRIDE), tiles.store<3>(second + HALF, SUMS_STRIDE);
}

template <class Form, class Meanwhile>
inline void pass_of(Tiles &tiles, long count, const char *x, long stride, const char *weights, long units, float *sums,
                    bool resume, Meanwhile meanwhile) {
    if (Form::two(count)) pass<Form, true>(tiles, x, stride, weights, units, sums, resume, meanwhile);
    else pass<Form, false>(tiles, x, stride, weights, units, sums, resume, meanwhile);
}

// The product of some rows by the tiles of a thread.
template <class Form>
struct Product {
    const Step &step;
    const PreparedRows &rows;
    long units, begin, end;  // units of inputs; packed tiles
    const char *after;       // weights that are needed next

    long inputs() const { return step.linear->in_features; }
    const char *tile(long index) const {
        return index < end ? step.linear->weight + index * units * UNIT_BYTES : after;
    }
    long stride() const { return units * Form::ROW_BYTES; }
    void finish_row(const float *sums, long index, long row) const {
        finish<bf16>(step, sums, Form::WHOLE ? rows.scales[row] : 1.0f, index, rows.first + row);
    }
    // Fetches the line that a row will be stored to. Without it, stores of many rows wait for memory one after the other.
    void want(long index, long row) const {
        if (step.non_temporal) return;
        const bf16 *y = (const bf16 *)step.y;
        asm volatile("prefetchw %0" ::"m"(y[(rows.first + row) * step.stride + index * step.linear->width()]));
    }
};

// Adds the sums of a row's high bytes and, ROWS behind them, of its low ones, or begins with them.
inline void add_whole(const float *whole, float *sums, bool begins) {
    const int32_t *high = (const int32_t *)whole, *low = high + ROWS * TILE;
#pragma omp simd
    for (int n = 0; n < TILE; n++) sums[n] = (begins ? 0.0f : sums[n]) + (float)(high[n] * 256 + low[n]);
}

struct Pending {  // rows that are multiplied by a piece
    float *whole;  // [2][ROWS][TILE] of integers, or null
    bool begins, ends;  // whether it is the first piece, and the last one
    float *sums;
    long index, row, count;
    template <class Form>
    void finish_some(const Product<Form> &product, long most) {
        for (; most > 0 && count > 0; most--, count--, row++, sums += TILE) {
            if (Form::WHOLE) add_whole(whole, sums, begins), whole += TILE;
            if (ends) product.finish_row(sums, index, row);
        }
    }
};

// Multiplies at most PASS_ROWS rows: the weights are read once, FETCH_BYTES before their use.
template <class Form>
inline void few_rows(Tiles &tiles, const Product<Form> &product, float *sums) {
    long tile_bytes = product.units * UNIT_BYTES, count = product.rows.count;
    long pieces = Form::WHOLE ? Form::pieces(product.inputs()) : 1;
    const char *limit = product.tile(product.begin) + (product.end - product.begin) * tile_bytes;
    alignas(64) float whole[2 * ROWS * TILE];
    Form::configure(tiles, count);
    auto fetch = [&](long, const char *at) {
        const char *next = at + FETCH_BYTES < limit ? at + FETCH_BYTES : product.after + (at + FETCH_BYTES - limit);
#pragma GCC unroll 32
        for (int line = 0; line < UNIT_BYTES / 64; line++) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    };
    for (long index = product.begin; index < product.end; index++) {
        for (long i = 0, from = 0, past; i < pieces; i++, from = past) {
            past = i + 1 < pieces ? Form::begin(product.inputs(), i + 1) : product.units;
            pass_of<Form>(tiles, count, product.rows.x + from * Form::ROW_BYTES, product.stride(),
                          product.tile(index) + from * UNIT_BYTES, past - from, Form::WHOLE ? whole : sums, false, fetch);
            Pending{whole, i == 0, i + 1 == pieces, sums, index, 0, count}.finish_some(product, count);
        }
    }
}

// Multiplies more than PASS_ROWS rows: some pieces of a packed tile stay in the cache while all rows are multiplied by them,
// and those pieces of the rows while GROUP packed tiles are. Each pass meanwhile prefetches its part of the next pieces,
// finishes the rows of the pass before it and fetches the lines that its own rows will be stored to.
// sums: [GROUP][passes][PASS_ROWS][TILE].
template <class Form>
inline void many_rows(Tiles &tiles, const Product<Form> &product, float *sums) {
    constexpr long MOST = Form::PASS_ROWS, TOGETHER = Form::TOGETHER;
    long pieces = Form::pieces(product.inputs()), parts = (pieces + TOGETHER - 1) / TOGETHER;
    long count = product.rows.count, passes = (count + MOST - 1) / MOST, last = count - (passes - 1) * MOST;
    long lines = (UNIT_BYTES / 64 + passes - 1) / passes, group = parts == 1 ? 1 : GROUP, turn = 0;
    alignas(64) float whole[2][2 * ROWS * TILE];
    Pending pending{};
    Form::configure(tiles, MOST);
    for (long g = product.begin; g < product.end; g += group) {
        long past = g + group < product.end ? g + group : product.end;
        for (long part = 0; part < parts; part++) {
            long own = pieces * part / parts, length = pieces * (part + 1) / parts - own, begin[TOGETHER + 1];
            for (long i = 0; i <= length; i++) begin[i] = Form::begin(product.inputs(), own + i);
            for (long t = g; t < past; t++) {
                const char *then = t + 1 < past         ? product.tile(t + 1) + begin[0] * UNIT_BYTES
                                   : part + 1 == parts ? product.tile(past)
                                                       : product.tile(g) + begin[length] * UNIT_BYTES;
                for (long p = 0; p < passes; p++) {
                    long here = p + 1 < passes ? MOST : last, first = p * MOST;
                    const char *next = then + p * (begin[length] - begin[0]) * lines * 64;
                    float *at = sums + ((t - g) * passes + p) * MOST * TILE;
                    if (here < MOST) Form::configure(tiles, here);
                    for (long i = 0; i < length; i++) {
                        long from = begin[i], units = begin[i + 1] - from;
                        long finished = (MOST + units - 1) / units;  // rows per unit
                        bool begins = own + i == 0, ends = own + i + 1 == pieces;
                        float *to = Form::WHOLE ? whole[turn ^= 1] : at;
                        const char *x = product.rows.x + first * product.stride() + from * Form::ROW_BYTES;
                        pass_of<Form>(tiles, here, x, product.stride(), product.tile(t) + from * UNIT_BYTES, units, to,
                                      !Form::WHOLE && !begins, [&](long k, const char *) {
                            for (long line = 0; line < lines; line++)
                                _mm_prefetch(next + ((from - begin[0] + k) * lines + line) * 64, _MM_HINT_T1);
                            pending.finish_some(product, finished);
                            for (long row = k * finished; ends && row < (k + 1) * finished && row < here; row++)
                                product.want(t, first + row);
                        });
                        if (Form::WHOLE || ends) pending = {to, begins, ends, at, t, first, here};
                    }
                }
                if (last < MOST) Form::configure(tiles, MOST);
            }
        }
    }
    pending.finish_some(product, MOST);
}

// Returns how many rows are multiplied by a piece of weights: whole passes, whose piece fits the L2 cache.
template <class Form>
inline long most_rows(long units) {
    long row_bytes = (units < Form::PIECE ? units : Form::PIECE) * Form::ROW_BYTES;
    long fit = ROWS_BYTES / row_bytes / Form::PASS_ROWS * Form::PASS_ROWS;
    return fit < MOST_ROWS ? fit : MOST_ROWS;
}

// See Operations.
template <class Form>
inline void multiply(const Step &step, const PreparedRows &rows, long begin, long end, const char *after, float *sums) {
    Tiles tiles;
    long units = (step.linear->in_features + Form::INPUTS - 1) / Form::INPUTS, most = most_rows<Form>(units);
    long blocks = (rows.count + most - 1) / most, groups = (rows.count + ROWS - 1) / ROWS;
    for (long b = 0; b < blocks; b++) {
        long first = groups * b / blocks * ROWS, past = groups * (b + 1) / blocks * ROWS;
        if (past > rows.count) past = rows.count;
        PreparedRows part{rows.x + first * units * Form::ROW_BYTES, rows.scales + first, rows.first + first, past - first};
        const char *next = b + 1 < blocks ? step.linear->weight + begin * units * UNIT_BYTES : after;
        Product<Form> product{step, part, units, begin, end, next};
        if (part.count <= Form::PASS_ROWS) few_rows(tiles, product, sums);
        else many_rows(tiles, product, sums);
    }
    tiles.release();
}

// A piece of the rows is one piece of their inputs up to PIECE units.
template <class Form>
constexpr Operations operations(bool copies, void (*prepare)(const Linear &, const void *, char *, float *)) {
    return {Form::INPUTS, UNIT_BYTES, Form::ROW_BYTES, copies, prepare, multiply<Form>,
            sizeof(bf16), MOST_ROWS, MOST_EACH, MOST_ROWS * Form::PIECE * Form::ROW_BYTES};
}

}  // namespace amx

#endif
