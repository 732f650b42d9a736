"""The floor of every row: the least time that its bytes and operations allow on a machine of given ceilings.

A pass through the model is two phases that cannot overlap, as one needs the output of the other: matrix products and
attention. Each takes as long as the slower of reading its bytes and doing its operations:

    phase = max(bytes / read bandwidth, operations / bf16 matmul rate)
    pass  = phase(weights; 2 x weights x tokens + 2 x head x sampled rows) + phase(KV read; 4 x width x layers x pairs)

where `pairs` are (token, token it attends to) and KV counts once per pass for all that share it. Everything else is
free: norms, rotary embedding, softmax, sampling, scheduling. So no engine reaches these floors; the distance to them is
the figure of interest.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from headstart.workload.scenarios import BURST, GENERATED, STREAMS
from headstart.workload.synthetic import INTENT
from headstart_lab.comparison import LONG_LENGTH, SAMPLED

ROTATIONS, LENGTH = 48, 1025
GROUPS, PROMPTS = 8, 8
BURST_REQUESTS = STREAM_COUNT = 32
ALONE_PROMPT = ALONE_OUTPUT = 128
COLD_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The cost of a decoder of the Llama family, from its config.json."""

    layer_weights: int  # of all layers: projections and the gated MLP
    head_weights: int
    kv_values: int  # keys and values per token, all layers
    attended: int  # query values per token, all layers: heads x head size x layers

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelSize":
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        kv = config.get("num_key_value_heads", heads) * size
        layer = hidden * (2 * heads * size + 2 * kv) + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers * layer, hidden * config["vocab_size"], 2 * kv * layers, heads * size * layers)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured maximum rates of the machine."""

    bytes_per_s: float
    flops: float  # of the faster of bfloat16 and float32 products

    def seconds(self, size: float, operations: float) -> float:
        """Return the least time to read `size` bytes and do `operations` at the same time."""
        return max(size / self.bytes_per_s, operations / self.flops)


class Pass(NamedTuple):
    """The work of one pass through the model."""

    tokens: float  # computed
    sampled: float  # of those, rows that need logits
    pairs: float  # of a token and one it attends to, including itself
    kv_tokens: float  # whose keys and values are read; those of tokens computed now are not


def causal(new: int, before: int = 0) -> float:
    """Return the pairs of `new` tokens that attend to `before` earlier ones, to each other and to themselves."""
    return new * before + new * (new + 1) / 2


class Floors:
    """Floors of one model on one machine; `weight_bytes` per weight: 2 for bf16, 1 for int8."""

    def __init__(self, model: ModelSize, ceilings: Ceilings, weight_bytes: int = 2) -> None:
        self._model, self._ceilings, self._weight_bytes = model, ceilings, weight_bytes

    def seconds(self, work: Pass) -> float:
        """Return the least time of one pass."""
        model = self._model
        weights = model.layer_weights + (model.head_weights if work.sampled else 0)
        products = 2 * model.layer_weights * work.tokens + 2 * model.head_weights * work.sampled
        attention = 4 * model.attended * work.pairs
        read = self._ceilings.seconds(self._weight_bytes * weights, products)
        return read + self._ceilings.seconds(2 * model.kv_values * work.kv_tokens, attention)

    def rows(self) -> dict[str, float]:
        """Return the seconds of each row; for a rate, the highest possible tokens or requests per second."""
        middle = STREAMS.own + STREAMS.output / 2  # unshared tokens of a stream, half way
        shared = self._decode(STREAM_COUNT, 1, STREAMS.shared, middle)
        distinct = self._decode(STREAM_COUNT, STREAM_COUNT, STREAMS.shared, middle)
        return {
            "single_stream": self._decode(1, 1, 0, ALONE_PROMPT + ALONE_OUTPUT / 2),
            "warm_ttft": self.seconds(Pass(INTENT.own, 1, causal(INTENT.own, INTENT.shared), INTENT.shared)),
            "cold_ttft": self.seconds(Pass(COLD_LENGTH, 1, causal(COLD_LENGTH), 0)),
            "long_ttft": self.seconds(Pass(LONG_LENGTH, 1, causal(LONG_LENGTH), 0)),
            "rotations_cold": self.seconds(Pass(ROTATIONS * LENGTH, ROTATIONS, ROTATIONS * causal(LENGTH), 0)),
            "rotations_warm": self._decode(ROTATIONS, ROTATIONS, LENGTH, 0),
            "decode_shared": STREAM_COUNT / shared,
            **dict.fromkeys(SAMPLED, STREAM_COUNT / shared),
            "decode_distinct": STREAM_COUNT / distinct,
            "shared_prefix": self._burst(GROUPS, PROMPTS, GENERATED.shared, GENERATED.own, GENERATED.output),
            "twins": self._burst(1, BURST_REQUESTS, BURST.shared, BURST.own, BURST.output),
            "poisson": 1 / self._request(INTENT.shared, INTENT.own, INTENT.output),
        }

    def _decode(self, streams: int, prefixes: int, shared: float, own: float) -> float:
        """Return one step of `streams` with `own` tokens each behind one of `prefixes` of `shared` tokens."""
        return self.seconds(Pass(streams, streams, streams * (shared + own), prefixes * shared + streams * own))

    def _burst(self, groups: int, prompts: int, shared: int, own: int, output: int) -> float:
        """Return the time of all prefixes once, the rest of every prompt, then all outputs but the first."""
        count = groups * prompts
        pairs = groups * causal(shared) + count * causal(own, shared)
        first = self.seconds(Pass(groups * shared + count * own, count, pairs, 0))
        return first + (output - 1) * self._decode(count, groups, shared, own + output / 2)

    def _request(self, shared: int, own: int, output: int) -> float:
        """Return a request's share of endless large steps behind one cached prefix: operations only, no reads."""
        model = self._model
        tokens = own + output - 1
        products = 2 * model.layer_weights * tokens + 2 * model.head_weights * output
        return (products + 4 * model.attended * causal(tokens, shared)) / self._ceilings.flops
