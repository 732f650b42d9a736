"""Linear: x @ W^T + b with the weight kept in the fastest form this machine has for it, and in that form only.

bfloat16 on a CPU is prepacked for oneDNN (`torch.ops.mkldnn`, private and therefore guarded): 1.1-2.4 times faster than
`F.linear` up to 48 rows and never slower at 1000 (2 Zen 5 cores, torch 2.13). The plain weight is dropped, so memory
does not double; only a tied embedding keeps its plain copy, for the lookup. Anything else is `F.linear`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH_HINT = 16  # oneDNN packs for this many rows; measured to make no difference between 1 and 256


class Linear:
    """A frozen linear layer, called on [T, in_features]. Takes the weight over: do not use it elsewhere."""

    __slots__ = ("bias", "out_features", "packed", "weight", "weight_bytes")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self.weight_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT) if self.packed else weight

    def __call__(self, rows: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return F.linear(rows, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed form exists here for this weight."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and bool(getattr(ops, "_is_mkldnn_bf16_supported", lambda: False)())
    )
