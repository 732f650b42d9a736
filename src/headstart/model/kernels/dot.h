// Sums of 16 outputs over pairs of inputs, for each instruction set: bf16, fp32 and int8 weights.
//
// A Unit is two inputs of one row; of fp32 it is one. Up to ROWS rows at a time keep their sums in registers: for all 32 outputs of a tile
// or, where columns(rows) is 1, for half of them. int8 weights are multiplied by rows of int16, and the products are
// summed in int32, which is exact for INT_PIECE pairs.
//
// A pass begins its sums with `begin` and adds them to those of earlier pieces with `end`; between the sections of a
// piece they are kept with `pause` and `resume`. SECTIONS: whether pieces are that large that sections pay.
#pragma once

#include "linear.h"

namespace {

// Maximum number of pairs summed in registers at a time. With INT_PIECE, the largest products just fit int32.
constexpr long FLOAT_PIECE = 1024, INT_PIECE = 256;

struct Quad {  // int16 of x for int8 weights that are packed for AMX tiles, four inputs side by side: 0 and 2, 1 and 3
    uint32_t even, odd;
};

// Prefetches `bytes`, at most two cache lines, into the second cache.
inline void prefetch(const char *at, long bytes) {
    _mm_prefetch(at, _MM_HINT_T1);
    if (bytes > 64) _mm_prefetch(at + 64, _MM_HINT_T1);
}

#if defined(__AVX512F__)

struct Floats {  // 16 sums of one row in fp32
    __m512 value;
    static Floats load(const float *from) { return {_mm512_loadu_ps(from)}; }
    void store(float *to) const { _mm512_storeu_ps(to, value); }
    void begin(float *) { value = _mm512_setzero_ps(); }
    void resume(const float *paused, float *) { value = _mm512_loadu_ps(paused); }
    void pause(float *paused, float *) const { _mm512_storeu_ps(paused, value); }
    void end(float *out) const { _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), value)); }
    void add(float other) { value = _mm512_add_ps(value, _mm512_set1_ps(other)); }
    void add_scaled(Floats whole, Floats scale, float row_scale) {  // whole * scale * row_scale
        value = _mm512_fmadd_ps(whole.value, _mm512_mul_ps(scale.value, _mm512_set1_ps(row_scale)), value);
    }
    void add_product(Floats a, float b) { value = _mm512_fmadd_ps(a.value, _mm512_set1_ps(b), value); }
};

struct Ints {  // the same in int32
    __m512i value;
    void add(Ints other) { value = _mm512_add_epi32(value, other.value); }
    void begin(float *) { value = _mm512_setzero_si512(); }
    void resume(const float *paused, float *) { value = _mm512_loadu_si512(paused); }
    void pause(float *paused, float *) const { _mm512_storeu_si512(paused, value); }
    void set(int number) { value = _mm512_set1_epi32(number); }
    Floats floats() const { return {_mm512_cvtepi32_ps(value)}; }
    void end(float *out) const { floats().end(out); }
};

// One step of a pass over 32 outputs, two registers wide.
template <class Op>
struct Wide {
    typedef bf16 Element;
    static constexpr bool SECTIONS = false;
    static constexpr int ROWS = 12;
    static constexpr int columns(int) { return 2; }
    template <class Sum, class Unit, int R, int C>
    static void step(Sum (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        prefetch(next, fetch);
        at += half * HALF * 2 * Op::BYTES;
        auto first = Op::load(at), second = Op::load(at + HALF * 2 * Op::BYTES);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            Op::add(sums[r][0], first, x + r * stride);
            Op::add(sums[r][1], second, x + r * stride);
        }
    }
};

#if defined(__AVX512BF16__)
struct Bf16 : Wide<Bf16> {
    template <int>
    using Sum = Floats;
    typedef uint32_t Unit;  // two bf16 of x
    typedef __m512bh Weights;
    static constexpr int BYTES = 2, INPUTS = 2, WEIGHT_BYTES = TILE * 2 * BYTES, PIECE = FLOAT_PIECE;
    static Weights load(const char *at) { return (__m512bh)_mm512_loadu_si512(at); }
    static void add(Floats &sum, Weights weights, const Unit *x) {
        sum.value = _mm512_dpbf16_ps(sum.value, weights, (__m512bh)_mm512_set1_epi32((int)*x));
    }
};
#else
struct FloatPair {
    float even, odd;
};
struct Bf16 : Wide<Bf16> {  // widened: a bf16 is the upper half of a float
    template <int>
    using Sum = Floats;
    typedef FloatPair Unit;
    struct Weights {
        __m512 even, odd;
    };
    static constexpr int BYTES = 2, INPUTS = 2, WEIGHT_BYTES = TILE * 2 * BYTES, PIECE = FLOAT_PIECE;
    static Weights load(const char *at) {
        __m512i both = _mm512_loadu_si512(at);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)))};
    }
    static void add(Floats &sum, Weights weights, const Unit *x) {
        sum.value = _mm512_fmadd_ps(weights.even, _mm512_set1_ps(x->even), sum.value);
        sum.value = _mm512_fmadd_ps(weights.odd, _mm512_set1_ps(x->odd), sum.value);
    }
};
#endif

struct Fp32 : Wide<Fp32> {
    template <int>
    using Sum = Floats;
    typedef float Unit, Element;
    typedef __m512 Weights;
    static constexpr int BYTES = 2, INPUTS = 1, WEIGHT_BYTES = TILE * 4, PIECE = FLOAT_PIECE;  // BYTES: half of a unit
    static Weights load(const char *at) { return _mm512_loadu_ps(at); }
    static void add(Floats &sum, Weights weights, const Unit *x) {
        sum.value = _mm512_fmadd_ps(weights, _mm512_set1_ps(*x), sum.value);
    }
};

struct Int8 : Wide<Int8> {
    template <int>
    using Sum = Ints;
    typedef uint32_t Unit;  // two int16 of x
    typedef __m512i Weights;
    static constexpr int BYTES = 1, INPUTS = 2, WEIGHT_BYTES = TILE * 2 * BYTES, PIECE = INT_PIECE;
    static Weights load(const char *at) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)at)); }
    static void add(Ints &sum, Weights weights, const Unit *x) {
#if defined(__AVX512VNNI__)
        // With the intrinsic, GCC 12 copies every sum in every iteration, which halves the speed.
        asm("vpdpwssd %2, %1, %0" : "+v"(sum.value) : "v"(weights), "v"(_mm512_set1_epi32((int)*x)));
#else
        sum.value = _mm512_add_epi32(sum.value, _mm512_madd_epi16(weights, _mm512_set1_epi32((int)*x)));
#endif
    }
};

struct Int8Quads : Wide<Int8Quads> {
    template <int>
    using Sum = Ints;
    typedef Quad Unit;
    struct Weights {
        __m512i even, odd;
    };
    static constexpr int BYTES = 2, INPUTS = 4, WEIGHT_BYTES = TILE * 4, PIECE = INT_PIECE / 2;  // BYTES: half of a unit
    static Weights load(const char *at) {
        __m512i all = _mm512_loadu_si512(at);
        return {_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), _mm512_srai_epi16(all, 8)};
    }
    static void add(Ints &sum, const Weights &weights, const Unit *x) {
        Int8::add(sum, weights.even, &x->even), Int8::add(sum, weights.odd, &x->odd);
    }
};

#else  // AVX2: two registers of 8

struct Floats {
    __m256 low, high;
    static Floats load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    void store(float *to) const {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
    }
    void begin(float *) { low = high = _mm256_setzero_ps(); }
    void resume(const float *paused, float *) { *this = load(paused); }
    void pause(float *paused, float *) const { store(paused); }
    void end(float *out) const {
        _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), low));
        _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(out + 8), high));
    }
    void add(float other) {
        low = _mm256_add_ps(low, _mm256_set1_ps(other)), high = _mm256_add_ps(high, _mm256_set1_ps(other));
    }
    void add_scaled(Floats whole, Floats scale, float row_scale) {  // whole * scale * row_scale
        __m256 factor = _mm256_set1_ps(row_scale);
        low = _mm256_fmadd_ps(whole.low, _mm256_mul_ps(scale.low, factor), low);
        high = _mm256_fmadd_ps(whole.high, _mm256_mul_ps(scale.high, factor), high);
    }
    void add_product(Floats a, float b) {
        low = _mm256_fmadd_ps(a.low, _mm256_set1_ps(b), low);
        high = _mm256_fmadd_ps(a.high, _mm256_set1_ps(b), high);
    }
};

struct Ints {
    __m256i low, high;
    void add(Ints other) {
        low = _mm256_add_epi32(low, other.low);
        high = _mm256_add_epi32(high, other.high);
    }
    void begin(float *) { low = high = _mm256_setzero_si256(); }
    void resume(const float *paused, float *) {
        low = _mm256_loadu_si256((const __m256i *)paused), high = _mm256_loadu_si256((const __m256i *)paused + 1);
    }
    void pause(float *paused, float *) const {
        _mm256_storeu_si256((__m256i *)paused, low);
        _mm256_storeu_si256((__m256i *)paused + 1, high);
    }
    void set(int number) { low = high = _mm256_set1_epi32(number); }
    Floats floats() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
    void end(float *out) const { floats().end(out); }
};

struct FloatPair {
    float even, odd;
};

struct Bf16 {  // widened; the even inputs first, so that the sums of six rows and the operands fit sixteen registers
    typedef bf16 Element;
    template <int>
    using Sum = Floats;
    typedef FloatPair Unit;
    static constexpr bool SECTIONS = true;
    static constexpr int ROWS = 6, BYTES = 2, INPUTS = 2, WEIGHT_BYTES = TILE * 2 * BYTES, PIECE = FLOAT_PIECE;
    static constexpr int columns(int rows) { return rows > 3 ? 1 : 2; }
    template <int R, int C>
    static void step(Sum<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        prefetch(next, fetch);
        at += half * HALF * 2 * BYTES;
        for (int c = 0; c < C; c++) {
            // Without this, GCC loads the weights of both columns first and keeps sums of three rows on the stack.
            if (R == 3 && c) asm volatile("" ::: "memory");
            step_column(sums, c, at + c * HALF * 4, x, stride);
        }
    }
    template <int R, int C>
    static void step_column(Floats (&sums)[R][C], int c, const char *at, const Unit *x, long stride) {
        const __m256i *both = (const __m256i *)at, upper = _mm256_set1_epi32((int)0xffff0000u);
        __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(both), 16));
        __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(both + 1), 16));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) multiply(sums[r][c], low, high, &x[r * stride].even);
        low = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(both), upper));
        high = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(both + 1), upper));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) multiply(sums[r][c], low, high, &x[r * stride].odd);
    }
    static void multiply(Floats &sum, __m256 low, __m256 high, const float *x) {
        __m256 factor = _mm256_broadcast_ss(x);
        add_product_in_place(sum.low, factor, low);
        add_product_in_place(sum.high, factor, high);
    }
};

struct Fp32 {
    template <int>
    using Sum = Floats;
    typedef float Unit, Element;
    static constexpr bool SECTIONS = true;
    static constexpr int ROWS = 6, BYTES = 2, INPUTS = 1, WEIGHT_BYTES = TILE * 4, PIECE = FLOAT_PIECE;
    static constexpr int columns(int rows) { return rows > 3 ? 1 : 2; }
    template <int R, int C>
    static void step(Sum<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        prefetch(next, fetch);
        for (int c = 0; c < C; c++) {
            const float *weights = (const float *)at + (half + c) * HALF;
            __m256 low = _mm256_loadu_ps(weights), high = _mm256_loadu_ps(weights + 8);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) Bf16::multiply(sums[r][c], low, high, x + r * stride);
        }
    }
};

struct Int8 {
    typedef bf16 Element;
    template <int>
    using Sum = Ints;
    typedef uint32_t Unit;
    static constexpr bool SECTIONS = false;
    static constexpr int ROWS = 5, BYTES = 1, INPUTS = 2, WEIGHT_BYTES = TILE * 2 * BYTES, PIECE = INT_PIECE;
    static constexpr int columns(int rows) { return rows > 2 ? 1 : 2; }
    template <int R, int C>
    static void step(Sum<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        prefetch(next, fetch);
        at += half * HALF * 2 * BYTES;
        for (int c = 0; c < C; c++) {
            __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at + 2 * c));
            __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at + 2 * c + 1));
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                __m256i pair = _mm256_set1_epi32((int)x[r * stride]);
                add_in_place(sums[r][c].low, _mm256_madd_epi16(low, pair));
                add_in_place(sums[r][c].high, _mm256_madd_epi16(high, pair));
            }
        }
    }
};

struct Int8Quads : Int8 {
    typedef Quad Unit;
    static constexpr int INPUTS = 4, WEIGHT_BYTES = TILE * 4, PIECE = INT_PIECE / 2;
    template <int R, int C>
    static void step(Sum<R> (&sums)[R][C], const char *at, int half, const Unit *x, long stride, const char *next,
                     long fetch) {
        prefetch(next, fetch);
        const __m256i *all = (const __m256i *)(at + half * HALF * 4);
        for (int c = 0; c < C; c++) {
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
                add(sums[r][c].low, all[2 * c], x[r * stride]), add(sums[r][c].high, all[2 * c + 1], x[r * stride]);
            }
        }
    }
    static void add(__m256i &sum, __m256i weights, Quad x) {
        __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8), odd = _mm256_srai_epi16(weights, 8);
        add_in_place(sum, _mm256_madd_epi16(even, _mm256_set1_epi32((int)x.even)));
        add_in_place(sum, _mm256_madd_epi16(odd, _mm256_set1_epi32((int)x.odd)));
    }
};

#endif

}  // namespace
