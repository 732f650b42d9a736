// Products with weights of 4 bits and fp16 scales per 32 inputs.
#include "amx_blocks.h"

const Operations Q4_0_OPERATIONS = block_operations<Grouped<4, Halves<false>, 8, RowsOfWords>>();
const Operations Q4_0_BYTES_OPERATIONS = block_operations<Grouped<4, Halves<false>, 8, RowsOfBytes>>();
const Operations Q4_1_OPERATIONS = block_operations<Grouped<4, Halves<true>, 0, RowsOfWords>>();
const Operations Q4_1_BYTES_OPERATIONS = block_operations<Grouped<4, Halves<true>, 0, RowsOfBytes>>();
