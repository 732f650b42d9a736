// Operations: the products of one format of weights, behind plain functions.
//
// The loops of a format are templates, which are large. Each product_*.cpp compiles those of some formats, and linear.cpp
// divides the work between threads without knowing them.
#pragma once

#include "sizes.h"

struct Step {  // a Link with addresses
    const Linear *linear;
    const void *x, *residual;
    void *y;
    long stride;  // of rows of y and residual
    bool non_temporal;  // whether y is written by non-temporal stores, in whole cache lines
};

struct PreparedRows {  // rows in the format that the weights need
    const char *x;        // [count][units] records of row_bytes
    const float *scales;  // [count] for INT8, else null
    long first, count;    // index of the first row in the step's buffers, number of rows
};

struct Operations {
    long inputs;        // of a unit
    long weight_bytes;  // of a unit of a tile
    long row_bytes;     // of a unit of a row
    bool copies;        // whether rows without a norm, of whole units, are used directly from their buffer
    // Writes one row of x in the format that the weights need; `scale` only for INT8.
    void (*prepare)(const Linear &linear, const void *x, char *to, float *scale);
    // Multiplies at most `block` rows by tiles [begin, end). `after` are the weights that this thread probably needs next.
    void (*multiply)(const Step &step, const PreparedRows &rows, long begin, long end, const char *after, float *sums);
    long element_bytes = sizeof(bf16);  // of x, y and residual
    long block = BLOCK, rows_each = ROWS_EACH, panel_bytes = PANEL_BYTES;  // see sizes.h
    const Operations *many = nullptr;  // from TILED_ROWS rows on, with the same bits from the same weights, or null

    long units(const Linear &linear) const { return (linear.in_features + inputs - 1) / inputs; }
    const char *tile(const Linear &linear, long index) const {
        return linear.weight + index * units(linear) * weight_bytes;
    }
    bool as_is(const Linear &linear) const { return copies && !linear.norm && linear.in_features % inputs == 0; }
};

// By format; defined in product_*.cpp. BYTES: for rows of 8 bits.
extern const Operations BF16_OPERATIONS, INT8_OPERATIONS, Q4_0_OPERATIONS, Q4_1_OPERATIONS, Q5_0_OPERATIONS,
    Q5_1_OPERATIONS, Q8_0_OPERATIONS, Q4_K_OPERATIONS, Q5_K_OPERATIONS, Q6_K_OPERATIONS, Q4_0_BYTES_OPERATIONS,
    Q4_1_BYTES_OPERATIONS, Q5_0_BYTES_OPERATIONS, Q5_1_BYTES_OPERATIONS, Q4_K_BYTES_OPERATIONS, Q5_K_BYTES_OPERATIONS,
    Q6_K_BYTES_OPERATIONS, FP32_OPERATIONS;

static inline const Operations &operations_of(long format, long row_bits = 16) {
    static const Operations *const words[NUM_FORMATS] = {
        &BF16_OPERATIONS, &INT8_OPERATIONS, &Q4_0_OPERATIONS, &Q4_1_OPERATIONS, &Q5_0_OPERATIONS,
        &Q5_1_OPERATIONS, &Q8_0_OPERATIONS, &Q4_K_OPERATIONS, &Q5_K_OPERATIONS, &Q6_K_OPERATIONS, &FP32_OPERATIONS};
    static const Operations *const bytes[NUM_FORMATS] = {
        &BF16_OPERATIONS, &INT8_OPERATIONS, &Q4_0_BYTES_OPERATIONS, &Q4_1_BYTES_OPERATIONS, &Q5_0_BYTES_OPERATIONS,
        &Q5_1_BYTES_OPERATIONS, &Q8_0_OPERATIONS, &Q4_K_BYTES_OPERATIONS, &Q5_K_BYTES_OPERATIONS, &Q6_K_BYTES_OPERATIONS, &FP32_OPERATIONS};
    return *(row_bits == 8 ? bytes : words)[format];
}

static inline const Operations &operations_of(const Linear &linear, long count = 0) {
    const Operations &found = operations_of(linear.format, linear.row_bits);
    return found.many && count >= TILED_ROWS ? *found.many : found;
}
