"""Fuzz a running Headstart: schemathesis on its OpenAPI document, and our own generators (fuzz_requests.py).

    fuzz.py [--requests 100000] [--seed 1] [--replicas 2] [--max-silence 0.5]

Starts `headstart serve` with the bundled model and API keys, fills its KV pool, its stored responses and the prompt
doctor's window (bounded by themselves), and warms it up with legal requests and with schemas. Exits with 1 if any
answer was a 5xx, if the memory of all its processes together grew by more than 150 MB at any moment (200 MB with
--replicas), if the server has not returned to idle afterwards, or if /livez was unanswered for longer than
--max-silence seconds (not judged without it: other work on the machine counts, too). With --replicas the report also
has the growth of the router and of each replica. The last line of stdout is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import hypothesis
import psutil
import requests
import schemathesis

from headstart_lab.fuzz.fuzz_requests import (
    THOUGHT,
    Post,
    broken_http,
    continued,
    disconnected,
    expensive,
    legal,
    mutated,
    numbers,
    reasoning,
    token_grammar,
)

ALLOWED_GROWTH = 150e6, 200e6  # bytes: of one server, of a router and its replicas
WARMING = 300  # legal requests before memory is compared, so that normal allocations are already made; at most these
GRAMMARS = 16  # and requests with a schema per server: the first starts the process that compiles grammars
KEYS = ("fuzz-key-one", "fuzz-key-two")
ADMIN = "fuzz-admin"
BEARER = {"authorization": f"Bearer {KEYS[0]}"}
SHARES = {
    "schemathesis": 0.2,
    "mutated": 0.4,
    "legal": 0.1,
    "disconnected": 0.07,
    "broken http": 0.08,
    "numbers": 0.03,
    "continued": 0.04,
    "reasoning": 0.03,
    "token grammar": 0.03,
    "expensive": 0.02,
}
MAX_IDS = 64  # of stored responses that are continued


MAKERS = {
    "mutated": mutated,
    "disconnected": disconnected,
    "expensive": expensive,
    "numbers": numbers,
    "reasoning": reasoning,
    "token grammar": token_grammar,
}


class Silence:
    """A process that asks for /livez all the time, and notes the longest wait for its answer.

    A thread here would count the turns that it waits for while requests are made.
    """

    def __init__(self, url: str) -> None:
        self._longest = multiprocessing.Value("d", 0.0)  # seconds
        self._process = multiprocessing.Process(target=_ask_all_the_time, args=(url, self._longest), daemon=True)

    @property
    def longest(self) -> float:
        return self._longest.value

    def start(self) -> None:
        self._process.start()

    def reset(self) -> None:
        self._longest.value = 0.0

    def stop(self) -> None:
        self._process.terminate()


def _ask_all_the_time(url: str, longest: Any) -> None:
    with requests.Session() as session:
        while True:
            time.sleep(0.02)
            began = time.monotonic()
            session.get(f"{url}/livez", timeout=600)
            longest.value = max(longest.value, time.monotonic() - began)


class Memory(threading.Thread):
    """A thread that polls the resident memory of a process and all its children, in all and by server."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.current = 0
        self.num_polls = 0
        self.servers: dict[int, int] = {}  # bytes by process id: of the router, or the only server, and of each replica
        self.server_peaks: dict[int, int] = {}
        self._root = psutil.Process(pid)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            self.poll()

    def poll(self) -> int:
        """Return the resident bytes now."""
        servers = {self._root.pid: _rss(self._root)}
        for child in _children(self._root):
            tree = sum(map(_rss, family(child)))
            server = child.pid if _is_replica(child) else self._root.pid
            servers[server] = servers.get(server, 0) + tree
        total = sum(servers.values())
        self.servers = servers
        for server, num_bytes in servers.items():
            self.server_peaks[server] = max(self.server_peaks.get(server, 0), num_bytes)
        self.current, self.peak, self.num_polls = total, max(self.peak, total), self.num_polls + 1
        return total

    def by_process(self) -> dict[str, int]:
        """Return the resident MB of each kind of process now."""
        found: Counter[str] = Counter()
        for process in family(self._root):
            try:
                name = next((word.rpartition(".")[2] for word in process.cmdline() if "headstart." in word), "server")
            except psutil.NoSuchProcess:
                continue
            found[name] += round(_rss(process) / 1e6)
        return dict(found)

    def stop(self) -> None:
        self._stopped.set()


def _rss(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all below it."""
    return [process, *(each for child in _children(process) for each in family(child))]


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the children that the kernel lists. psutil reads all processes of the machine for that."""
    found = list[psutil.Process]()
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
            found += [psutil.Process(int(pid)) for pid in task.read_text().split()]
    return found


def _is_replica(process: psutil.Process) -> bool:
    try:
        return any("replica_process" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


class Fuzz:
    """One run against one server."""

    def __init__(self, url: str, memory: Memory, seed: int) -> None:
        self.url = url
        self.memory = memory
        self.seed = seed
        self.statuses: dict[str, Counter[int]] = {name: Counter() for name in (*SHARES, "grammar")}
        self.failures: list[str] = []
        self.growth: dict[str, float] = {}
        self.silence: dict[str, float] = {}  # seconds, by kind
        self.ids: list[str] = []  # of the latest stored responses

    def note(self, kind: str, status: int, what: object) -> None:
        """Count a response, and record a 5xx as a failure."""
        self.statuses[kind][status] += 1
        if status >= 500:
            self.failures.append(f"{kind}: {status} for {str(what)[:600]}")

    # ------------------------------------------------------------------------------------------------- our generators

    async def post(self, session: aiohttp.ClientSession, kind: str, request: Post, key: str) -> None:
        """Send one request; a stream that ends in a server error counts as a server error."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        try:
            async with session.post(self.url + request.path, data=request.body, headers=headers) as response:
                if request.hang_up is not None:
                    await response.content.read(request.hang_up)
                    response.close()
                    self.note(kind, response.status, request.body)
                    return
                answer = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            self.statuses[kind][0] += 1
            if kind in ("mutated", "legal"):
                self.failures.append(f"{kind}: {error!r} for {request.body[:300]!r}")
            return
        if kind == "continued" and (found := re.search(rb'"id":"(resp_[0-9a-f]{32})"', answer)):
            self.ids = [*self.ids[1 - MAX_IDS :], found[1].decode()]
        failed = re.search(rb'event: error\ndata: .*?"type":"server_error"', answer)
        self.note(kind, 599 if failed else response.status, (request.path, request.body, answer[:300]))

    async def generated(self, kind: str, count: int, at_once: int) -> None:
        """Send `count` requests of one kind, `at_once` at a time."""
        numbers = iter(range(count))
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

            async def work() -> None:
                for number in numbers:
                    rng = random.Random(f"{self.seed} {kind} {number}")
                    key = rng.choice(KEYS)
                    if kind == "broken http":
                        await self.raw(rng, key)
                    else:
                        await self.post(session, kind, self._make(kind, rng), key)

            await asyncio.gather(*(work() for _ in range(at_once)))

    def _make(self, kind: str, rng: random.Random) -> Post:
        if kind == "continued":
            return continued(rng, self.ids)
        if kind == "legal":
            path, body = legal(rng)
            return Post(
                path,
                json.dumps(body | {"max_tokens": min(body.get("max_tokens") or 8, 8)} | {"min_tokens": 0}).encode(),
            )
        if kind == "grammar":
            question = {"role": "user", "content": f"{rng.random()}"}
            schema = {"type": "object", "properties": {f"n{rng.randrange(999)}": {"type": "integer"}}}
            wanted = {"type": "json_schema", "json_schema": {"name": "found", "schema": schema}}
            asked = {"messages": [question], "max_tokens": 8, "response_format": wanted}
            return Post("/v1/chat/completions", json.dumps(asked).encode())
        return MAKERS[kind](rng)

    async def raw(self, rng: random.Random, key: str) -> None:
        """Write bytes to a socket, read the response for a while, disconnect."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = broken_http(rng, key)
        try:
            writer.write(data)
            async with asyncio.timeout(rng.choice((0.05, 0.5))):
                answer = await reader.read(1 << 20)
            found = re.match(rb"HTTP/1.1 (\d\d\d)", answer)
            self.note("broken http", int(found[1]) if found else 0, (data[:500], answer[:200]))
        except (TimeoutError, ConnectionError):
            self.note("broken http", 0, data)
        finally:
            writer.close()

    # -------------------------------------------------------------------------------------------------- schemathesis

    def schemathesis(self, count: int, document: dict[str, Any]) -> None:
        """Send `count` requests drawn from the server's own OpenAPI document, half of them in violation of it."""
        schema = schemathesis.openapi.from_dict(document)
        operations = [result.ok() for result in schema.get_all_operations()]
        pairs = [(operation, mode) for operation in operations for mode in schemathesis.GenerationMode]
        rng, done = random.Random(self.seed), self.statuses["schemathesis"]
        while done.total() < count:
            for pair in list(pairs):
                weight = 4 if pair[0].body else 1
                wanted = min(-(-count * weight // (len(pairs) * 3)), count - done.total())
                if wanted > 0 and not self._one_operation(*pair, wanted, rng.getrandbits(32)):
                    pairs.remove(pair)  # an operation without parameters has no invalid requests

    def _one_operation(self, operation: Any, mode: Any, wanted: int, seed: int) -> bool:
        """Send up to `wanted` requests of one operation, and return whether there were any."""
        left = wanted

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(wanted, 1),
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal left
            if left <= 0:
                return
            left -= 1
            if isinstance(case.body, dict) and "max_tokens" in case.body and isinstance(case.body["max_tokens"], int):
                case.body["max_tokens"] = min(case.body["max_tokens"], 8)
            try:
                answer = case.call(base_url=self.url, headers=BEARER, timeout=600)
            except Exception as error:  # some cases cannot be sent: control characters in a header
                self.statuses["schemathesis"][0] += 1
                if "Connection" in type(error).__name__:
                    self.failures.append(f"schemathesis: {error!r}")
                return
            self.note("schemathesis", answer.status_code, (operation.label, case.body, answer.text[:300]))

        try:
            send()
        except hypothesis.errors.Unsatisfiable:
            return False
        return left < wanted


def fill(url: str, pool_tokens: int) -> None:
    """Fill the KV pool, the stored responses and the prompt doctor's window, which are bounded in bytes by themselves.

    Later growth is not due to them then.
    """
    rng = random.Random(0)
    thought = {"type": "reasoning_text", "text": THOUGHT * 25_000}  # 1 MB that the chat template drops
    items = [{"type": "reasoning", "summary": [], "content": [thought]}, {"role": "user", "content": "a"}]
    turn = {"role": "assistant", "content": "b", "reasoning_content": THOUGHT * 15_000}
    chat = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "c"}]
    posts: list[tuple[str, Any]] = [("/v1/responses", {"input": items, "max_output_tokens": 1})] * 40
    posts += [("/v1/chat/completions", {"messages": chat, "max_tokens": 1})] * 16
    for _ in range(pool_tokens // 1500 + 1):
        prompt = [rng.randrange(1536) for _ in range(1800)]
        posts.append(("/v1/completions", {"prompt": prompt, "max_tokens": 1}))

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            for path, body in posts:
                for key in KEYS:
                    headers = {"authorization": f"Bearer {key}"}
                    async with session.post(url + path, json=body, headers=headers) as response:
                        assert response.status == 200, await response.text()
                        await response.read()

    asyncio.run(run())


def start(arguments: list[str], log: Path) -> tuple["subprocess.Popen[bytes]", str]:
    """Start a server, and return it with its address once it is ready."""
    command = [sys.executable, "-m", "headstart", "serve", "--port", "0", *arguments]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "GOMP_SPINCOUNT": "0"})
    while process.poll() is None:
        found = re.search(r" at (http://\S+)/v1|on (http://[^\s,]+)", log.read_text(errors="replace"))
        if found and _is_ready(url := found[1] or found[2]):
            return process, url
        time.sleep(0.1)
    raise SystemExit(f"the server ended:\n{log.read_text(errors='replace')[-2000:]}")


def openapi_document(log: Path) -> dict[str, Any]:
    """Return the document of a separate server: a router has none."""
    process, url = start([], log)
    try:
        return requests.get(url + "/openapi.json", timeout=30).json()
    finally:
        process.terminate()
        process.wait()
        log.unlink()


def _is_ready(url: str) -> bool:
    import urllib.request

    try:
        return urllib.request.urlopen(url + "/health", timeout=5).status == 200
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="more than one: through a router")
    parser.add_argument("--kind", action="append", choices=list(SHARES), help="only these; default: all")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--max-silence", type=float, default=float("inf"), help="seconds without an answer of /livez")
    options = parser.parse_args()
    arguments = [part for key in KEYS for part in ("--api-key", key)]
    arguments += ["--admin-api-key", ADMIN, "--kv-cache-memory", "64MiB", "--no-access-log"]
    arguments += [
        "--diagnostics-size",
        str(1 << 20),
    ]  # full after some hundred requests, so its growth is no growth either
    arguments += ["--replicas", str(options.replicas)] if options.replicas > 1 else []
    kinds = options.kind or list(SHARES)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        document = openapi_document(log) if options.replicas > 1 else None
        process, url = start(arguments, log)
        memory = Memory(process.pid)
        try:
            document = document or requests.get(f"{url}/openapi.json", headers=BEARER, timeout=30).json()
            fill(url, 40_000 * options.replicas)
            idle = memory.poll()
            warming = Fuzz(url, memory, -1)
            asyncio.run(warming.generated("legal", min(WARMING, options.requests // 4), options.at_once))
            asyncio.run(warming.generated("grammar", GRAMMARS * options.replicas, options.at_once))
            assert warming.statuses["grammar"].keys() == {200}, warming.statuses["grammar"]
            time.sleep(2)
            base = memory.poll()
            memory.peak, bases, memory.server_peaks = base, memory.servers, {}
            print("warm", memory.by_process(), file=sys.stderr, flush=True)
            memory.start()
            silence = Silence(url)
            silence.start()
            fuzz, began = Fuzz(url, memory, options.seed), time.monotonic()
            scale = options.requests / sum(SHARES[kind] for kind in kinds)
            for kind in kinds:
                count, memory.peak = round(SHARES[kind] * scale), memory.current
                silence.reset()
                if kind == "schemathesis":
                    fuzz.schemathesis(count, document)
                else:
                    asyncio.run(fuzz.generated(kind, count, options.at_once))
                fuzz.growth[kind] = (memory.peak - base) / 1e6
                fuzz.silence[kind] = silence.longest
                told = f"{fuzz.growth[kind]:+.0f} MB, silent {silence.longest:.2f} s, now {memory.by_process()}"
                print(kind, dict(fuzz.statuses[kind]), told, file=sys.stderr, flush=True)
            memory.stop()
            silence.stop()
            health, admin = _after(url)
        finally:
            process.terminate()
            process.wait(60)
        tail = log.read_text(errors="replace")[-3000:]
    growth = [memory.server_peaks.get(server, 0) - num_bytes for server, num_bytes in bases.items()]
    report = {
        "requests": sum(counter.total() for counter in fuzz.statuses.values()),
        "seconds": round(time.monotonic() - began),
        "replicas": options.replicas,
        "seed": options.seed,
        "statuses": {kind: dict(sorted(fuzz.statuses[kind].items())) for kind in kinds},
        "server_errors": len(fuzz.failures),
        "idle_mb": round(idle / 1e6),
        "base_mb": round(base / 1e6),
        "peak_growth_mb": {kind: round(value) for kind, value in fuzz.growth.items()},
        "longest_silence_s": {kind: round(value, 2) for kind, value in fuzz.silence.items()},
        "server_growth_mb": [round(value / 1e6) for value in growth],
        "end_growth_mb": round((memory.current - base) / 1e6),
        "polls": memory.num_polls,
        "health_after": health,
        "after": admin,
    }
    for failure in fuzz.failures[:20]:
        print(failure, file=sys.stderr)
    valid = (
        not fuzz.failures
        and max(fuzz.growth.values()) <= ALLOWED_GROWTH[options.replicas > 1] / 1e6
        and max(fuzz.silence.values()) <= options.max_silence
        and health == 200
        and not admin["running"]
    )
    if not valid:
        print(tail, file=sys.stderr)
    print(json.dumps(report | {"valid": valid}))
    return 0 if valid else 1


def _after(url: str) -> tuple[int, dict[str, float]]:
    """Return the status of /health and the gauges that must be back at zero."""
    import urllib.request

    time.sleep(2)
    status = urllib.request.urlopen(url + "/health", timeout=30).status
    request = urllib.request.Request(url + "/metrics", headers={"authorization": "Bearer fuzz-admin"})
    page = urllib.request.urlopen(request, timeout=30).read().decode()
    names = {"running": r"num_requests_running", "waiting": r"num_requests_waiting"}
    return status, {
        name: sum(float(value) for value in re.findall(rf"^\w+:{metric}(?:{{.*}})? (\S+)$", page, re.MULTILINE))
        for name, metric in names.items()
    }


if __name__ == "__main__":
    sys.exit(main())
