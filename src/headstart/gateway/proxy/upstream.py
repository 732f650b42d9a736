"""Upstream: one attempt to have one replica answer one request, and in which way it failed if it did."""

from collections.abc import Iterable, Mapping
from enum import Enum

import aiohttp
import msgspec

from headstart.core.errors import HeadstartError

HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_OTHER_TARGETS = frozenset(  # some frameworks take these for the path or the method, which the router has judged
    (b"x-original-url", b"x-rewrite-url", b"x-http-method", b"x-http-method-override", b"x-method-override")
)
_OF_THIS_REQUEST = frozenset((b"host", b"content-length", b"accept-encoding", b"expect", b"x-headstart-explain"))
_NOT_SENT_ON = HOP_BY_HOP | _OTHER_TARGETS | _OF_THIS_REQUEST
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
    UNREACHED = "unreached"  # no connection in time: the replica is down, or the router itself was too slow
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
            *(Failure.REFUSED, Failure.UNREACHED, Failure.LOST, Failure.DEAD, Failure.HUNG),
            *(Failure.DRAINING, Failure.LOADING),
        )

    @property
    def is_of_connection(self) -> bool:
        """Whether the connection may be all that failed: the replica itself may well answer over another one."""
        return self in (Failure.REFUSED, Failure.UNREACHED, Failure.LOST)

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
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return Failure.UNREACHED
    if isinstance(error, aiohttp.ClientConnectorError):
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


def headers_on(
    headers: Iterable[tuple[bytes, bytes]], own: Mapping[str, str], sender: str = ""
) -> list[tuple[str, str]]:
    """Return a client's headers as they are sent on, repeated ones repeated, with `own` instead of those of its names.

    The headers of the client's connection end here: the hop-by-hop ones and those that `Connection` names. The address
    of the `sender`, if it is given, is added to those that the request came by. `headers` as in an ASGI scope.
    """
    sent, route, dropped = list[tuple[str, str]](), "", set[str]()
    for raw, value in headers:
        if raw in _NOT_SENT_ON:
            if raw == b"connection":
                dropped |= _names_in(value)
            continue
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        if name == "x-forwarded-for":
            route += text + ", "
        elif name not in own:
            sent.append((name, text))
    if dropped:
        sent = [header for header in sent if header[0] not in dropped]
    if "content-type" not in dict(sent):
        sent.append(("content-type", "application/json"))
    if sender:
        sent.append(("x-forwarded-for", route + sender))
    return [*sent, ("accept-encoding", "identity"), *own.items()]


def headers_back(response: aiohttp.ClientResponse, content_type: bytes = b"") -> "list[tuple[bytes, bytes]]":
    """Return those of a replica's headers that are passed back: a closed list, printable values, repeats kept.

    What a replica says beside these is not meant for clients: cookies, redirects, its own name and address.
    `content_type`: what is said of the body instead of the replica's own word.
    """
    kept, dropped = list[tuple[bytes, bytes]](), set[str]()
    for header in response.raw_headers:
        name = header[0].lower()
        if name in _SENT_BACK or name.startswith(_SENT_BACK_PREFIXES):
            kept.append((name, header[1]))
        elif name == b"connection":
            dropped |= _names_in(header[1])
        elif name == b"content-type" and not content_type:
            content_type = header[1]
    found = [header for header in kept if header[0].decode("latin-1") not in dropped] if dropped else kept
    if content_type:
        found.insert(0, (b"content-type", content_type))
    return [header for header in found if header[1].decode("latin-1").isprintable()]


def _names_in(value: bytes) -> set[str]:
    """Return the names that a `Connection` header declares to be of one connection only (RFC 9110, 7.6.1)."""
    return {word.strip().lower() for word in value.decode("latin-1").split(",")}
