"""Random prompts and arrival times: pure functions, chance is the `rng` argument.

Not here: traces of real traffic, and sentences that a model can understand (`intent.py`).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The lengths of requests, in tokens: a prefix that a group shares, a part of their own, and the output."""

    shared: int
    own: int
    output: int


INTENT = RequestShape(shared=900, own=100, output=30)  # intent recognition: PrefixCacheManager (blog)


def random_tokens(length: int, vocab_size: int, rng: Random) -> "array[int]":
    """Return packed token ids, uniformly drawn from [0, vocab_size)."""
    return array("i", rng.choices(range(vocab_size), k=length))


def token_rotations(token_ids: Sequence[int], count: int) -> "list[array[int]]":
    """Return `count` prompts of the same tokens, the i-th rotated left by i: no common prefix (vLLM #3402)."""
    if not 1 <= count <= len(token_ids):
        raise ValueError(f"{count} rotations of {len(token_ids)} tokens: count must lie in 1..{len(token_ids)}")
    tokens = array("i", token_ids)
    return [tokens[i:] + tokens[:i] for i in range(count)]


def shared_prefix_prompts(
    groups: int, prompts: int, shape: RequestShape, vocab_size: int, rng: Random
) -> "list[array[int]]":
    """Return `groups` x `prompts` prompts, group by group; each group starts with the same `shape.shared` tokens."""
    result: list[array[int]] = []
    for _ in range(groups):
        prefix = random_tokens(shape.shared, vocab_size, rng)
        result += prompts_with_prefix(prefix, prompts, shape.own, vocab_size, rng)
    return result


def prompts_with_prefix(
    prefix: "array[int]", prompts: int, own: int, vocab_size: int, rng: Random
) -> "list[array[int]]":
    """Return `prompts` prompts: the given prefix, then `own` random tokens each."""
    return [prefix + random_tokens(own, vocab_size, rng) for _ in range(prompts)]


def unit_poisson_arrivals(count: int, rng: Random) -> list[float]:
    """Return arrival times of a Poisson process of one request per second, the first after one gap.

    Divide by a rate to get that rate: the same draw then serves every rate of a search, and every engine in it.
    """
    return list(accumulate(rng.expovariate(1.0) for _ in range(count)))


def poisson_arrivals(rate: float, count: int, rng: Random) -> list[float]:
    """Return `count` arrival times in seconds of a Poisson process of `rate` requests per second."""
    if rate <= 0:
        raise ValueError(f"rate is {rate}; it must be above 0 requests per second")
    return [time / rate for time in unit_poisson_arrivals(count, rng)]
