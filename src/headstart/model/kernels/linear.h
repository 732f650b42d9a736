// y = x @ W^T for bf16 rows x [M, K] and weights that are packed once, in bf16 or in int8 with a scale per output.
//
// The packed form is the same for every instruction set: tiles of 32 outputs, [N / 32][K / 2][32][2]. The two weights
// of an output for a pair of inputs are adjacent, as the dot product instructions need; N and K are padded with zeros.
// A tile of a gated weight (gate rows, then up rows) holds 16 gates and their 16 ups.
#pragma once

#include "rows.h"

constexpr int TILE = 32, HALF = 16;

struct Linear {  // mirrored by library.py
    const char *weight;   // packed tiles, 64-byte aligned
    const float *scales;  // [tiles * 32] for int8 weights, in the order of the tiles; null: the weights are bf16
    const float *bias;    // [tiles * 32] in the order of the tiles, or null
    const bf16 *norm;     // [K]: rows are RMS-normalised first and multiplied by it, or null
    float eps;
    int gated;                       // silu(gate) * up is stored
    long in_features, out_features;  // K, and the number of stored outputs: half of the weight's rows if it is gated

    long pairs() const { return (in_features + 1) / 2; }
    int width() const { return gated ? HALF : TILE; }  // of a tile, in stored outputs
    long tiles() const { return (out_features + width() - 1) / width(); }
    const char *tile(long index) const { return weight + index * pairs() * TILE * (scales ? 2 : 4); }
};

struct Link {  // mirrored by library.py: one product of a chain, on numbered buffers
    const Linear *linear;
    const Heads *heads;  // rotary embedding of the outputs, or null
    int x, y, residual;  // x [count, K], y [count, out_features], residual with the shape of y or -1; y may be residual
};
