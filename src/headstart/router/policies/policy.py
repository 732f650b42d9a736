"""Policy: the seam between the state of the replicas and their ranking."""

from typing import NamedTuple, Protocol

from headstart.router.endpoint import Endpoint
from headstart.router.policies.rendezvous import weights
from headstart.router.routing_request import RoutingRequest


class Candidate(NamedTuple):
    """A replica that may serve a request, and how much of the prompt is predicted to be cached there."""

    endpoint: Endpoint
    hit_blocks: int
    hit_tokens: int  # at most all but one of the prompt's

    @property
    def name(self) -> str:
        return self.endpoint.name


class View(NamedTuple):
    """The input of a policy. `key` is the hash of the prompt's first block that no replica has."""

    request: RoutingRequest
    candidates: tuple[Candidate, ...]
    key: bytes
    now: float

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt.num_tokens


class Choice(NamedTuple):
    """Candidates in ranked order: the first is used, the others are fallbacks.

    `scores` are the policy's own numbers of `ranked`; `memo` is passed back to the policy by `picked`.
    """

    ranked: tuple[Candidate, ...]
    scores: tuple[float, ...]
    reason: str
    memo: object = None


class Policy(Protocol):
    """A ranking of replicas. No state changes before `picked`."""

    name: str
    lower_is_better: bool

    def choose(self, view: View) -> Choice:
        """Rank all candidates of a view; there is at least one."""
        ...

    def picked(self, choice: Choice, endpoint: Endpoint) -> None:
        """Record that the request is sent to this replica."""
        ...


def by_number(view: View, numbers: list[float], reason: str, memo: object = None) -> Choice:
    """Rank candidates by a number, smallest first; ties by the weight of the key."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    best = numbers[order[0]]
    ties = [i for i in order if numbers[i] == best]
    if len(ties) > 1:
        ranks = weights(view.key, [view.candidates[i].endpoint.digest for i in ties])
        order[: len(ties)] = [ties[place] for place in ranks.argsort()[::-1]]
    return Choice(tuple(view.candidates[i] for i in order), tuple(numbers[i] for i in order), reason, memo)
