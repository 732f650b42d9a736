// Packing of weights [N, K] of bf16 or fp32 into tiles, once at load; linear.h describes the tiles.
#include "tile_rows.h"

// Packs weight [rows, K] into `out` [tiles, pairs, 32, 2] of bf16, whose K is padded to whole units.
EXPORT void headstart_pack_bf16(const bf16 *weight, bf16 *out, long tiles, long out_features, long in_features,
                                int gated, int threads) {
    long pairs = (in_features + BF16_INPUTS - 1) / BF16_INPUTS * BF16_INPUTS / 2;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            for (long i = 0; i < 2 * pairs; i++) {
                bf16 value = row < 0 || i >= in_features ? 0 : weight[row * in_features + i];
                out[((tile * pairs + i / 2) * TILE + c) * 2 + i % 2] = value;
            }
        }
    }
}

// Packs weight [rows, K] into `out` [tiles, K, 32] of fp32.
EXPORT void headstart_pack_fp32(const float *weight, float *out, long tiles, long out_features, long in_features,
                                int gated, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            for (long i = 0; i < in_features; i++)
                out[(tile * in_features + i) * TILE + c] = row < 0 ? 0.0f : weight[row * in_features + i];
        }
    }
}

// Packs weight [rows, K] into `out` [tiles, K / INT8_SIDE, 32, INT8_SIDE] of int8, whose K is padded to whole units, and its
// scales [tiles, 32]: weight = int8 * scale.
EXPORT void headstart_pack_int8(const bf16 *weight, int8_t *out, float *scales, long tiles, long out_features,
                                long in_features, int gated, int threads) {
    long padded = (in_features + INT8_INPUTS - 1) / INT8_INPUTS * INT8_INPUTS;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            const bf16 *from = weight + row * in_features;
            float largest = 0;
            for (long i = 0; row >= 0 && i < in_features; i++) largest = fmaxf(largest, fabsf(to_float(from[i])));
            scales[tile * TILE + c] = largest / 127.0f;
            float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
            for (long i = 0; i < padded; i++) {
                float value = row < 0 || i >= in_features ? 0 : rintf(to_float(from[i]) * inverse);
                out[tile * padded * TILE + (i / INT8_SIDE * TILE + c) * INT8_SIDE + i % INT8_SIDE] = (int8_t)value;
            }
        }
    }
}
