// y = x @ W^T for bf16 rows x [M, K] and weights that were packed once, in bf16 or in int8 with a scale per output.
//
// Packed form, the same for every instruction set: tiles of 32 outputs, [N / 32][K / 2][32][2]. The two weights that an
// output has for a pair of inputs lie side by side, which is what the dot product instructions take; N and K are padded
// with zeros. Of a gated weight (gate rows above up rows) a tile holds 16 gates and their 16 ups.
#pragma once

#include "rows.h"

constexpr int TILE = 32, HALF = 16;

struct Linear {  // mirrored by load.py
    const char *weight;   // packed tiles, 64-byte aligned
    const float *scales;  // [tiles * 32] of int8 weights, in the order of the tiles; null: the weights are bf16
    const float *bias;    // [tiles * 32] in the order of the tiles, or null
    const bf16 *norm;     // [K]: rows are RMS-normalised first and multiplied by it, or null
    float eps;
    int gated;                       // silu(gate) * up is stored
    long in_features, out_features;  // K, and the outputs that are stored: half of the weight's if it is gated

    long pairs() const { return (in_features + 1) / 2; }
    int width() const { return gated ? HALF : TILE; }  // of a tile, in outputs that are stored
    long tiles() const { return (out_features + width() - 1) / width(); }
    const char *tile(long index) const { return weight + index * pairs() * TILE * (scales ? 2 : 4); }
};

struct Link {  // mirrored by load.py: one product of a chain, on buffers known by their number
    const Linear *linear;
    const Heads *heads;  // the outputs are heads that are turned in the end, or null
    int x, y, residual;  // [count, K] -> [count, out_features], plus a buffer of that shape, or -1. y may be residual
};
