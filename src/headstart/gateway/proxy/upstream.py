"""Upstream: one attempt to get an answer from one replica, and the ways in which it can fail."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
_OTHER_TARGETS = frozenset(  # some frameworks override the path or method by these, after the router checked them
    (b"x-original-url", b"x-rewrite-url", b"x-http-method", b"x-http-method-override", b"x-method-override")
)
_OF_THIS_REQUEST = frozenset(
    (
        *(b"host", b"content-length", b"accept-encoding", b"expect", b"x-headstart-explain"),
        *(b"x-headstart-priority", b"x-headstart-timeout-ms"),
        b"x-gateway-destination-endpoint",  # addresses of replicas, for a gateway
    )
)
_NOT_SENT_ON = HOP_BY_HOP | _OTHER_TARGETS | _OF_THIS_REQUEST
SENT_BACK = frozenset(
    (
        *(b"cache-control", b"content-disposition", b"content-language", b"deprecation", b"retry-after"),
        *(
            b"www-authenticate",
            b"x-accel-buffering",
            b"x-should-retry",
            b"server-timing",
            b"x-headstart-dropped-keywords",
        ),
    )
)
SENT_BACK_PREFIXES = (b"openai-", b"x-ratelimit-")
GATEWAY_STATUSES = (502, 504)  # a gateway in front of a replica reports that it lost it


class AttemptFailureReason(Enum):
    """The reason why an attempt brought no answer."""

    REFUSED = "refused"  # no connection: no server is listening
    UNREACHED = "unreached"  # no connection in time: the replica is down, or the router itself was too slow
    LOST = "lost"  # the connection ended without an answer
    DEAD = "dead"  # its HTTP server answers, and reports that its engine has died
    HUNG = "hung"  # the whole replica is silent, by more evidence than this request's own wait
    SILENT = "silent"  # nothing arrived for too long
    GARBLED = "garbled"  # the response is not a valid answer
    DRAINING = "draining"  # it accepts no new requests
    LOADING = "loading"
    BUSY = "busy"  # 429
    BROKEN = "broken"  # 502, 503, 504

    @property
    def costs_no_retry(self) -> bool:
        """Whether another attempt is free of the retry budget: a replica that fails so gets no more requests.

        Losses that the request itself may cause are bounded by MAX_LOSSES of proxy.py.
        """
        return self in (
            *(
                AttemptFailureReason.REFUSED,
                AttemptFailureReason.UNREACHED,
                AttemptFailureReason.LOST,
                AttemptFailureReason.DEAD,
                AttemptFailureReason.HUNG,
            ),
            *(AttemptFailureReason.DRAINING, AttemptFailureReason.LOADING),
        )

    @property
    def is_connection_failure(self) -> bool:
        """Whether possibly only the connection failed: the replica may answer over another one."""
        return self in (AttemptFailureReason.REFUSED, AttemptFailureReason.UNREACHED, AttemptFailureReason.LOST)

    @property
    def is_transient(self) -> bool:
        """Whether the replica is expected back soon: its connection failed, or it is being restarted."""
        return self.is_connection_failure or self in (AttemptFailureReason.DRAINING, AttemptFailureReason.LOADING)

    @property
    def counts_against_health(self) -> bool:
        """Whether it counts against the replica's health."""
        return self not in (AttemptFailureReason.DRAINING, AttemptFailureReason.LOADING, AttemptFailureReason.BUSY)

    @property
    def may_have_killed_replica(self) -> bool:
        """Whether the replica may have been lost because of the request sent to it."""
        return self in (
            AttemptFailureReason.LOST,
            AttemptFailureReason.DEAD,
            AttemptFailureReason.HUNG,
            AttemptFailureReason.SILENT,
        )


@dataclass(slots=True)
class UnstreamedReplicaAnswer:
    """An answer of a replica that is no event stream. `is_whole`: `body` is complete, not only its beginning."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_whole: bool = True


class AttemptError(HeadstartError):
    """An attempt failed before the client received any part of an answer. `answer`: the replica's response, if any."""

    def __init__(
        self, failure: AttemptFailureReason, detail: str, answer: UnstreamedReplicaAnswer | None = None
    ) -> None:
        super().__init__(detail)
        self.failure = failure
        self.answer = answer

    @property
    def may_have_killed_replica(self) -> bool:
        """Whether the replica, or one behind a gateway, may have been lost because of this request."""
        return self.failure.may_have_killed_replica or (
            self.answer is not None and self.answer.status in GATEWAY_STATUSES
        )


class InvalidReplicaResponseError(aiohttp.ClientError):
    """A replica's response is not a valid answer. The message contains nothing of the response."""


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(_Error):
    error: _Error | str | None = None  # Ollama's is a text


def classify_client_error(error: BaseException) -> AttemptFailureReason:
    """Return the failure that an exception of the HTTP client means."""
    if isinstance(error, InvalidReplicaResponseError | aiohttp.ClientResponseError) and not isinstance(
        error, aiohttp.ServerDisconnectedError
    ):
        return AttemptFailureReason.GARBLED  # ClientResponseError: the head could not be parsed
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return AttemptFailureReason.UNREACHED
    if isinstance(error, aiohttp.ClientConnectorError):
        return AttemptFailureReason.REFUSED
    return AttemptFailureReason.SILENT if isinstance(error, TimeoutError) else AttemptFailureReason.LOST


def classify_refusal(status: int, body: bytes) -> AttemptFailureReason | None:
    """Return the failure for which another replica is tried; None: the answer is for the client."""
    if status == 429:
        return AttemptFailureReason.BUSY
    if status not in (502, 503, 504):
        return None
    return _failure_by_code(_error_in(body).code) if b'"' in body else AttemptFailureReason.BROKEN


def classify_error_event(document: bytes) -> tuple[AttemptFailureReason | None, int]:
    """Return the same for an error in the first event of a stream, and the HTTP status that it stands for."""
    error = _error_in(document)
    code = error.code
    if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
        return (_refusal_of_status(code), code)
    if code == "queue_full":
        return AttemptFailureReason.BUSY, 429
    failure = _failure_by_code(code)
    if failure is not AttemptFailureReason.BROKEN:
        return failure, 503
    return None, 400 if error.type == "invalid_request_error" else 500


def _refusal_of_status(status: int) -> AttemptFailureReason | None:
    if status == 429:
        return AttemptFailureReason.BUSY
    return AttemptFailureReason.BROKEN if status in (502, 503, 504) else None


def _failure_by_code(code: str | int | None) -> AttemptFailureReason | None:
    """Return the failure that the code of an error object means."""
    if code == "replica_lost":
        return None  # from another router, which has made all its attempts
    if code == "engine_dead":
        return AttemptFailureReason.DEAD
    if code == "engine_silent":
        return AttemptFailureReason.LOADING  # nothing was admitted, and it may come back
    return AttemptFailureReason(code) if code in ("draining", "loading") else AttemptFailureReason.BROKEN


def _error_in(document: bytes) -> _Error:
    try:
        body = msgspec.json.decode(document, type=_ErrorBody)
        return body.error if isinstance(body.error, _Error) else body  # that of the Responses API and of Ollama is flat
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Error()


def forwarded_request_headers(
    headers: Iterable[tuple[bytes, bytes]], own: Mapping[str, str], sender: str = ""
) -> list[tuple[str, str]]:
    """Return a client's headers as they are forwarded, repeats kept, with `own` in place of headers of the same name.

    The headers of the client's connection are dropped: the hop-by-hop ones and those that `Connection` lists. The
    address `sender`, if given, is appended to x-forwarded-for. `headers` as in an ASGI scope.
    """
    sent, route, dropped = list[tuple[str, str]](), "", set[str]()
    for raw, value in headers:
        if raw in _NOT_SENT_ON:
            if raw == b"connection":
                dropped |= _names_in(value)
            continue
        if raw == b"x-api-key" and "authorization" in own:
            continue  # the other way to send a key
        name, text = raw.decode("latin-1"), value.decode("latin-1")
        if name == "x-forwarded-for":
            route += text + ", "
        elif name not in own and not (name == "tracestate" and "traceparent" in own):
            sent.append((name, text))
    if dropped:
        sent = [header for header in sent if header[0] not in dropped]
    if "content-type" not in dict(sent):
        sent.append(("content-type", "application/json"))
    if sender:
        sent.append(("x-forwarded-for", route + sender))
    return [*sent, ("accept-encoding", "identity"), *own.items()]


def request_header_changes(
    headers: Iterable[tuple[bytes, bytes]], own: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Return the headers that another proxy must set, and those it must remove, to forward a request as
    `forwarded_request_headers`.

    The headers of the client's connection, and x-forwarded-for, are left to that proxy.
    """
    removed = {name for name, _ in headers if name in _OTHER_TARGETS or name == b"x-headstart-explain"}
    if "authorization" in own:
        removed.add(b"x-api-key")
    if "traceparent" in own and "tracestate" not in own:
        removed.add(b"tracestate")
    return {"accept-encoding": "identity", **own}, sorted(name.decode("latin-1") for name in removed)


def returned_response_headers(
    headers: Iterable[tuple[bytes, bytes]], content_type: bytes = b""
) -> "list[tuple[bytes, bytes]]":
    """Return the headers of a replica that are returned to the client: a closed list, printable values, repeats kept.

    All others are not meant for clients: cookies, redirects, the replica's name and address. `content_type` replaces
    the replica's own.
    """
    kept, dropped = list[tuple[bytes, bytes]](), set[str]()
    for header in headers:
        name = header[0].lower()
        if name in SENT_BACK or name.startswith(SENT_BACK_PREFIXES):
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
    """Return the header names that a `Connection` header marks as hop-by-hop (RFC 9110, 7.6.1)."""
    return {word.strip().lower() for word in value.decode("latin-1").split(",")}
