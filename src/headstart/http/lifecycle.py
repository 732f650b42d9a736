"""Lifecycle of an HTTP process: port, HTTP server, signals, drain, exit code. Shared by server and gateway."""

import asyncio
import contextlib
import errno
import functools
import signal
import socket
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headstart.core.errors import ConfigError
from headstart.http.logs import ServerLog
from headstart.http.protocol.connections import MIN_CONNECTIONS, ConnectionTable
from headstart.http.protocol.http_protocol import BoundedHttpProtocol

EXIT_OK, EXIT_BROKEN, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130
INTERRUPT_SECONDS = 10.0  # limit of the drain after Ctrl-C
CUT_SECONDS = 3.0  # for connections that are still open when all requests are answered


def open_listener(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Return a listening socket, at the path `uds` if given. Called before anything is loaded. Raises ConfigError."""
    if uds is not None:
        return _listen_at(Path(uds).expanduser())
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


def listener_address(listener: socket.socket) -> tuple[str, int, str]:
    """Return host, port and path of a listening socket; the path is empty unless it is a Unix socket."""
    found = listener.getsockname()
    return ("localhost", 80, found) if isinstance(found, str) else (*found[:2], "")


def unlink_socket_file(uds: str | None) -> None:
    """Remove the file of a Unix socket, if there is one, at the end of its process."""
    if uds is not None:
        Path(uds).expanduser().unlink(missing_ok=True)


def _listen_at(path: Path) -> socket.socket:
    """Return a socket listening at a path; a socket that an earlier process left is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
        listener.bind(str(path))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        why = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on --uds {path}: {why}") from error
    return listener


class UvicornWithoutSignals(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class ShutdownSignals:
    """Shutdown signals of a process: SIGTERM drains, Ctrl-C drains for a shorter time, again Ctrl-C stops at once."""

    def __init__(
        self, drain_seconds: float, log: ServerLog, *, num_requests: Callable[[], int], on_drain: Callable[[], None]
    ) -> None:
        """`num_requests` returns the number of requests in flight; `on_drain` is called to stop admission."""
        self.begun = asyncio.Event()
        self.at_once = asyncio.Event()
        self.drain_seconds = drain_seconds
        self._log = log
        self._num_requests = num_requests
        self._on_drain = on_drain

    def install_handlers(self) -> None:
        """Handle the signals of this process from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _terminate(self) -> None:
        """Begin to drain: admit no new requests, answer the admitted ones. A second SIGTERM changes nothing."""
        if not self.begun.is_set():
            self._log_drain("SIGTERM: ", "")
        self._begin()

    def _interrupt(self) -> None:
        if self.begun.is_set():
            self._log.write_line("headstart: stopping at once")
            self.at_once.set()
            return
        self.drain_seconds = min(self.drain_seconds, INTERRUPT_SECONDS)
        self._log_drain("", "; Ctrl-C again stops at once")
        self._begin()

    def _begin(self) -> None:
        self._on_drain()
        self.begun.set()

    def _log_drain(self, why: str, more: str) -> None:
        count, seconds = self._num_requests(), f"{self.drain_seconds:.0f} s"
        self._log.write_line(f"headstart: {why}{count} requests under way get up to {seconds} to finish{more}")


def uvicorn_config(app: ASGIApp, table: ConnectionTable | None = None) -> uvicorn.Config:
    """Return uvicorn's config for an application; `table` holds its connections."""
    table = ConnectionTable(MIN_CONNECTIONS) if table is None else table
    return uvicorn.Config(
        app,
        http=functools.partial(BoundedHttpProtocol, table=table),  # type: ignore[arg-type]  # it is only called
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


async def run_until_any_ends(*works: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
    """Return the result of `works[0]` if it ends first or together with others, else None; cancel the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
