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
void prepare_int8(const Linear &linear, const void *row, char *out, float *scale) {
    const bf16 *x = (const bf16 *)row, *norm = (const bf16 *)linear.norm;
    int16_t *to = (int16_t *)out;
    long size = linear.in_features;
    float factor = row_factor(linear, x), largest = 0, poison = 0;
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

void prepare_fp32(const Linear &linear, const void *row, char *out, float *) {
    const float *x = (const float *)row, *norm = (const float *)linear.norm;
    float *to = (float *)out, factor = row_factor(linear, x);
    if (!norm) return (void)memcpy(to, x, linear.in_features * sizeof(float));
#pragma omp simd
    for (long i = 0; i < linear.in_features; i++) to[i] = x[i] * factor * norm[i];
}

}  // namespace

#if defined(AMX_TILES)
// A piece of the rows is one piece of their inputs up to amx::PIECE units.
const Operations BF16_OPERATIONS{BF16_INPUTS, amx::UNIT_BYTES, amx::ROW_UNIT_BYTES, COPIES, prepare_bf16, amx::multiply,
                                 sizeof(bf16), MOST_ROWS, MOST_EACH, MOST_ROWS * amx::PIECE * amx::ROW_UNIT_BYTES};
#else
const Operations BF16_OPERATIONS{2, Bf16::WEIGHT_BYTES, sizeof(Bf16::Unit), COPIES, prepare_bf16, multiply<Bf16>};
#endif
const Operations INT8_OPERATIONS{2, Int8::WEIGHT_BYTES, sizeof(Int8::Unit), false, prepare_int8, multiply<Int8>};
const Operations FP32_OPERATIONS{1, Fp32::WEIGHT_BYTES, sizeof(Fp32::Unit), true, prepare_fp32, multiply<Fp32>, sizeof(float)};
