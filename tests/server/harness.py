"""A server in a process of its own, as users run it, and the server's parts inside this process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
from server import fork_server
from server.fake_engine import build_fake

from headstart.config.options import EngineOptions, ServerOptions
from headstart.engine import engine_client
from headstart.engine.engine_client import Build, EngineClient
from headstart.engine.wire import UnsentRequests
from headstart.http.logs import ServerLog
from headstart.openai.sandbox import sandbox_pool
from headstart.server.app import build_app
from headstart.server.run_server import warm_configured_prefixes
from headstart.server.server_state import ServerState
from headstart_lab.router.failover_processes import quiet_ports

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0  # seconds; a wait this long has failed, on however busy a machine
"""Seconds for whatever is sure to come, however busy the machine: a longer wait is a bug."""
_RUN_FAKE = """
import importlib, json, sys
from headstart.config.options import EngineOptions, ServerOptions, TenantEntry
from headstart.server.run_server import serve
from server.fake_engine import build_fake
options = json.loads(sys.argv[2])
for name, value in json.loads(sys.argv[3]).items():
    module, _, constant = name.rpartition(".")
    setattr(importlib.import_module("headstart." + module), constant, value)
options.update(api_key=tuple(options["api_key"]), admin_api_key=tuple(options["admin_api_key"]))
options["tenants"] = tuple(TenantEntry(entry["name"], tuple(entry["api_keys"])) for entry in options["tenants"])
sys.exit(serve(build_fake, EngineOptions(model=sys.argv[1]), ServerOptions(**options)))
"""


class Server:
    """A running server process; its stderr goes to a file."""

    def __init__(self, process: "subprocess.Popen[bytes] | fork_server.Forked", log_path: Path) -> None:
        self.process = process
        self.log_path = log_path
        self.url = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_ready(self) -> "Server":
        """Waits for the banner, and takes the address from it."""
        found = wait_for(lambda: re.search(r" at (http://\S+)/v1", self.log) or self.process.poll() is not None)
        assert isinstance(found, re.Match), f"exit code {self.process.poll()}:\n{self.log}"
        self.url = found[1]
        return self

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=PATIENCE, **options)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code."""
        self.process.send_signal(signal_number)
        return self.wait()

    def kill(self) -> None:
        """kill -9 for the server and its engine, both at once."""
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        assert self.stop(signal.SIGKILL) == -signal.SIGKILL

    def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        return self.process.wait(PATIENCE)

    def metric(self, name: str) -> float:
        """Returns the sum of the samples with that name."""
        text = self.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{| )", line))


def wait_for(probe: Any) -> Any:
    """Returns the first true value of `probe()`, or fails when it has had all the time there is."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = probe()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def address_of(pid: int) -> str | None:
    """The address on which that process listens, from the kernel's table: nothing is printed before it is ready."""
    listening = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return f"http://127.0.0.1:{listening[0].laddr.port}" if listening else None


def server_environment() -> dict[str, str]:
    """Return the environment of servers: this process's, and the folders that modules are found in."""
    folders = [*(str(ROOT / path) for path in ("src", "lab/src", "tests")), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders).rstrip(os.pathsep)}


@contextmanager
def spawn(command: list[str], log_path: Path, *, truly: bool = False, umask: int = -1) -> Iterator[Server]:
    """Starts a process that serves, and kills it at the end if it still runs. `umask`: -1 leaves this process's.

    A server or router that tests start often is forked from a process that has imported it already, unless `truly`.
    """
    environment = server_environment()
    with log_path.open("wb") as log:
        modules = None if truly else _modules(command)
        process = modules and fork_server.fork(command[1:], environment, log.fileno(), modules, umask=umask)
        if process is None:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, umask=umask
            )
    try:
        yield Server(process, log_path)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def fork_processes(set_attribute: Callable[[Any, str, object], object] = setattr) -> None:
    """Fork what a server in this process starts, its engine and its sandboxes, where the surroundings are usual."""

    def spawn_engine(descriptor: int) -> Any:
        words = ["-m", engine_process]
        return fork_server.fork(words, here(), 2, fork_server.FAKE, given=descriptor) or TRUE_ENGINE(descriptor)

    def spawn_sandbox(module: str, descriptor: int) -> Any:
        environment = {**sandbox_pool.minimal_environment(os.environ), "PYTHONPATH": here()["PYTHONPATH"]}
        forked = fork_server.fork(["-m", module], environment, 2, (module,), given=descriptor)
        return forked or TRUE_SANDBOX(module, descriptor)

    def here() -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    engine_process = "headstart.engine.engine_process"
    set_attribute(engine_client, "_spawn", spawn_engine)
    set_attribute(sandbox_pool, "_spawn", spawn_sandbox)


def start_processes_truly(set_attribute: Callable[[Any, str, object], object]) -> None:
    """Start engines and sandboxes as the product does."""
    set_attribute(engine_client, "_spawn", TRUE_ENGINE)
    set_attribute(sandbox_pool, "_spawn", TRUE_SANDBOX)


TRUE_ENGINE, TRUE_SANDBOX = engine_client._spawn, sandbox_pool._spawn
fork_processes()


def _modules(command: list[str]) -> tuple[str, ...] | None:
    """Modules that the process of that command imports, None if it is no server that is forked."""
    match command[1:4]:
        case ["-c", code, *_] if code == _RUN_FAKE:
            return fork_server.FAKE
        case ["-c", code, *_] if "headstart_lab.runners.null_replica" in code:
            return fork_server.FAKE
        case ["-m", "headstart", "route"]:
            return fork_server.FAKE
        case ["-m", "headstart", "serve"]:
            return fork_server.REAL
        case ["-c", code, "serve"] if "server.patient" in code:
            return fork_server.REAL
        case _:
            return None


def fake_command(model: str, *, constants: dict[str, float] | None = None, **options: Any) -> list[str]:
    """The command that serves a fake engine; `model` as in fake_engine.py.

    `constants` of modules that are to have another value, as "server.run_server.DEAD_SECONDS". The heartbeat is not
    missed unless a test sets `heartbeat_timeout`: other processes may take all cores for seconds.
    """
    settings = asdict(ServerOptions(**{"port": 0, "heartbeat_timeout": PATIENCE, **options}))
    return [sys.executable, "-c", _RUN_FAKE, model, json.dumps(settings), json.dumps(constants or {})]


@contextmanager
def fake_server(model: str, log_path: Path, **options: Any) -> Iterator[Server]:
    """A ready server around a fake engine."""
    with spawn(fake_command(model, **options), log_path) as server:
        yield server.wait_ready()


class Inside:
    """The application in this process, over ASGI, around an engine process."""

    def __init__(self, state: ServerState, engine: EngineClient, client: httpx.AsyncClient) -> None:
        self.state = state
        self.engine = engine
        self.client = client

    async def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})


@asynccontextmanager
async def inside(
    model: str, build: Build = build_fake, generation_config: str = "auto", **options: Any
) -> AsyncIterator[Inside]:
    """Everything of a server but its sockets; prefixes of the options are warmed first."""
    engine = EngineClient()
    settings = ServerOptions(**{"access_log": "none", "heartbeat_timeout": PATIENCE, **options})
    try:
        info = await engine.start(build, EngineOptions(model=model, generation_config=generation_config))
        state = ServerState(settings, engine, ServerLog())
        loaded = state.make_served_model(info)
        await warm_configured_prefixes(state, loaded)
        state.start_admitting(loaded)
        transport = httpx.ASGITransport(build_app(state), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=PATIENCE) as client:
            yield Inside(state, engine, client)
    finally:
        await engine.close()


async def until(probe: Any) -> None:
    """Waits until `probe()` is true."""
    async with asyncio.timeout(PATIENCE):
        while not probe():
            await asyncio.sleep(0.01)


async def turns(count: int = 100) -> None:
    """Lets the other tasks run, as many turns of the event loop on a busy machine as on an idle one."""
    for _ in range(count):
        await asyncio.sleep(0.001)


def parse_events(text: str) -> list[Any]:
    """Returns the JSON of every data line, and "[DONE]" as it is."""
    datas = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def quiet_port() -> int:
    """A free port that no system hands out by itself, so that it is still free when a server has ended on it."""
    return quiet_ports(1)[0]


def num_told(server: Inside) -> int:
    """Return how many tokens the streams of this server have been given."""
    return sum(generation.num_tokens for job in server.state._jobs for generation in job.generations)


async def gone_at_once(app: Any, path: str, body: bytes) -> int:
    """The status for a client that disconnects when it has sent the body."""
    status = 0
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "client": ("127.0.0.1", 1)}, receive, send)
    return status


def waiting_bytes(outbox: UnsentRequests) -> int:
    """Return the bytes of the prompts that an outbox holds."""
    letters = (letter for queue in outbox._queues.values() for letter in queue)
    return sum(sum(map(len, letter.message.prompts)) for letter in letters if letter.message is not None)


def unsent_bytes(client: EngineClient) -> int:
    """Return the bytes for the engine that its process has not read yet."""
    assert client._transport is not None
    return client._transport.get_write_buffer_size() + waiting_bytes(client._outbox)
