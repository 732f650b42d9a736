// Sums over groups of 32 inputs, for weights of 4, 5, 6 or 8 bits with a scale per output and group.
//
// Rows are integers of 16 or 8 bits with a scale per group (group_rows.h). The integers of weights and rows are multiplied
// and summed exactly (group_sums.h), and the sum of a group is scaled and added in fp32. A weight is therefore the number
// that its file says, and the order of additions within a group does not matter.
//
// A unit of a tile is GROUPS groups and the fp16 factors that they share, if any: [GROUPS][record], factors. A record
// has the bits of the integers by planes, for each half of a tile, then the scales. In all planes a word is 16 bits, and
// two adjacent words are the two inputs of a pair for one output:
//   4 bits:  [half][4][16 outputs][2] words, whose four bits j are those of pair 4b + j, for b the second index
//   + 1 bit: [half][16 outputs][2] words; bit p belongs to pair p
//   + 2 bits: [half][2][16 outputs][2] words; bits 2p and 2p + 1 belong to pair 8h + p, for h the second index
//   8 bits:  [half][16 pairs][16 outputs][2] bytes, signed
#pragma once

#include "group_sums.h"
#include "tiles.h"

namespace {

// ---- scales -----------------------------------------------------------------------------------------------------------

// A scale in fp16 per output and group, and with MIN a number in fp16 that is added to every weight of the group.
template <bool MIN>
struct Halves {
    static constexpr int GROUPS = 1, SUMS = 1, BYTES = TILE * 2 * (MIN ? 2 : 1), FACTOR_BYTES = 0;
    static constexpr bool HAS_MIN = MIN;
    static Floats scale(const char *at, const char *, int column, int) { return from_halves(at + column * HALF * 2); }
    static Floats least(const char *at, const char *, int column) {
        return MIN ? from_halves(at + (TILE + column * HALF) * 2) : Floats();
    }
};

// Q4_K and Q5_K: for each group of 256 inputs an fp16 scale and an fp16 minimum, and for each 32 of them the integers
// that they are multiplied by. The minimum is subtracted.
struct ScalesK {
    static constexpr int GROUPS = 8, SUMS = 1, BYTES = TILE * 2, FACTOR_BYTES = TILE * 4;
    static constexpr bool HAS_MIN = true;
    static Floats scale(const char *at, const char *factors, int column, int) {
        return multiplied(from_bytes(at + column * HALF), from_halves(factors + column * HALF * 2));
    }
    static Floats least(const char *at, const char *factors, int column) {
        Floats whole = from_bytes(at + TILE + column * HALF);
        return multiplied(whole, from_halves(factors + (TILE + column * HALF) * 2));
    }
};

// Q6_K: an fp16 scale for 256 inputs, and a signed integer that it is multiplied by for each 16 of them.
struct Scales6 {
    static constexpr int GROUPS = 8, SUMS = 2, BYTES = TILE * 2, FACTOR_BYTES = TILE * 2;
    static constexpr bool HAS_MIN = false;
    static Floats scale(const char *at, const char *factors, int column, int part) {
        Floats whole = from_signed_bytes(at + part * TILE + column * HALF);
        return multiplied(whole, from_halves(factors + column * HALF * 2));
    }
    static Floats least(const char *, const char *, int) { return Floats(); }
};

// ---- products ---------------------------------------------------------------------------------------------------------

// Sums of one row over groups. Those of few rows are carried in registers through a pass; those of more rows are stored,
// since the sums of a group need the registers. Both continue the sums of earlier pieces, so they are the same numbers.
struct Carried {
    Floats value;
    void begin(float *out) { value = Floats::load(out); }
    void end(float *out) const { value.store(out); }
    void resume(const float *, float *out) { begin(out); }
    void pause(float *, float *out) const { end(out); }
    Floats get() const { return value; }
    void set(Floats to) { value = to; }
    static void leave_group() {}
};

struct Stored {
    float *at;
    void begin(float *out) { at = out; }
    void end(float *) const {}
    void resume(const float *, float *out) { begin(out); }
    void pause(float *, float *) const {}
    Floats get() const { return Floats::load(at); }
    void set(Floats to) { to.store(at); }
    // Without this, GCC keeps a second copy of all sums on the stack.
    static void leave_group() { asm volatile("" ::: "memory"); }
};

template <int BITS, class Scales, int OFFSET, template <int, int, int> class RowsOf>
struct Grouped {
    typedef bf16 Element;
    typedef RowsOf<BITS, Scales::SUMS, OFFSET> Rows;
    typedef typename Rows::Group Group;
    template <int R>
    using Sum = typename Either<(R <= WORDS_CARRIED), Carried, Stored>::Type;
    struct Unit {
        Group groups[Scales::GROUPS];
    };
    static constexpr int PLANES_BYTES = TILE * GROUP_INPUTS * BITS / 8, RECORD = PLANES_BYTES + Scales::BYTES;
    static constexpr int INPUTS = Scales::GROUPS * GROUP_INPUTS;
    static constexpr int WEIGHT_BYTES = Scales::GROUPS * RECORD + Scales::FACTOR_BYTES;
    static constexpr bool SECTIONS = false;
    static constexpr int ROWS = Rows::ROWS, PIECE = 2048 / INPUTS;
    static constexpr int columns(int rows) { return words_columns(rows); }

    template <int R, int C>
    static void step(Sum<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        const char *factors = at + Scales::GROUPS * RECORD;
        long fetched = 0;
        for (int g = 0; g < Scales::GROUPS; g++, at += RECORD) {
            for (; fetched < fetch * (g + 1) / Scales::GROUPS; fetched += 64) _mm_prefetch(next + fetched, _MM_HINT_T1);
            for (int part = 0; part < Scales::SUMS; part++)
                add_part(sums, at, factors, half, part, x, stride, g);
        }
    }

    // Adds the products of a group, or of 16 of its inputs if those have a scale of their own.
    template <int R, int C>
    static void add_part(Sum<R> (&sums)[R][C], const char *at, const char *factors, int half, int part, const Unit *x,
                         long stride, int g) {
        Ints whole[R][C];
        Rows::sum(whole, at, half, part, x, stride, g);
        const char *scales = at + PLANES_BYTES;
        for (int c = 0; c < C; c++) {
            Floats scale = Scales::scale(scales, factors, half + c, part), least = Scales::least(scales, factors, half + c);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const Group &row = x[r * stride].groups[g];
                Floats sum = sums[r][c].get();
                sum.add_scaled(whole[r][c].floats(), scale, row.scale);
                if (Scales::HAS_MIN) sum.add_product(least, row.scaled_sum);
                sums[r][c].set(sum);
            }
        }
        Sum<R>::leave_group();
    }
};

template <class Op>
void prepare_grouped(const Linear &linear, const void *x, char *to, float *) {
    long groups = (linear.in_features + Op::INPUTS - 1) / Op::INPUTS * (Op::INPUTS / GROUP_INPUTS);
    prepare_groups(linear, (const bf16 *)x, (typename Op::Group *)to, groups);
}

template <class Op>
constexpr Operations grouped_operations() {
    return {Op::INPUTS, Op::WEIGHT_BYTES, sizeof(typename Op::Unit), false, prepare_grouped<Op>, multiply<Op>};
}

}  // namespace
