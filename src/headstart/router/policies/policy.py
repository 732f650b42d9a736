"""Policy: the seam between the state of the replicas and their ranking."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, overload

from headstart.router.endpoint import Endpoint
from headstart.router.policies.rendezvous import rendezvous_weights
from headstart.router.routing_request import RoutingRequest


class Candidate(NamedTuple):
    """A replica that may serve a request, and how much of the prompt is predicted to be cached there."""

    endpoint: Endpoint
    hit_blocks: int
    hit_tokens: int  # at most all but one of the prompt's

    @property
    def name(self) -> str:
        return self.endpoint.name


class Candidates(Sequence[Candidate]):
    """Candidates in an order; each is made when it is asked for. The columns are in the order of the fleet."""

    __slots__ = ("_order", "endpoints", "hit_blocks", "hit_tokens")

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        hit_blocks: Sequence[int],
        hit_tokens: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> None:
        self.endpoints, self.hit_blocks, self.hit_tokens = endpoints, hit_blocks, hit_tokens
        self._order = range(len(endpoints)) if order is None else order

    def reordered(self, order: Sequence[int]) -> "Candidates":
        """Return the candidates of these positions in the fleet, in this order."""
        return Candidates(self.endpoints, self.hit_blocks, self.hit_tokens, order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._of, self._order)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> "Candidates": ...
    def __getitem__(self, index: int | slice) -> "Candidate | Candidates":
        if isinstance(index, slice):
            return self.reordered(self._order[index])
        return self._of(self._order[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidates) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _of(self, place: int) -> Candidate:
        return Candidate(self.endpoints[place], self.hit_blocks[place], self.hit_tokens[place])


class PolicyInput(NamedTuple):
    """The input of a policy. `key` is the hash of the prompt's first block that no replica has."""

    request: RoutingRequest
    candidates: Candidates
    key: bytes
    now: float

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.prompt.num_tokens


class RankedCandidates(NamedTuple):
    """Candidates in ranked order: the first is used, the others are fallbacks.

    `scores` are the policy's own numbers of `ranked`; `memo` is passed back to the policy by `record_pick`.
    """

    ranked: Sequence[Candidate]
    scores: tuple[float, ...]
    reason: str
    memo: object = None


class Policy(Protocol):
    """A ranking of replicas. No state changes before `record_pick`."""

    name: str

    def rank(self, view: PolicyInput) -> RankedCandidates:
        """Rank all candidates of a view; there is at least one."""
        ...

    def record_pick(self, choice: RankedCandidates, endpoint: Endpoint) -> None:
        """Record that the request is sent to this replica. Policies without a state need not define it."""


def rank_by_number(view: PolicyInput, numbers: list[float], reason: str, memo: object = None) -> RankedCandidates:
    """Rank candidates by a number, smallest first; ties by the weight of the key."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    best = numbers[order[0]]
    ties = [i for i in order if numbers[i] == best]
    if len(ties) > 1:
        ranks = rendezvous_weights(view.key, [view.candidates.endpoints[i].digest for i in ties])
        order[: len(ties)] = [ties[place] for place in ranks.argsort()[::-1]]
    return RankedCandidates(view.candidates.reordered(order), tuple(numbers[i] for i in order), reason, memo)
