// Common definitions of all kernels: exported names, bf16 as bits, and rounding to bf16.
//
// One whole library is compiled per instruction set; the sources test the compiler's macros. They use no standard
// library templates and no torch headers: the interface is plain C, and the calling Python code checks the bounds.
#pragma once

#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef uint16_t bf16;

// Products of bf16 are computed on AMX tiles, or in a build for tests by their twin; see amx.h.
#if defined(__AMX_BF16__) || defined(TWIN_TILES)
#define AMX_TILES
#endif

static inline float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline float to_float(float value) { return value; }

// Rounds to nearest, ties to even, as torch does; a NaN stays a NaN.
static inline bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)0x7fc0u;
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if !defined(__AVX512F__)
// Sums of products in registers, for loops whose sums just fit the sixteen registers. With intrinsics, GCC 12 lets sums
// change registers or adds products to each other first, and then keeps a part of the sums on the stack: products take
// 1.3 times as long.
static inline void add_in_place(__m256i &sum, __m256i product) {
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
}
static inline void add_shorts_in_place(__m256i &sum, __m256i product) {
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(product));
}
static inline void add_product_in_place(__m256 &sum, __m256 a, __m256 b) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b));
}
#endif
