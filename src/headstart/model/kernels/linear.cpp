// y = x @ W^T for bf16 rows x [M, K] and weights that were packed once, in bf16 or in int8 with a scale per output.
//
// Packed form, the same for every instruction set: tiles of 32 outputs, [N / 32][K / 2][32][2]. The two weights that an
// output has for a pair of inputs lie side by side, which is what the dot product instructions take; N and K are padded
// with zeros. One pass over a tile computes up to ROWS rows of x, with all sums in registers. A tile stays in the L2
// cache while all rows pass over it; meanwhile the next one is fetched, so that memory and arithmetic overlap.
//
// Of a gated weight (gate rows above up rows) a tile holds 16 gates and their 16 ups, and silu(gate) * up is stored.
#include "rows.h"

namespace {

constexpr int TILE = 32, HALF = 16;
constexpr long MANY_ROWS = 16;  // so many are shared out among the threads also where a row takes but a moment

// ---- arithmetic: sums of 16 outputs, over pairs of inputs -------------------------------------------------------------

#if defined(__AVX512F__)

struct Floats {  // 16 sums of one row in fp32
    __m512 value;
    void clear() { value = _mm512_setzero_ps(); }
    void add_to(float *out) const { _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), value)); }
};

struct Ints {  // the same in int32
    __m512i value;
    void clear() { value = _mm512_setzero_si512(); }
    void add_to(float *out) const {
        _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), _mm512_cvtepi32_ps(value)));
    }
};

#if defined(__AVX512BF16__)
struct Bf16 {
    typedef Floats Sum;
    typedef uint32_t Pair;  // two bf16 of x
    typedef __m512bh Weights;
    static constexpr int ROWS = 12, BYTES = 2;
    static Weights load(const char *at) { return (__m512bh)_mm512_loadu_si512(at); }
    static void add(Sum &sum, Weights weights, const Pair *x) {
        sum.value = _mm512_dpbf16_ps(sum.value, weights, (__m512bh)_mm512_set1_epi32((int)*x));
    }
};
#else
struct FloatPair {
    float even, odd;
};
struct Bf16 {  // widened: a bf16 is the upper half of a float
    typedef Floats Sum;
    typedef FloatPair Pair;
    struct Weights {
        __m512 even, odd;
    };
    static constexpr int ROWS = 12, BYTES = 2;
    static Weights load(const char *at) {
        __m512i both = _mm512_loadu_si512(at);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)))};
    }
    static void add(Sum &sum, Weights weights, const Pair *x) {
        sum.value = _mm512_fmadd_ps(weights.even, _mm512_set1_ps(x->even), sum.value);
        sum.value = _mm512_fmadd_ps(weights.odd, _mm512_set1_ps(x->odd), sum.value);
    }
};
#endif

struct Int8 {
    typedef Ints Sum;
    typedef uint32_t Pair;  // two int16 of x
    typedef __m512i Weights;
    static constexpr int ROWS = 12, BYTES = 1;
    static Weights load(const char *at) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at)); }
    static void add(Sum &sum, Weights weights, const Pair *x) {
#if defined(__AVX512VNNI__)
        // As an intrinsic GCC 12 copies every sum in every round of the loop, at half the speed.
        asm("vpdpwssd %2, %1, %0" : "+v"(sum.value) : "v"(weights), "v"(_mm512_set1_epi32((int)*x)));
#else
        sum.value = _mm512_add_epi32(sum.value, _mm512_madd_epi16(weights, _mm512_set1_epi32((int)*x)));
#endif
    }
};

#else  // AVX2: two registers of 8

struct Floats {
    __m256 low, high;
    void clear() { low = high = _mm256_setzero_ps(); }
    void add_to(float *out) const {
        _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), low));
        _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(out + 8), high));
    }
};

struct Ints {
    __m256i low, high;
    void clear() { low = high = _mm256_setzero_si256(); }
    void add_to(float *out) const {
        _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_cvtepi32_ps(low)));
        _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(out + 8), _mm256_cvtepi32_ps(high)));
    }
};

struct FloatPair {
    float even, odd;
};

struct Bf16 {
    typedef Floats Sum;
    typedef FloatPair Pair;
    struct Weights {
        __m256i low, high;
    };
    static constexpr int ROWS = 3, BYTES = 2;
    static Weights load(const char *at) {
        return {_mm256_loadu_si256((const __m256i *)at), _mm256_loadu_si256((const __m256i *)(at + 32))};
    }
    static __m256 even(__m256i both) { return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); }
    static __m256 odd(__m256i both) {
        return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)));
    }
    static void add(Sum &sum, Weights weights, const Pair *x) {
        __m256 x_even = _mm256_set1_ps(x->even), x_odd = _mm256_set1_ps(x->odd);
        sum.low = _mm256_fmadd_ps(even(weights.low), x_even, sum.low);
        sum.high = _mm256_fmadd_ps(even(weights.high), x_even, sum.high);
        sum.low = _mm256_fmadd_ps(odd(weights.low), x_odd, sum.low);
        sum.high = _mm256_fmadd_ps(odd(weights.high), x_odd, sum.high);
    }
};

struct Int8 {
    typedef Ints Sum;
    typedef uint32_t Pair;
    struct Weights {
        __m256i low, high;
    };
    static constexpr int ROWS = 2, BYTES = 1;
    static Weights load(const char *at) {
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)),
                _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at + 16)))};
    }
    static void add(Sum &sum, Weights weights, const Pair *x) {
        __m256i pair = _mm256_set1_epi32((int)*x);
        sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(weights.low, pair));
        sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(weights.high, pair));
    }
};

#endif

// ---- one tile ---------------------------------------------------------------------------------------------------------

// The largest products of int16 and int8, so many pairs of them, still fit an int32.
constexpr long MAX_INT_PAIRS = 256;

// Adds R rows of x [R][stride] times one tile to out [R][TILE]. Each pair of inputs fetches `fetch` bytes from `next` on.
template <class Op, int R>
void pass(const typename Op::Pair *x, long stride, const char *tile, long pairs, const char *next, long fetch,
          float *out) {
    constexpr long STEP = TILE * 2 * Op::BYTES;
    typename Op::Sum sums[R][2];
    for (int r = 0; r < R; r++) sums[r][0].clear(), sums[r][1].clear();
    for (long k = 0; k < pairs; k++) {
        typename Op::Weights first = Op::load(tile + k * STEP), second = Op::load(tile + k * STEP + STEP / 2);
        _mm_prefetch(next + k * fetch, _MM_HINT_T1);
        if (fetch > 64) _mm_prefetch(next + k * fetch + 64, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Op::add(sums[r][0], first, x + r * stride + k);
            Op::add(sums[r][1], second, x + r * stride + k);
        }
    }
    for (int r = 0; r < R; r++) sums[r][0].add_to(out + r * TILE), sums[r][1].add_to(out + r * TILE + HALF);
}

template <class Op, int R = Op::ROWS>
void pass_of(int rows, const typename Op::Pair *x, long stride, const char *tile, long pairs, const char *next,
             long fetch, float *out) {
    if constexpr (R > 1) {
        if (rows < R) return pass_of<Op, R - 1>(rows, x, stride, tile, pairs, next, fetch, out);
    }
    pass<Op, R>(x, stride, tile, pairs, next, fetch, out);
}

// ---- one call ---------------------------------------------------------------------------------------------------------

struct Linear {  // mirrored by load.py
    const char *weight;   // packed tiles, 64-byte aligned
    const float *scales;  // [tiles * 32] of int8 weights, in the order of the tiles; null: the weights are bf16
    const float *bias;    // [tiles * 32] in the order of the tiles, or null
    const bf16 *norm;     // [K]: rows are RMS-normalised first and multiplied by it, or null
    float eps;
    int gated;
    long in_features, out_features;  // K, and the outputs that are stored: half of the weight's if it is gated
};

struct Link {  // mirrored by load.py: one product of a chain, on buffers known by their number
    const Linear *linear;
    const Heads *heads;       // the outputs are heads that are turned in the end, or null
    int x, y, residual;       // [count, K] -> [count, out_features], plus a buffer of that shape, or -1. y may be residual
};

struct Step {  // the same with addresses
    const Linear *linear;
    const bf16 *x, *residual;
    bf16 *y;
};

// ---- before: rows as an Op takes them ---------------------------------------------------------------------------------

// What multiplies a normalised row, or 1.
float row_factor(const Linear &linear, const bf16 *x) {
    return linear.norm ? inverse_rms(x, linear.in_features, linear.eps) : 1.0f;
}

// x[i], normalised where the layer asks for it, and rounded to bf16 as the rows between two layers are.
inline float element(const bf16 *x, const bf16 *norm, float factor, long i) {
    return norm ? to_float(to_bf16(to_float(x[i]) * factor * to_float(norm[i]))) : to_float(x[i]);
}

#if defined(__AVX512BF16__)
void prepare(const Linear &linear, const bf16 *x, uint32_t *out, float *) {
    long size = linear.in_features;
    bf16 *to = (bf16 *)out;
    if (size % 2) to[size] = 0;
    if (linear.norm) {
        float factor = row_factor(linear, x);
#pragma omp simd
        for (long i = 0; i < size; i++) to[i] = to_bf16(to_float(x[i]) * factor * to_float(linear.norm[i]));
    } else {
        memcpy(to, x, size * sizeof(bf16));
    }
}
#else
void prepare(const Linear &linear, const bf16 *x, FloatPair *out, float *) {
    long size = linear.in_features;
    float *to = (float *)out, factor = row_factor(linear, x);
    const bf16 *norm = linear.norm;
#pragma omp simd
    for (long i = 0; i < size; i++) to[i] = element(x, norm, factor, i);
    if (size % 2) to[size] = 0;
}
#endif

// Rows for int8 weights become int16 with one scale each: 2^-16 of the row's largest number, finer than bf16 is there.
// A row that is not finite as a whole gives NaN in all its outputs.
void prepare_int16(const Linear &linear, const bf16 *x, uint32_t *out, float *scale) {
    long size = linear.in_features;
    int16_t *to = (int16_t *)out;
    float factor = row_factor(linear, x), largest = 0, poison = 0;
    const bf16 *norm = linear.norm;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (long i = 0; i < size; i++) {
        float value = element(x, norm, factor, i);
        largest = fabsf(value) > largest ? fabsf(value) : largest;
        poison += value * 0.0f;
    }
    *scale = poison == 0 ? largest / 32767.0f : NAN;
    float inverse = poison == 0 && largest > 1e-30f ? 32767.0f / largest : 0.0f;
    if (inverse == 0) {
        memset(to, 0, (size + 1) / 2 * 2 * sizeof(int16_t));
        return;
    }
#pragma omp simd
    for (long i = 0; i < size; i++) to[i] = (int16_t)(int)rintf(element(x, norm, factor, i) * inverse);
    if (size % 2) to[size] = 0;
}

// ---- after: sums become outputs ---------------------------------------------------------------------------------------

// Stores one row's sums of a tile: scaled, biased, gated, added to the residual, rounded where torch rounds.
void finish(const Step &step, float *sums, float row_scale, long tile, long row) {
    const Linear &linear = *step.linear;
    if (linear.scales) {
        const float *scales = linear.scales + tile * TILE;
        for (int c = 0; c < TILE; c++) sums[c] *= scales[c] * row_scale;
    }
    if (linear.bias) {
        const float *bias = linear.bias + tile * TILE;
        for (int c = 0; c < TILE; c++) sums[c] += bias[c];
    }
    bf16 rounded[TILE];
    int width = linear.gated ? HALF : TILE;
    if (linear.gated) {
        for (int c = 0; c < HALF; c++) rounded[c] = silu_times(to_bf16(sums[c]), to_bf16(sums[c + HALF]));
    } else {
        for (int c = 0; c < TILE; c++) rounded[c] = to_bf16(sums[c]);
    }
    long at = row * linear.out_features + tile * width, left = linear.out_features - tile * width;
    int count = left < width ? (int)left : width;
    if (step.residual) {
        for (int c = 0; c < count; c++) rounded[c] = to_bf16(to_float(rounded[c]) + to_float(step.residual[at + c]));
    }
    memcpy(step.y + at, rounded, count * sizeof(bf16));
}

// ---- all of it --------------------------------------------------------------------------------------------------------

// All rows through one tile.
template <class Op>
void through_tile(const Step &step, const typename Op::Pair *x, const float *scales, long count, long tile) {
    constexpr long STEP = TILE * 2 * Op::BYTES;
    const Linear &linear = *step.linear;
    long pairs = (linear.in_features + 1) / 2, passes = (count + Op::ROWS - 1) / Op::ROWS;
    const char *weights = linear.weight + tile * pairs * STEP, *next = weights + pairs * STEP;
    long fetch = (STEP + passes - 1) / passes;
    for (long p = 0; p < passes; p++) {
        long begin = count * p / passes, end = count * (p + 1) / passes;
        float sums[Op::ROWS * TILE] = {0};
        long piece = Op::BYTES == 1 ? MAX_INT_PAIRS : pairs;
        for (long k = 0; k < pairs; k += piece) {
            long length = pairs - k < piece ? pairs - k : piece;
            pass_of<Op>(end - begin, x + begin * pairs + k, pairs, weights + k * STEP, length,
                        next + (p * pairs + k) * fetch, fetch, sums);
        }
        for (long row = begin; row < end; row++)
            finish(step, sums + (row - begin) * TILE, scales ? scales[row] : 1.0f, tile, row);
    }
}

// Bytes for `count` rows as an Op takes them, at most, and their scales.
inline long prepared_bytes(long in_features, long count) { return (count * ((in_features + 1) / 2 * 8 + 4) + 63) / 64 * 64; }

// One product, by all threads of a parallel region together; they leave it together. Of few rows each thread prepares a
// copy of its own, which is cheaper than waiting for another's.
template <class Op, class Prepare>
void product(const Step &step, char *scratch, long count, bool as_is, Prepare prepare) {
    typedef typename Op::Pair Pair;
    const Linear &linear = *step.linear;
    long pairs = (linear.in_features + 1) / 2, width = linear.gated ? HALF : TILE;
    long tiles = (linear.out_features + width - 1) / width, chunk = tiles / (8 * omp_get_num_threads()) + 1;
    bool few = count < MANY_ROWS;
    if (few) scratch += omp_get_thread_num() * prepared_bytes(linear.in_features, count);
    Pair *prepared = (Pair *)scratch;
    float *scales = (float *)(prepared + count * pairs);
    if (!as_is && few) {
        for (long row = 0; row < count; row++)
            prepare(linear, step.x + row * linear.in_features, prepared + row * pairs, scales + row);
    } else if (!as_is) {
#pragma omp for
        for (long row = 0; row < count; row++)
            prepare(linear, step.x + row * linear.in_features, prepared + row * pairs, scales + row);
    }
    const Pair *x = as_is ? (const Pair *)step.x : prepared;
#pragma omp for schedule(dynamic, chunk)
    for (long tile = 0; tile < tiles; tile++) through_tile<Op>(step, x, linear.scales ? scales : nullptr, count, tile);
}

void run(const Step &step, char *scratch, long count) {
    const Linear &linear = *step.linear;
    if (linear.scales) return product<Int8>(step, scratch, count, false, prepare_int16);
#if defined(__AVX512BF16__)
    bool as_is = !linear.norm && linear.in_features % 2 == 0;
#else
    bool as_is = false;
#endif
    product<Bf16>(step, scratch, count, as_is, prepare);
}

// Index in the weight of what a tile holds at `column`; the number of rows or more: padding.
long source_row(long tile, int column, long out_features, int gated) {
    if (!gated) return tile * TILE + column < out_features ? tile * TILE + column : -1;
    long output = tile * HALF + column % HALF;
    if (output >= out_features) return -1;
    return column < HALF ? output : out_features + output;
}

}  // namespace

// ---- exported ---------------------------------------------------------------------------------------------------------

// Bytes of scratch a chain needs whose widest rows have `in_features`.
EXPORT long headstart_scratch(long in_features, long count, int threads) {
    return prepared_bytes(in_features, count) * (count < MANY_ROWS ? threads : 1);
}

// Runs `num_links` products one after the other in one parallel region; each may read what those before it wrote.
// cosine and sine [count, 2, rotary_dim / 2] are the angles of heads (see rows.h), null if there are none. scratch:
// headstart_scratch bytes for the largest K, 64-byte aligned.
EXPORT void headstart_chain(const Link *links, int num_links, bf16 *const *buffers, const bf16 *cosine,
                            const bf16 *sine, char *scratch, long count, int threads) {
#pragma omp parallel num_threads(threads)
    for (int l = 0; l < num_links; l++) {
        const Link &link = links[l];
        bf16 *y = buffers[link.y];
        run({link.linear, buffers[link.x], link.residual < 0 ? nullptr : buffers[link.residual], y}, scratch, count);
        if (!link.heads) continue;
#pragma omp for
        for (long row = 0; row < count; row++) turn_heads(*link.heads, y, cosine, sine, row);
    }
}

// Packs weight [rows, K] into `out` [tiles, pairs, 32, 2] of bf16.
EXPORT void headstart_pack_bf16(const bf16 *weight, bf16 *out, long tiles, long out_features, long in_features,
                                int gated, int threads) {
    long pairs = (in_features + 1) / 2;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            for (long i = 0; i < 2 * pairs; i++) {
                bf16 value = row < 0 || i >= in_features ? 0 : weight[row * in_features + i];
                out[((tile * pairs + i / 2) * TILE + c) * 2 + i % 2] = value;
            }
        }
    }
}

// Packs weight [rows, K] into `out` [tiles, pairs, 32, 2] of int8, and its scales [tiles, 32]: weight = int8 * scale.
EXPORT void headstart_pack_int8(const bf16 *weight, int8_t *out, float *scales, long tiles, long out_features,
                                long in_features, int gated, int threads) {
    long pairs = (in_features + 1) / 2;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            const bf16 *from = weight + row * in_features;
            float largest = 0;
            for (long i = 0; row >= 0 && i < in_features; i++) largest = fmaxf(largest, fabsf(to_float(from[i])));
            scales[tile * TILE + c] = largest / 127.0f;
            float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
            for (long i = 0; i < 2 * pairs; i++) {
                float value = row < 0 || i >= in_features ? 0 : rintf(to_float(from[i]) * inverse);
                out[((tile * pairs + i / 2) * TILE + c) * 2 + i % 2] = (int8_t)value;
            }
        }
    }
}
