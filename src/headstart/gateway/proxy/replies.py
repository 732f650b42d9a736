"""Replies: responses of replicas, read within bounds and validated before any part is relayed or used.

A replica is trusted to compute, not to send valid HTTP: a proxy in front of it may answer with HTML, and its port may
belong to another program by now. On generation routes, a success is status 200 and a JSON object with choices, or a
stream of events whose first one is a JSON object. An error keeps its status, and its body only if that is an error
object.

ResponseReplicas: the replica that holds each stored response, by the id of the response.

Only this router's latest answers are known: ids of another router, of before a restart, or beyond MAX_RESPONSES are
unknown, and their requests are answered with 404.
"""

import codecs
import json
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import aiohttp
import msgspec

from headstart.apis.api import Api
from headstart.apis.api_table import APIS, OTHER, UNCACHED, api_of_path, generation_api_of_path
from headstart.core.errors import NoReplicaError
from headstart.gateway.proxy.upstream import (
    AttemptError,
    AttemptFailureReason,
    InvalidReplicaResponseError,
    UnstreamedReplicaAnswer,
    returned_response_headers,
)
from headstart.http.http_errors import HttpError
from headstart.openai.json_pieces import encode_json
from headstart.openai.request_json import parse_json
from headstart.openai.responses import error_object
from headstart.router.routing_decision import RoutingDecision

MAX_ANSWER_BYTES = 64 << 20  # on routes that do not generate
KEPT_BYTES = 8 << 20
"""Most bytes of an answer that are kept until it is complete, while all together are within MAX_KEPT_BYTES.

A longer one is relayed as it arrives, and no other replica is tried then.
"""
MAX_ERROR_BYTES = 1 << 20
UNCOUNTED_BYTES = 16 << 10  # of an answer that arrived at once; not counted as held
MAX_INTERIM = 32  # responses of status 1xx before the final one
_JSON = b"application/json"
_SLICE_BYTES = 64 << 10
ID_BYTES = 512  # at the beginning of an answer that are searched for its id
_ID = re.compile(rb'"id"\s*:\s*"([A-Za-z0-9._:-]{1,128})"')
MAX_WATCHED = 20  # decisions
WATCH_SECONDS = 10.0  # for which decisions are noted after the last look
WATCH_INTERVAL = 0.05  # seconds between two that are noted
MAX_EXPLAINED = 16  # replicas in the header that explains a decision: it must fit into a response head
MAX_RESPONSES = 32_768  # about 300 bytes each


def client_session_options() -> dict[str, Any]:
    """Return the options of a session with replicas: no decompression, bounded interim responses, no cookies."""
    return {"auto_decompress": False, "response_class": InterimLimitedResponse, "cookie_jar": aiohttp.DummyCookieJar()}


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
JSON_ROUTES = UNCACHED | {api.path for api in APIS}
"""The routes whose answers are JSON objects, or streams of them."""


class InterimLimitedResponse(aiohttp.ClientResponse):
    """A response with a bounded number of interim responses before it."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the head. Raises InvalidReplicaResponseError after MAX_INTERIM heads of status 1xx."""
        protocol, count = connection.protocol, 0
        read = protocol.read

        def counted() -> Any:
            nonlocal count
            count += 1
            if count > MAX_INTERIM:
                raise InvalidReplicaResponseError("more than 32 interim responses")
            return read()

        protocol.read = counted  # aiohttp reads interim responses in a loop of its own that has no bound
        try:
            return await super().start(connection)
        finally:
            del protocol.read


def check_if_event_stream(response: aiohttp.ClientResponse, path: str) -> bool:
    """Return whether a stream of events follows. Raises InvalidReplicaResponseError for an invalid head."""
    status = response.status
    if not (200 <= status < 300 or 400 <= status < 600) or status == 407:
        raise InvalidReplicaResponseError(f"the replica answered with status {status}")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise InvalidReplicaResponseError("the replica answered in an encoding that it was not asked for")
    if generation_api_of_path(path) is not OTHER and status < 300 and status != 200:
        raise InvalidReplicaResponseError(f"the replica answered with status {status}")
    return status == 200 and response.content_type == generation_api_of_path(path).end.media_type


def _keep_all(num_bytes: int) -> bool:
    return True


async def read_bounded_body(
    response: aiohttp.ClientResponse, max_bytes: int, keep: Callable[[int], object] = _keep_all
) -> bytes:
    """Return the body. Raises InvalidReplicaResponseError if it is longer than `max_bytes`. `keep` receives the size
    of each piece."""

    def kept(num_bytes: int) -> bool:
        keep(num_bytes)
        return True

    body, is_whole = await _read_up_to(response, max_bytes, kept)
    if not is_whole:
        raise InvalidReplicaResponseError(f"the replica's answer has more than {max_bytes} bytes")
    return body


async def _read_up_to(
    response: aiohttp.ClientResponse, max_bytes: int, keep: Callable[[int], bool]
) -> tuple[bytes, bool]:
    """Return the body and True, or False and its beginning: slightly more than `max_bytes`, or until `keep` says no."""
    pieces, size, is_kept = list[bytes](), 0, True
    while is_kept and (piece := await response.content.readany()):
        pieces.append(piece)
        size += len(piece)
        if size <= UNCOUNTED_BYTES and response.content.at_eof():
            break
        is_kept = keep(len(piece)) and size <= max_bytes
    return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), is_kept


async def read_complete_answer(
    response: aiohttp.ClientResponse, path: str, keep: Callable[[int], bool] = _keep_all
) -> UnstreamedReplicaAnswer:
    """Return an answer in one piece, the beginning of a long one, or an error.

    `keep` receives the size of each piece; once it returns False, no more of an answer is kept. Raises
    InvalidReplicaResponseError for anything else, and what `keep` raises.
    """
    status = response.status
    if status >= 400:
        body = await read_bounded_body(response, MAX_ERROR_BYTES)
        if not is_error_body(body):
            told = error_object(f"the replica answered {status}", status=status)
            body = encode_json(api_of_path(path).error_body(status, told, ""))
        return UnstreamedReplicaAnswer(status, returned_response_headers(response.raw_headers, _JSON), body)
    api = generation_api_of_path(path)
    if path not in JSON_ROUTES:
        return UnstreamedReplicaAnswer(
            status,
            returned_response_headers(response.raw_headers),
            await read_bounded_body(response, MAX_ANSWER_BYTES, keep),
        )
    body, is_whole = await _read_up_to(response, KEPT_BYTES, keep)
    if not is_whole:
        if not api.beginning.match(body):
            raise InvalidReplicaResponseError("the replica's answer does not begin like one of this route")
        return UnstreamedReplicaAnswer(
            status, returned_response_headers(response.raw_headers, _JSON), body, is_whole=False
        )
    _check_object(body, api.answer)
    return UnstreamedReplicaAnswer(status, returned_response_headers(response.raw_headers, _JSON), body)


def is_error_body(body: bytes) -> bool:
    """Return whether a body is an error as OpenAI, vLLM, SGLang or FastAPI write it."""
    try:
        value = parse_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(value, Mapping):
        return False
    found: Mapping[str, Any] = value
    error = found.get("error")
    if isinstance(error, Mapping):
        return isinstance(error.get("message"), str)
    return isinstance(error, str) or isinstance(found.get("message"), str) or "detail" in found


def begins_like_answer(beginning: bytes, api: Api) -> bool:
    """Return whether bytes are the beginning of a generated answer of an API, or of an event of it."""
    return api is not OTHER and api.beginning.match(beginning) is not None


def is_first_event_error(data: bytes) -> bool:
    """Return whether the first event of a stream is an error. Raises InvalidReplicaResponseError if it is no JSON
    object."""
    try:
        found = _FIELDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidReplicaResponseError("the replica's first event is no JSON object") from None
    is_named_error = bytes(found.get("type", b"")) == b'"error"'
    return is_named_error or ("error" in found and "choices" not in found)


def _check_object(body: bytes, decoder: "msgspec.json.Decoder[Any]") -> None:
    try:
        decoder.decode(body)
        if body.isascii():
            return
        decode = codecs.getincrementaldecoder("utf-8")().decode  # `decoder` does not validate the parts that it skips
        for start in range(0, len(body), _SLICE_BYTES):
            decode(body[start : start + _SLICE_BYTES], start + _SLICE_BYTES >= len(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidReplicaResponseError("the replica's answer is no JSON object of this route") from None


def find_answer_id(piece: bytes) -> str:
    """Return the first id in the beginning of an answer; "" if there is none."""
    found = _ID.search(piece, 0, ID_BYTES)
    return found[1].decode() if found else ""


def decision_header(decision: RoutingDecision) -> bytes:
    """Return the reasons of a routing decision as the value of a header."""
    return json.dumps(_explained(decision), separators=(",", ":")).encode()


class WatchedRoutingDecisions:
    """The latest routing decisions with the price of each replica; noted only while someone watches."""

    def __init__(self) -> None:
        self._latest: deque[dict[str, Any]] = deque(maxlen=MAX_WATCHED)
        self._until = self._next = -inf

    def record_if_watched(self, decision: RoutingDecision, now: float) -> None:
        """Note a decision about a prompt before it is sent; a few each second are enough to watch."""
        if self._next <= now < self._until and decision.view.num_prompt_tokens:
            self._next = now + WATCH_INTERVAL
            self._latest.appendleft(_explained(decision))

    def list_and_extend_watch(self, now: float) -> list[dict[str, Any]]:
        """Return the noted decisions, newest first, and note further ones for a while."""
        self._until = now + WATCH_SECONDS
        return list(self._latest)


def _explained(decision: RoutingDecision) -> dict[str, Any]:
    explanation = decision.explain()
    explanation["candidates"] = explanation["candidates"][:MAX_EXPLAINED]
    explanation["excluded"] = dict(list(explanation["excluded"].items())[:MAX_EXPLAINED])
    return explanation


def replica_lost_error() -> HttpError:
    """Return the error that ends a stream whose replica was lost."""
    return HttpError(
        502, "the replica was lost in the middle of this answer; send the request again", code="replica_lost"
    )


def too_many_losses_error(request_id: str, num_losses: int) -> HttpError:
    """Return the error of a request during which too many replicas were lost."""
    return HttpError(
        502,
        f"replicas were lost {num_losses} times while they had request {request_id}; it is not sent to another one",
        code="replica_lost",
        headers={"x-should-retry": "false"},
    )


def no_answer_error(error: AttemptError, num_attempts: int) -> HttpError:
    """Return the error for a request that no replica answered."""
    if error.failure is AttemptFailureReason.GARBLED:
        message = "the replica's answer could not be read as one of this API; its operator finds more in the metrics"
        return HttpError(502, message, code="bad_replica_answer", headers={"retry-after": "1"})
    unreached = dict.fromkeys((AttemptFailureReason.REFUSED, AttemptFailureReason.UNREACHED), "could not be reached")
    what = {AttemptFailureReason.SILENT: "did not answer in time", **unreached}
    text = what.get(error.failure, "gave no answer")
    return HttpError(
        502,
        f"the replica {text}, attempt {num_attempts} being the last; try again",
        code="replica_unreachable",
        headers={"retry-after": "1"},
    )


def no_replicas_error(error: NoReplicaError) -> HttpError:
    """Return the error for a request for which no replica was available."""
    reasons = sorted(set(error.reasons.values()))
    why = f" ({', '.join(reasons)})" if reasons else ""
    return HttpError(
        503, f"no replica can take this request now{why}; try again", code="no_replicas", headers={"retry-after": "1"}
    )


class _Owner(NamedTuple):
    replica: str  # URL
    domain: bytes  # of the router's tenant that created the response; empty: the replica alone checks keys


class ResponseReplicas:
    """Replicas by response id, least recently used first."""

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def add(self, response_id: str, replica: str, domain: bytes) -> None:
        """Note that a replica holds a response."""
        if not response_id:
            return
        self._owners[response_id] = _Owner(replica, domain)
        self._owners.move_to_end(response_id)
        if len(self._owners) > self._max_responses:
            self._owners.popitem(last=False)

    def find(self, response_id: str, domain: bytes, param: str) -> str:
        """Return the URL of the replica that holds a response.

        Raises HttpError 404 for an id that is unknown or another tenant's; `param` is the field that contained it.
        """
        owner = self._owners.get(response_id)
        if owner is None or owner.domain != domain:
            message = (
                f"response {response_id[:128]!a} is not known to this router: it was never, or too long ago; "
                "send the whole conversation as input"
            )
            raise HttpError(404, message, code="response_not_found", param=param)
        self._owners.move_to_end(response_id)
        return owner.replica


def response_replica_gone_error(response_id: str, param: str) -> HttpError:
    """Return the error for a response whose replica does not serve any more."""
    message = (
        f"the replica that holds response {response_id[:128]!a} is gone, and the response with it; "
        "send the whole conversation as input"
    )
    return HttpError(404, message, code="response_not_found", param=param)
