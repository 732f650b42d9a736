"""Cached tokens: converts an engine's `cached_tokens` into the router's blocks.

Engines count in their own tokens and in whole blocks of their own size, which may have changed with a restart. A
difference within this rounding is not an error: a correct index must not be corrected.
"""

from math import gcd

from headstart.router.endpoint import Endpoint
from headstart.router.routing_request import ReportedTokenUsage, RoutingPrompt

MAX_GRANULE = 256  # tokens; no engine has larger blocks
INEXACT_SHARE = 0.25  # of the text before or after a hit, whichever is shorter: tolerance of its units


def count_reported_cached_blocks(
    endpoint: Endpoint, prompt: RoutingPrompt, usage: ReportedTokenUsage, expected: int
) -> int:
    """Return the number of leading blocks that were cached; `expected` if the report agrees with it.

    Updates the estimate of the replica's real block size.
    """
    exact = prompt.exact and usage.prompt_tokens == prompt.num_tokens
    if exact and usage.cached_tokens >= prompt.num_tokens - 1:
        return prompt.num_tokens // endpoint.block_size  # all but the token that yields the logits
    if exact:
        endpoint.granule = gcd(endpoint.granule, usage.cached_tokens)
        cached = usage.cached_tokens
        slack = min(endpoint.granule, MAX_GRANULE) - 1 if endpoint.granule > endpoint.block_size else 0
    else:
        cached = usage.cached_tokens * prompt.num_tokens // max(usage.prompt_tokens, 1)
        part = min(expected * endpoint.block_size, prompt.num_tokens - expected * endpoint.block_size)
        slack = 2 * endpoint.block_size + int(INEXACT_SHARE * part)
    blocks, believed = cached // endpoint.block_size, expected * endpoint.block_size
    if cached <= believed <= cached + slack or (not exact and abs(cached - believed) <= slack):
        return expected
    return blocks
