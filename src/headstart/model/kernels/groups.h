// Sums over groups of 32 inputs, for weights of 4, 5, 6 or 8 bits with a scale per output and group.
//
// A group of a row is int16 with one scale, a power of two: numbers of at least 2^-7 of the largest one keep all bits of
// a bf16, smaller ones are rounded to steps of at most 2^-14 of it.
// The integers of weights and rows are multiplied and summed in int32, which is exact, and the sum of a group is scaled
// and added in fp32. A weight is therefore the number that its file says, and the order of additions within a group does
// not matter. Some formats subtract OFFSET from every integer: the sums then begin with -OFFSET times the group's sum.
//
// A unit of a tile is GROUPS groups and the fp16 factors that they share, if any: [GROUPS][record], factors. A record
// has the bits of the integers by planes, for each half of a tile, then the scales. In all planes a word is 16 bits, and
// two adjacent words are the two inputs of a pair for one output:
//   4 bits:  [half][4][16 outputs][2] words, whose four bits j are those of pair 4b + j, for b the second index
//   + 1 bit: [half][16 outputs][2] words; bit p belongs to pair p
//   + 2 bits: [half][2][16 outputs][2] words; bits 2p and 2p + 1 belong to pair 8h + p, for h the second index
//   8 bits:  [half][16 pairs][16 outputs][2] bytes, signed
#pragma once

#include "elements.h"
#include "tiles.h"
#include "words.h"

namespace {

constexpr int GROUP_INPUTS = 32, GROUP_PAIRS = 16;

struct GroupOfRow {
    uint32_t pairs[GROUP_PAIRS];  // two int16 each
    int32_t sums[2];              // of the first and the second 16 inputs
    float scale, scaled_sum;      // value = int16 * scale; scaled_sum = scale * (sums[0] + sums[1])
};

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
    Floats get() const { return value; }
    void set(Floats to) { value = to; }
    static void leave_group() {}
};

struct Stored {
    float *at;
    void begin(float *out) { at = out; }
    void end(float *) const {}
    Floats get() const { return Floats::load(at); }
    void set(Floats to) { to.store(at); }
    // Without this, GCC keeps a second copy of all sums on the stack.
    static void leave_group() { asm volatile("" ::: "memory"); }
};

template <bool, class A, class>
struct Either {
    typedef A Type;
};
template <class A, class B>
struct Either<false, A, B> {
    typedef B Type;
};

template <int BITS, class Scales, int OFFSET>
struct Grouped {
    template <int R>
    using Sum = typename Either<(R <= WORDS_CARRIED), Carried, Stored>::Type;
    struct Unit {
        GroupOfRow groups[Scales::GROUPS];
    };
    static constexpr int PLANES_BYTES = TILE * GROUP_INPUTS * BITS / 8, RECORD = PLANES_BYTES + Scales::BYTES;
    static constexpr int INPUTS = Scales::GROUPS * GROUP_INPUTS;
    static constexpr int WEIGHT_BYTES = Scales::GROUPS * RECORD + Scales::FACTOR_BYTES;
    static constexpr int ROWS = WORDS_ROWS, PIECE = 2048 / INPUTS;
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
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const GroupOfRow &row = x[r * stride].groups[g];
            int sum = Scales::SUMS == 2 ? row.sums[part] : row.sums[0] + row.sums[1];
            for (int c = 0; c < C; c++) OFFSET ? whole[r][c].set(-OFFSET * sum) : whole[r][c].begin(nullptr);
        }
        constexpr int QUADS = 4 / Scales::SUMS;
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
        const char *scales = at + PLANES_BYTES;
        for (int c = 0; c < C; c++) {
            Floats scale = Scales::scale(scales, factors, half + c, part), least = Scales::least(scales, factors, half + c);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                const GroupOfRow &row = x[r * stride].groups[g];
                Floats sum = sums[r][c].get();
                sum.add_scaled(whole[r][c], scale, row.scale);
                if (Scales::HAS_MIN) sum.add_product(least, row.scaled_sum);
                sums[r][c].set(sum);
            }
        }
        Sum<R>::leave_group();
    }
};

// Returns the next number of a row, or 0 beyond its end.
inline float element_or_zero(const Linear &linear, const bf16 *x, float factor, long i) {
    return i < linear.in_features ? element(x, linear.norm, factor, i) : 0.0f;
}

// Returns the float with this biased exponent, 1 to 254.
inline float power_of_two(uint32_t exponent) {
    uint32_t bits = exponent << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Writes a row as groups. A group with a number that is not finite gets the scale NaN, so all outputs become NaN.
inline void prepare_groups(const Linear &linear, const bf16 *x, GroupOfRow *to, long groups) {
    float factor = row_factor(linear, x), values[GROUP_INPUTS];
    const bf16 *norm = linear.norm;
    for (long g = 0; g < groups; g++) {
        long at = g * GROUP_INPUTS, left = linear.in_features - at;
        if (left < GROUP_INPUTS) {
            for (int i = 0; i < GROUP_INPUTS; i++) values[i] = element_or_zero(linear, x, factor, at + i);
        } else {
#pragma omp simd
            for (int i = 0; i < GROUP_INPUTS; i++) values[i] = element(x + at, norm ? norm + at : norm, factor, i);
        }
        float largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
        for (int i = 0; i < GROUP_INPUTS; i++) {
            largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
            poison += values[i] * 0.0f;
        }
        uint32_t exponent;
        memcpy(&exponent, &largest, 4);
        exponent >>= 23;
        float inverse = poison == 0 && exponent > 14 ? power_of_two(268 - exponent) : 0.0f;
        float scale = poison != 0 ? NAN : exponent > 14 ? power_of_two(exponent - 14) : 0.0f;
        int16_t whole[GROUP_INPUTS];
#pragma omp simd
        for (int i = 0; i < GROUP_INPUTS; i++) whole[i] = (int16_t)(int)rintf((inverse ? values[i] : 0.0f) * inverse);
        int sums[2] = {0, 0};
        for (int part = 0; part < 2; part++) {
            int sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < GROUP_INPUTS / 2; i++) sum += whole[part * GROUP_INPUTS / 2 + i];
            sums[part] = sum;
        }
        memcpy(to[g].pairs, whole, sizeof whole);
        to[g].sums[0] = sums[0], to[g].sums[1] = sums[1];
        to[g].scale = scale, to[g].scaled_sum = scale * (float)(sums[0] + sums[1]);
    }
}

template <class Op>
void prepare_grouped(const Linear &linear, const bf16 *x, char *to, float *) {
    long groups = (linear.in_features + Op::INPUTS - 1) / Op::INPUTS * (Op::INPUTS / GROUP_INPUTS);
    prepare_groups(linear, x, (GroupOfRow *)to, groups);
}

template <class Op>
constexpr Operations grouped_operations() {
    return {Op::INPUTS, Op::WEIGHT_BYTES, sizeof(typename Op::Unit), false, prepare_grouped<Op>, multiply<Op>};
}

}  // namespace
