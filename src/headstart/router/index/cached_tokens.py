"""What an engine's `cached_tokens` means in the router's blocks.

Engines count in their own tokens and in whole blocks of their own size, which may have changed with a restart. A
difference that this rounding explains is none: contents that are right must not be corrected.
"""

from math import gcd

from headstart.router.endpoint import Endpoint
from headstart.router.routing_request import Prompt, Usage

MAX_GRANULE = 256  # tokens; no engine has larger blocks
INEXACT_SHARE = 0.25  # of the text before or behind a hit, whichever is less: so much its units may differ from tokens


def cached_blocks(endpoint: Endpoint, prompt: Prompt, usage: Usage, expected: int) -> int:
    """How many leading blocks of the prompt were cached; `expected` if the report is no reason to think otherwise.

    Changes what is known of the replica's real block size.
    """
    exact = prompt.exact and usage.prompt_tokens == prompt.num_tokens
    if exact and usage.cached_tokens >= prompt.num_tokens - 1:
        return prompt.num_tokens // endpoint.block_size  # all of it but the token that yields the logits
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
