// Packing of weights that are stored in blocks, as in GGUF files, into tiles; groups.h describes the tiles.
//
// Block layouts: ggml/src/ggml-common.h of llama.cpp.
#include "operations.h"
#include "tile_rows.h"

namespace {

constexpr int MOST = 256;  // inputs of a block

struct Block {  // unpacked
    uint8_t whole[MOST];  // integers of up to 6 bits, or signed bytes
    uint8_t scales[16], minima[8];
    uint16_t factor, least;  // fp16
};

int bits_of(int format) {
    switch (format) {
        case Q5_0: case Q5_1: case Q5_K: return 5;
        case Q6_K: return 6;
        case Q8_0: return 8;
        default: return 4;
    }
}

long block_bytes(int format) {
    switch (format) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q4_K: return 144;
        case Q5_K: return 176;
        default: return 210;
    }
}

uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

// The scales and minima of Q4_K and Q5_K: 6 bits each, in 12 bytes.
void read_scales(const uint8_t *from, Block &block) {
    for (int i = 0; i < 4; i++) {
        block.scales[i] = from[i] & 63, block.minima[i] = from[4 + i] & 63;
        block.scales[4 + i] = (uint8_t)((from[8 + i] & 15) | (from[i] >> 6) << 4);
        block.minima[4 + i] = (uint8_t)(from[8 + i] >> 4 | (from[4 + i] >> 6) << 4);
    }
}

void read_32(int format, const uint8_t *from, Block &block) {
    bool least = format == Q4_1 || format == Q5_1, fifth = format == Q5_0 || format == Q5_1;
    block.factor = half_at(from);
    if (least) block.least = half_at(from + 2);
    from += least ? 4 : 2;
    if (format == Q8_0) {
        memcpy(block.whole, from, 32);
        return;
    }
    const uint8_t *high = from;
    from += fifth ? 4 : 0;
    for (int i = 0; i < 32; i++) {
        block.whole[i] = i < 16 ? from[i] & 15 : from[i - 16] >> 4;
        if (fifth) block.whole[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
    }
}

void read_k(int format, const uint8_t *from, Block &block) {
    block.factor = half_at(from), block.least = half_at(from + 2) ^ 0x8000u;  // the minimum is subtracted
    read_scales(from + 4, block);
    const uint8_t *high = from + 16, *low = format == Q5_K ? from + 48 : from + 16;
    for (int i = 0; i < 256; i++) {
        uint8_t byte = low[i / 64 * 32 + i % 32];
        block.whole[i] = i / 32 % 2 ? byte >> 4 : byte & 15;
        if (format == Q5_K) block.whole[i] |= (uint8_t)((high[i % 32] >> i / 32 & 1) << 4);
    }
}

void read_6(const uint8_t *from, Block &block) {
    for (int i = 0; i < 256; i++) {
        int part = i / 128, quarter = i % 128 / 32, j = i % 32;
        uint8_t low = from[part * 64 + quarter % 2 * 32 + j], high = from[128 + part * 32 + j];
        block.whole[i] = (uint8_t)((quarter < 2 ? low & 15 : low >> 4) | (high >> 2 * quarter & 3) << 4);
    }
    memcpy(block.scales, from + 192, 16);
    block.factor = half_at(from + 208);
}

void read_block(int format, const uint8_t *from, Block &block) {
    if (format == Q6_K) read_6(from, block);
    else if (format == Q4_K || format == Q5_K) read_k(format, from, block);
    else read_32(format, from, block);
}

// Puts the integers of 32 inputs of an output into the planes of its record.
void write_planes(int bits, const uint8_t *whole, char *record, int column) {
    int half = column / HALF, lane = column % HALF;
    if (bits == 8) {
        for (int i = 0; i < 32; i++) record[((half * 16 + i / 2) * HALF + lane) * 2 + i % 2] = (char)whole[i];
        return;
    }
    uint16_t *words = (uint16_t *)record;
    for (int i = 0; i < 32; i++) {
        int pair = i / 2, word = lane * 2 + i % 2;
        words[(half * 4 + pair / 4) * 32 + word] |= (uint16_t)((whole[i] & 15) << pair % 4 * 4);
        if (bits == 5) words[(8 + half) * 32 + word] |= (uint16_t)(whole[i] >> 4 << pair);
        if (bits == 6) words[(8 + half * 2 + pair / 8) * 32 + word] |= (uint16_t)(whole[i] >> 4 << pair % 8 * 2);
    }
}

// Writes one block of an output into the unit of its tile, which is zero before.
void write_unit(int format, const Block &block, char *unit, int column) {
    int bits = bits_of(format);
    long planes = TILE * 32 * bits / 8;
    if (format < Q4_K) {
        write_planes(bits, block.whole, unit, column);
        uint16_t *halves = (uint16_t *)(unit + planes);
        halves[column] = block.factor;
        if (format == Q4_1 || format == Q5_1) halves[TILE + column] = block.least;
        return;
    }
    long record = planes + 2 * TILE;
    for (int g = 0; g < 8; g++) {
        write_planes(bits, block.whole + g * 32, unit + g * record, column);
        uint8_t *scales = (uint8_t *)(unit + g * record + planes);
        scales[column] = format == Q6_K ? block.scales[2 * g] : block.scales[g];
        scales[TILE + column] = format == Q6_K ? block.scales[2 * g + 1] : block.minima[g];
    }
    uint16_t *factors = (uint16_t *)(unit + 8 * record);
    factors[column] = block.factor;
    if (format != Q6_K) factors[TILE + column] = block.least;
}

}  // namespace

// Returns the bytes of one packed tile of a weight with `in_features` inputs.
EXPORT long headstart_tile_bytes(int format, long in_features) {
    const Operations &op = operations_of(format);
    return (in_features + op.inputs - 1) / op.inputs * op.weight_bytes;
}

// Packs rows of blocks [rows, row_bytes] into `out`, which is zero before. A row has whole blocks of `format`, which is
// Q4_0 or later.
EXPORT void headstart_pack_blocks(const uint8_t *rows, long row_bytes, char *out, int format, long tiles,
                                  long out_features, int gated, int threads) {
    long weight_bytes = operations_of(format).weight_bytes, size = block_bytes(format), units = row_bytes / size;
#pragma omp parallel for num_threads(threads)
    for (long tile = 0; tile < tiles; tile++) {
        Block block;
        for (int c = 0; c < TILE; c++) {
            long row = source_row(tile, c, out_features, gated);
            for (long unit = 0; row >= 0 && unit < units; unit++) {
                read_block(format, rows + row * row_bytes + unit * size, block);
                write_unit(format, block, out + (tile * units + unit) * weight_bytes, c);
            }
        }
    }
}
