// The rows of a weight that a tile holds.
#pragma once

#include "linear.h"

namespace {

// Returns the row of the weight that a tile holds at `column`, or -1 for padding.
inline long source_row(long tile, int column, long out_features, int gated) {
    if (!gated) return tile * TILE + column < out_features ? tile * TILE + column : -1;
    long output = tile * HALF + column % HALF;
    if (output >= out_features) return -1;
    return column < HALF ? output : out_features + output;
}

}  // namespace
