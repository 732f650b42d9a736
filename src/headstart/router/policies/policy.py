"""Policy: the seam between what is known of the replicas and the order in which they are asked."""

from typing import NamedTuple, Protocol

from headstart.router.endpoint import Endpoint
from headstart.router.policies.rendezvous import weight
from headstart.router.routing_request import RoutingRequest


class Candidate(NamedTuple):
    """A replica that may serve a request, and how much of the prompt it is believed to have cached."""

    endpoint: Endpoint
    hit_blocks: int
    hit_tokens: int  # at most all but one of the prompt's

    @property
    def name(self) -> str:
        return self.endpoint.name


class View(NamedTuple):
    """All a policy decides by. `key` is the name of the prompt's first block that no replica has."""

    ask: RoutingRequest
    candidates: tuple[Candidate, ...]
    key: bytes
    now: float

    @property
    def prompt_tokens(self) -> int:
        return self.ask.prompt.num_tokens


class Choice(NamedTuple):
    """Candidates in the order in which they are asked: the first, and if that fails the others.

    `scores` are the policy's own numbers of `ranked`, `memo` what it wants to be given back.
    """

    ranked: tuple[Candidate, ...]
    scores: tuple[float, ...]
    reason: str
    memo: object = None


class Policy(Protocol):
    """How a replica is chosen. Nothing changes before `picked`."""

    name: str
    lower_is_better: bool

    def choose(self, view: View) -> Choice:
        """The order of all candidates of a view; there is at least one."""
        ...

    def picked(self, choice: Choice, endpoint: Endpoint) -> None:
        """The request went to this one."""
        ...


def by_number(view: View, numbers: list[float], reason: str, memo: object = None) -> Choice:
    """Candidates by a number, the smallest first; of equal ones that first which goes best with the key."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    best = numbers[order[0]]
    ties = [i for i in order if numbers[i] == best]
    if len(ties) > 1:
        ties.sort(key=lambda i: weight(view.key, view.candidates[i].name), reverse=True)
        order[: len(ties)] = ties
    return Choice(tuple(view.candidates[i] for i in order), tuple(numbers[i] for i in order), reason, memo)
