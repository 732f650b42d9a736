// Products with weights of 8 bits and fp16 scales per 32 inputs, and of 6 bits with integer scales per 16 inputs.
#include "amx_blocks.h"

const Operations Q8_0_OPERATIONS = block_operations<Grouped<8, Halves<false>, 0, RowsOfWords>>();
const Operations Q6_K_OPERATIONS = block_operations<Grouped<6, Scales6, 32, RowsOfWords>>();
const Operations Q6_K_BYTES_OPERATIONS = block_operations<Grouped<6, Scales6, 32, RowsOfBytes>>();
