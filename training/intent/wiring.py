"""Initial weights that already contain the copying circuit, so that training does not have to find it.

Layer 0 gets heads that attend 1, 2 and 3 tokens back and write the result into separate subspaces. Layer 1 gets two
heads that find an earlier token that followed the current token (one of them: that followed the last two tokens) and
promote it: the induction heads of Olsson et al. 2022, "In-context Learning and Induction Heads". With random weights
they had not formed after 560 steps. Nothing is frozen, and nothing here depends on intents.
"""

import torch
from network import Attention, Network
from torch import Tensor

_COMMON = 0.6
_SHARPNESS = 60.0
_MATCH = 200.0


@torch.no_grad()
def wire(network: Network) -> None:
    """Overwrite the embeddings, and the first heads of layers 0 and 1."""
    shape = network.shape
    hidden, head_dim = shape.hidden_size, shape.head_dim
    basis = torch.linalg.qr(torch.randn(hidden, hidden))[0]
    common, free = basis[:, 0], basis[:, 1:]
    identity = torch.randn(shape.vocab_size, hidden - 1) @ free.T / hidden**0.5
    weight = network.model.embed_tokens.weight
    weight.copy_((1 - _COMMON**2) ** 0.5 * identity + _COMMON * common)

    content = [basis[:, 1 + i * head_dim : 1 + (i + 1) * head_dim] for i in range(2)]
    written = [torch.linalg.qr(torch.randn(hidden, head_dim))[0] for _ in range(3)]
    first, second = (network.model.layers[i].self_attn for i in range(2))
    for head, distance in enumerate((1, 2, 3)):
        _look_back(first, head, distance, common)
        _write(first, head, written[head], 0.12)
    _head(first.k_proj.weight, 1, head_dim).copy_(_head(first.k_proj.weight, 0, head_dim))
    for kv_head in range(2):
        _head(first.v_proj.weight, kv_head, head_dim).copy_(content[0].T)
        _head(second.v_proj.weight, kv_head, head_dim).copy_(content[kv_head].T)
    slow = _slow_pairs(head_dim)
    scale = (_MATCH / 30) ** 0.5
    other = torch.linalg.qr(torch.randn(head_dim, head_dim))[0]
    for head, kv_head in ((0, 0), (2, 1)):
        query, key = _head(second.q_proj.weight, head, head_dim), _head(second.k_proj.weight, kv_head, head_dim)
        query.zero_()
        key.zero_()
        query[slow] = scale * content[0].T[slow]
        key[slow] = scale * written[0].T[slow]
        if kv_head == 1:
            query[slow] += scale * (other @ written[0].T)[slow]
            key[slow] += scale * (other @ written[1].T)[slow]
        _write(second, head, content[kv_head], 0.25)


def _look_back(attention: Attention, head: int, distance: int, common: Tensor) -> None:
    """Make a head attend `distance` positions back: query and key are constant, rotary phases do the rest."""
    head_dim = attention.shape.head_dim
    half = head_dim // 2
    theta = attention.shape.rope_theta ** (-torch.arange(half) / half)
    fast = (theta > 0.02).float()
    size = (_SHARPNESS**0.5) / (_COMMON * attention.shape.hidden_size**0.5)
    query = torch.cat((fast * (distance * theta).cos(), -fast * (distance * theta).sin())) * size
    key = torch.cat((fast, torch.zeros(half))) * size
    _head(attention.q_proj.weight, head, head_dim).copy_(torch.outer(query, common))
    _head(attention.k_proj.weight, 0, head_dim).copy_(torch.outer(key, common))


def _write(attention: Attention, head: int, directions: Tensor, scale: float) -> None:
    """Make a head add its value to the stream along `directions` [hidden, D]."""
    head_dim = attention.shape.head_dim
    attention.o_proj.weight[:, head * head_dim : (head + 1) * head_dim] = scale * directions


def _slow_pairs(head_dim: int) -> Tensor:
    """Return the dimensions of a head that rotate little over a whole context, for matching content."""
    half = head_dim // 2
    return torch.cat((torch.arange(half // 2, half), torch.arange(half + half // 2, head_dim)))


def _head(weight: Tensor, head: int, head_dim: int) -> Tensor:
    return weight[head * head_dim : (head + 1) * head_dim]
