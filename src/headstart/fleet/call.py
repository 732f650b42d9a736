"""Call: one request of a client, from its admission to its end, and what became of it."""

from dataclasses import dataclass, field

from headstart.fleet.reading import Reading
from headstart.fleet.upstream import Failure
from headstart.router.pick import Pick


@dataclass(slots=True)
class Call:
    """One request of a client and what became of it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    reading: Reading
    request_id: str
    explains: bool = False
    shows_replica: bool = False  # the client is an administrator
    tried: list[str] = field(default_factory=list[str])  # who is not to be asked again
    num_attempts: int = 0
    num_losses: int = 0  # attempts under which a replica was lost, perhaps because of this request
    was_late: bool = False  # it was taken from a replica that seemed silent by its lateness alone
    pick: Pick | None = None  # the last one
    route: bytes = b""  # why that one was picked
    is_pending: bool = False  # without a first token, as far as we know
    started: bool = False  # the client has a status line
    committed: bool = False  # and a part of an answer
    first_token_at: float | None = None
    output_tokens: int | None = None
    answer_id: str = ""  # as the client gets it in the answer
    failures: list[Failure] = field(default_factory=list[Failure])
    outcome: str = "error"  # or ok; lost: in the middle of a stream; gone: the client went away
