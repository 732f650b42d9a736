"""Call: one client request at the router, from admission to its last byte: attempts, failures, outcome."""

from dataclasses import dataclass, field

from headstart.gateway.held_bytes import LARGE_BYTES, ByteReservation, bytes_of
from headstart.gateway.proxy.request_reader import ReadRequest
from headstart.gateway.proxy.upstream import Failure
from headstart.router.routing_decision import RoutingDecision


@dataclass(slots=True)
class ProxiedCall:
    """One request of a client and what became of it."""

    path: str
    headers: list[tuple[bytes, bytes]]
    sender: str  # address
    reading: ReadRequest
    request_id: str
    explains: bool = False
    shows_replica: bool = False  # the client is an administrator
    hold: ByteReservation | None = None  # of memory; None: it is not counted
    num_rest_bytes: int = 0  # of an event whose end has not come
    is_trimmed: bool = False  # its prompt is too long to be kept for the explainer
    tried: list[str] = field(default_factory=list[str])  # who is not to be asked again
    num_attempts: int = 0
    num_losses: int = 0  # attempts under which a replica was lost, perhaps because of this request
    was_late: bool = False  # it was taken from a replica that seemed silent by its lateness alone
    pick: RoutingDecision | None = None  # the last one
    route: bytes = b""  # why that one was picked
    is_pending: bool = False  # without a first token, as far as we know
    started: bool = False  # the client has a status line
    committed: bool = False  # and a part of an answer
    first_token_at: float | None = None
    output_tokens: int | None = None
    answer_id: str = ""  # as the client gets it in the answer
    failures: list[Failure] = field(default_factory=list[Failure])
    outcome: str = "error"  # or ok; lost: in the middle of a stream; gone: the client went away

    def trim(self) -> None:
        """Free what a large request needs no more once its blocks have their names: text and tokens of its prompt."""
        if not self.is_trimmed and len(self.reading.body) >= LARGE_BYTES:
            self.is_trimmed = True
            self.reading.ask.prompt.drop_tokens()
            self.reading.text = None
            if self.hold is not None:
                self.hold.set(bytes_of(self.reading) + self.num_rest_bytes)

    def drop_body(self) -> None:
        """Free the body: it is sent to no other replica."""
        num_bytes, self.reading.body = len(self.reading.body), b""
        if self.hold is not None:
            self.hold.grow(-num_bytes)

    def hold_rest(self, num_bytes: int) -> None:
        """Count what is kept of an unfinished event. Raises QueueFullError."""
        if self.hold is not None:
            self.hold.grow(num_bytes - self.num_rest_bytes)
            self.num_rest_bytes = num_bytes
