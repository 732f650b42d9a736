// Vectors of fp32 with the width of the variant, and the products of attention.
//
// A product sums words of pages times words of rows. A Kind defines the multiplication of a word: one fp32, two bf16
// widened to fp32, or two bf16 at once if the processor supports it. It takes PARTS steps; each broadcasts FACTORS
// adjacent numbers of a row and multiplies them by one part of a word.
#pragma once

#include "attention.h"

namespace {

#if defined(__AVX512F__)
enum { LANES = 16 };
typedef __m512 vec;
typedef __m512i words;
static inline vec zero() { return _mm512_setzero_ps(); }
static inline vec all(float x) { return _mm512_set1_ps(x); }
static inline vec load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, vec x) { _mm512_storeu_ps(p, x); }
static inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec quotient(vec a, vec b) { return _mm512_div_ps(a, b); }
// Returns the second operand if either is NaN.
static inline vec greater(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec lesser(vec a, vec b) { return _mm512_min_ps(a, b); }
static inline float sum(vec x) { return _mm512_reduce_add_ps(x); }
static inline float first(vec x) { return _mm512_cvtss_f32(x); }
static inline float greatest(vec x) { return _mm512_reduce_max_ps(x); }
static inline words load_words(const void *p) { return _mm512_loadu_si512(p); }
static inline vec low_half(words w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
static inline vec high_half(words w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
}
static inline vec scaled_by_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }
static inline vec nearest(vec x) { return _mm512_roundscale_ps(x, 0); }
// x - floor(x); 0 or NaN for an infinite x.
static inline vec fraction(vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
// a where x is at least y, else b: also where either is NaN.
static inline vec where_at_least(vec x, vec y, vec a, vec b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GE_OQ), b, a);
}
// x * 2^floor(n), or 0 for n below -126: operations that give or take denormal numbers are slow.
static inline vec scaled_by_floor(vec x, vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, all(-126.0f), _CMP_NLT_UQ), x, n);
}
// Returns sum + a * b, where a sum is one of many.
static inline vec plus_product(vec sum, vec a, vec b) { return fma(a, b, sum); }
// `x` in lanes [from, to), `other` elsewhere.
static inline vec between(vec x, vec other, int from, int to) {
    uint32_t upto = to >= LANES ? 0xffffu : to <= 0 ? 0u : (1u << to) - 1u;
    uint32_t before = from >= LANES ? 0xffffu : from <= 0 ? 0u : (1u << from) - 1u;
    return _mm512_mask_blend_ps((__mmask16)(upto & ~before), other, x);
}
#else
enum { LANES = 8 };
typedef __m256 vec;
typedef __m256i words;
static inline vec zero() { return _mm256_setzero_ps(); }
static inline vec all(float x) { return _mm256_set1_ps(x); }
static inline vec load(const float *p) { return _mm256_loadu_ps(p); }
static inline void store(float *p, vec x) { _mm256_storeu_ps(p, x); }
static inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec quotient(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec greater(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec lesser(vec a, vec b) { return _mm256_min_ps(a, b); }
static inline float first(vec x) { return _mm256_cvtss_f32(x); }
static inline float sum(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static inline float greatest(vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
static inline words load_words(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vec low_half(words w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
static inline vec high_half(words w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000u)));
}
static inline vec nearest(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vec scaled_by_power(vec x, vec n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
static inline vec where_at_least(vec x, vec y, vec a, vec b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_GE_OQ)); }
static inline vec fraction(vec x) { return sub(x, _mm256_floor_ps(x)); }
static inline vec scaled_by_floor(vec x, vec n) {
    vec scaled = scaled_by_power(x, _mm256_floor_ps(greater(all(-126.0f), n)));
    return _mm256_and_ps(scaled, _mm256_cmp_ps(n, all(-126.0f), _CMP_NLT_UQ));
}
static inline vec plus_product(vec sum, vec a, vec b) {
    add_product_in_place(sum, a, b);
    return sum;
}
static inline vec between(vec x, vec other, int from, int to) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i low = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1));
    __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_and_si256(low, high)));
}
#endif
enum { PAGE_VECS = PAGE / LANES };

// 2^x for x <= 128, with an error of 2e-7; 2^-126 for x below -126; a NaN stays a NaN. Coefficients: exp2f of Cephes.
static inline vec power_of_two(vec x) {
    x = greater(all(-126.0f), x);
    vec n = nearest(x), r = sub(x, n);
    vec p = fma(all(1.535336188319500e-4f), r, all(1.339887440266574e-3f));
    p = fma(p, r, all(9.618437357674640e-3f));
    p = fma(p, r, all(5.550332471162809e-2f));
    p = fma(p, r, all(2.402264791363012e-1f));
    p = fma(p, r, all(6.931472028550421e-1f));
    return scaled_by_power(fma(p, r, all(1.0f)), n);
}

static inline float power_of_two(float x) { return first(power_of_two(all(x))); }

// cap * tanh(x / cap), given 2 * log2(e) / cap.
static inline vec capped(vec x, float cap, float twice) {
    vec e = power_of_two(lesser(all(126.0f), mul(x, all(twice))));
    return sub(all(cap), quotient(all(2.0f * cap), add(e, all(1.0f))));
}

// One fp32 per word.
struct Single {
    enum { W = 1, PARTS = 1, TILED = 0 };
    typedef float element;  // of pages
    typedef float factor;   // of rows: a word has PARTS times FACTORS of them
    enum { FACTORS = 1 };
    typedef vec operand;
    static operand take(const uint32_t *p, int) { return load((const float *)p); }
    static operand spread(const factor *row) { return all(*row); }
    static vec step(vec acc, operand row, operand word) { return plus_product(acc, row, word); }
    static void put(factor *to, vec x) { store(to, x); }
    static void pack(factor *to, const element *from, int count) { memcpy(to, from, sizeof(float) * count); }
};

// Two bf16 per word, widened to fp32 and multiplied one after the other.
struct Widened {
    enum { W = 2, PARTS = 2, TILED = 0 };
    typedef bf16 element;
    typedef float factor;
    enum { FACTORS = 1 };
    typedef vec operand;
    static operand take(const uint32_t *p, int part) {
        words w = load_words(p);
        return part == 0 ? low_half(w) : high_half(w);
    }
    static operand spread(const factor *row) { return all(*row); }
    static vec step(vec acc, operand row, operand word) { return plus_product(acc, row, word); }
    static void put(factor *to, vec x) { store(to, x); }
    static void pack(factor *to, const element *from, int count) {
        for (int i = 0; i < count; i++) to[i] = to_float(from[i]);
    }
};

#if defined(__AVX512BF16__)
// Two bf16 per word, multiplied and summed by vdpbf16ps.
struct Paired {
    enum { W = 2, PARTS = 1, TILED = 0 };
    typedef bf16 element;
    typedef bf16 factor;
    enum { FACTORS = 2 };
    typedef __m512bh operand;
    static operand take(const uint32_t *p, int) { return (__m512bh)_mm512_loadu_si512(p); }
    static operand spread(const factor *row) {
        int32_t pair;
        memcpy(&pair, row, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static vec step(vec acc, operand row, operand word) { return _mm512_dpbf16_ps(acc, row, word); }
    static void put(factor *to, vec x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }
    static void pack(factor *to, const element *from, int count) { memcpy(to, from, sizeof(bf16) * count); }
};
#endif

#if defined(AMX_TILES)
// Two bf16 per word, multiplied on tiles; see attention_amx.h.
struct Tiled {
    enum { W = 2, PARTS = 1, TILED = 1, FACTORS = 2 };
    typedef bf16 element;
    typedef bf16 factor;
    static void put(factor *to, vec x, vec y) {  // behind each other
#if defined(__AVX512BF16__)
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(y, x));
#else
        float lanes[2 * LANES];
        store(lanes, x), store(lanes + LANES, y);
        for (int i = 0; i < 2 * LANES; i++) to[i] = to_bf16(lanes[i]);
#endif
    }
    static void pack(factor *to, const element *from, int count) { memcpy(to, from, sizeof(bf16) * count); }
};
#endif

static inline void put_row(float *to, const float *from, int count) { memcpy(to, from, sizeof(float) * count); }
static inline void put_row(bf16 *to, const float *from, int count) {
    for (int i = 0; i < count; i++) to[i] = to_bf16(from[i]);
}

}  // namespace
