"""One streamed request to an OpenAI endpoint, and its result. `endpoint_runner.py` sends many.

Prompts are token ids, so that lengths are exact. The number of cached tokens comes from the server's usage, which may
omit it: that is different from zero.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import aiohttp

from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord

FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that the client raises if the server is down or responds in another format."""


@dataclass(frozen=True, slots=True)
class EndpointTarget:
    """The server to measure."""

    url: str  # with or without /v1
    model: str = ""  # empty: the first one in the server's list
    api_key: str = ""
    timeout: float = 300.0  # timeout of a request in seconds

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class StreamFailedError(Exception):
    """A request that did not complete correctly; the text gives the reason."""


class RefusedError(StreamFailedError):
    """The server responded with a status that is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:300]}")
        self.status = status


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """The result of one request. `cached_tokens`: None if its usage does not include them."""

    record: RequestRecord
    cached_tokens: int | None


def open_session(seconds: float, *, idle_seconds: float = 2, **options: Any) -> aiohttp.ClientSession:
    """Return a session with any number of connections and a timeout per request.

    An idle connection is closed before the server does it: a request sent at that moment would look like a failure.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_seconds)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds), connector=connector, **options)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the JSON of one line of a stream: None for `[DONE]`, an empty dict for a line without data.

    Raises ValueError for anything but a JSON object.
    """
    if not line.startswith(b"data:"):
        return {}
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return None
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError(f"an event that is no JSON object: {event!r}")
    return cast("dict[str, Any]", event)


def parse_event_or_raise(line: bytes) -> dict[str, Any] | None:
    """Return the same as `parse_event`, but raise StreamFailedError for an error event."""
    event = parse_event(line)
    if event is not None and "error" in event:
        raise StreamFailedError(f"error in mid stream: {event['error']}")
    return event


def cached_tokens_in_usage(usage: dict[str, Any]) -> int | None:
    """Return the cached prompt tokens of a usage object, in OpenAI's form or DeepSeek's; None: not included."""
    details = usage.get("prompt_tokens_details") or {}
    found = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))
    return None if found is None else int(found)


def request_body_of_job(job: Job, model: str, **changes: object) -> bytes:
    """Return the JSON of one streamed completion of `job.output` tokens; `changes`: fields to set, None to omit."""
    body = {
        "model": model,
        "prompt": job.prompt.tolist(),
        "max_tokens": job.output,
        "temperature": job.sampling.temperature,
        "top_p": job.sampling.top_p if job.sampling.top_p < 1 else None,
        "top_k": job.sampling.top_k or None,  # not in OpenAI's API, but in vLLM's and SGLang's
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    changed = {key: value for key, value in (body | changes).items() if value is not None}
    return json.dumps(changed).encode()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request before it is sent. `body` is made in advance, so that sending is cheap."""

    request_id: str
    job: Job
    body: bytes


async def send_streamed_request(
    session: aiohttp.ClientSession, target: EndpointTarget, call: PreparedRequest, arrival: float, start: float
) -> StreamedReply:
    """Run one request to completion; a failure becomes the record's error.

    `arrival` and the times of the record are seconds after `start`, which is on the clock of `time.perf_counter`.
    """
    times: list[float] = []
    usage: dict[str, Any] = {}
    cached: int | None = None
    error: str | None = None
    try:
        async for event in _events(session, target, call.body):
            usage = event.get("usage") or usage
            if event.get("choices"):  # also without text: a token may produce none
                times.append(time.perf_counter() - start)
        cached = cached_tokens_in_usage(usage)
        _check(call.job, usage, cached, times)
    except (*FAILURES, StreamFailedError) as failure:
        error = str(failure) or type(failure).__name__
    record = RequestRecord(
        call.request_id,
        arrival,
        times[0] if times else None,
        times[-1] if times and error is None else None,
        len(call.job.prompt),
        cached or 0,
        call.job.output if error is None else 0,
        max((b - a for a, b in pairwise(times)), default=0.0),
        error,
    )
    return StreamedReply(record, cached)


async def probe_cached_tokens(session: aiohttp.ClientSession, target: EndpointTarget, body: bytes) -> int | None:
    """Send one completion and return its reported cached tokens. Raises StreamFailedError and FAILURES."""
    usage: dict[str, Any] = {}
    async for event in _events(session, target, body):
        usage = event.get("usage") or usage
    if "prompt_tokens" not in usage:
        raise StreamFailedError("the stream has no usage, although stream_options.include_usage asked for it")
    return cached_tokens_in_usage(usage)


async def _events(session: aiohttp.ClientSession, target: EndpointTarget, body: bytes) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON events of one streamed completion, up to `[DONE]`. Raises StreamFailedError if it breaks off."""
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{target.base}/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise RefusedError(response.status, await response.text())
        async for line in response.content:
            event = parse_event_or_raise(line)
            if event is None:
                await response.content.read()  # read to the end: closing early looks like a cancelled request
                return
            yield event
    raise StreamFailedError("the stream ended without [DONE]")


def _check(job: Job, usage: dict[str, Any], cached: int | None, times: list[float]) -> None:
    """Raise StreamFailedError if the server's token counts do not match the request."""
    asked, counted = (len(job.prompt), job.output), (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if not usage:
        raise StreamFailedError("the stream has no usage, although stream_options.include_usage asked for it")
    if counted != asked:
        hint = "; does the server know ignore_eos?" if counted[0] == asked[0] else ""
        raise StreamFailedError(f"usage says {counted} tokens in and out, sent were {asked}{hint}")
    if cached is not None and not 0 <= cached <= asked[0]:
        raise StreamFailedError(f"usage says that {cached} of {asked[0]} prompt tokens were cached")
    if not times:
        raise StreamFailedError("the stream had no choices")
