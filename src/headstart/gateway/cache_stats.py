"""Cache statistics of a fleet: /v1/cache/stats of every replica, and the sums over the replicas that report.

The sums have the fields of one server's answer. `store` is not summed: replicas may share one folder, which would be
counted several times. Engines without this route (vLLM, SGLang) are listed as not reporting.

Fan-out: administrative requests sent to every replica: pinned prefixes and cache resets.

The router has checked the administrator's key; replicas see the caller's own key, or `--replica-api-key`.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from headstart.gateway.proxy.replies import check_if_event_stream, read_bounded_body, read_complete_answer
from headstart.gateway.proxy.upstream import UnstreamedReplicaAnswer, forwarded_request_headers
from headstart.http.http_errors import HttpError
from headstart.http.web_pages import is_proxy_or_page_header
from headstart.openai.request_json import parse_json
from headstart.openai.responses import Json

PATH = "/v1/cache/stats"
ANSWER_SECONDS = 10.0
MAX_BYTES = 1 << 20  # of one replica's answer: about a thousand tenants
_REFUSALS = (401, 403, 503)  # returned if no replica reports
_SHARE = "avoidable_share"
_RATIOS = ("hit_rate", "prefill_redundancy")
_NOT_SUMMED = ("model", "block_size", "store", "losses", *_RATIOS)

Counts = dict[str, int]
FANOUT_SECONDS = 300.0  # a prefix is computed before its answer comes


async def broadcast_for_single_answer(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    method: str,
    target: str,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    own: dict[str, str],
) -> UnstreamedReplicaAnswer:
    """Send a request to all replicas at once and return the first answer that is an error, else the first answer.

    `target`: path and query. Raises HttpError 503 if there is no replica, and 502 if a replica gave no answer: then the
    other replicas may have done it.
    """
    if not urls:
        raise HttpError(503, "no replica is up", code="no_replicas", headers={"retry-after": "1"})
    sent = forwarded_request_headers(
        [(name, value) for name, value in headers if not is_proxy_or_page_header(name)], own
    )

    async def send(url: str) -> UnstreamedReplicaAnswer:
        timeout = aiohttp.ClientTimeout(total=FANOUT_SECONDS)
        async with session.request(
            method, url + target, headers=sent, data=body, timeout=timeout, allow_redirects=False
        ) as response:
            check_if_event_stream(response, target.partition("?")[0])
            return await read_complete_answer(response, target.partition("?")[0])

    answers = await asyncio.gather(*map(send, urls), return_exceptions=True)
    silent = [url for url, answer in zip(urls, answers, strict=True) if isinstance(answer, BaseException)]
    if silent:
        message = f"{len(silent)} of {len(urls)} replicas gave no answer; ask again when all are up"
        raise HttpError(502, message, code="replica_unreachable")
    found = [answer for answer in answers if isinstance(answer, UnstreamedReplicaAnswer)]
    return next((answer for answer in found if answer.status >= 400), found[0])


class ReplicaCacheLosses(msgspec.Struct, frozen=True):
    """The losses of one server; zeros from a server that does not report them."""

    evicted_tokens: int = 0
    examined_requests: int = 0
    examined_tokens: int = 0
    avoidable_tokens: int = 0
    avoidable_share: float | None = None
    causes: Counts = {}


class ReplicaStats(msgspec.Struct):
    """The answer of one Headstart server; in tokens unless docs/api.md says otherwise."""

    model: str
    block_size: int
    prompt_tokens: Counts
    prefill_tokens: int
    ideal_tokens: int
    blocks: Counts
    evictions: Counts
    requests: Counts
    hit_rate: float | None = None
    replayed_tokens: int = 0
    prefill_redundancy: float = 1.0
    generation_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    promise_skips: int = 0
    adoptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    tenants: dict[str, Counts] = {}
    losses: ReplicaCacheLosses = ReplicaCacheLosses()
    store: dict[str, Any] | None = None


class ReplicaStatsReply(msgspec.Struct):
    """The statistics of one replica, or the reason why there are none; `status` 0: no answer was received."""

    url: str
    status: int = 0
    stats: ReplicaStats | None = None

    @property
    def error(self) -> str | None:
        """The reason why there are no statistics; None if there are."""
        if self.stats is not None:
            return None
        if not self.status:
            return "no answer"
        return "not readable" if self.status == 200 else f"answered {self.status}"


async def fetch_all_replica_stats(
    session: aiohttp.ClientSession, urls: Sequence[str], headers: list[tuple[bytes, bytes]], own: dict[str, str]
) -> list[ReplicaStatsReply]:
    """Request the statistics of every replica with the caller's headers; `own` replaces headers of the same name.

    Raises HttpError 503 if there is no replica.
    """
    if not urls:
        raise HttpError(503, "no replica is up", code="no_replicas", headers={"retry-after": "1"})
    kept = ("authorization", "x-request-id")
    sent = [(name, value) for name, value in forwarded_request_headers(headers, own) if name in (*kept, *own)]
    return list(await asyncio.gather(*(_fetch(session, url, sent) for url in urls)))


def fleet_stats_json(found: Sequence[ReplicaStatsReply], *, is_admin: bool, is_own_key: bool) -> Json:
    """Return the JSON of a fleet's statistics: the sums and, for administrators, the statistics of each replica.

    `is_own_key`: replicas saw the caller's key and omitted what it may not see. Otherwise only administrators see the
    rows of tenants. Raises HttpError if no replica reports statistics.
    """
    reported = [one.stats for one in found if one.stats is not None]
    if not reported:
        raise _none_reported(found)
    answer: Json = {"object": "fleet.cache.stats", "num_replicas": len(found), "num_reporting": len(reported)}
    answer |= _summed(reported)
    if not (is_admin or is_own_key):
        answer["tenants"] = {}
    if is_admin:
        answer["replicas"] = [
            {"url": one.url, "error": one.error, "stats": None if one.stats is None else msgspec.to_builtins(one.stats)}
            for one in found
        ]
    return answer


async def _fetch(session: aiohttp.ClientSession, url: str, headers: list[tuple[str, str]]) -> ReplicaStatsReply:
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    answer = ReplicaStatsReply(url)
    try:
        async with session.get(url + PATH, headers=headers, timeout=timeout, allow_redirects=False) as response:
            check_if_event_stream(response, PATH)
            body = await read_bounded_body(response, MAX_BYTES)
            answer.status = response.status
    except (aiohttp.ClientError, TimeoutError, ConnectionError):
        return answer
    if answer.status == 200:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer.stats = msgspec.convert(parse_json(body), ReplicaStats)
    return answer


def _none_reported(found: Sequence[ReplicaStatsReply]) -> HttpError:
    refused = next((one.status for one in found if one.status in _REFUSALS), 0)
    reasons = ", ".join(sorted({one.error or "" for one in found}))
    message = f"none of {len(found)} replicas reported its cache statistics ({reasons})"
    if refused:
        return HttpError(refused, message, code="permission_denied" if refused < 500 else "no_replicas")
    if all(one.status in (404, 405) for one in found):
        return HttpError(404, f"{message}; Headstart's do, at this path", code="not_reported")
    return HttpError(502, message, code="replica_unreachable", headers={"retry-after": "1"})


def _summed(reported: Sequence[ReplicaStats]) -> Json:
    """Return the sums of all counts, and ratios of the sums. A field in which replicas differ is null."""
    rows: list[Json] = [msgspec.to_builtins(stats) for stats in reported]
    total: Json = {name: _same([row[name] for row in rows]) for name in ("model", "block_size")}
    total |= _sums([{name: value for name, value in row.items() if name not in _NOT_SUMMED} for row in rows])
    prompt, ideal = total["prompt_tokens"], total["ideal_tokens"]
    total["hit_rate"] = prompt.get("cached", 0) / prompt["total"] if prompt.get("total") else None
    total["prefill_redundancy"] = total["prefill_tokens"] / ideal if ideal else 1.0
    losses = _sums([{key: value for key, value in row["losses"].items() if key != _SHARE} for row in rows])
    examined = losses["examined_tokens"]
    total["losses"] = {**losses, _SHARE: losses["avoidable_tokens"] / examined if examined else None}
    return total


def _sums(rows: Sequence[Json]) -> Json:
    """Return the sums of numbers by key, including those in nested objects."""
    total: Json = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        total[key] = _sums(values) if isinstance(values[0], dict) else sum(values)
    return total


def _same(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None
