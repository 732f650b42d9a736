"""Settings of every test: one quiet compute thread, settled before torch is imported, and repeatable examples."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Generator
from functools import cache
from importlib.metadata import entry_points
from ipaddress import ip_address
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
PATHS = [*(str(ROOT / folder / "src") for folder in (".", "lab", "plugins")), os.environ.get("PYTHONPATH", "")]


def announce_laboratory() -> str:
    """Return a folder with the entry points of lab/, as its installation would write them."""
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = Path(tempfile.mkdtemp(prefix="headstart-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    written = folder / f"headstart_lab-{project['version']}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, parts in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in parts.items()))
    ]
    (written / "entry_points.txt").write_text("\n".join(lines))
    return str(folder)


if not entry_points(group="headstart.bench"):  # the laboratory is not installed; workers inherit the folder
    PATHS.append(announce_laboratory())
    sys.path.append(PATHS[-1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))  # for subprocesses
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():  # kernels for GPUs run in the interpreter; read when anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a script runs pytest in the background

import patience  # noqa: E402
import pytest  # noqa: E402
from httpx._transports import default as httpx_transports  # noqa: E402
from httpx2._transports import default as httpx2_transports  # noqa: E402
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

pytest_plugins = ["fewer_examples", "file_seconds", "forked_workers"]


def only_loopback(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no test connects to another machine, not even to an address that is a hostile example."""
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
        assert host == "localhost" or ip_address(host).is_loopback, f"a test connects to {arguments[1]}"


sys.addaudithook(only_loopback)


# One for all clients: each, and each `httpx.get`, reads the certificates of 150 authorities for 25 ms of CPU time.
# Nothing here is signed by any of them.
for transports in (httpx_transports, httpx2_transports):  # httpx2: of SDKs
    transports.create_ssl_context = cache(transports.create_ssl_context)


def has_cache() -> bool:
    """Whether kernels that were built can be kept for the next run."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # no home
        return False
    return True


if not has_cache():  # one for this run, which workers inherit
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="headstart-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# No deadline: two shared cores. Derandomised: a red run is red again; `--hypothesis-seed` explores.
settings.register_profile(
    "headstart", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("no-shrink", settings.get_profile("headstart"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("headstart")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Builds the kernels before tests: once, by all cores, and in no test's time. Cached, it takes a moment."""
    if session.config.option.forks:
        subprocess.run([sys.executable, str(ROOT / "tests" / "build_kernels.py")], check=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects without the search for cycles, a fifth of its time, and keeps what it leaves out of later searches.

    Modules and items are 700 MB, which a full search takes a second for, and tests of memory ask for many. Forked
    processes of tests share the processes that fork servers.
    """
    gc.disable()
    try:
        collected = yield
        harness = sys.modules.get("server.harness")
        if harness and session.config.option.forks and not session.config.option.collectonly:
            harness.fork_server.start(harness.server_environment())
        return collected
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules complain of what the last search, at the exit, does not free
        gc.enable()


@pytest.fixture
def true_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and sandboxes of servers in this process are started as the product does, not forked."""
    from server import harness

    harness.start_processes_truly(monkeypatch.setattr)


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores on disk of this process are always preferred, and waited for."""
    patience.prefer_the_store(monkeypatch.setattr)
