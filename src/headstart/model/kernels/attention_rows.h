// Softmax of a segment for 16 rows together: what `soften` and `join` of attention_tile.h are for one row.
//
// Maxima and sums of the rows are reduced together, row by lane, so that 16 rows take a third of the instructions. The order
// of a row's sum depends on its own numbers alone.
#pragma once

#include "attention_tile.h"

#if defined(AMX_TILES)

namespace amx {
namespace {

// A row of [16, LANES] numbers for each of 16 rows.
typedef float Partial[ROWS][LANES];

#if defined(__AVX512F__)
// Writes op over each row of `from`. Rows 2i and 2i + 1 are interleaved, then pairs of rows, then quarters of vectors.
template <class Combine>
inline void reduce(const Partial &from, float *to, Combine op) {
    vec quarter[4];
    for (int i = 0; i < 4; i++) {
        vec two[2];
        for (int j = 0; j < 2; j++) {
            vec a = load(from[4 * i + 2 * j]), b = load(from[4 * i + 2 * j + 1]);
            two[j] = op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        __m512d a = _mm512_castps_pd(two[0]), b = _mm512_castps_pd(two[1]);
        quarter[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    vec half[2];
    for (int i = 0; i < 2; i++) {
        vec a = quarter[2 * i], b = quarter[2 * i + 1];
        half[i] = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    store(to, op(_mm512_shuffle_f32x4(half[0], half[1], 0x88), _mm512_shuffle_f32x4(half[0], half[1], 0xdd)));
}
#else
template <class Combine>
inline void reduce(const Partial &from, float *to, Combine op) {
    for (int r = 0; r < ROWS; r++) {
        float lanes[LANES];
        memcpy(lanes, from[r], sizeof lanes);
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int i = 0; i < width; i++) lanes[i] = first(op(all(lanes[i]), all(lanes[i + width])));
        to[r] = lanes[0];
    }
}
#endif

// The results of a segment for 16 rows; see Sums.
struct alignas(64) RowSums {
    float greatest[ROWS], total[ROWS];
};

// Calls visit(slot, vector) for the scores of a row: `change` of those that it sees, `other` in the place of the others.
template <class Change, class Visit>
inline void each_score(const float *scores, const Piece &piece, int from, int upto, Change change, vec other, Visit visit) {
    if (piece.whole && from <= piece.position[0] && upto >= piece.position[piece.count - 1] + PAGE) {
        for (int slot = 0; slot < piece.count * PAGE; slot += LANES) visit(slot, change(load(scores + slot)));
        return;
    }
    for (int p = 0; p < piece.count; p++) {
        int seen = upto - piece.position[p] < piece.filled[p] ? upto - piece.position[p] : piece.filled[p];
        int skip = from - piece.position[p];
        for (int v = 0; v < PAGE_VECS; v++) {
            int slot = p * PAGE + v * LANES;
            visit(slot, between(change(load(scores + slot)), other, skip - v * LANES, seen - v * LANES));
        }
    }
}

// Converts the scores [rows][score_stride] of rows [first, first + count) of a tile to weights [rows][weight_stride]. Calls
// meanwhile(row) after each of 16 rows.
template <class Call>
inline void soften(const Tile<Tiled> &tile, int first, int count, const Piece &piece, Scaling scaling, float *scores,
                   long score_stride, bf16 *weights, long weight_stride, RowSums &sums, Call &meanwhile) {
    alignas(64) Partial partial;
    int size = piece.count * PAGE;
    float to_base2 = scaling.scale * LOG2E;
    if (scaling.softcap > 0.0f) {
        float twice = 2.0f * LOG2E * scaling.scale / scaling.softcap;
        for (int r = 0; r < count; r++) {
            float *row = scores + r * score_stride;
            for (int i = 0; i < size; i += LANES) store(row + i, capped(load(row + i), scaling.softcap, twice));
        }
        to_base2 = LOG2E;
    }
    for (int r = 0; r < ROWS; r++) {
        vec most = all(-INFINITY);
        if (r < count)
            each_score(scores + r * score_stride, piece, tile.from[first + r], tile.upto[first + r],
                       [&](vec x) { return mul(x, all(to_base2)); }, all(-INFINITY), [&](int, vec x) { most = greater(most, x); });
        store(partial[r], most);
    }
    reduce(partial, sums.greatest, [](vec a, vec b) { return greater(a, b); });
    for (int r = 0; r < ROWS; r++) {
        vec total = zero();
        bf16 *to = weights + r * weight_stride;
        if (r < count && sums.greatest[r] == -INFINITY) {  // nothing seen
            for (int i = 0; i < size; i += LANES) Tiled::put(to + i, zero());
        } else if (r < count) {
            vec below = all(-sums.greatest[r]);
            each_score(scores + r * score_stride, piece, tile.from[first + r], tile.upto[first + r],
                       [&](vec x) { return power_of_two(fma(x, all(to_base2), below)); }, zero(), [&](int slot, vec x) {
                           total = add(total, x);
                           Tiled::put(to + slot, x);
                       });
        }
        store(partial[r], total);
        meanwhile(r);
    }
    reduce(partial, sums.total, [](vec a, vec b) { return add(a, b); });
}

// Adds the results of a segment for rows [first, first + count) of a tile to those before it: the same bits as `join`.
inline void join_rows(Tile<Tiled> &tile, int first, int count, const float *out, const RowSums &next) {
    alignas(64) float factor[ROWS];
    for (int r = 0; r < ROWS; r++)
        factor[r] = r < count ? -fabsf(tile.sums[first + r].greatest - next.greatest[r]) : 0.0f;
    for (int r = 0; r < ROWS; r += LANES) store(factor + r, power_of_two(load(factor + r)));
    for (int r = 0; r < count; r++, out += tile.dims) {
        if (next.greatest[r] == -INFINITY) continue;  // nothing seen
        Sums &sums = tile.sums[first + r];
        bool rises = !(sums.greatest - next.greatest[r] >= 0.0f);  // see `join`
        float before = rises ? factor[r] : 1.0f, share = rises ? 1.0f : factor[r];
        sums = {rises ? next.greatest[r] : sums.greatest, fmaf(next.total[r], share, sums.total * before)};
        float *to = tile.out + (first + r) * tile.dims;
        for (int dim = 0; dim < tile.dims; dim += LANES)
            store(to + dim, fma(load(out + dim), all(share), mul(load(to + dim), all(before))));
    }
}

}  // namespace
}  // namespace amx

#endif
