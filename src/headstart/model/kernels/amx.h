// Operations on AMX tiles: the instructions, or in a build with TWIN_TILES a twin in plain C++ that gives the same bits.
//
// `dot` defines the order of a sum. With the pairs of inputs p = 0, 1, ... of two tiles, from +0 on,
//     even = fma(a[2p], b[2p], even),  odd = fma(a[2p + 1], b[2p + 1], odd),  c = c + (even + odd)
// where every operation rounds to nearest even, reads denormals as zeros and writes them as zeros, whatever MXCSR says.
// Sums that are stored and loaded again keep their bits. `dot_bytes` adds products of bytes in int32, which is exact.
#pragma once

#include "common.h"

#if defined(AMX_TILES)

namespace amx {

constexpr int ROWS = 16, DEPTH = 32;  // rows of a tile; numbers of bf16 that one operation multiplies for an output

struct alignas(64) Shapes {  // the operand of ldtilecfg
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
    void set(int tile, long count, int bytes) {
        if (count > 0) rows[tile] = (uint8_t)count, row_bytes[tile] = (uint16_t)bytes;
    }
};

#if defined(TWIN_TILES)

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Denormals are read as zeros of the same sign.
inline float read(uint32_t bits) { return float_of(bits & 0x7f800000u ? bits : bits & 0x80000000u); }
inline float read(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return read(bits);
}

// Returns `rounded`, or a zero if the exact result, here in double, is denormal also with an unlimited exponent: below
// 2^-126 after rounding to 24 bits. In that range `exact` is exact, or rounds to the same side of the limit.
inline float flushed(float rounded, double exact) {
    const double limit = 0x1p-126 - 0x1p-151;  // rounds to 2^-126
    return fabs(exact) < limit ? copysignf(0.0f, rounded) : rounded;
}
inline float sum_of(float a, float b) { return flushed(a + b, (double)a + b); }
inline float multiply_add(float a, float b, float c) { return flushed(fmaf(a, b, c), (double)a * b + c); }

// Adds a row of `pairs` pairs times a tile to c.
inline void add_products(const bf16 *a, const bf16 (*b)[DEPTH], int pairs, float *c) {
    float even[ROWS] = {0}, odd[ROWS] = {0};
    for (int p = 0; p < pairs; p++) {
        float first = read((uint32_t)a[2 * p] << 16), second = read((uint32_t)a[2 * p + 1] << 16);
        for (int n = 0; n < ROWS; n++) {
            even[n] = multiply_add(first, read((uint32_t)b[p][2 * n] << 16), even[n]);
            odd[n] = multiply_add(second, read((uint32_t)b[p][2 * n + 1] << 16), odd[n]);
        }
    }
    for (int n = 0; n < ROWS; n++) c[n] = sum_of(read(c[n]), sum_of(even[n], odd[n]));
}

// The same for quadruples of bytes.
template <class Byte>
inline void add_byte_products(const Byte *a, const int8_t (*b)[4 * ROWS], int quads, int32_t *c) {
    for (int q = 0; q < quads; q++)
        for (int n = 0; n < ROWS; n++)
            for (int i = 0; i < 4; i++) c[n] += a[4 * q + i] * b[q][4 * n + i];
}

class Tiles {
   public:
    void configure(const Shapes &to) {
        shapes = to;
        memset(tiles, 0, sizeof tiles);
    }
    void release() {}
    template <int T>
    void zero() {
        memset(tiles[T], 0, sizeof tiles[T]);
    }
    template <int T>
    void load(const void *at, long stride) {
        zero<T>();
        for (int r = 0; r < shapes.rows[T]; r++) memcpy(tiles[T][r], (const char *)at + r * stride, shapes.row_bytes[T]);
    }
    template <int T>
    void store(void *at, long stride) const {
        for (int r = 0; r < shapes.rows[T]; r++) memcpy((char *)at + r * stride, tiles[T][r], shapes.row_bytes[T]);
    }
    template <int C, int A, int B>
    void dot() {
        for (int r = 0; r < shapes.rows[C]; r++)
            add_products((const bf16 *)tiles[A][r], (const bf16 (*)[DEPTH])tiles[B], shapes.row_bytes[A] / 4,
                         (float *)tiles[C][r]);
    }
    template <int C, int A, int B, class Byte>
    void dot_bytes() {
        for (int r = 0; r < shapes.rows[C]; r++)
            add_byte_products((const Byte *)tiles[A][r], (const int8_t (*)[4 * ROWS])tiles[B], shapes.row_bytes[A] / 4,
                              (int32_t *)tiles[C][r]);
    }

   private:
    Shapes shapes;
    alignas(64) char tiles[8][ROWS][64];
};

#else

// Inline assembly, because GCC 12's _tile_loadd does not tell the compiler that it reads memory: stores to a row that is
// loaded next may move behind it. The number of a tile is a template argument here.
class Tiles {
   public:
    void configure(const Shapes &to) { asm volatile("ldtilecfg %0" ::"m"(to)); }
    void release() { asm volatile("tilerelease"); }  // a thread without tiles is cheaper to switch
    template <int T>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    template <int T>
    void load(const void *at, long stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(at), "r"(stride) : "memory");
    }
    template <int T>
    void store(void *at, long stride) const {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(at), "r"(stride) : "memory");
    }
    template <int C, int A, int B>
    void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B, class Byte>  // of A: int8_t or uint8_t; those of B are signed
    void dot_bytes() {
        if (Byte(-1) < 0) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
        else asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

#endif

}  // namespace amx

#endif
