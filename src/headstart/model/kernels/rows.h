// What happens to single rows between two matrix products: normalisation and the gate. Plain loops, which the compiler
// vectorises for each instruction set; numbers are rounded to bf16 where torch's own operators round.
#pragma once
#include "common.h"

// 1 / sqrt(mean(x^2) + eps) of x [size].
static inline float inverse_rms(const bf16 *x, long size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < size; i++) sum += to_float(x[i]) * to_float(x[i]);
    return 1.0f / sqrtf(sum / (float)size + eps);
}

// e^x to about 1e-7 of it, for any float; branchless, so that loops over it vectorise. NaN stays NaN.
static inline float exponential(float x) {
    float bounded = x > -87.0f ? (x < 88.0f ? x : 88.0f) : -87.0f;
    float whole = rintf(bounded * 1.44269504f);
    float rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
    float power = 1.0f + rest * (1.0f + rest * (0.5f + rest * (1.66666667e-1f + rest * (4.16666667e-2f +
                  rest * (8.33333333e-3f + rest * 1.38888889e-3f)))));
    int32_t bits = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x != x ? x : power * scale;
}

// silu(gate) * up, silu rounded first.
static inline bf16 silu_times(bf16 gate, bf16 up) {
    float value = to_float(gate);
    return to_bf16(to_float(to_bf16(value / (1.0f + exponential(-value)))) * to_float(up));
}
