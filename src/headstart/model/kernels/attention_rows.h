// Softmax of a segment for 16 rows together: what `soften` and `join` of attention_tile.h are for one row.
//
// Maxima and sums of the rows are reduced together, row by lane, so that 16 rows take a third of the instructions. Scores of
// slots that a row does not see are -inf, so whole pairs of pages are converted. The order of a row's sum depends on its
// own numbers alone.
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

// 2^x for x <= 0, with an error of 3e-6, since weights are rounded to bf16; 0 for x below -126; a NaN stays a NaN.
inline vec rough_weight_of(vec x) {
    vec r = fraction(x);
    vec p = fma(all(1.353417e-2f), r, all(5.201146e-2f));
    p = fma(p, r, all(2.4144275e-1f));
    p = fma(p, r, all(6.930038e-1f));
    return scaled_by_floor(fma(p, r, all(1.0000026f)), x);
}

// What is computed of a segment for 16 rows. Rows lie so far apart that they do not share a set of the cache.
struct alignas(64) Group {
    float score[ROWS][CHUNK + PAGE];
    bf16 weight[ROWS][CHUNK + 2 * PAGE];
    float greatest[ROWS], total[ROWS];  // see Sums
    float before[ROWS], share[ROWS];    // factors of what is before the segment, and of it
    float out[ROWS * (MAX_DIMS + PAGE)];
};

// Replaces the scores [pages * PAGE] of slots that a row does not see by -inf.
inline void mask_scores(const Piece &piece, int pages, int from, int upto, float *scores) {
    int first = piece.position[0], begin = piece.skip, end = piece.skip + piece.count;
    if (piece.whole) {  // the row sees all slots of these
        if (from > first) begin += ceil_div(from - first, PAGE);
        if (upto < first + piece.count * PAGE) end = piece.skip + (upto - first) / PAGE;
    }
    for (int page = 0; page < pages; page++) {
        if (piece.whole && page == begin && begin < end) page = end;
        if (page >= pages) break;
        int own = page - piece.skip, low = 0, high = 0;
        if (own >= 0 && own < piece.count) {
            low = from - piece.position[own], high = upto - piece.position[own];
            if (high > piece.filled[own]) high = piece.filled[own];
        }
        for (int v = 0; v < PAGE; v += LANES)
            store(scores + page * PAGE + v, between(load(scores + page * PAGE + v), all(-INFINITY), low - v, high - v));
    }
}

// Converts the scores of `count` rows of a tile, from `first` on, to weights. Both have `pages` pages, those of the piece
// from piece.skip on.
inline void soften(const Tile<Tiled> &tile, int first, int count, const Piece &piece, int pages, Scaling scaling, Group &group) {
    alignas(64) Partial partial;
    int size = pages * PAGE;
    float to_base2 = scaling.scale * LOG2E, twice = 0.0f;
    if (scaling.softcap > 0.0f) twice = 2.0f * to_base2 / scaling.softcap, to_base2 = LOG2E;
    for (int r = 0; r < ROWS; r++) {
        float *scores = group.score[r];
        vec most = all(-INFINITY);
        if (r < count) {
            for (int i = 0; twice != 0.0f && i < size; i += LANES)
                store(scores + i, capped(load(scores + i), scaling.softcap, twice));
            mask_scores(piece, pages, tile.from[first + r], tile.upto[first + r], scores);
            for (int i = 0; i < size; i += LANES) most = greater(most, load(scores + i));
        }
        store(partial[r], mul(most, all(to_base2)));
    }
    reduce(partial, group.greatest, [](vec a, vec b) { return greater(a, b); });
    for (int r = 0; r < ROWS; r++) {
        vec total = zero(), below = all(group.greatest[r] == -INFINITY ? 0.0f : -group.greatest[r]);
        for (int i = 0; r < count && i < size; i += 2 * LANES) {
            vec x = rough_weight_of(fma(load(group.score[r] + i), all(to_base2), below));
            vec y = rough_weight_of(fma(load(group.score[r] + i + LANES), all(to_base2), below));
            total = add(add(total, x), y);
            Tiled::put(group.weight[r] + i, x, y);
        }
        store(partial[r], total);
    }
    reduce(partial, group.total, [](vec a, vec b) { return add(a, b); });
}

// Adds the results of a segment for `count` rows of a tile, from `first` on, to those before it: the same bits as `join`.
inline void join_rows(Tile<Tiled> &tile, int first, int count, Group &next, long out_stride) {
    for (int r = 0; r < ROWS; r += LANES) {
        float *greatest = tile.greatest + first + r, *total = tile.total + first + r;
        vec own = load(next.greatest + r), apart = sub(load(greatest), own), one = all(1.0f);
        vec lower = lesser(apart, sub(zero(), apart)), factor = where_at_least(all(-126.0f), lower, zero(), power_of_two(lower));
        vec before = where_at_least(apart, zero(), one, factor), share = where_at_least(apart, zero(), factor, one);
        vec sum = fma(load(next.total + r), share, mul(load(total), before)), unseen = all(-FLT_MAX);
        store(total, where_at_least(unseen, own, load(total), sum));
        store(greatest, where_at_least(apart, zero(), load(greatest), own));
        store(next.before + r, before), store(next.share + r, share);
    }
    for (int r = 0; r < count; r++) {
        if (next.greatest[r] == -INFINITY) continue;  // nothing seen, as above
        float *to = tile.out + (first + r) * tile.dims;
        const float *out = next.out + r * out_stride;
        vec before = all(next.before[r]), share = all(next.share[r]);
#pragma GCC unroll 4
        for (int dim = 0; dim < tile.dims; dim += LANES)
            store(to + dim, fma(load(out + dim), share, mul(load(to + dim), before)));
    }
}

}  // namespace
}  // namespace amx

#endif
