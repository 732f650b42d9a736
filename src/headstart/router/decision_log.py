"""DecisionRecord: one line of the decision log, complete enough to replay the decision with another policy.

Block hashes are truncated to eight bytes: enough to tell the prompts of a log apart, without their text.
"""

from dataclasses import asdict, dataclass
from typing import Any

from headstart.core.cache.hashing import BlockHash
from headstart.router.routing_request import RoutingPrompt, RoutingRequest

NAME_BYTES = 8


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """The routing decision for one request, and its outcome. Times in seconds on the caller's clock."""

    at: float
    endpoint: str
    reason: str
    scores: dict[str, float]  # of the policy, by replica
    excluded: dict[str, str]
    prompt_tokens: int
    block_size: int
    names: str  # block hashes of the prompt at that size, hexadecimal, joined
    output_tokens: int  # most that the request allows; 0: not known
    predicted_tokens: int  # expected to be cached there
    expected_ms: float  # time to first token
    cached_tokens: int | None = None  # as reported by the replica
    num_output: int | None = None  # tokens of the answer, as reported
    first_token: float | None = None
    finish: float | None = None
    ok: bool = True
    session: str | None = None
    adapter: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of a line of JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "DecisionRecord":
        """Return the record of a line of JSON. Raises TypeError for unknown fields."""
        return cls(**fields)

    def to_routing_request(self) -> RoutingRequest:
        """Return the original routing request, to be routed again."""
        raw = bytes.fromhex(self.names)
        names = [BlockHash(raw[start : start + NAME_BYTES]) for start in range(0, len(raw), NAME_BYTES)]
        prompt = RoutingPrompt.from_block_hashes(names, self.prompt_tokens, self.block_size)
        return RoutingRequest(prompt, adapter=self.adapter, session=self.session, max_tokens=self.output_tokens)


def join_hashes(names: list[BlockHash]) -> str:
    """Return block hashes in the format of a record."""
    return b"".join(name[:NAME_BYTES] for name in names).hex()
