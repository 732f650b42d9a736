"""Added latency and CPU time of Ray Serve against the Python front: the same replica, rounds in alternation (A B A B).

    python benchmarks/ray/overhead.py [--requests 100] [--rounds 4] [--tokens 32]

Starts a Ray with one replica of the bundled model, and `headstart route` in front of that replica's server. A client
sends streams one after another, to one front and the other in turn. The last line of stdout is one JSON document;
times in milliseconds. Differences of medians are what Ray adds: its HTTP proxy, the ingress and the request router.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil

from headstart import __version__
from headstart.cli.serve import RAY_DEFAULTS
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions

KEY, ADMIN = "client", "administrator"
HEADERS = {"authorization": f"Bearer {KEY}"}
PORTS = {"ray": 18765, "python": 18766}
RAY_PROCESSES = ("ray::ProxyActor", "ray::ServeReplica:headstart:ingress", "ray::ServeReplica:headstart:replica")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=4, help="of each front")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    options = parser.parse_args()
    os.environ.update(RAY_DEFAULTS | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    import ray
    from ray import serve

    from headstart.gateway.ray.ray_application import application

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORTS["ray"]})
    engine = EngineOptions(threads=1, num_gpu_blocks_override=512)
    server = ServerOptions(api_key=(KEY,), admin_api_key=(ADMIN,), access_log="none")
    serve.run(application(engine, server, RouterOptions()), name="headstart", route_prefix="/")
    python = None
    try:
        fleet = httpx.get(f"{_url('ray')}/v1/fleet", headers={"authorization": f"Bearer {ADMIN}"}, timeout=60).json()
        python = _python_front(fleet["replicas"][0]["url"])
        document = _measured(options, python)
    finally:
        if python is not None:
            python.terminate()
            python.wait()
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(document))  # last: Ray writes to stdout, too


def _url(front: str) -> str:
    return f"http://127.0.0.1:{PORTS[front]}"


def _python_front(replica: str) -> "subprocess.Popen[bytes]":
    words = ["route", "--replica", replica, "--port", str(PORTS["python"]), "--access-log", "none"]
    command = [sys.executable, "-m", "headstart", *words]
    process = subprocess.Popen(command, env={**os.environ, "HEADSTART_API_KEY": KEY})
    while True:
        try:
            if httpx.get(f"{_url('python')}/health", timeout=60).status_code == 200:
                return process
        except httpx.TransportError:
            assert process.poll() is None, "the router has ended"
        time.sleep(0.2)


def _measured(options: argparse.Namespace, python: "subprocess.Popen[bytes]") -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    processes = {
        "ray": [child for child in psutil.Process().children(recursive=True) if _name(child).startswith(RAY_PROCESSES)],
        "python": [psutil.Process(python.pid)],
    }
    fronts = ("python", "ray")
    for front in fronts:
        _round(front, 10, options.tokens)  # connections and caches
        found[front] = {"first_byte_ms": [], "token_ms": [], "cpu_ms": []}
    for number in range(options.rounds):
        for front in fronts:
            before = _cpu(processes[front])
            first, token = _round(front, options.requests, options.tokens)
            found[front]["cpu_ms"].append((_cpu(processes[front]) - before) * 1e3 / options.requests)
            found[front]["first_byte_ms"].append(first)
            found[front]["token_ms"].append(token)
            print(f"round {number}: {front} {first:.2f} ms to the first byte, {token:.3f} ms a token", file=sys.stderr)
    added = {
        name: statistics.median(found["ray"][name]) - statistics.median(found["python"][name]) for name in found["ray"]
    }
    return {
        "bench": "ray-overhead",
        "version": __version__,
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "settings": vars(options),
        "medians_of_rounds": found,
        "added": {name: round(value, 3) for name, value in added.items()},
    }


def _round(front: str, requests: int, tokens: int) -> tuple[float, float]:
    """Return the median milliseconds to the first byte, and those between two pieces of a stream."""
    firsts, gaps = list[float](), list[float]()
    with httpx.Client(base_url=_url(front), headers=HEADERS, timeout=120) as client:
        for number in range(requests):
            body = {
                "prompt": f"question {number % 10} of a round",
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
            start = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                times = [time.perf_counter() for _ in response.iter_raw()]
            firsts.append((times[0] - start) * 1e3)
            gaps.append((times[-1] - times[0]) * 1e3 / (tokens - 1))
    return statistics.median(firsts), statistics.median(gaps)


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _cpu(processes: list[psutil.Process]) -> float:
    """Return the CPU seconds of processes, user and system."""
    return sum(times.user + times.system for process in processes for times in [process.cpu_times()])


if __name__ == "__main__":
    main()
