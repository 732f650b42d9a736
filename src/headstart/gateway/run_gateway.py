"""route: runs one router from start to end: port, replicas, HTTP, signals, drain, exit code."""

import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import uvloop
from prometheus_client import disable_created_metrics

from headstart import __version__
from headstart.allocator import configure_malloc, trim_heap_regularly
from headstart.config.options import RouterOptions, ServerOptions
from headstart.core.cache.hashing import HashChain
from headstart.core.errors import ConfigError
from headstart.gateway.discovery.discovery import Discovery, DnsDiscovery, FileDiscovery, StaticDiscovery
from headstart.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from headstart.gateway.discovery.kubernetes_objects import parse_target
from headstart.gateway.gateway_state import GatewayState
from headstart.gateway.http_front import HttpFront, RouterFront
from headstart.gateway.proxy.replies import client_session_options
from headstart.gateway.proxy.request_reader import RequestParser
from headstart.gateway.replica_tokenizers import load_named_tokenizer
from headstart.gateway.replicas.replica_address import ReplicaAddress, parse_replica_address
from headstart.http.decision_log_writer import DecisionLog
from headstart.http.lifecycle import (
    EXIT_BROKEN,
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ShutdownSignals,
    open_listener,
    run_until_any_ends,
    unlink_socket_file,
)
from headstart.http.logs import ServerLog
from headstart.http.web_pages import is_loopback
from headstart.openai.tokenizer.segmented_tokenizer import SegmentedTokenizer
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.router.index.modelled_pool import PoolFactory

KEEPALIVE_SECONDS = 4.0  # of idle connections to replicas; vLLM closes them after 5
FIRST_LOOK_SECONDS = 3.0  # the banner waits this long for the first probe of the replicas
MAX_LINES = 1_000  # of a BufferedLog; at this number they are written, with or without the banner
_EXAMPLE = "file:replicas.txt, dns:replicas.default.svc:8000, or kubernetes:inferencepool/NAME"


def run_router(
    router_options: RouterOptions,
    server_options: ServerOptions,
    discovery: Discovery | None = None,
    fronts: Sequence[RouterFront] = (),
    chain: HashChain | None = None,
    pools: PoolFactory | None = None,
) -> int:
    """Run a router until SIGTERM or Ctrl-C; return the exit code. Replicas come from `discovery`, else the options.

    `fronts`: further ways into the router; unless the first of them has an address for clients, the router's own HTTP
    server serves them, too. `chain` computes block hashes, and `pools` holds the indexes; None: in Python.

    0: all admitted requests were answered. 1: requests were cut off at the end of the drain. 2: invalid options, with a
    message of one line. 130: stopped at once by a second Ctrl-C.
    """
    log = ServerLog()
    configure_malloc()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads wait busily; other requests need the cores
    try:
        found = discovery or discovery_from_options(router_options)
        rules = frozenset(server_options.prompt_rule)
        reader = RequestParser(load_router_tokenizer(router_options.tokenizer), rules, chain)
        decisions = DecisionLog(Path(router_options.decision_log)) if router_options.decision_log else None
        is_own = not (fronts and fronts[0].url)
        listener = open_listener(server_options.host, server_options.port, server_options.uds) if is_own else None
    except ConfigError as error:
        log.write_line(f"headstart: {error}")
        return EXIT_CONFIG
    disable_created_metrics()
    try:
        with listener or contextlib.nullcontext(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            all_fronts = fronts if listener is None else [HttpFront(listener), *fronts]
            life = _Life(router_options, server_options, found, reader, decisions, all_fronts, log, pools)
            return runner.run(life.run())
    finally:
        if decisions is not None:
            decisions.close()
        if is_own:
            unlink_socket_file(server_options.uds)


def discovery_from_options(options: RouterOptions) -> Discovery:
    """Return the discovery of the options. Raises ConfigError if they list no replicas."""
    if options.discover is not None and options.replica:
        raise ConfigError("give replicas by --replica or by --discover, not both")
    if options.discover is not None:
        return parse_discovery(options.discover, allow_loopback=options.allow_loopback_endpoints)
    if not options.replica:
        raise ConfigError("no replicas: name them, as in headstart route --replica http://127.0.0.1:8001")
    addresses: Sequence[ReplicaAddress] = [parse_replica_address(text) for text in options.replica]
    return StaticDiscovery(addresses)


def load_router_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer that the option names; None for one that is found later, and for none."""
    return None if name in ("auto", "none") else SegmentedTokenizer(load_named_tokenizer(name))


class _Life:
    """One run of a router."""

    def __init__(
        self,
        router_options: RouterOptions,
        server_options: ServerOptions,
        discovery: Discovery,
        reader: RequestParser,
        decisions: DecisionLog | None,
        fronts: Sequence[RouterFront],
        log: ServerLog,
        pools: PoolFactory | None,
    ) -> None:
        self._router_options = router_options
        self._options = server_options
        self._discovery = discovery
        self._reader = reader
        self._decisions = decisions
        self._fronts = fronts  # the first one is that of the clients
        self._log = log
        self._pools = pools
        self._held_log = BufferedLog()  # for lines that contain addresses of replicas
        self._listed = asyncio.Event()  # discovery has listed the replicas

    async def run(self) -> int:
        """Start everything, wait, and shut everything down; return the exit code."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=10)
        async with aiohttp.ClientSession(connector=connector, trust_env=False, **client_session_options()) as session:
            try:
                state = GatewayState(
                    self._router_options,
                    self._options,
                    session,
                    self._reader,
                    self._held_log,
                    self._decisions,
                    pools=self._pools,
                )
            except ConfigError as error:
                self._log.write_line(f"headstart: {error}")
                return EXIT_CONFIG
            self._shutdown = ShutdownSignals(
                self._options.drain_timeout,
                self._log,
                num_requests=lambda: state.num_under_way,
                on_drain=state.start_draining,
            )
            self._shutdown.install_handlers()

            def changed(addresses: Sequence[ReplicaAddress]) -> None:
                if any(not isinstance(front, HttpFront) for front in self._fronts):
                    addresses = [replace(address, ranks=1) for address in addresses]  # Envoy knows servers only
                state.members.on_replicas_changed(addresses)
                for front in self._fronts:
                    front.on_replicas_changed(addresses)
                self._listed.set()

            watching = asyncio.create_task(self._discovery.watch_replicas(changed))
            try:
                return await self._live(state, watching)
            finally:
                self._held_log.release()
                await state.close()
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _live(self, state: GatewayState, watching: "asyncio.Task[None]") -> int:
        await self._first_look(state, watching)
        if watching.done() and isinstance(error := watching.exception(), ConfigError):
            self._log.write_line(f"headstart: {error}")
            return EXIT_CONFIG
        if self._router_options.tokenizer == "auto":
            state.load_tokenizer_when_known(self._log)
        trimming = asyncio.create_task(trim_heap_regularly())
        try:
            try:
                for front in self._fronts:
                    await front.start(state)
            except ConfigError as error:
                self._log.write_line(f"headstart: {error}")
                return EXIT_CONFIG
            if not self._listed.is_set():  # replicas that are still starting
                await _any_of(watching, self._listed.wait(), self._shutdown.begun.wait())
                await self._first_look(state, watching, timeout=None)
            if not watching.done() and not self._shutdown.begun.is_set():
                self._log.write_line(self._banner(state))
            self._held_log.release()
            gc.collect()
            gc.freeze()  # modules and large indexes: a full collection of them would stop all streams for 60 ms
            await _any_of(watching, self._shutdown.begun.wait(), *(front.ended.wait() for front in self._fronts))
            if any(front.ended.is_set() for front in self._fronts):
                state.start_draining()
                return EXIT_BROKEN
            if watching.done() and not watching.cancelled():
                more = "; the router stops" if self._listed.is_set() else ""
                self._log.write_line(f"headstart: {watching.exception() or 'discovery has ended'}{more}")
                state.start_draining()
                return EXIT_CONFIG if isinstance(watching.exception(), ConfigError) else EXIT_BROKEN
            return await self._drain(state)
        finally:
            trimming.cancel()
            for front in self._fronts:
                await front.stop(at_once=self._shutdown.at_once.is_set())

    async def _first_look(
        self, state: GatewayState, watching: "asyncio.Task[None]", timeout: float | None = FIRST_LOOK_SECONDS
    ) -> None:
        """Wait until every known replica was probed once; `timeout` None: without a limit."""
        await _any_of(watching, state.members.seen.wait(), self._shutdown.begun.wait(), timeout=timeout)

    async def _drain(self, state: GatewayState) -> int:
        deadline = time.monotonic() + self._shutdown.drain_seconds
        while state.num_under_way and not self._shutdown.at_once.is_set() and time.monotonic() < deadline:
            await run_until_any_ends(state.idle.wait(), self._shutdown.at_once.wait(), timeout=0.5)
        if not state.num_under_way:
            return EXIT_OK
        self._log.write_line(f"headstart: {state.num_under_way} requests were cut off")
        return EXIT_INTERRUPTED if self._shutdown.at_once.is_set() else EXIT_BROKEN

    def _banner(self, state: GatewayState) -> str:
        url = self._fronts[0].url
        members = state.members.members.values()
        up = sum(member.state == "up" for member in members)
        others = Counter("not reached" if m.state in ("new", "absent") else m.state for m in members if m.state != "up")
        waiting = f" ({', '.join(f'{count} {state}' for state, count in sorted(others.items()))})" if others else ""
        names = sorted({card.id for card in state.members.distinct_model_cards()})
        counting = "the replicas' own tokens" if state.reader.tokenizer is not None else "bytes (no tokenizer here)"
        lines = [
            f"Headstart {__version__} routes to {self._discovery.describe()} at {url}/v1",
            f"  replicas {up} of {len(members)} up{waiting}" + (f", serving {', '.join(names[:4])}" if names else ""),
            f"  policy   {state.router.policy.name}, prompts counted in {counting}",
            f"  keys     {_keys(self._options)}",
            f"  look     {_look(self._options, url)}",
        ]
        return "\n".join(lines)


async def _any_of(
    watching: "asyncio.Task[None]", *works: Coroutine[Any, Any, Any], timeout: float | None = None
) -> None:
    """Wait until one of `works` is done, or `watching`, which continues if it is not."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait([*tasks, watching], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _look(options: ServerOptions, url: str) -> str:
    if options.api_key or options.tenants or options.admin_api_key:
        return f'with KEY set to the admin key: curl -H "Authorization: Bearer $KEY" {url}/v1/fleet'
    return f"curl {url}/v1/fleet"


def _keys(options: ServerOptions) -> str:
    count = len(options.api_key) + sum(len(tenant.api_keys) for tenant in options.tenants)
    if count:
        return f"{count} configured, of {len(options.api_key) + len(options.tenants)} tenants"
    if is_loopback(options.host):
        return "clients' keys are the replicas' business"
    return "NONE HERE: clients' keys are the replicas' business, and everyone can reach this address"


class BufferedLog(ServerLog):
    """A log that buffers its lines until the banner, so that the first address on stderr is the router's.

    The states of replicas are known before the banner, and their lines contain the replicas' addresses.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._lines: list[str] | None = []  # None: released

    def write_line(self, text: str) -> None:
        """Write a line, or buffer it until `release`."""
        if self._lines is None:
            super().write_line(text)
            return
        self._lines.append(text)
        if len(self._lines) >= MAX_LINES:
            self.release()

    def release(self) -> None:
        """Write the buffered lines in order, and all later ones at once. Calling it twice is harmless."""
        lines, self._lines = self._lines, None
        for text in lines or ():
            super().write_line(text)


def parse_discovery(text: str, *, allow_loopback: bool = False) -> Discovery:
    """Return the discovery for `file:PATH`, `dns:NAME:PORT` or `kubernetes:TARGET`. Raises ConfigError for others.

    `allow_loopback`: a cluster's and a name's endpoints may be at loopback addresses.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest).expanduser())
    if kind == "kubernetes" and rest:
        return KubernetesDiscovery(parse_target(rest), allow_loopback=allow_loopback)
    name, colon, port = rest.rpartition(":")
    if kind == "dns" and colon and port.isascii() and port.isdigit():
        return DnsDiscovery(name.removeprefix("[").removesuffix("]"), int(port), allow_loopback=allow_loopback)
    raise ConfigError(f"discover is {text!r}; write it like {_EXAMPLE}")
