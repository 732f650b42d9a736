// Attention of rows of queries to pages of keys and values: scores, softmax, weighted sums, in tiles that fill the
// registers.
//
// An item is computed segment by segment; for each all rows are computed, up to MICRO_ROWS at a time: scores, weights
// 2^(score - greatest of the segment), weighted values. Masked slots do not affect the result: scores of slots that a row
// does not see are replaced, and values of slots that no row of the item sees are zeroed in a copy. A segment's results
// for a row depend neither on other rows nor on other segments; `join` adds them to those of the segments before.
#pragma once

#include "amx.h"
#include "attention_math.h"

namespace {

enum { CHUNK = MAX_SEGMENT * PAGE, AHEAD = 4 };
#if defined(__AVX512F__)
enum { REGISTERS = 32 };
#else
enum { REGISTERS = 16 };
#endif
const float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// Products are separate functions: if they are inlined into a large one, compilers run out of registers and spill sums.
#define SEPARATE __attribute__((noinline))

// Returns how many units of `vectors` fit the registers with the sums of `rows` rows; `most` at most.
constexpr int at_once(int rows, int vectors, int most) {
    int fit = (REGISTERS - 1) / ((rows + 1) * vectors);
    return fit < most ? fit : most;
}

// The factor and the cap of the scores; softcap 0: no cap.
struct Scaling {
    float scale, softcap;
};

// The pages of a segment that an item reads, in order, and a few that follow (or the last one again) to be prefetched.
struct Piece {
    const uint32_t *keys[MAX_SEGMENT + AHEAD], *values[MAX_SEGMENT + AHEAD];
    int position[MAX_SEGMENT], filled[MAX_SEGMENT];  // position of slot 0; number of slots with tokens
    int count, skip;  // skip: pages of the segment before them that are not read, modulo two
    bool whole;  // every slot has a token
};

// The greatest score in base 2 that a row has seen, and the sum of the weights relative to it.
struct Sums {
    float greatest, total;
};

// The state of a tile of rows.
template <typename Kind>
struct Tile {
    alignas(64) typename Kind::factor queries[TILE_ROWS * MAX_DIMS];
    alignas(64) float out[TILE_ROWS * MAX_DIMS];  // [rows, dims], relative to `sums`
    float greatest[TILE_ROWS], total[TILE_ROWS];  // the Sums of each row
    int from[TILE_ROWS], upto[TILE_ROWS];         // positions that a row attends to
    int rows, dims, low, high;                    // positions that any row attends to
    alignas(64) uint32_t masked[PAGE * MAX_DIMS];
#if defined(AMX_TILES)
    amx::Tiles tiles;
#endif
    Sums sums(int row) const { return {greatest[row], total[row]}; }
    void set_sums(int row, Sums to) { greatest[row] = to.greatest, total[row] = to.total; }
};

// Scratch memory for the rows that are computed together.
template <typename Kind>
struct Scratch {
    alignas(64) float score[MICRO_ROWS * CHUNK];
    alignas(64) typename Kind::factor weight[MICRO_ROWS * CHUNK];
    alignas(64) float out[MICRO_ROWS * MAX_DIMS];
    Sums sums[MICRO_ROWS];
};

// Adds the results of a segment to those before it, `out` [dims] and `sums`. Not inlined: every caller rounds alike.
static SEPARATE void join(float *out, Sums &sums, const float *segment, Sums next, int dims) {
    if (next.greatest == -INFINITY) return;  // nothing seen
    float apart = sums.greatest - next.greatest;
    bool rises = !(apart >= 0.0f);  // also from -inf, where both states are zero, and with a NaN, which is propagated
    float factor = fabsf(apart) >= 126.0f ? 0.0f : power_of_two(-fabsf(apart));  // products with less would be denormal
    float before = rises ? factor : 1.0f, share = rises ? 1.0f : factor;
    sums = {rises ? next.greatest : sums.greatest, fmaf(next.total, share, sums.total * before)};
    for (int dim = 0; dim < dims; dim += LANES)
        store(out + dim, fma(load(segment + dim), all(share), mul(load(out + dim), all(before))));
}

// Computes the scores of R rows and P pages: queries [words][R] words.
template <typename Kind, int R, int P, bool FETCH>
static SEPARATE void score_pages(const typename Kind::factor *queries, int num_words, const uint32_t *const *pages,
                               const uint32_t *const *next, float *scores) {
    enum { VECS = P * PAGE_VECS, WORD = Kind::PARTS * Kind::FACTORS };
    vec acc[R][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) acc[r][v] = zero();
    for (int word = 0; word < num_words; word++) {
        if (FETCH)
            for (int page = 0; page < P; page++) _mm_prefetch((const char *)(next[page] + word * PAGE), _MM_HINT_T0);
#pragma GCC unroll 2
        for (int part = 0; part < Kind::PARTS; part++) {
            typename Kind::operand keys[VECS];
#pragma GCC unroll 8
            for (int v = 0; v < VECS; v++)
                keys[v] = Kind::take(pages[v / PAGE_VECS] + word * PAGE + v % PAGE_VECS * LANES, part);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                typename Kind::operand query = Kind::spread(queries + (word * R + r) * WORD + part * Kind::FACTORS);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) acc[r][v] = Kind::step(acc[r][v], query, keys[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; v++) store(scores + r * CHUNK + v * LANES, acc[r][v]);
}

// The same for all pages from `page` on, P at a time while that many remain.
template <typename Kind, int R, int P, bool FETCH>
static inline void score_piece(const typename Kind::factor *queries, int num_words, const Piece &piece, int page,
                               float *scores) {
    for (; page + P <= piece.count; page += P)
        score_pages<Kind, R, P, FETCH>(queries, num_words, piece.keys + page, piece.keys + page + P,
                                       scores + page * PAGE);
    if constexpr (P > 1) score_piece<Kind, R, P - 1, FETCH>(queries, num_words, piece, page, scores);
}

// Adds the weighted values of `count` pages to out [R, dims], for V vectors of columns.
template <typename Kind, int R, int V, bool FETCH>
static SEPARATE void weigh_pages(const typename Kind::factor *weights, const uint32_t *const *pages, int count, int dims,
                               int column, float *out) {
    enum { WORD = Kind::PARTS * Kind::FACTORS };
    vec acc[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) acc[r][v] = load(out + r * dims + column + v * LANES);
    for (int p = 0; p < count; p++) {
        const uint32_t *values = pages[p] + column, *next = pages[p + 2] + column;
        const typename Kind::factor *row = weights + p * PAGE;
        for (int word = 0; word < PAGE / Kind::W; word++) {
            if (FETCH)
#pragma GCC unroll 8
                for (int v = 0; v < V; v++)
                    _mm_prefetch((const char *)(next + word * dims + v * LANES), _MM_HINT_T0);
#pragma GCC unroll 2
            for (int part = 0; part < Kind::PARTS; part++) {
                typename Kind::operand value[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) value[v] = Kind::take(values + word * dims + v * LANES, part);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    typename Kind::operand weight = Kind::spread(row + r * CHUNK + word * WORD + part * Kind::FACTORS);
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) acc[r][v] = Kind::step(acc[r][v], weight, value[v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(out + r * dims + column + v * LANES, acc[r][v]);
}

// The same for `width` vectors of columns, at most V.
template <typename Kind, int R, int V, bool FETCH>
static inline void weigh_width(int width, const typename Kind::factor *weights, const uint32_t *const *pages, int count,
                               int dims, int column, float *out) {
    if (width == V) return weigh_pages<Kind, R, V, FETCH>(weights, pages, count, dims, column, out);
    if constexpr (V > 1) weigh_width<Kind, R, V - 1, FETCH>(width, weights, pages, count, dims, column, out);
}

template <typename Kind, int R, bool FETCH>
static inline void weigh_columns(const typename Kind::factor *weights, const uint32_t *const *pages, int count,
                                 int dims, float *out) {
    enum { MOST = at_once(R, 1, 4) };
    int left = dims / LANES;
    for (int column = 0; left > 0;) {
        // As even as possible: five vectors are divided into three and two.
        int width = ceil_div(left, ceil_div(left, MOST));
        weigh_width<Kind, R, MOST, FETCH>(width, weights, pages, count, dims, column, out);
        column += width * LANES;
        left -= width;
    }
}

// 2^x for x <= 0; 0 below 2^-100, which adds nothing to a sum of weights of at least 1: products with a weight that is almost
// denormal are denormal, and slow.
static inline vec weight_of(vec x) { return where_at_least(all(-100.0f), x, zero(), power_of_two(x)); }

// Converts one row's scores of a piece to weights. Returns the greatest score and the sum of the weights.
template <typename Kind>
static inline Sums soften(float *scores, const Piece &piece, int from, int upto, Scaling scaling,
                          typename Kind::factor *weights) {
    float to_base2 = scaling.scale * LOG2E;
    int count = piece.count;
    if (scaling.softcap > 0.0f) {
        float twice = 2.0f * LOG2E * scaling.scale / scaling.softcap;
        for (int i = 0; i < count * PAGE; i += LANES) store(scores + i, capped(load(scores + i), scaling.softcap, twice));
        to_base2 = LOG2E;
    }
    bool all_seen = piece.whole && from <= piece.position[0] && upto >= piece.position[count - 1] + PAGE;
    // Calls visit(slot of the piece, vector of its scores in base 2, or of `other` where the row does not see the slot).
    auto each_seen = [&](auto score_of, vec other, auto visit) {
        for (int p = 0; p < count; p++) {
            int seen = upto - piece.position[p] < piece.filled[p] ? upto - piece.position[p] : piece.filled[p];
            int skip = from - piece.position[p];
            for (int v = 0; v < PAGE_VECS; v++) {
                int slot = p * PAGE + v * LANES;
                vec x = score_of(load(scores + slot));
                visit(slot, all_seen ? x : between(x, other, skip - v * LANES, seen - v * LANES));
            }
        }
    };
    vec most = all(-INFINITY);
    each_seen([&](vec x) { return mul(x, all(to_base2)); }, all(-INFINITY), [&](int, vec x) { most = greater(most, x); });
    float reached = greatest(most);
    if (reached == -INFINITY) {  // nothing seen
        for (int i = 0; i < count * PAGE; i += LANES) Kind::put(weights + i, zero());
        return {-INFINITY, 0.0f};
    }
    vec total = zero();
    each_seen([&](vec x) { return weight_of(fma(x, all(to_base2), all(-reached))); }, zero(), [&](int slot, vec x) {
        total = add(total, x);
        Kind::put(weights + slot, x);
    });
    return {reached, sum(total)};
}

// Returns `copy`, filled with the values of a page with the slots outside [low, high) set to zero.
template <typename Kind>
static inline const uint32_t *masked_values(const uint32_t *page, int dims, int low, int high, uint32_t *copy) {
    for (int word = 0; word < PAGE / Kind::W; word++) {
        uint32_t keep = 0;
        for (int place = 0; place < Kind::W; place++) {
            int slot = word * Kind::W + place;
            if (slot >= low && slot < high) keep |= Kind::W == 1 ? 0xffffffffu : 0xffffu << 16 * place;
        }
        for (int dim = 0; dim < dims; dim++) copy[word * dims + dim] = page[word * dims + dim] & keep;
    }
    return copy;
}

// Calls visit(first page, pages, their number, whether they are a copy) for the values of a piece: runs of pages of which
// every slot is seen by some row are visited at once, other pages alone, as a masked copy.
template <typename Kind, class Visit>
static inline void each_run(Tile<Kind> &tile, const Piece &piece, Visit visit) {
    for (int begin = 0, end; begin < piece.count; begin = end) {
        int low = tile.low - piece.position[begin], high = tile.high - piece.position[begin];
        if (high > piece.filled[begin]) high = piece.filled[begin];
        end = begin + 1;
        if (low <= 0 && high >= PAGE) {
            for (; end < piece.count; end++)
                if (tile.high < piece.position[end] + PAGE || piece.filled[end] < PAGE) break;
            visit(begin, piece.values + begin, end - begin, false);
        } else {
            const uint32_t *copy = masked_values<Kind>(piece.values[begin], tile.dims, low, high, tile.masked);
            const uint32_t *pages[3] = {copy, copy, copy};
            visit(begin, pages, 1, true);
        }
    }
}

// Computes the rows [first, first + R) of a tile for one piece.
template <typename Kind, int R, bool FETCH>
static inline void attend_rows(Tile<Kind> &tile, int first, const Piece &piece, Scaling scaling) {
    Scratch<Kind> scratch;
    int dims = tile.dims;
    const typename Kind::factor *queries = tile.queries + first * dims;
    score_piece<Kind, R, at_once(R, PAGE_VECS, AHEAD), FETCH>(queries, dims / Kind::W, piece, 0, scratch.score);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        int row = first + r;
        scratch.sums[r] = soften<Kind>(scratch.score + r * CHUNK, piece, tile.from[row], tile.upto[row], scaling,
                                       scratch.weight + r * CHUNK);
    }
    memset(scratch.out, 0, sizeof(float) * R * dims);
    each_run(tile, piece, [&](int begin, const uint32_t *const *pages, int count, bool masked) {
        const typename Kind::factor *weight = scratch.weight + begin * PAGE;
        if (masked) weigh_columns<Kind, R, false>(weight, pages, count, dims, scratch.out);
        else weigh_columns<Kind, R, FETCH>(weight, pages, count, dims, scratch.out);
    });
    for (int r = 0; r < R; r++) {
        Sums sums = tile.sums(first + r);
        join(tile.out + (first + r) * dims, sums, scratch.out + r * dims, scratch.sums[r], dims);
        tile.set_sums(first + r, sums);
    }
}

// Computes R rows, or fewer, of a tile for one piece; the first rows of the tile prefetch the next pages for all.
template <typename Kind, int R = MICRO_ROWS>
static inline void attend_some_rows(Tile<Kind> &tile, int first, int rows, const Piece &piece, Scaling scaling) {
    if (rows < R) {
        if constexpr (R > 1) attend_some_rows<Kind, R - 1>(tile, first, rows, piece, scaling);
    } else if (first == 0) {
        attend_rows<Kind, R, true>(tile, first, piece, scaling);
    } else {
        attend_rows<Kind, R, false>(tile, first, piece, scaling);
    }
}

// Returns how many parts the rows of a tile are divided into: those that are in registers together, or single rows.
template <typename Kind>
static inline int parts_of(int rows) {
    return Kind::TILED ? rows : ceil_div(rows, MICRO_ROWS);
}

// Returns the first row of part `index`, if `rows` are divided into `parts` as evenly as possible.
static inline int part_of(int rows, int index, int parts) { return rows * index / parts; }

// Computes all rows of a tile for one piece. attention_amx.h has this and the next two for a Tile<Tiled>.
template <typename Kind>
static inline void attend_all_rows(Tile<Kind> &tile, const Piece &piece, Scaling scaling) {
    for (int part = 0, parts = parts_of<Kind>(tile.rows); part < parts; part++) {
        int first = part_of(tile.rows, part, parts);
        attend_some_rows<Kind>(tile, first, part_of(tile.rows, part + 1, parts) - first, piece, scaling);
    }
}

// Each thread calls these before its first item and after its last.
template <typename Kind>
static inline void begin_items(Tile<Kind> &) {}
template <typename Kind>
static inline void end_items(Tile<Kind> &) {}

}  // namespace
