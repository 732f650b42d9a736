"""Small replicas and prompts for the tests of the router: blocks of four tokens, caches of a few blocks."""

from headstart.core.cache.hashing import BlockHash
from headstart.router.endpoint import Endpoint
from headstart.router.index.approximate_index import ApproximateIndex
from headstart.router.router import Router
from headstart.router.routing_decision import RoutingDecision
from headstart.router.routing_request import ReportedTokenUsage, RoutingPrompt, RoutingRequest, router_root
from headstart.router.step_rates import StepRates

BLOCK = 4
RATES = StepRates(1.0, 0.0, 0.0, 1.0, 0.0)  # a millisecond per prefill and one per token
ROOT = router_root("m")


def prompt(*blocks: int, tail: int = 1) -> RoutingPrompt:
    """A prompt of blocks that are the same wherever the number is, and `tail` tokens more."""
    return RoutingPrompt([10 * block + i for block in blocks for i in range(BLOCK)] + [9] * tail, ROOT)


def ask(*blocks: int, tail: int = 1, session: str | None = None) -> RoutingRequest:
    """A request for such a prompt."""
    return RoutingRequest(prompt(*blocks, tail=tail), session=session)


def names(*blocks: int) -> list[BlockHash]:
    """The names of such a prompt's blocks."""
    return prompt(*blocks).block_hashes(BLOCK)


def endpoint(name: str, num_blocks: int = 16, rates: StepRates = RATES) -> Endpoint:
    """A replica with a shadow of the right size and rates that are known."""
    return Endpoint(name, ApproximateIndex(num_blocks), block_size=BLOCK, prior=rates)


def serve(router: Router, request: RoutingRequest, now: float = 0.0, cached: int | None = None) -> RoutingDecision:
    """Routes one request and lets it end at once; `cached` is what the replica says, by default what was believed."""
    pick = router.pick(request, now)
    pick = router.record_sent(pick, now)
    believed = pick.candidate.hit_tokens
    usage = ReportedTokenUsage(request.prompt.num_tokens, believed if cached is None else cached)
    router.record_first_token(pick, now + pick.flight.prefill_ms / 1e3 if pick.flight else now, usage)
    router.record_finished(pick, now + 1.0, usage)
    return pick
