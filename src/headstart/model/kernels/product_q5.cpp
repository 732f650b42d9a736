// Products with weights of 5 bits and fp16 scales per 32 inputs.
#include "amx_blocks.h"

const Operations Q5_0_OPERATIONS = block_operations<Grouped<5, Halves<false>, 16, RowsOfWords>>();
const Operations Q5_0_BYTES_OPERATIONS = block_operations<Grouped<5, Halves<false>, 16, RowsOfBytes>>();
const Operations Q5_1_OPERATIONS = block_operations<Grouped<5, Halves<true>, 0, RowsOfWords>>();
const Operations Q5_1_BYTES_OPERATIONS = block_operations<Grouped<5, Halves<true>, 0, RowsOfBytes>>();
