"""Replies: responses of replicas, read within bounds and validated before any part is relayed or used.

A replica is trusted to compute, not to send valid HTTP: a proxy in front of it may answer with HTML, and its port may
belong to another program by now. On generation routes, a success is status 200 and a JSON object with choices, or a
stream of events whose first one is a JSON object. An error keeps its status, and its body only if that is an error
object.
"""

import codecs
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from headstart.apis.api import Api
from headstart.apis.api_table import APIS, OTHER, UNCACHED, api_of, generation_api
from headstart.gateway.proxy.upstream import Answer, GarbledError, headers_back
from headstart.openai.request_json import json_value
from headstart.openai.responses import encode, error_object

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


def session_options() -> dict[str, Any]:
    """Return the options of a session with replicas: no decompression, bounded interim responses, no cookies."""
    return {"auto_decompress": False, "response_class": ReplicaReply, "cookie_jar": aiohttp.DummyCookieJar()}


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
JSON_ROUTES = UNCACHED | {api.path for api in APIS}
"""The routes whose answers are JSON objects, or streams of them."""


class ReplicaReply(aiohttp.ClientResponse):
    """A response with a bounded number of interim responses before it."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the head. Raises GarbledError after MAX_INTERIM heads of status 1xx."""
        protocol, count = connection.protocol, 0
        read = protocol.read

        def counted() -> Any:
            nonlocal count
            count += 1
            if count > MAX_INTERIM:
                raise GarbledError("more than 32 interim responses")
            return read()

        protocol.read = counted  # aiohttp reads interim responses in a loop of its own that has no bound
        try:
            return await super().start(connection)
        finally:
            del protocol.read


def check_head(response: aiohttp.ClientResponse, path: str) -> bool:
    """Return whether a stream of events follows. Raises GarbledError for an invalid head."""
    status = response.status
    if not (200 <= status < 300 or 400 <= status < 600) or status == 407:
        raise GarbledError(f"the replica answered with status {status}")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise GarbledError("the replica answered in an encoding that it was not asked for")
    if generation_api(path) is not OTHER and status < 300 and status != 200:
        raise GarbledError(f"the replica answered with status {status}")
    return status == 200 and response.content_type == generation_api(path).end.media_type


def _keep_all(num_bytes: int) -> bool:
    return True


async def read_bounded(
    response: aiohttp.ClientResponse, max_bytes: int, keep: Callable[[int], object] = _keep_all
) -> bytes:
    """Return the body. Raises GarbledError if it is longer than `max_bytes`. `keep` receives the size of each piece."""

    def kept(num_bytes: int) -> bool:
        keep(num_bytes)
        return True

    body, is_whole = await _read_up_to(response, max_bytes, kept)
    if not is_whole:
        raise GarbledError(f"the replica's answer has more than {max_bytes} bytes")
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


async def read_answer(response: aiohttp.ClientResponse, path: str, keep: Callable[[int], bool] = _keep_all) -> Answer:
    """Return an answer in one piece, the beginning of a long one, or an error.

    `keep` receives the size of each piece; once it returns False, no more of an answer is kept. Raises
    GarbledError for anything else, and what `keep` raises.
    """
    status = response.status
    if status >= 400:
        body = await read_bounded(response, MAX_ERROR_BYTES)
        if not is_error_object(body):
            told = error_object(f"the replica answered {status}", status=status)
            body = encode(api_of(path).error_body(status, told, ""))
        return Answer(status, headers_back(response.raw_headers, _JSON), body)
    api = generation_api(path)
    if path not in JSON_ROUTES:
        return Answer(status, headers_back(response.raw_headers), await read_bounded(response, MAX_ANSWER_BYTES, keep))
    body, is_whole = await _read_up_to(response, KEPT_BYTES, keep)
    if not is_whole:
        if not api.beginning.match(body):
            raise GarbledError("the replica's answer does not begin like one of this route")
        return Answer(status, headers_back(response.raw_headers, _JSON), body, is_whole=False)
    _check_object(body, api.answer)
    return Answer(status, headers_back(response.raw_headers, _JSON), body)


def is_error_object(body: bytes) -> bool:
    """Return whether a body is an error as OpenAI, vLLM, SGLang or FastAPI write it."""
    try:
        value = json_value(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(value, Mapping):
        return False
    found: Mapping[str, Any] = value
    error = found.get("error")
    if isinstance(error, Mapping):
        return isinstance(error.get("message"), str)
    return isinstance(error, str) or isinstance(found.get("message"), str) or "detail" in found


def begins_like(beginning: bytes, api: Api) -> bool:
    """Return whether bytes are the beginning of a generated answer of an API, or of an event of it."""
    return api is not OTHER and api.beginning.match(beginning) is not None


def error_in_first(data: bytes) -> bool:
    """Return whether the first event of a stream is an error. Raises GarbledError if it is no JSON object."""
    try:
        found = _FIELDS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise GarbledError("the replica's first event is no JSON object") from None
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
        raise GarbledError("the replica's answer is no JSON object of this route") from None
