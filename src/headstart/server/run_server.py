"""serve: the life of one server. Port, engine process, HTTP, signals, drain, exit code."""

import asyncio
import secrets
import socket
import time
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headstart.allocator import configure_malloc, trim_heap_regularly
from headstart.config.options import EngineOptions, ServerOptions
from headstart.core.errors import ConfigError, DrainingError, EngineDeadError
from headstart.engine.engine_client import Build, EngineClient
from headstart.engine.request_recorder import RequestRecorder
from headstart.engine.wire import stats_from_values
from headstart.http.decision_log_writer import DecisionLog
from headstart.http.lifecycle import (
    CUT_SECONDS,
    EXIT_BROKEN,
    EXIT_CONFIG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ShutdownSignals,
    UvicornWithoutSignals,
    listener_address,
    open_listener,
    run_until_any_ends,
    unlink_socket_file,
    uvicorn_config,
)
from headstart.http.logs import ServerLog
from headstart.http.protocol.connections import ConnectionTable, max_server_connections
from headstart.openai.responses import Json
from headstart.server.app import build_app
from headstart.server.banner import startup_banner, store_banner_text
from headstart.server.cache_api.live_figures import LiveFigures
from headstart.server.prefix_requests import POLL_SECONDS, WARMING
from headstart.server.server_state import ServedModel, ServerState
from headstart.server.statistics import log_statistics_regularly
from headstart.store.files import read_or_create_folder_secret
from headstart.store.tiers.tier import derive_key, parse_tier_places, read_shared_secrets

DEAD_SECONDS = 1.0  # a server whose engine died answers 503 for this long, so that clients and probes see it


def serve(
    build: Build,
    engine_options: EngineOptions,
    server_options: ServerOptions,
    log: ServerLog | None = None,
    *,
    num_shares: int = 1,
) -> int:
    """Serve until SIGTERM or Ctrl-C, and return the exit code. `num_shares`: see ServerState.

    0: all admitted requests were answered. 1: the engine died, or requests were cut off at the end of the drain. 2: the
    options cannot work, reported in one line. 130: stopped at once by a second Ctrl-C.
    """
    log = log or ServerLog()
    configure_malloc()
    try:
        listener = open_listener(server_options.host, server_options.port, server_options.uds)
    except ConfigError as error:
        log.write_line(f"headstart: {error}")
        return EXIT_CONFIG
    disable_created_metrics()  # no extra `_created` series per counter
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_Run(build, engine_options, server_options, listener, log, num_shares).run())
        finally:
            unlink_socket_file(server_options.uds)


@dataclass(slots=True)
class _Run:
    """One run of a server."""

    build: Build
    engine_options: EngineOptions
    options: ServerOptions
    listener: socket.socket
    log: ServerLog
    num_shares: int
    shutdown: ShutdownSignals = field(init=False)
    figures: LiveFigures = field(init=False)

    async def run(self) -> int:
        """Start HTTP and engine, serve until a signal or the engine's death, and stop both. Return the exit code."""
        engine = EngineClient()
        try:
            state = ServerState(self.options, engine, self.log, self._domain_secret(), num_shares=self.num_shares)
            recording = DecisionLog(Path(self.options.record)) if self.options.record else None
        except ConfigError as error:
            self.log.write_line(f"headstart: {error}")
            return EXIT_CONFIG
        if recording is not None:
            engine.recorder = RequestRecorder(recording.enqueue)
        shutdown = self.shutdown = ShutdownSignals(
            self.options.drain_timeout, self.log, num_requests=lambda: state.num_jobs, on_drain=state.start_draining
        )
        shutdown.install_handlers()
        self.figures = LiveFigures(state)
        cap = max_server_connections(self.options.max_num_queued_reqs, files_each=1)
        http = UvicornWithoutSignals(uvicorn_config(build_app(state, self.figures), ConnectionTable(cap)))
        serving = asyncio.create_task(http.serve(sockets=[self.listener]))
        try:
            return await self._live(state, engine)
        finally:
            http.should_exit = True
            http.force_exit = shutdown.at_once.is_set()
            await asyncio.wait([serving])
            await self._close(engine)
            if state.tracer is not None:
                await asyncio.to_thread(state.tracer.close)
            if recording is not None:
                recording.close()

    def _domain_secret(self) -> bytes:
        """Return the secret that tenants' domains derive from: random, or with a store that of its folder or file.

        With it, other processes find the same blocks. Raises ConfigError for an unusable folder or file.
        """
        options = self.engine_options
        folder, url = (None, None) if options.kv_store is None else parse_tier_places(options.kv_store)
        if url is not None:  # also beside a folder: the domains are those of all machines
            return derive_key(read_shared_secrets(options.kv_store_secret)[-1], b"domains")
        return secrets.token_bytes(32) if folder is None else read_or_create_folder_secret(folder)

    async def _live(self, state: ServerState, engine: EngineClient) -> int:
        try:
            started = await self._until_stopped(engine.start(self.build, self.engine_options))
            if started is None:
                self.log.write_line("headstart: stopped while loading")
                return EXIT_OK
            model = state.make_served_model(started)
            await asyncio.to_thread(model.tokenizer.start_chat_renderer)
            if await self._until_stopped(warm_configured_prefixes(state, model)) is None:
                self.log.write_line("headstart: stopped while loading")
                return EXIT_OK
            store = await self._store_text(engine)
            state.start_admitting(model)
        except (ConfigError, EngineDeadError) as error:
            self.log.write_line(f"headstart: {error}")
            return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_BROKEN
        host, port, path = listener_address(self.listener)
        self.log.write_line(startup_banner(model, self.options, host, port, store=store, uds=path))
        works = log_statistics_regularly(state), trim_heap_regularly(), self.figures.sample_regularly()
        regular = [asyncio.create_task(work) for work in works]
        try:
            await self._until_stopped(engine.died.wait())
            return await self._drain(state, engine)
        finally:
            for task in regular:
                task.cancel()

    async def _store_text(self, engine: EngineClient) -> str | None:
        """Return the banner's text about the store, None without one. Raises EngineDeadError."""
        stats = stats_from_values(await engine.call("cache_stats"))
        folder = self.engine_options.kv_store
        return None if stats.store is None or folder is None else store_banner_text(folder, stats.store)

    async def _drain(self, state: ServerState, engine: EngineClient) -> int:
        """Wait for the admitted requests up to the drain timeout, cancel the rest, and return the exit code."""
        if engine.dead is not None:
            self.log.write_line(f"headstart: the engine has stopped ({engine.dead}); so does the server")
            await run_until_any_ends(self.shutdown.at_once.wait(), timeout=DEAD_SECONDS)
            return EXIT_BROKEN
        deadline = time.monotonic() + self.shutdown.drain_seconds
        while (
            state.num_jobs
            and engine.dead is None
            and not self.shutdown.at_once.is_set()
            and time.monotonic() < deadline
        ):
            await run_until_any_ends(state.idle.wait(), self.shutdown.at_once.wait(), engine.died.wait(), timeout=0.5)
        if not state.num_jobs:
            return EXIT_OK if engine.dead is None else EXIT_BROKEN
        self.log.write_line(f"headstart: {state.num_jobs} requests were cut off")
        state.cancel_all_jobs(DrainingError("the server shut down before this request was finished"))
        await run_until_any_ends(state.idle.wait(), timeout=CUT_SECONDS)
        return EXIT_INTERRUPTED if self.shutdown.at_once.is_set() else EXIT_BROKEN

    async def _close(self, engine: EngineClient) -> None:
        """Stop the engine, which first writes its pending blocks to the store; a second Ctrl-C kills it instead."""
        store = engine.stats.store
        if store is not None and store.num_pending and engine.dead is None and not self.shutdown.at_once.is_set():
            self.log.write_line(f"headstart: writing {store.num_pending:,} blocks to the store; Ctrl-C stops at once")
        hurry = asyncio.create_task(self.shutdown.at_once.wait())
        closing = asyncio.create_task(engine.close())
        await asyncio.wait([closing, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            engine.kill()
        hurry.cancel()
        await closing

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`, or None if a signal arrived first."""
        return await run_until_any_ends(work, self.shutdown.begun.wait())


async def warm_configured_prefixes(state: ServerState, model: ServedModel) -> int:
    """Pin and compute the entries; return how many are computed. Failed entries are logged and do not stop the server.

    Raises EngineDeadError.
    """
    entries, engine, log = state.options.prefixes, state.engine, state.log
    if not entries:
        return 0
    start = time.monotonic()
    with _bar() as bar:
        task = bar.add_task("warming prefixes", total=None)
        await state.prefixes.add_configured(entries, model.tokenizer, model.bounds)
        while True:
            listed = await state.prefixes.list_prefixes()
            total = sum(entry["tokens"] for entry in listed)
            bar.update(task, total=total, completed=min(engine.stats.counters.computed_tokens, total))
            if all(entry["state"] != WARMING for entry in listed):
                break
            await asyncio.sleep(POLL_SECONDS)
    for entry in listed:
        log.write_line(f"headstart: {_line(entry)}")
    warm = [entry for entry in listed if not entry["error"]]
    log.write_line(f"headstart: {len(warm)} of {len(listed)} prefixes are warm after {time.monotonic() - start:.1f} s")
    return len(warm)


def _line(entry: Json) -> str:
    if entry["error"]:
        return f"prefix {entry['name']!a} is not there: {entry['error']}"
    whose = f"for tenant {entry['tenant']}" if entry["tenant"] else "public"
    return f"prefix {entry['name']!a}: {entry['tokens']:,} tokens in {entry['blocks']:,} pinned blocks, {whose}"


@contextmanager
def _bar() -> Generator[Progress]:
    """Yield a progress bar on stderr that is removed at the end; disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
