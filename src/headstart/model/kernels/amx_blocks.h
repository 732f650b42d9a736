// Products of many rows with weights in blocks on AMX tiles, with the bits that group_sums.h and groups.h give.
//
// The integers of rows and weights are numbers of bf16: those of a row have at most 8 significant bits, as they come from
// bf16 or are bytes. In the sums of a group every partial sum is an integer of at most 2^24, if the weights of 5 and 6 bits
// are signed, so an operation on bf16 gives the exact integer, which is scaled and added in the same order. Weights of 8 bits
// are 16 times a signed number of 4 bits, and an unsigned one.
#pragma once

#include "amx_products.h"
#include "groups.h"

namespace {

#if defined(AMX_TILES)

template <class Op>
struct OnTiles;

template <int BITS, class Scales, int OFFSET, template <int, int, int> class RowsOf>
struct OnTiles<Grouped<BITS, Scales, OFFSET, RowsOf>> {
    typedef Grouped<BITS, Scales, OFFSET, RowsOf> Op;
    static constexpr int PARTS = Scales::SUMS, ROWS = amx::ROWS, OPERANDS = BITS == 8 ? 2 : 1;
    static constexpr int GROUPS = 8 / OPERANDS;             // that are unpacked at a time
    static constexpr int CENTRE = BITS == 5 ? 16 : OFFSET;  // is subtracted from the weights
    static constexpr long PIECE = GROUPS / Scales::GROUPS, GROUP_BYTES = GROUP_INPUTS * sizeof(bf16), BLOCK = 2 * ::BLOCK;
    static constexpr long MOST = (1 << BITS / OPERANDS) - 1 - CENTRE, GREATEST = MOST > CENTRE ? MOST : CENTRE;
    static_assert(GROUP_INPUTS / PARTS * GREATEST * 32767 <= 1 << 24, "a sum of bf16 is not exact");

    struct OfGroup {  // of a row
        float scale, scaled_sum, rest, unused;  // rest: what the sum of the integers has besides that of the signed weights
    };
    static constexpr long ROW_BYTES = Scales::GROUPS * (GROUP_BYTES + sizeof(OfGroup));  // of a unit

    // A row is the integers of all groups, and then their OfGroup.
    static void prepare(const Linear &linear, const void *x, char *to, float *) {
        long groups = units_of<Op>(linear) * Scales::GROUPS;
        OfGroup *of = (OfGroup *)(to + groups * GROUP_BYTES);
        round_groups<typename Op::Group>(linear, (const bf16 *)x, groups, [&](long g, const int16_t *whole, const int *sums, float scale) {
            int sum = sums[0] + sums[1];
            bf16 *values = (bf16 *)(to + g * GROUP_BYTES);
            for (int i = 0; i < GROUP_INPUTS; i++) values[i] = to_bf16((float)whole[i]);
            of[g] = {scale, scale * (float)sum, (float)((CENTRE - OFFSET) * sum), 0};
        });
    }

    // A piece of a tile: the integers [GROUPS][OPERANDS][16 pairs][32 outputs][2], their scales and minima.
    struct alignas(64) Unpacked {
        bf16 whole[GROUPS][OPERANDS][GROUP_INPUTS * TILE];
        bf16 number[64];  // of the bits of a weight; of 8 bits: of the low ones, and from 32 on of the high ones
        float scale[GROUPS][PARTS][TILE], least[GROUPS][TILE];

        Unpacked() {
            for (int i = 0; i < 64; i++) number[i] = to_bf16((float)(OPERANDS == 1 ? i - CENTRE : i < 40 ? i % 32 : i - 48));
        }
        void store(Words words, bf16 *to, int table) const {
#if defined(__AVX512F__)
            __m512i low = _mm512_load_si512(number + table), high = _mm512_load_si512(number + 32);
            _mm512_store_si512(to, BITS == 6 ? _mm512_permutex2var_epi16(low, words.value, high)
                                             : _mm512_permutexvar_epi16(words.value, low));
#else
            uint16_t from[2 * HALF];
            memcpy(from, &words, sizeof from);
            for (int i = 0; i < 2 * HALF; i++) to[i] = number[table + from[i]];
#endif
        }
        void store_pair(Words words, int g, long at) {
            if constexpr (OPERANDS == 2) store(words.right<4>().masked(15), whole[g][1] + at, 32), words = words.masked(15);
            store(words, whole[g][0] + at, 0);
        }
        // Unpacks `units` units and meanwhile prefetches as many bytes from `next` on.
        void unpack(const char *unit, long units, const char *next) {
            for (int g = 0; g < units * Scales::GROUPS; g++) {
                const char *at = unit + g / Scales::GROUPS * Op::WEIGHT_BYTES, *factors = at + Scales::GROUPS * Op::RECORD;
                at += g % Scales::GROUPS * Op::RECORD;
                for (long line = 0; line < Op::RECORD; line += 64) _mm_prefetch(next + (at - unit) + line, _MM_HINT_T1);
                for (int half = 0; half < 2; half++) {
                    for (int b = 0; b < 4; b++) {
                        Planes<BITS> planes;
                        planes.load(at, half, b);
#pragma GCC unroll 4
                        for (int j = 0; j < 4; j++) store_pair(planes.pair(j), g, ((4 * b + j) * TILE + half * HALF) * 2);
                    }
                    const char *scales = at + Op::PLANES_BYTES;
                    for (int p = 0; p < PARTS; p++) Scales::scale(scales, factors, half, p).store(scale[g][p] + half * HALF);
                    if (Scales::HAS_MIN) Scales::least(scales, factors, half).store(least[g] + half * HALF);
                }
            }
        }
    };

    // Adds a group of 16 rows times a half of a tile to `sums`. Tile C has the integers.
    template <int C, bool FULL>
    __attribute__((always_inline)) static void add_group(amx::Tiles &tiles, Floats (&sums)[ROWS], const char *x,
                                                         const char *of_group, long stride, const Unpacked &weights, int g,
                                                         int half, int count, float *whole) {
        for (int p = 0; p < PARTS; p++) {
            tiles.load<C + 2>(x + p * GROUP_BYTES / PARTS, stride);
            for (int i = 0; i < OPERANDS; i++) {
                tiles.zero<C>();
                tiles.load<C + 4>(weights.whole[g][i] + (p * GROUP_PAIRS / PARTS * TILE + half * HALF) * 2, amx::HALF_STRIDE);
                tiles.dot<C, C + 2, C + 4>();
                tiles.store<C>(whole + i * ROWS * HALF, HALF * sizeof(float));
            }
            Floats scale = Floats::load(weights.scale[g][p] + half * HALF);
            Floats least = Scales::HAS_MIN ? Floats::load(weights.least[g] + half * HALF) : Floats();
#pragma GCC unroll 16
            for (int r = 0; r < (FULL ? ROWS : count); r++) {
                const OfGroup &row = *(const OfGroup *)(of_group + r * stride);
                Floats product = Floats::load(whole + r * HALF);
                if (OPERANDS == 2) product.add_product(Floats::load(whole + (ROWS + r) * HALF), 16.0f);
                if (CENTRE != OFFSET) product.add(row.rest);
                sums[r].add_scaled(product, scale, row.scale);
                if (Scales::HAS_MIN) sums[r].add_product(least, row.scaled_sum);
            }
        }
    }

    // Adds at most 16 rows times half of a piece to `out` [16][TILE].
    template <bool FULL>
    static void pass(amx::Tiles &tiles, const char *x, const char *of_group, long stride, const Unpacked &weights, int groups,
                     int half, int count, float *out) {
        alignas(64) float whole[2][OPERANDS * ROWS * HALF];
        Floats sums[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < (FULL ? ROWS : count); r++) sums[r] = Floats::load(out + r * TILE + half * HALF);
        for (int g = 0; g < groups; g += 2) {
            add_group<0, FULL>(tiles, sums, x + g * GROUP_BYTES, of_group + g * sizeof(OfGroup), stride, weights, g, half,
                               count, whole[0]);
            if (g + 1 == groups) break;
            add_group<1, FULL>(tiles, sums, x + (g + 1) * GROUP_BYTES, of_group + (g + 1) * sizeof(OfGroup), stride, weights,
                               g + 1, half, count, whole[1]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < (FULL ? ROWS : count); r++) sums[r].store(out + r * TILE + half * HALF);
    }

    // See Operations. The rows of the last tile are behind those of `prepared`: linear.cpp has memory for them.
    static void multiply(const Step &step, const PreparedRows &prepared, long begin, long end, const char *after, float *sums) {
        const Linear &linear = *step.linear;
        long units = units_of<Op>(linear), stride = units * ROW_BYTES, count = prepared.count;
        long together = tiles_together(count, stride, BLOCK);
        amx::Tiles tiles;
        amx::Shapes shapes;
        for (int t = 0; t < 6; t++) shapes.set(t, t < 4 ? ROWS : ROWS / PARTS, t == 2 || t == 3 ? 64 / PARTS : 64);
        tiles.configure(shapes);
        Unpacked weights;
        for (long first = begin; first < end; first += together) {
            long last = first + together < end ? first + together : end;
            for (long tile = 0; tile < last - first; tile++)
                memset(sums + tile * BLOCK * TILE, 0, count * TILE * sizeof(float));
            for (long k = 0; k < units; k += PIECE) {
                long length = units - k < PIECE ? units - k : PIECE;
                for (long tile = first; tile < last; tile++) {
                    const char *next = tile + 1 < last    ? tile_of<Op>(linear, tile + 1) + k * Op::WEIGHT_BYTES
                                       : k + PIECE < units ? tile_of<Op>(linear, first) + (k + PIECE) * Op::WEIGHT_BYTES
                                       : last < end        ? tile_of<Op>(linear, last)
                                                           : after;
                    weights.unpack(tile_of<Op>(linear, tile) + k * Op::WEIGHT_BYTES, length, next);
                    for (long row = 0; row < count; row += ROWS) {
                        const char *x = prepared.x + row * stride, *of = x + units * Scales::GROUPS * GROUP_BYTES;
                        int rows = count - row < ROWS ? (int)(count - row) : ROWS, groups = (int)length * Scales::GROUPS;
                        long g = k * Scales::GROUPS;
                        for (int half = 0; half < 2; half++)
                            (rows == ROWS ? pass<true> : pass<false>)(
                                tiles, x + g * GROUP_BYTES, of + g * sizeof(OfGroup), stride, weights, groups, half, rows,
                                sums + ((tile - first) * BLOCK + row) * TILE);
                    }
                }
            }
            for (long row = 0; row < count; row++)
                for (long tile = first; tile < last; tile++)
                    finish<bf16>(step, sums + ((tile - first) * BLOCK + row) * TILE, 1.0f, tile, prepared.first + row);
        }
        tiles.release();
    }

    static constexpr Operations MANY{Op::INPUTS, Op::WEIGHT_BYTES, ROW_BYTES, false, prepare, multiply, sizeof(bf16), BLOCK};
};

template <class Op>
constexpr Operations with_tiles(Operations few) {
    few.many = &OnTiles<Op>::MANY;
    return few;
}

#else

template <class Op>
constexpr Operations with_tiles(Operations few) {
    return few;
}

#endif

template <class Op>
constexpr Operations block_operations() {
    return with_tiles<Op>(grouped_operations<Op>());
}

}  // namespace
