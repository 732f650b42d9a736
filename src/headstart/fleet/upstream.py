"""Upstream: one attempt to have one replica answer one request, and in which way it failed if it did."""

from collections.abc import Iterable, Mapping
from enum import Enum

import aiohttp
import msgspec

from headstart.core.errors import HeadstartError

HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    )
)
_OTHER_TARGETS = frozenset(  # some frameworks take these for the path or the method, which the router has judged
    ("x-original-url", "x-rewrite-url", "x-http-method", "x-http-method-override", "x-method-override")
)
_ROUTING = frozenset(("x-headstart-replica", "x-headstart-route"))  # of another router: its replicas' addresses
_OF_THIS_REQUEST = frozenset(("host", "content-length", "accept-encoding", "expect", "x-headstart-explain"))
_NOT_SENT_ON = HOP_BY_HOP | _OTHER_TARGETS | _OF_THIS_REQUEST
_NOT_SENT_BACK = HOP_BY_HOP | _ROUTING | {"content-length", "date", "server", "x-request-id"}
_NEVER_DROPPED = "x-forwarded-for"  # the router's own: without it a replica takes the client for one of its machine


class Failure(Enum):
    """Why an attempt brought no answer."""

    REFUSED = "refused"  # no connection at all: nobody is there
    LOST = "lost"  # the connection ended without an answer
    SILENT = "silent"  # nothing came for too long
    DRAINING = "draining"  # it said that it takes nothing new
    LOADING = "loading"
    BUSY = "busy"  # 429
    BROKEN = "broken"  # 502, 503, 504

    @property
    def is_free(self) -> bool:
        """Whether trying another one is none of the retries that must be few: who fails so gets no more requests."""
        return self in (Failure.REFUSED, Failure.LOST, Failure.DRAINING, Failure.LOADING)

    @property
    def is_its_fault(self) -> bool:
        """Whether it counts against the replica's health."""
        return self in (Failure.REFUSED, Failure.LOST, Failure.SILENT, Failure.BROKEN)


class Answer:
    """A whole answer of a replica: what it says when it refuses, or all of an answer that is no stream."""

    def __init__(self, status: int, headers: "list[tuple[bytes, bytes]]", body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


class AttemptError(HeadstartError):
    """An attempt failed before the client had anything of an answer. `answer`: what the replica said, if anything."""

    def __init__(self, failure: Failure, detail: str, answer: Answer | None = None) -> None:
        super().__init__(detail)
        self.failure = failure
        self.answer = answer


class _Error(msgspec.Struct):
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def failure_of(error: BaseException) -> Failure:
    """What an exception of the client library means."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Failure.REFUSED
    return Failure.SILENT if isinstance(error, TimeoutError) else Failure.LOST


def refusal(status: int, body: bytes) -> Failure | None:
    """Which failure an answer is for which another replica should be asked; None: the answer is the client's."""
    if status == 429:
        return Failure.BUSY
    if status not in (502, 503, 504):
        return None
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    code = error.code if error is not None else None
    return Failure(code) if code in ("draining", "loading") else Failure.BROKEN


def headers_on(headers: Iterable[tuple[bytes, bytes]], own: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a client's headers as they are sent on, repeated ones repeated, with `own` instead of those of its names.

    The headers of the client's connection end here: the hop-by-hop ones and those that `Connection` names.
    """
    decoded = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    dropped = _NOT_SENT_ON | _connection_names(decoded) | {name.lower() for name in own}
    sent = [(name, value) for name, value in decoded if name not in dropped]
    if not any(name == "content-type" for name, _ in sent):
        sent.append(("content-type", "application/json"))
    return [*sent, ("accept-encoding", "identity"), *own.items()]


def headers_back(response: aiohttp.ClientResponse) -> "list[tuple[bytes, bytes]]":
    """Return a replica's headers as they are sent back, without those of its connection to the router."""
    named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.raw_headers]
    dropped = _NOT_SENT_BACK | _connection_names(named)
    return [
        (name.lower(), value)
        for (name, value), (text, _) in zip(response.raw_headers, named, strict=True)
        if text not in dropped
    ]


def _connection_names(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names that `Connection` headers declare to be of one connection only (RFC 9110, 7.6.1)."""
    values = (value for name, value in headers if name == "connection")
    return {word.strip().lower() for value in values for word in value.split(",")} - {_NEVER_DROPPED}
