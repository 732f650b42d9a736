"""Flight: one request in flight at a replica. Period: a busy period of one replica."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headstart.core.cache.hashing import BlockHash
from headstart.router.step_rates import PrefillWork


@dataclass(slots=True, eq=False)
class BusyPeriod:
    """A busy period of one replica: the prefills that ended in it."""

    start: float
    streams: float  # integrals of its load at the start
    resident: float
    end: float = field(init=False)
    tokens: int = 0
    pairs: float = 0.0
    num_steps: int = 0
    num_open: int = 0  # requests whose work is not known for certain yet
    is_closed: bool = False
    is_judged: bool = False
    factor: float = 1.0  # pace of its replica when it was judged
    is_void: bool = False  # a request failed in it

    def __post_init__(self) -> None:
        self.end = self.start


@dataclass(slots=True, eq=False)
class RequestFlight:
    """One request in flight at a replica."""

    work: PrefillWork
    prefill_ms: float
    backlog_ms: float
    prompt_tokens: int
    output_tokens: int  # estimate
    num_computed: int = 0  # tokens of its work in steps that ended, as far as token events show
    num_events: int = 0  # token events after its first token
    token_at: float = 0.0  # of the last one, or of the first token
    step: int = 0  # number of the step of its last event
    first_step: int = 0  # and of that of its first token
    entered: int = 0  # the step that ran when it was sent, beside streams and with no other pending; 0: not
    num_steps: int = 0  # of its prefill, if all were seen; 0: not known
    block_hashes: list[BlockHash] = field(init=False)  # of its prompt, while pending
    hit_blocks: int = 0  # of these, expected to be cached when it is computed
    leader: "RequestFlight | None" = None  # while pending: the request that computes the last block of this hit
    awaited: int = 0  # tokens of the leader's work that are to be computed in earlier steps
    turn: int = 0  # number of the earliest step that may compute it
    wait_ms: float = 0.0  # for blocks, as expected when it was sent
    sent_at: float = 0.0
    answered_at: float | None = None
    is_assumed: bool = False
    period: BusyPeriod | None = None  # from its first token until its work is known
    done_before: int = 0  # state of the replica at its first token, as are the next three
    pairs_before: float = 0.0
    streams_before: float = 0.0
    resident_before: float = 0.0

    def __post_init__(self) -> None:
        self.block_hashes = []

    @property
    def expected_ttft_ms(self) -> float:
        """Time to its first token, as expected when it was sent."""
        return self.backlog_ms + self.prefill_ms

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt that it does not compute."""
        return self.prompt_tokens - self.work.tokens


def find_request_computing_prefix(
    block_hashes: Sequence[BlockHash], hit: int, pending: Iterable[RequestFlight]
) -> RequestFlight | None:
    """Return the pending request that computes the last block of a hit of so many blocks, if there is one."""
    if not hit:
        return None
    last = block_hashes[hit - 1]
    for other in pending:
        if other.hit_blocks < hit <= len(other.block_hashes) and other.block_hashes[hit - 1] == last:
            return other
    return None
