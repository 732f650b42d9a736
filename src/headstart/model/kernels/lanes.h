// Vectors of fp32 with the width of the variant, and as many bf16: for the operations after the matrix products.
#pragma once

#include "common.h"

namespace {

#if defined(__AVX512F__)
enum { LANES = 16 };
typedef __m512 vec;
typedef __m256i halves;  // bf16 numbers, one per lane
inline vec all(float x) { return _mm512_set1_ps(x); }
inline vec load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, vec x) { _mm512_storeu_ps(p, x); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
inline vec quotient(vec a, vec b) { return _mm512_div_ps(a, b); }
// Returns the second operand if either is NaN.
inline vec greater(vec a, vec b) { return _mm512_max_ps(a, b); }
inline vec lesser(vec a, vec b) { return _mm512_min_ps(a, b); }
inline vec nearest(vec x) { return _mm512_roundscale_ps(x, 0); }
inline vec scaled_by_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }
inline halves load(const bf16 *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline void store(bf16 *p, halves x) { _mm256_storeu_si256((__m256i *)p, x); }
inline void stream(float *p, vec x) { _mm512_stream_ps(p, x); }  // non-temporal; p is aligned
inline void stream(bf16 *p, halves x) { _mm256_stream_si256((__m256i *)p, x); }
inline vec widened(halves x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline halves rounded(vec x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 unordered = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    bits = _mm512_mask_blend_epi32(unordered, bits, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
#endif
}
inline float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
inline float greatest_of(vec x) { return _mm512_reduce_max_ps(x); }
// The lanes that are at least `least`; 0 in the others.
inline vec kept(vec x, vec least) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), x); }
// The lanes of x where `key` is at least `least`; 0 in the others.
inline vec kept_where(vec x, vec key, vec least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key, least, _CMP_GE_OQ), x);
}
inline long count_at_least(vec x, vec least) {
    return __builtin_popcount(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ));
}
// Writes the lanes in [least, end) to `out`, in order, and returns their number. `out` has room for LANES.
inline long append_between(float *out, vec x, vec least, vec end) {
    __mmask16 mask = _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), x, end, _CMP_LT_OQ);
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(mask, x));  // a compressing store is slow on Zen 4
    return __builtin_popcount(mask);
}
#else
enum { LANES = 8 };
typedef __m256 vec;
typedef __m128i halves;
inline vec all(float x) { return _mm256_set1_ps(x); }
inline vec load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, vec x) { _mm256_storeu_ps(p, x); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
inline vec quotient(vec a, vec b) { return _mm256_div_ps(a, b); }
inline vec greater(vec a, vec b) { return _mm256_max_ps(a, b); }
inline vec lesser(vec a, vec b) { return _mm256_min_ps(a, b); }
inline vec nearest(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec scaled_by_power(vec x, vec n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline halves load(const bf16 *p) { return _mm_loadu_si128((const __m128i *)p); }
inline void store(bf16 *p, halves x) { _mm_storeu_si128((__m128i *)p, x); }
inline void stream(float *p, vec x) { _mm256_stream_ps(p, x); }
inline void stream(bf16 *p, halves x) { _mm_stream_si128((__m128i *)p, x); }
inline vec widened(halves x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline halves rounded(vec x) {
    __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    vec unordered = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(unordered));
    bits = _mm256_srli_epi32(bits, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
inline float sum_of(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float greatest_of(vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
// The lanes that are at least `least`; 0 in the others.
inline vec kept(vec x, vec least) { return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ), x); }
// The lanes of x where `key` is at least `least`; 0 in the others.
inline vec kept_where(vec x, vec key, vec least) { return _mm256_and_ps(_mm256_cmp_ps(key, least, _CMP_GE_OQ), x); }
inline long count_at_least(vec x, vec least) {
    return __builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ)));
}
// Writes the lanes in [least, end) to `out`, in order, and returns their number. `out` has room for LANES.
inline long append_between(float *out, vec x, vec least, vec end) {
    vec inside = _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_GE_OQ), _mm256_cmp_ps(x, end, _CMP_LT_OQ));
    float lanes[LANES];
    store(lanes, x);
    long count = 0;
    for (unsigned mask = (unsigned)_mm256_movemask_ps(inside); mask; mask &= mask - 1)
        out[count++] = lanes[__builtin_ctz(mask)];
    return count;
}
#endif

// e^x with a relative error of about 1e-7, for any float. NaN stays NaN.
inline vec exponential(vec x) {
    x = lesser(all(88.0f), greater(all(-87.0f), x));
    vec whole = nearest(mul(x, all(1.44269504f)));
    vec rest = fma(whole, all(2.12194440e-4f), fma(whole, all(-0.693359375f), x));  // ln 2 in two parts
    vec power = fma(all(1.38888889e-3f), rest, all(8.33333333e-3f));
    power = fma(power, rest, all(4.16666667e-2f));
    power = fma(power, rest, all(1.66666667e-1f));
    power = fma(power, rest, all(0.5f));
    power = fma(power, rest, all(1.0f));
    return scaled_by_power(fma(power, rest, all(1.0f)), whole);
}

// The numbers of a row as they are stored.
template <class Element>
struct As;
template <>
struct As<bf16> {
    static halves stored(vec x) { return rounded(x); }
};
template <>
struct As<float> {
    static vec stored(vec x) { return x; }
};
inline vec widened(vec x) { return x; }

// silu(gate) * up; gate, up and silu are rounded to Element, as in torch's operators.
template <class Element>
inline vec silu_times(vec gate, vec up) {
    gate = widened(As<Element>::stored(gate));
    vec silu = quotient(gate, add(all(1.0f), exponential(sub(all(0.0f), gate))));
    return mul(widened(As<Element>::stored(silu)), widened(As<Element>::stored(up)));
}

}  // namespace
