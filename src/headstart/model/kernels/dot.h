// Sums of 16 outputs over pairs of inputs, for each instruction set: bf16 weights, and int8 weights.
//
// A Pair is two inputs of one row; Weights are those of 16 outputs for it. ROWS rows at a time keep their sums in
// registers. int8 weights meet rows of int16, and their products are summed in int32: exact, for so many pairs.
#pragma once

#include "common.h"

namespace {

// Pairs that are summed in registers at a time, at most. In int32 so many of the largest products just fit.
constexpr long FLOAT_PIECE = 1024, INT_PIECE = 256;

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
    static constexpr int ROWS = 12, BYTES = 2, PIECE = FLOAT_PIECE;
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
    static constexpr int ROWS = 12, BYTES = 2, PIECE = FLOAT_PIECE;
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
    static constexpr int ROWS = 12, BYTES = 1, PIECE = INT_PIECE;
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
    void add_to(float *out) const { Floats{_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}.add_to(out); }
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
    static constexpr int ROWS = 3, BYTES = 2, PIECE = FLOAT_PIECE;
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
    static constexpr int ROWS = 2, BYTES = 1, PIECE = INT_PIECE;
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

}  // namespace
