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
_OF_THIS_REQUEST = frozenset(("host", "content-length", "accept-encoding", "expect", "x-headstart-explain"))
_NOT_SENT_ON = HOP_BY_HOP | _OTHER_TARGETS | _OF_THIS_REQUEST
_NEVER_DROPPED = "x-forwarded-for"  # the router's own: without it a replica takes the client for one of its machine
_SENT_BACK = frozenset(
    (
        *(b"cache-control", b"content-disposition", b"content-language", b"deprecation", b"retry-after"),
        *(b"www-authenticate", b"x-accel-buffering", b"x-should-retry"),
    )
)
_SENT_BACK_PREFIXES = (b"openai-", b"x-ratelimit-")
GATEWAY_STATUSES = (502, 504)  # a gateway in front of a replica says that it lost it


class Failure(Enum):
    """Why an attempt brought no answer."""

    REFUSED = "refused"  # no connection at all: nobody is there
    LOST = "lost"  # the connection ended without an answer
    DEAD = "dead"  # its front is there, and says that its engine has died
    HUNG = "hung"  # the replica as a whole has gone silent, by more evidence than this request's own waiting
    SILENT = "silent"  # nothing came for too long
    GARBLED = "garbled"  # what came is no answer
    DRAINING = "draining"  # it said that it takes nothing new
    LOADING = "loading"
    BUSY = "busy"  # 429
    BROKEN = "broken"  # 502, 503, 504

    @property
    def is_free(self) -> bool:
        """Whether trying another one is none of the retries that must be few: who fails so gets no more requests.

        Losses that may be the request's own doing are bounded by MAX_LOSSES of proxy.py.
        """
        return self in (
            *(Failure.REFUSED, Failure.LOST, Failure.DEAD, Failure.HUNG),
            *(Failure.DRAINING, Failure.LOADING),
        )

    @property
    def is_its_fault(self) -> bool:
        """Whether it counts against the replica's health."""
        return self not in (Failure.DRAINING, Failure.LOADING, Failure.BUSY)

    @property
    def is_loss(self) -> bool:
        """Whether the replica may have been lost because of the very request that was sent there."""
        return self in (Failure.LOST, Failure.DEAD, Failure.HUNG, Failure.SILENT)


class Answer:
    """An answer of a replica that is no stream of events. `is_whole`: `body` is all of it, not its beginning only."""

    def __init__(
        self, status: int, headers: "list[tuple[bytes, bytes]]", body: bytes, *, is_whole: bool = True
    ) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.is_whole = is_whole


class AttemptError(HeadstartError):
    """An attempt failed before the client had anything of an answer. `answer`: what the replica said, if anything."""

    def __init__(self, failure: Failure, detail: str, answer: Answer | None = None) -> None:
        super().__init__(detail)
        self.failure = failure
        self.answer = answer

    @property
    def is_loss(self) -> bool:
        """Whether the replica, or the one behind a gateway, may have been lost because of this request."""
        return self.failure.is_loss or (self.answer is not None and self.answer.status in GATEWAY_STATUSES)


class GarbledError(aiohttp.ClientError):
    """What a replica sent is no answer. The message is in our own words and holds nothing of what came."""


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def failure_of(error: BaseException) -> Failure:
    """What an exception of the client library means."""
    if isinstance(error, GarbledError | aiohttp.ClientResponseError) and not isinstance(
        error, aiohttp.ServerDisconnectedError
    ):
        return Failure.GARBLED  # ClientResponseError: the head could not be parsed
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return Failure.REFUSED
    return Failure.SILENT if isinstance(error, TimeoutError) else Failure.LOST


def refusal(status: int, body: bytes) -> Failure | None:
    """Which failure an answer is for which another replica should be asked; None: the answer is the client's."""
    if status == 429:
        return Failure.BUSY
    if status not in (502, 503, 504):
        return None
    return _failure_by_code(_error_in(body).code) if b'"' in body else Failure.BROKEN


def refusal_in_event(document: bytes) -> tuple[Failure | None, int]:
    """The same of an error that is the first event of a stream, and the HTTP status that it stands for."""
    error = _error_in(document)
    code = error.code
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
        return (_refusal_of_status(code), code)
    if code == "queue_full":
        return Failure.BUSY, 429
    failure = _failure_by_code(code)
    if failure is not Failure.BROKEN:
        return failure, 503
    return None, 400 if error.type == "invalid_request_error" else 500


def _refusal_of_status(status: int) -> Failure | None:
    if status == 429:
        return Failure.BUSY
    return Failure.BROKEN if status in (502, 503, 504) else None


def _failure_by_code(code: str | int | None) -> Failure | None:
    """The failure that the code of an error object tells."""
    if code == "replica_lost":
        return None  # a router's own last word: it has tried what may be tried
    if code == "engine_dead":
        return Failure.DEAD
    if code == "engine_silent":
        return Failure.LOADING  # nothing was admitted, and it may come back
    return Failure(code) if code in ("draining", "loading") else Failure.BROKEN


def _error_in(document: bytes) -> _Error:
    try:
        return msgspec.json.decode(document, type=_ErrorBody).error or _Error()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Error()


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


def headers_back(response: aiohttp.ClientResponse, content_type: bytes = b"") -> "list[tuple[bytes, bytes]]":
    """Return those of a replica's headers that are passed back: a closed list, printable values, repeats kept.

    What a replica says beside these is not meant for clients: cookies, redirects, its own name and address.
    `content_type`: what is said of the body instead of the replica's own word.
    """
    headers = [(name.lower(), value) for name, value in response.raw_headers]
    dropped = _connection_names((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    types = [content_type] if content_type else [value for name, value in headers if name == b"content-type"][:1]
    found = [(b"content-type", value) for value in types if value.decode("latin-1").isprintable()]
    for name, value in headers:
        known = name in _SENT_BACK or name.startswith(_SENT_BACK_PREFIXES)
        if known and name.decode("latin-1") not in dropped and value.decode("latin-1").isprintable():
            found.append((name, value))
    return found


def _connection_names(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the names that `Connection` headers declare to be of one connection only (RFC 9110, 7.6.1)."""
    values = (value for name, value in headers if name == "connection")
    return {word.strip().lower() for value in values for word in value.split(",")} - {_NEVER_DROPPED}
