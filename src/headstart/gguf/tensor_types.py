"""The types of tensors in a GGUF file: number, name, and the sizes of a block. From `enum ggml_type` of ggml.h."""

from typing import NamedTuple


class TensorType(NamedTuple):
    """One type: `block_size` weights are stored in `block_bytes` bytes. Sizes of 0: not supported here."""

    name: str
    block_size: int = 0
    block_bytes: int = 0


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1"),
    10: TensorType("Q2_K"),
    11: TensorType("Q3_K"),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K"),
    16: TensorType("IQ2_XXS"),
    17: TensorType("IQ2_XS"),
    18: TensorType("IQ3_XXS"),
    19: TensorType("IQ1_S"),
    20: TensorType("IQ4_NL"),
    21: TensorType("IQ3_S"),
    22: TensorType("IQ2_S"),
    23: TensorType("IQ4_XS"),
    24: TensorType("I8"),
    25: TensorType("I16"),
    26: TensorType("I32"),
    27: TensorType("I64"),
    28: TensorType("F64"),
    29: TensorType("IQ1_M"),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0"),
    35: TensorType("TQ2_0"),
    39: TensorType("MXFP4"),
}
SUPPORTED_TYPES = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.block_size)
