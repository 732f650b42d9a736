// y = x @ W^T for rows x [M, K] and weights that are packed once. Rows and results are fp32 for weights in fp32, else bf16;
// then weights are in bf16, in int8 with a scale per output, or in the block formats of GGUF files with scales per group
// of inputs.
//
// The packed form is the same for every instruction set: tiles of 32 outputs, and of each tile one record after the
// other, for a unit of inputs each. A unit of bf16 and int8 is a pair of inputs, whose weights for one output are
// adjacent, as the dot product instructions need: [N / 32][K / 2][32][2]; on AMX tiles int8 has four: [N / 32][K / 4][32][4]. A unit of fp32 is one input: [N / 32][K][32].
// groups.h describes the units of the other formats. N and K are padded with zeros. A tile of a gated weight (gate rows, then up rows) holds 16 gates and their
// 16 ups.
#pragma once

#include "rows.h"

constexpr int TILE = 32, HALF = 16;

// The format of a packed weight; mirrored by packed.py. The names from Q4_0 on are those of GGUF.
enum Format { BF16, INT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FP32, NUM_FORMATS };

// Inputs of a unit: a pair, or those of one operation on AMX tiles. K is padded to whole units. The weights of INT8_SIDE
// inputs are adjacent.
#if defined(AMX_TILES)
constexpr long BF16_INPUTS = 32, INT8_INPUTS = 64, INT8_SIDE = 4;
#else
constexpr long BF16_INPUTS = 2, INT8_INPUTS = 2, INT8_SIDE = 2;
#endif

struct Linear {  // mirrored by library.py
    const char *weight;   // packed tiles, 64-byte aligned
    const float *scales;  // [tiles * 32] for INT8, in the order of the tiles, else null
    const float *bias;    // [tiles * 32] in the order of the tiles, or null
    const void *norm;     // [K] of the rows' type: rows are RMS-normalised first and multiplied by it, or null
    float eps;
    int gated;                       // silu(gate) * up is stored
    long in_features, out_features;  // K, and the number of stored outputs: half of the weight's rows if it is gated
    long format;                     // a Format
    long row_bits;                   // 16, or 8: of a number of a row, for weights of at most 6 bits

    int width() const { return gated ? HALF : TILE; }  // of a tile, in stored outputs
    long tiles() const { return (out_features + width() - 1) / width(); }
};

struct Link {  // mirrored by library.py: one product of a chain, on numbered buffers
    const Linear *linear;
    const Heads *heads;  // rotary embedding of the outputs, or null
    int x, y, residual;   // x [count, K], y [count, stride], residual with the shape of y or -1; y may be residual
    long offset, stride;  // the outputs are columns [offset, offset + out_features) of y and residual
};
