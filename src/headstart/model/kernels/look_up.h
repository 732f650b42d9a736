// The lookup of rows of a packed weight.
#pragma once

#include "linear.h"

// Writes row `row` of the weight to `to` [K]; blocks become the numbers of their file, rounded to bf16. Not for INT8 and FP32.
void look_up_row(const Linear &linear, long row, bf16 *to);
