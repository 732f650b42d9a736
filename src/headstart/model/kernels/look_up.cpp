// Rows of a packed weight by number, for an embedding that is also the output head, or that a file stores in blocks: no
// second copy in bf16 is kept. groups.h describes the tiles; pack.cpp and pack_blocks.cpp write them.
#include "look_up.h"

#include "operations.h"

namespace {

constexpr int GROUP = 32;  // inputs

// The places of 32 inputs of an output in a tile: [32 outputs, the planes of their bits], then the scales.
struct Record {
    const char *at;
    int column, bits;

    int lane() const { return column % HALF; }
    int half() const { return column / HALF; }
    long planes() const { return TILE * GROUP * bits / 8; }
    const uint8_t *scales() const { return (const uint8_t *)at + planes(); }

    int whole(int i) const {
        if (bits == 8) return ((const int8_t *)at)[((half() * 16 + i / 2) * HALF + lane()) * 2 + i % 2];
        const uint16_t *words = (const uint16_t *)at;
        int pair = i / 2, word = lane() * 2 + i % 2;
        int low = words[(half() * 4 + pair / 4) * 32 + word] >> pair % 4 * 4 & 15;
        if (bits == 5) return low | (words[(8 + half()) * 32 + word] >> pair & 1) << 4;
        if (bits == 6) return low | (words[(8 + half() * 2 + pair / 8) * 32 + word] >> pair % 8 * 2 & 3) << 4;
        return low;
    }
};

struct Layout {
    int bits, offset;  // of the integers
    bool least;        // whether a number is added to every weight of a group
};

Layout layout_of(int format) {
    switch (format) {
        case Q4_0: return {4, 8, false};
        case Q4_1: return {4, 0, true};
        case Q5_0: return {5, 16, false};
        case Q5_1: return {5, 0, true};
        case Q8_0: return {8, 0, false};
        case Q4_K: return {4, 0, true};
        case Q5_K: return {5, 0, true};
        default: return {6, 32, false};
    }
}

float from_half(const uint16_t *at) { return _cvtsh_ss(*at); }

// Writes `count` weights from input `begin` of a record on. Products are exact: they have at most 24 bits.
void write_weights(const Record &record, const Layout &layout, int begin, int count, float scale, float least, bf16 *to) {
    for (int i = begin; i < begin + count; i++) {
        float product = (float)(record.whole(i) - layout.offset) * scale;
        to[i] = to_bf16(layout.least ? product + least : product);
    }
}

void look_up_blocks(const Linear &linear, long row, bf16 *to) {
    int format = (int)linear.format, column = (int)(row % TILE);
    const Operations &op = operations_of(format);
    Layout layout = layout_of(format);
    const char *unit = op.tile(linear, row / TILE);
    bool wide = format >= Q4_K;
    long record_bytes = TILE * GROUP * layout.bits / 8 + 2 * TILE;  // of the wide formats
    for (long k = 0; k < linear.in_features; k += op.inputs, unit += op.weight_bytes) {
        if (!wide) {
            Record record = {unit, column, layout.bits};
            const uint16_t *halves = (const uint16_t *)record.scales();
            float least = layout.least ? from_half(halves + TILE + column) : 0;
            write_weights(record, layout, 0, GROUP, from_half(halves + column), least, to + k);
            continue;
        }
        const uint16_t *factors = (const uint16_t *)(unit + 8 * record_bytes);
        float factor = from_half(factors + column), lowest = layout.least ? from_half(factors + TILE + column) : 0;
        for (int g = 0; g < 8; g++) {
            Record record = {unit + g * record_bytes, column, layout.bits};
            const uint8_t *scales = record.scales();
            bf16 *group = to + k + g * GROUP;
            if (format == Q6_K) {
                for (int part = 0; part < 2; part++)
                    write_weights(record, layout, part * 16, 16, factor * (float)(int8_t)scales[part * TILE + column], 0, group);
            } else {
                float scale = factor * (float)scales[column], least = lowest * (float)scales[TILE + column];
                write_weights(record, layout, 0, GROUP, scale, least, group);
            }
        }
    }
}

}  // namespace

void look_up_row(const Linear &linear, long row, bf16 *to) {
    if (linear.format != BF16) return look_up_blocks(linear, row, to);
    const bf16 *from = (const bf16 *)operations_of(BF16).tile(linear, row / TILE) + row % TILE * 2;
    for (long i = 0; i < linear.in_features; i++) to[i] = from[i / 2 * TILE * 2 + i % 2];
}

// ---- exported ---------------------------------------------------------------------------------------------------------

// Writes rows `ids` of the weight to `out` [count, K] in fp32 or bf16, as the rows of its product; see look_up_row.
EXPORT void headstart_look_up(const Linear *linear, const int64_t *ids, long count, void *out) {
    long size = linear->in_features;
    if (linear->format != FP32) {
        for (long i = 0; i < count; i++) look_up_row(*linear, ids[i], (bf16 *)out + i * size);
        return;
    }
    for (long i = 0; i < count; i++) {
        const float *from = (const float *)linear->weight + ids[i] / TILE * size * TILE + ids[i] % TILE;
        for (long k = 0; k < size; k++) ((float *)out)[i * size + k] = from[k * TILE];
    }
}
