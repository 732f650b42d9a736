"""ReplicaMonitor: periodic probes of a fleet's replicas, and their state.

A replica is polled at /health; when it is up, its models and cache size are read. A replica that refused connections
and returns later was restarted: its cache is empty, perhaps of another size. A replica that only answers slowly is left
to the router's own accounting. However many addresses are listed, few are probed at once and in a second; those of
replicas that are up have probes of their own, so that addresses where there is none do not keep them waiting.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import aiohttp

from headstart.gateway.proxy.request_reader import ResolvedModelName
from headstart.gateway.replicas.probes import (
    ModelCard,
    ScrapedMetrics,
    metrics_in_cards,
    parse_json_or_none,
    parse_metrics,
    parse_models,
    parse_sglang_cache_size,
)
from headstart.gateway.replicas.replica_address import ReplicaAddress, data_parallel_rank_of, server_url_of
from headstart.http.logs import ServerLog
from headstart.router.endpoint import Endpoint
from headstart.router.index.prefix_index import PrefixIndex
from headstart.router.router import Router

LOOK_SECONDS = 2.0  # for an answer to a probe; a busy server may be slow
MAX_SILENCES = 3  # probes in a row without an answer, after which the replica is absent
MAX_PROBES = 256  # at once, of replicas that are up, and again of others
UP_RATE, OTHER_RATE = 400.0, 100.0  # probes per second of all replicas that are up, and of all others
DEFAULT_BLOCK = 16  # tokens, of a replica that does not report it
MAX_HEALTH = 2**16  # bytes
MAX_MODELS = 2**21  # 3,000 adapters with all fields that vLLM lists for each
SHORT_PAGE = 2**13  # bytes of metrics that are parsed on the event loop
MAX_METRICS = 2**22  # vLLM's page of one engine has 100 KB


class MonitoredReplica:
    """One replica. `state`: new, up, loading, draining or absent."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.state = "new"
        self.metrics = ScrapedMetrics()
        self.models: tuple[ModelCard, ...] = ()
        self.endpoint: Endpoint | None = None
        self.was_gone = False  # since its models were read last
        self.num_probes = 0
        self.num_silences = 0  # probes in a row without an answer
        self.silent_since = 0.0  # when the first of them began
        self.num_unready = 0  # probes in a row answered with 503, neither loading nor draining
        self.unready_since = 0.0
        self.scraped_at = 0.0
        self.checks_keys: bool | None = None  # whether it refuses requests without a valid key; None: unknown

    @property
    def modelled_block_size_and_count(self) -> tuple[int, int]:
        """The size of its blocks in tokens and their number, as its cache is modelled; 0: not reported.

        Smaller blocks than the usual ones are taken together, since each costs as much memory and time as a larger one.
        Events name blocks, so a replica that publishes any is modelled in its own.
        """
        size, num_blocks = self.metrics.block_size, self.metrics.num_blocks
        count = -(-DEFAULT_BLOCK // size) if size and self.address.events is None else 1
        return size * count, num_blocks // count

    @property
    def base_model(self) -> str:
        """The model whose weights it serves under all its names; "" if it does not report one."""
        return next((card.id for card in self.models if card.parent is None), "")


class ReplicaObserver(Protocol):
    """The owner of a ReplicaMonitor."""

    def open_replica_index(self, member: MonitoredReplica) -> PrefixIndex:
        """Return the index of the cache of a replica that is first seen or was restarted."""
        ...

    def on_probed(self, member: MonitoredReplica) -> None:
        """Called after every probe of a replica."""
        ...

    def on_replica_removing(self, url: str) -> None:
        """Called before a replica is removed."""
        ...

    def on_models_changed(self) -> None:
        """Called when the served models, or the replicas, have changed."""
        ...


class ReplicaMonitor:
    """Keeps the router's endpoints in step with the replicas. `changed` is a Discovery's callback; end with `close`."""

    def __init__(
        self,
        router: Router,
        session: aiohttp.ClientSession,
        log: ServerLog,
        observer: ReplicaObserver,
        *,
        health_interval: float,
        scrape_interval: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.members: dict[str, MonitoredReplica] = {}
        self.seen = asyncio.Event()  # every replica of the first list was probed once
        self._router = router
        self._session = session
        self._log = log
        self._observer = observer
        self._health_interval = health_interval
        self._scrape_interval = scrape_interval
        self._headers = headers or {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_up = 0
        self._num_new = 0
        self._up_probes, self._other_probes = asyncio.Semaphore(MAX_PROBES), asyncio.Semaphore(MAX_PROBES)

    def on_replicas_changed(self, addresses: Sequence[ReplicaAddress]) -> None:
        """Add new replicas, and remove those that are not among `addresses`; requests in flight there may still end."""
        wanted = {one.url: one for address in addresses for one in address.expand_ranks()}
        for url in [url for url, member in self.members.items() if wanted.get(url) != member.address]:
            self._tasks.pop(url).cancel()
            self._count(self.members.pop(url).state, "")
            self._observer.on_replica_removing(url)
            self._router.remove(url)
            self._log.event("replica", {"replica": url, "state": "removed"}, text=f"replica {url}: removed")
        for url, address in wanted.items():
            if url not in self.members:
                self.members[url] = member = MonitoredReplica(address)
                self._count("", member.state)
                self._tasks[url] = asyncio.create_task(self._probe_forever(member))
        if not addresses:
            self.seen.set()
        self._observer.on_models_changed()

    async def close(self) -> None:
        """Stop probing."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def distinct_model_cards(self) -> list[ModelCard]:
        """Return the models that any replica serves, each once."""
        found: dict[str, ModelCard] = {}
        for member in self.members.values():
            if member.endpoint is not None:
                for card in member.models:
                    found.setdefault(card.id, card)
        return list(found.values())

    def fleet_models_by_name(self) -> dict[str, ResolvedModelName]:
        """Return the model and adapter of each model name, with the longest context of its replicas."""
        found: dict[str, ResolvedModelName] = {}
        lengths: dict[str, list[int]] = {}
        own: dict[str, list[bool]] = {}
        for member in self.members.values():
            for card in member.models:
                found.setdefault(
                    card.id,
                    ResolvedModelName(member.base_model, card.id if card.parent else None, card.default_max_tokens),
                )
                own.setdefault(card.id, []).append(card.fields.get("owned_by") == "headstart")
                lengths.setdefault(card.id, []).append(card.max_model_len)
        return {
            name: replace(
                served, max_model_len=max(lengths[name]) if all(lengths[name]) else 0, reads_parts=not all(own[name])
            )
            for name, served in found.items()
        }

    @property
    def knows_all_models(self) -> bool:
        """Whether every replica has reported its models, so that any other name is an error."""
        known = [member.models for member in self.members.values()]
        return bool(known) and all(known)

    # ---------------------------------------------------------------------------------------------------- one replica

    async def _probe_forever(self, member: MonitoredReplica) -> None:
        """Probe a replica until cancelled."""
        while True:
            async with self._up_probes if member.state == "up" else self._other_probes:
                member.num_probes += 1
                try:
                    await self._probe(member)
                    self._observer.on_probed(member)
                except Exception as error:  # an error at one replica must not stop the probes of the others
                    self._log.log_exception("replica_look_failed", error, member.address.url)
            if not self._num_new:
                self.seen.set()
            is_up, num_others = member.state == "up", len(self.members) - self._num_up
            count, rate = (self._num_up, UP_RATE) if is_up else (num_others, OTHER_RATE)
            await asyncio.sleep(probe_interval(self._health_interval, count, rate))

    def _count(self, before: str, state: str) -> None:
        """Count a replica in a new state; empty: it is not there."""
        self._num_new += (state == "new") - (before == "new")
        self._num_up += (state == "up") - (before == "up")

    async def _probe(self, member: MonitoredReplica) -> None:
        state = await self._state(member)
        if state == "up":
            if member.state != "up" or member.endpoint is None:
                await self._read_models(member)
            elif 0 < self._scrape_interval <= time.monotonic() - member.scraped_at:
                await self._scrape(member)
        endpoint = member.endpoint
        if endpoint is not None and state == "up":
            endpoint.health.record_ready()
        elif endpoint is not None:
            endpoint.health.record_unavailable(
                time.monotonic(), absent=state != "draining", draining=state == "draining"
            )
        if state != member.state:
            url, before = member.address.url, member.state
            text = f"replica {url}: {state}, {before} before"
            self._log.event("replica", {"replica": url, "state": state, "before": before}, text=text)
            self._count(before, state)
            member.state = state

    async def _state(self, member: MonitoredReplica) -> str:
        probed_at = time.monotonic()
        try:
            status, body = await self._get(member, "/health", MAX_HEALTH)
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError):
            member.was_gone = True
            member.num_silences = member.num_unready = 0  # its connections end by themselves
            return "absent"
        except (aiohttp.ClientError, TimeoutError):
            member.silent_since = member.silent_since if member.num_silences else probed_at
            member.num_silences += 1
            silent = member.num_silences >= MAX_SILENCES or member.state == "new"
            return "absent" if silent else member.state
        member.num_silences = 0
        if status == 503:
            state = next((state for state in ("loading", "draining") if f'"{state}"'.encode() in body), "absent")
        else:
            state = ""
        if state == "absent":
            member.unready_since = member.unready_since if member.num_unready else probed_at
            member.num_unready += 1
        else:
            member.num_unready = 0
        if state:
            return state
        return "up" if status < 300 or 400 <= status < 500 else "absent"  # a redirect comes from another program

    async def _read_models(self, member: MonitoredReplica) -> None:
        """Read its models and metrics, and make it a candidate."""
        before, first = member.models, member.endpoint is None
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            status, body = await self._get(member, "/v1/models", MAX_MODELS)
            if not self._headers and status < 500:
                member.checks_keys = status in (401, 403)
            if status == 200 and (document := parse_json_or_none(body)) is not None:
                member.models = parse_models(document)
        if not await self._scrape(member):
            member.metrics = metrics_in_cards(member.models) or member.metrics
        if first:
            member.endpoint = endpoint = Endpoint(
                member.address.url,
                self._observer.open_replica_index(member),
                block_size=member.modelled_block_size_and_count[0] or DEFAULT_BLOCK,
            )
        else:
            assert member.endpoint is not None
            endpoint = member.endpoint
            if member.was_gone:
                self._reset(member, endpoint)
        member.was_gone = False
        endpoint.models = frozenset(card.id for card in member.models)
        endpoint.tokenizer = member.models[0].tokenizer_digest if member.models else ""
        if member.models and (step_tokens := member.models[0].max_step_tokens):
            endpoint.load.set_max_step_tokens(step_tokens)
        if first:
            self._router.add(endpoint)
        if first or member.models != before:
            self._observer.on_models_changed()

    async def _scrape(self, member: MonitoredReplica) -> bool:
        """Read /metrics; return whether it was available. Without it the router relies on its own accounting."""
        member.scraped_at = time.monotonic()
        path = "/metrics?load" if member.metrics.kind == "headstart" else "/metrics"
        try:
            status, body = await self._get(member, path, MAX_METRICS)
        except (aiohttp.ClientError, TimeoutError):
            return False
        if status != 200:
            return False
        page, rank = complete_lines(body, MAX_METRICS), data_parallel_rank_of(member.address.url)
        is_long = len(body) > SHORT_PAGE
        found = await asyncio.to_thread(parse_metrics, page, rank) if is_long else parse_metrics(page, rank)
        if found.kind == "sglang" and not found.num_blocks and not member.metrics.num_blocks:
            found = await self._sglang(member, found)
        before, endpoint = member.metrics, member.endpoint
        member.metrics = found
        if endpoint is None:
            return True
        endpoint.reported = found.to_replica_report(time.monotonic())
        if (found.block_size, found.num_blocks) != (before.block_size, before.num_blocks) and found.num_blocks:
            self._reset(member, endpoint)  # it was restarted between two probes
        return True

    async def _sglang(self, member: MonitoredReplica, found: ScrapedMetrics) -> ScrapedMetrics:
        with suppress(aiohttp.ClientError, TimeoutError, ValueError):
            status, body = await self._get(member, "/get_server_info", MAX_MODELS)
            if status == 200:
                size, pages = parse_sglang_cache_size(parse_json_or_none(body))
                return ScrapedMetrics("sglang", size, pages, found.waiting, found.running, found.kv_usage)
        return found

    def _reset(self, member: MonitoredReplica, endpoint: Endpoint) -> None:
        endpoint.reset_for_block_size(
            member.modelled_block_size_and_count[0] or endpoint.block_size, self._observer.open_replica_index(member)
        )
        url, state = member.address.url, "started again, its cache is empty"
        self._log.event("replica", {"replica": url, "state": state}, text=f"replica {url}: {state}")

    async def _get(self, member: MonitoredReplica, path: str, max_bytes: int) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=LOOK_SECONDS)
        url = server_url_of(member.address.url) + path
        async with self._session.get(url, timeout=timeout, headers=self._headers, allow_redirects=False) as response:
            return response.status, await read_body_prefix(response, max_bytes)


def probe_interval(interval: float, count: int, rate: float) -> float:
    """Return the seconds between two probes of a replica, one of `count` that have `rate` probes per second."""
    return max(interval, count / rate)


async def read_body_prefix(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body, or its first `max_bytes`; a connection with more data is closed."""
    parts: list[bytes] = []
    left = max_bytes
    while left > 0 and (part := await response.content.read(min(left, 2**16))):
        parts.append(part)
        left -= len(part)
    if not left and not response.content.at_eof():
        response.close()
    return b"".join(parts)


def complete_lines(body: bytes, max_bytes: int) -> str:
    """Return the text of a body that was read up to `max_bytes`, without a line that may have been cut."""
    whole = body if len(body) < max_bytes else body[: body.rfind(b"\n") + 1]
    return whole.decode(errors="replace")
