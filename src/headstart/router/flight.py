"""Flight: one request in flight at a replica. Period: a busy period of one replica."""

from collections.abc import Iterable, Sequence

from headstart.core.cache.hashing import BlockHash
from headstart.router.step_rates import Work


class Period:
    """A busy period of one replica: the prefills that ended in it."""

    __slots__ = (
        *(
            "end",
            "factor",
            "is_closed",
            "is_judged",
            "is_void",
            "num_open",
            "num_steps",
            "pairs",
            "resident",
            "start",
            "streams",
            "tokens",
        ),
    )

    def __init__(self, start: float, streams: float, resident: float) -> None:
        self.start = self.end = start
        self.streams, self.resident = streams, resident  # integrals of its load at the start
        self.tokens, self.pairs = 0, 0.0
        self.num_steps = 0
        self.num_open = 0  # requests whose work is not known for certain yet
        self.is_closed = self.is_judged = False
        self.factor = 1.0  # pace of its replica when it was judged
        self.is_void = False  # a request failed in it


class Flight:
    """One request in flight at a replica."""

    __slots__ = (
        *(
            "answered_at",
            "backlog_ms",
            "done_before",
            "is_assumed",
            "output_tokens",
            "pairs_before",
            "period",
            "prefill_ms",
        ),
        *("entered", "first_step", "num_computed", "num_events", "num_steps", "prompt_tokens", "resident_before"),
        *("sent_at", "step", "wait_ms"),
        *("awaited", "block_hashes", "hit_blocks", "leader", "streams_before", "token_at", "turn", "work"),
    )

    def __init__(
        self, work: Work, prefill_ms: float, backlog_ms: float, prompt_tokens: int, output_tokens: int
    ) -> None:
        self.work = work
        self.prefill_ms = prefill_ms
        self.backlog_ms = backlog_ms
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens  # estimate
        self.num_computed = 0  # tokens of its work in steps that ended, as far as token events show
        self.num_events = 0  # token events after its first token
        self.token_at = 0.0  # of the last one, or of the first token
        self.step = self.first_step = 0  # numbers of the steps of its last event and of its first token
        self.entered = (
            0  # number of the step that ran when it was sent, beside streams and with no other pending; 0: not
        )
        self.num_steps = 0  # of its prefill, if all were seen; 0: not known
        self.block_hashes: list[BlockHash] = []  # of its prompt, while pending
        self.hit_blocks = 0  # of these, expected to be cached when it is computed
        self.leader: Flight | None = None  # while pending: the request that computes the last block of this hit
        self.awaited = 0  # tokens of the leader's work that are to be computed in earlier steps
        self.turn = 0  # number of the earliest step that may compute it
        self.wait_ms = 0.0  # for blocks, as expected when it was sent
        self.sent_at = 0.0
        self.answered_at: float | None = None
        self.is_assumed = False
        self.period: Period | None = None  # from its first token until its work is known
        self.done_before = 0  # state of the replica at its first token
        self.pairs_before = self.streams_before = self.resident_before = 0.0

    @property
    def expected_ms(self) -> float:
        """Time to its first token, as expected when it was sent."""
        return self.backlog_ms + self.prefill_ms

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt that it does not compute."""
        return self.prompt_tokens - self.work.tokens


def leader_of(block_hashes: Sequence[BlockHash], hit: int, pending: Iterable[Flight]) -> Flight | None:
    """Return the pending request that computes the last block of a hit of so many blocks, if there is one."""
    if not hit:
        return None
    last = block_hashes[hit - 1]
    for other in pending:
        if other.hit_blocks < hit <= len(other.block_hashes) and other.block_hashes[hit - 1] == last:
            return other
    return None
