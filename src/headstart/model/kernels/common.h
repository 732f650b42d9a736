// Common definitions of all kernels: exported names, bf16 as bits, and rounding to bf16.
//
// One whole library is compiled per instruction set; the sources test the compiler's macros. They use no standard
// library templates and no torch headers: the interface is plain C, and the calling Python code checks the bounds.
#pragma once

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef uint16_t bf16;

static inline float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// Rounds to nearest, ties to even, as torch does; a NaN stays a NaN.
static inline bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)0x7fc0u;
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
