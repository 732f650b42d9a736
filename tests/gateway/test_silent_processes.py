"""Real servers behind a router, one of them stopped by SIGSTOP: no request is lost, and it returns after SIGCONT."""

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from gateway.test_route import routing
from server.harness import PATIENCE, Server, spawn, wait_for

NUM_REQUESTS = 20


@contextmanager
def null_server(log_path: Path, heartbeat_timeout: float) -> Iterator[Server]:
    """A `headstart serve` whose engine computes nothing and counts as silent after so many seconds."""
    source = (
        "import sys; from headstart_lab.runners.null_replica import build_null; "
        "from headstart.config.options import EngineOptions, ServerOptions; "
        "from headstart.server.run_server import serve; "
        "sys.exit(serve(build_null, EngineOptions(), ServerOptions(port=0, heartbeat_timeout=float(sys.argv[1]))))"
    )
    with spawn([sys.executable, "-c", source, str(heartbeat_timeout)], log_path) as server:
        yield server.wait_ready()


def engine_of(server: Server) -> int:
    """The process of a server's engine."""
    return min(child.pid for child in psutil.Process(server.process.pid).children())  # started before any other


def test_a_server_stopped_behind_a_router_loses_no_request(tmp_path: Path) -> None:
    flags = ("--routing-policy", "round-robin", "--retry-budget", "0")
    with (
        null_server(tmp_path / "one", heartbeat_timeout=5.0) as one,
        null_server(tmp_path / "other", heartbeat_timeout=PATIENCE) as other,  # however busy the machine
        routing(tmp_path / "route", one.url, other.url, flags=flags) as router,
    ):

        def states() -> dict[str, str]:
            return {replica["url"]: replica["state"] for replica in router.get("/v1/fleet").json()["replicas"]}

        def ask(number: int) -> httpx.Response:
            body = {"prompt": [number] * 40, "max_tokens": 3, "stream": number % 4 < 2, "ignore_eos": True}
            return router.post("/v1/completions", json=body)

        def one_answers() -> bool:
            answer = router.post("/v1/completions", json={"prompt": [1], "max_tokens": 1})
            return answer.headers.get("x-headstart-replica") == one.url

        wait_for(lambda: set(states().values()) == {"up"})
        for process in (one.process.pid, engine_of(one)):
            os.kill(process, signal.SIGSTOP)
            try:
                with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                    answers = list(pool.map(ask, range(NUM_REQUESTS)))
                assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
                assert not any('"error"' in answer.text for answer in answers)
                assert {answer.headers["x-headstart-replica"] for answer in answers} == {other.url}
                assert states()[one.url] == "absent"
            finally:
                os.kill(process, signal.SIGCONT)
            wait_for(lambda: states()[one.url] == "up")
            wait_for(one_answers)
