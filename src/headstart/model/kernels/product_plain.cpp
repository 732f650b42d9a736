// Products with weights in bf16 and fp32, and in int8 with a scale per output: the rows they need, and their loops.
#include "elements.h"
#include "amx_products.h"
#include "tiles.h"

namespace {

#if defined(__AVX512BF16__) || defined(AMX_TILES)
constexpr bool COPIES = true;
void prepare_bf16(const Linear &linear, const void *row, char *out, float *) {
    const bf16 *x = (const bf16 *)row, *norm = (const bf16 *)linear.norm;
    long size = linear.in_features;
    bf16 *to = (bf16 *)out;
    for (long i = size; i % BF16_INPUTS; i++) to[i] = 0;
    if (norm) {
        float factor = row_factor(linear, x);
#pragma omp simd
        for (long i = 0; i < size; i++) to[i] = to_bf16(to_float(x[i]) * factor * to_float(norm[i]));
    } else {
        memcpy(to, x, size * sizeof(bf16));
    }
}
#else
constexpr bool COPIES = false;
void prepare_bf16(const Linear &linear, const void *row, char *out, float *) {
    const bf16 *x = (const bf16 *)row, *norm = (const bf16 *)linear.norm;
    long size = linear.in_features;
    float *to = (float *)out, factor = row_factor(linear, x);
#pragma omp simd
    for (long i = 0; i < size; i++) to[i] = element(x, norm, factor, i);
    if (size % 2) to[size] = 0;
}
#endif

// Rows for int8 weights become int16 with one scale per row: steps of 2^-15 of the row's largest number, finer than
// bf16 at that number. A row with a number that is not finite gives NaN in all its outputs.
constexpr long STEP = 64;
enum Layout {
    PAIRS,   // in their order
    QUADS,   // see Quad
    PLANES,  // for AMX tiles: of 64 numbers, the high bytes and then the low bytes
};
template <Layout LAYOUT>
void prepare_int8(const Linear &linear, const void *row, char *out, float *scale) {
    const bf16 *x = (const bf16 *)row, *norm = (const bf16 *)linear.norm;
    long size = linear.in_features, padded = (size + INT8_INPUTS - 1) / INT8_INPUTS * INT8_INPUTS;
    float factor = row_factor(linear, x), largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
    for (long i = 0; i < size; i++) {
        float value = element(x, norm, factor, i);
        largest = fabsf(value) > largest ? fabsf(value) : largest;
        poison += value * 0.0f;
    }
    *scale = poison == 0 ? largest / 32767.0f : NAN;
    float inverse = poison == 0 && largest > 1e-30f ? 32767.0f / largest : 0.0f;
    if (inverse == 0 || size < padded) memset(out, 0, padded * sizeof(int16_t));
    if (inverse == 0) return;
    for (long k = 0; k < size; k += STEP, out += STEP * sizeof(int16_t)) {
        long count = size - k < STEP ? size - k : STEP;
#pragma omp simd
        for (long i = 0; i < count; i++) {
            int whole = (int)rintf(element(x + k, norm ? norm + k : norm, factor, i) * inverse);
            if (LAYOUT == PLANES) out[i] = (char)(whole >> 8), out[STEP + i] = (char)whole;
            else ((int16_t *)out)[i] = (int16_t)whole;
        }
        for (__m128i *eight = (__m128i *)out; LAYOUT == QUADS && eight < (__m128i *)out + STEP / 8; eight++)
            _mm_storeu_si128(eight, _mm_shufflehi_epi16(_mm_shufflelo_epi16(_mm_loadu_si128(eight), 0xd8), 0xd8));
    }
}

void prepare_fp32(const Linear &linear, const void *row, char *out, float *) {
    const float *x = (const float *)row, *norm = (const float *)linear.norm;
    float *to = (float *)out, factor = row_factor(linear, x);
    if (!norm) return (void)memcpy(to, x, linear.in_features * sizeof(float));
#pragma omp simd
    for (long i = 0; i < linear.in_features; i++) to[i] = x[i] * factor * norm[i];
}

}  // namespace

#if defined(AMX_TILES)
const Operations BF16_OPERATIONS = amx::operations<amx::Floating>(COPIES, prepare_bf16);
const Operations INT8_MANY = amx::operations<amx::Integers>(false, prepare_int8<PLANES>);
const Operations INT8_OPERATIONS = [] {
    Operations few{INT8_INPUTS, amx::UNIT_BYTES, INT8_INPUTS * sizeof(int16_t), false, prepare_int8<QUADS>, multiply<Int8Quads>};
    few.many = &INT8_MANY;
    return few;
}();
#else
const Operations BF16_OPERATIONS{2, Bf16::WEIGHT_BYTES, sizeof(Bf16::Unit), COPIES, prepare_bf16, multiply<Bf16>};
const Operations INT8_OPERATIONS{2, Int8::WEIGHT_BYTES, sizeof(Int8::Unit), false, prepare_int8<PAIRS>, multiply<Int8>};
#endif
const Operations FP32_OPERATIONS{1, Fp32::WEIGHT_BYTES, sizeof(Fp32::Unit), true, prepare_fp32, multiply<Fp32>, sizeof(float)};
