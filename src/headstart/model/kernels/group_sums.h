// Integer sums of the products of a group of 32 inputs, or of one of its two parts, for rows of 16 and of 8 bits.
//
// Both are exact. Some formats subtract OFFSET from every integer of a weight: the sums then have -OFFSET times the sum of
// the row's integers.
#pragma once

#include "group_rows.h"
#include "words.h"

namespace {

// Returns the sum of the row's integers that belong to the integers of a part.
template <int SUMS, class Group>
inline int row_sum(const Group &row, int part) {
    return SUMS == 2 ? row.sums[part] : row.sums[0] + row.sums[1];
}

// Rows of 16 bits: products of pairs of int16 are added in int32.
template <int BITS, int SUMS, int OFFSET>
struct RowsOfWords {
    typedef GroupOfWords Group;
    static constexpr int ROWS = WORDS_ROWS;

    template <int R, int C, class Unit>
    static void sum(Ints (&whole)[R][C], const char *at, int half, int part, const Unit *x, long stride, int g) {
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            int sum = row_sum<SUMS>(x[r * stride].groups[g], part);
            for (int c = 0; c < C; c++) OFFSET ? whole[r][c].set(-OFFSET * sum) : whole[r][c].begin(nullptr);
        }
        constexpr int QUADS = 4 / SUMS;
#pragma GCC unroll WORDS_UNROLLED
        for (int b = part * QUADS; b < (part + 1) * QUADS; b++) {
            Planes<BITS> planes[C];
            for (int c = 0; c < C; c++) planes[c].load(at, half + c, b);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                Words weights[C];
                for (int c = 0; c < C; c++) weights[c] = planes[c].pair(j);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    const uint32_t *pair = x[r * stride].groups[g].pairs + 4 * b + j;
                    for (int c = 0; c < C; c++) add_products(whole[r][c], weights[c], pair);
                }
            }
        }
    }
};

// Rows of 8 bits: products of bytes are added in int16 as long as the largest ones fit, then in int32; with VNNI in int32
// from the start. An instruction multiplies twice as many bytes as int16.
template <int BITS, int SUMS, int OFFSET>
struct RowsOfBytes {
    typedef GroupOfBytes Group;
    static constexpr int ROWS = BYTES_ROWS, QUADS = 4 / SUMS;
    static_assert(2 * Shorts::fitting(BITS) * 2 * ((1 << BITS) - 1) * 127 <= 32767, "a sum of int16 overflows");

    template <int R, int C, class Unit>
    static void sum(Ints (&whole)[R][C], const char *at, int half, int part, const Unit *x, long stride, int g) {
        constexpr int FITTING = ByteSums<R>::fitting(BITS), LOOPS = FITTING < QUADS ? FITTING : QUADS;
        add_loops<LOOPS, true>(whole, at, half, part, x, stride, g, part * QUADS);
#pragma GCC unroll 4
        for (int b = part * QUADS + LOOPS; b < (part + 1) * QUADS; b += LOOPS)
            add_loops<LOOPS, false>(whole, at, half, part, x, stride, g, b);
    }

    // Adds the four pairs b and the next ones, or begins the sums with them.
    template <int LOOPS, bool BEGIN, int R, int C, class Unit>
    static void add_loops(Ints (&whole)[R][C], const char *at, int half, int part, const Unit *x, long stride, int g,
                          int b) {
        ByteSums<R> sums[R][C];
        add_four<0, true>(sums, at, half, x, stride, g, b);
        add_four<1, false>(sums, at, half, x, stride, g, b);
#pragma GCC unroll 4
        for (int i = 1; i < LOOPS; i++) {
            add_four<0, false>(sums, at, half, x, stride, g, b + i);
            add_four<1, false>(sums, at, half, x, stride, g, b + i);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++) {
                Ints total = sums[r][c].total();
                if (BEGIN && OFFSET) whole[r][c].set(-OFFSET * row_sum<SUMS>(x[r * stride].groups[g], part));
                if (BEGIN && !OFFSET) whole[r][c] = total;
                else whole[r][c].add(total);
            }
        }
    }

    // Adds the pairs 4b + J and 4b + J + 2.
    template <int J, bool BEGIN, int R, int C, class Unit>
    static void add_four(ByteSums<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, int g, int b) {
        Words weights[C];
        for (int c = 0; c < C; c++) {
            Planes<BITS> planes;
            planes.load(at, half + c, b);
            weights[c] = planes.template bytes<J>();
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const uint32_t *four = x[r * stride].groups[g].fours + 2 * b + J;
            for (int c = 0; c < C; c++) BEGIN ? sums[r][c].begin(weights[c], four) : sums[r][c].add(weights[c], four);
        }
    }
};

}  // namespace
