// Products with weights of 4 and 5 bits, whose scales and minima are integers of 6 bits times an fp16 per 256 inputs.
#include "amx_blocks.h"

const Operations Q4_K_OPERATIONS = block_operations<Grouped<4, ScalesK, 0, RowsOfWords>>();
const Operations Q4_K_BYTES_OPERATIONS = block_operations<Grouped<4, ScalesK, 0, RowsOfBytes>>();
const Operations Q5_K_OPERATIONS = block_operations<Grouped<5, ScalesK, 0, RowsOfWords>>();
const Operations Q5_K_BYTES_OPERATIONS = block_operations<Grouped<5, ScalesK, 0, RowsOfBytes>>();
