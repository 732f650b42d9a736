"""Decision: one line of the decision log. All that is needed to see why, and to decide again with another policy.

Names of blocks are cut to eight bytes: enough to tell the prompts of a log apart, and nothing of their text.
"""

from dataclasses import asdict, dataclass
from typing import Any

from headstart.core.cache.hashing import BlockHash
from headstart.router.routing_request import Prompt, RoutingRequest

NAME_BYTES = 8


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """What was decided about one request, and what came of it. Times in seconds on the body's clock."""

    at: float
    endpoint: str
    reason: str
    scores: dict[str, float]  # of the policy, by replica
    excluded: dict[str, str]
    prompt_tokens: int
    block_size: int
    names: str  # of the prompt's blocks at that size, hexadecimal, joined
    output_tokens: int
    predicted_tokens: int  # believed to be cached there
    expected_ms: float  # to the first token
    cached_tokens: int | None = None  # as the replica said
    first_token: float | None = None
    finish: float | None = None
    ok: bool = True
    session: str | None = None
    adapter: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "DecisionRecord":
        """The decision a line of JSON stands for. Raises TypeError for fields it does not know."""
        return cls(**fields)

    def ask(self) -> RoutingRequest:
        """The request as it was, to be routed again."""
        raw = bytes.fromhex(self.names)
        names = [BlockHash(raw[start : start + NAME_BYTES]) for start in range(0, len(raw), NAME_BYTES)]
        prompt = Prompt.of_names(names, self.prompt_tokens, self.block_size)
        return RoutingRequest(prompt, adapter=self.adapter, session=self.session, max_tokens=self.output_tokens)


def joined(names: list[BlockHash]) -> str:
    """Names as a decision has them."""
    return b"".join(name[:NAME_BYTES] for name in names).hex()
