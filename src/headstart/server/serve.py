"""serve: one server from start to end. Port, engine process, HTTP, signals, drain, exit code."""

import asyncio
import contextlib
import errno
import functools
import secrets
import signal
import socket
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from prometheus_client import disable_created_metrics
from starlette.types import ASGIApp

from headstart.core.errors import ConfigError, DrainingError, EngineDeadError
from headstart.options import EngineOptions, ServerOptions
from headstart.server.allocator import give_memory_back, trim_regularly
from headstart.server.app import build_app
from headstart.server.banner import banner, store_text
from headstart.server.connections import MIN_CONNECTIONS, ConnectionTable, connection_cap
from headstart.server.engine_client import Build, EngineClient
from headstart.server.http_protocol import BoundedHttpProtocol
from headstart.server.logs import Log
from headstart.server.state import Phase, ServerState
from headstart.server.statistics import write_statistics
from headstart.server.warming import warm_prefixes
from headstart.server.wire import stats_of
from headstart.store.files import read_secret

EXIT_OK, EXIT_BROKEN, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130
INTERRUPT_SECONDS = 10.0  # what Ctrl-C leaves for the requests under way
DEAD_SECONDS = 1.0  # how long a broken server still answers 503, so that everybody hears of it
CUT_SECONDS = 3.0  # for connections that are still open when everything was answered


def serve(build: Build, engine_options: EngineOptions, server_options: ServerOptions, log: Log | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C and returns the exit code.

    0: everything admitted was answered. 1: the engine broke, or requests were cut off at the end of the drain. 2: the
    options cannot work, said in one line. 130: stopped at once by a second Ctrl-C.
    """
    log = log or Log()
    give_memory_back()
    try:
        listener = listen(server_options.host, server_options.port)
    except ConfigError as error:
        log.line(f"headstart: {error}")
        return EXIT_CONFIG
    disable_created_metrics()  # a second series per counter that nobody reads
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Run(build, engine_options, server_options, listener, log).run())


def listen(host: str, port: int) -> socket.socket:
    """Takes the port before anything is loaded. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host {host!r} and port {port} are no address to listen on: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; stop what uses it, or choose another with --port (0: any)"
            raise ConfigError(message) from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _Run:
    """One life of a server."""

    def __init__(
        self,
        build: Build,
        engine_options: EngineOptions,
        server_options: ServerOptions,
        listener: socket.socket,
        log: Log,
    ) -> None:
        self._build = build
        self._engine_options = engine_options
        self._options = server_options
        self._listener = listener
        self._log = log
        self._stop = asyncio.Event()  # a signal asked for the end
        self._now = asyncio.Event()  # and another one for it at once
        self._drain_seconds = server_options.drain_timeout

    async def run(self) -> int:
        """Starts everything, waits, and ends everything."""
        engine = EngineClient()
        try:
            state = ServerState(self._options, engine, self._log, self._domain_secret())
        except ConfigError as error:
            self._log.line(f"headstart: {error}")
            return EXIT_CONFIG
        self._install_signals(state)
        cap = connection_cap(self._options.max_num_queued_reqs, files_each=1)
        http = HttpServer(uvicorn_config(build_app(state), ConnectionTable(cap)))
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        try:
            return await self._live(state, engine)
        finally:
            http.should_exit = True
            http.force_exit = self._now.is_set()
            await asyncio.wait([serving])
            await self._close(engine)

    def _domain_secret(self) -> bytes:
        """What tenants' domains are derived from: the folder's, if blocks are to be found again by other processes.

        Raises ConfigError for a folder that cannot be used.
        """
        if self._engine_options.kv_store is None:
            return secrets.token_bytes(32)
        return read_secret(Path(self._engine_options.kv_store).expanduser())

    async def _live(self, state: ServerState, engine: EngineClient) -> int:
        try:
            started = await self._until_stopped(engine.start(self._build, self._engine_options))
            if started is None:
                self._log.line("headstart: stopped while loading")
                return EXIT_OK
            model = state.prepare(started)
            await asyncio.to_thread(model.tokenizer.start_chat)
            if await self._until_stopped(warm_prefixes(state, model)) is None:
                self._log.line("headstart: stopped while loading")
                return EXIT_OK
            store = await self._store_text(engine)
            state.open(model)
        except (ConfigError, EngineDeadError) as error:
            self._log.line(f"headstart: {error}")
            return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_BROKEN
        host, port = self._listener.getsockname()[:2]
        self._log.line(banner(model, self._options, host, port, store=store))
        regular = [asyncio.create_task(work) for work in (write_statistics(state), trim_regularly())]
        try:
            await self._until_stopped(engine.died.wait())
            return await self._drain(state, engine)
        finally:
            for task in regular:
                task.cancel()

    async def _store_text(self, engine: EngineClient) -> str | None:
        """What the banner says of the store, None without one. Raises EngineDeadError."""
        stats = stats_of(await engine.call("cache_stats"))
        folder = self._engine_options.kv_store
        return None if stats.store is None or folder is None else store_text(folder, stats.store)

    async def _drain(self, state: ServerState, engine: EngineClient) -> int:
        """Answers what was admitted, for as long as there is time."""
        if engine.dead is not None:
            self._log.line(f"headstart: the engine has stopped ({engine.dead}); so does the server")
            await first_of(self._now.wait(), timeout=DEAD_SECONDS)
            return EXIT_BROKEN
        deadline = time.monotonic() + self._drain_seconds
        while state.num_jobs and engine.dead is None and not self._now.is_set() and time.monotonic() < deadline:
            await first_of(state.idle.wait(), self._now.wait(), engine.died.wait(), timeout=0.5)
        if not state.num_jobs:
            return EXIT_OK if engine.dead is None else EXIT_BROKEN
        self._log.line(f"headstart: {state.num_jobs} requests were cut off")
        state.cancel_all(DrainingError("the server shut down before this request was finished"))
        await first_of(state.idle.wait(), timeout=CUT_SECONDS)
        return EXIT_INTERRUPTED if self._now.is_set() else EXIT_BROKEN

    async def _close(self, engine: EngineClient) -> None:
        """Ends the engine, which first writes what waits for its store, unless somebody is in a hurry."""
        store = engine.stats.store
        if store is not None and store.num_pending and engine.dead is None and not self._now.is_set():
            self._log.line(f"headstart: writing {store.num_pending:,} blocks to the store; Ctrl-C stops at once")
        hurry = asyncio.create_task(self._now.wait())
        closing = asyncio.create_task(engine.close())
        await asyncio.wait([closing, hurry], return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            engine.kill()
        hurry.cancel()
        await closing

    async def _until_stopped(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of `work`, or None if a signal came first."""
        return await first_of(work, self._stop.wait())

    def _install_signals(self, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate, state)
        loop.add_signal_handler(signal.SIGINT, self._interrupt, state)

    def _terminate(self, state: ServerState) -> None:
        """SIGTERM: nothing new is admitted, everything admitted is answered. Again: no change."""
        if not self._stop.is_set():
            patience = f"{self._drain_seconds:.0f} s"
            self._log.line(f"headstart: SIGTERM: {state.num_jobs} requests under way get up to {patience} to finish")
        self._begin_drain(state)

    def _interrupt(self, state: ServerState) -> None:
        """Ctrl-C: as SIGTERM, with less patience. Again: now."""
        if self._stop.is_set():
            self._log.line("headstart: stopping at once")
            self._now.set()
            return
        self._drain_seconds = min(self._drain_seconds, INTERRUPT_SECONDS)
        self._log.line(
            f"headstart: {state.num_jobs} requests under way get up to {self._drain_seconds:.0f} s to finish; "
            "Ctrl-C again stops at once"
        )
        self._begin_drain(state)

    def _begin_drain(self, state: ServerState) -> None:
        state.phase = Phase.DRAINING
        self._stop.set()


def uvicorn_config(app: ASGIApp, table: ConnectionTable | None = None) -> uvicorn.Config:
    """How an application of ours is served; `table` holds its connections."""
    table = ConnectionTable(MIN_CONNECTIONS) if table is None else table
    return uvicorn.Config(
        app,
        http=functools.partial(BoundedHttpProtocol, table=table),  # type: ignore[arg-type]  # it is called, no more
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(CUT_SECONDS),
    )


async def first_of(*works: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """Returns what the first of `works` returns if it is the first to end, else None; the rest is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
