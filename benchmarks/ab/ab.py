"""Compare two checkouts row by row, in turn; see README.md. The last line of stdout is JSON."""

import argparse
import asyncio
import contextlib
import copy
import json
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

HERE = Path(__file__).parent
LIMIT = 1.05
BURST = "server: 8 x 4 prompts behind new prefixes"
HTTP_ROWS = ("streamed completion", "whole completion", "chat")
FIRST_TOKENS = ("server: first token, 900 of 1,000 cached", "router and server: first token, 900 of 1,000 cached")
CHUNKS = 10  # turns within one pair where a measurement is short: other load on the machine changes within seconds
IN_PROCESS = (
    *("one stream, greedy", "32 streams, greedy", "32 streams, sampled", "32 streams, logprobs"),
    *("prefill of 1,000 tokens", "first token, 900 of 1,000 cached"),
    *("32 requests behind one new prefix", "16 cached prompts again"),
    "8 x 4 prompts behind new prefixes",
    *("1,000 tokens computed and written to a store", "1,000 tokens from a store"),
    *("step of 256 decodes, no model", "admission of 4,096 tokens, no model", "routed request, no sockets"),
)
LONG = (*(row for row in IN_PROCESS if "no model" not in row), BURST, *FIRST_TOKENS)  # a turn is long enough


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which `headstart` is the one of a checkout."""
    folders = (checkout.resolve() / "src", checkout.resolve() / "lab" / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


class Worker:
    """A worker.py process."""

    def __init__(self, checkout: Path, model: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), model],
            env=environment(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, row: str, seed: int) -> float:
        """Run one row and return its figure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"row": row, "seed": seed}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())["value"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Served:
    """A server or router of a checkout, as processes."""

    def __init__(self, checkout: Path, arguments: list[str], log: Path, variables: dict[str, str]) -> None:
        words = [sys.executable, "-m", "headstart", *arguments, "--port", "0", "--no-access-log"]
        self._process = subprocess.Popen(
            words, env=environment(checkout) | variables, stdout=log.open("wb"), stderr=subprocess.STDOUT
        )
        while not (found := re.search(r" at (http://[^\s/]+)/v1", log.read_text(errors="replace"))):
            if self._process.poll() is not None:
                raise SystemExit(log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        self.url = found[1]
        self.watched: list[str] = []  # while it is measured, as by an open page
        self.is_sampled: bool | None = None  # whether requests say that their trace is recorded; None: they say nothing

    def headers(self) -> dict[str, str]:
        """Return the headers of the next request."""
        if self.is_sampled is None:
            return {}
        return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-0{self.is_sampled:d}"}

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads of all its processes so far, from the scheduler's own clock (ns)."""
        root = psutil.Process(self._process.pid)
        tasks = [
            task
            for process in (root, *root.children(recursive=True))
            for task in Path(f"/proc/{process.pid}/task").iterdir()
        ]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@contextlib.contextmanager
def watched(served: Served) -> Generator[None]:
    """Read the addresses that are watched, one after the other, again and again, as an open page does."""
    ended = threading.Event()

    def read() -> None:
        while served.watched and not ended.is_set():
            for path in served.watched:
                with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(served.url + path) as answer:
                    answer.read()  # a router has no tree of its own

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


async def load(served: Served, path: str, bodies: list[dict[str, Any]], at_once: int) -> None:
    """Send all bodies, `at_once` at a time, and read every answer to its end."""
    left = iter(bodies)
    async with aiohttp.ClientSession() as session:

        async def work() -> None:
            for body in left:
                async with session.post(served.url + path, json=body, headers=served.headers()) as response:
                    data = await response.read()
                    assert response.status == 200, data

        await asyncio.gather(*(work() for _ in range(at_once)))


def served_rows(old: Served, new: Served, prefix: str, count: int) -> dict[str, Callable[[int, int], float]]:
    """Return rows over HTTP: CPU milliseconds of all processes per request."""

    def row(path: str, make: Callable[[random.Random], dict[str, Any]]) -> Callable[[int, int], float]:
        def measure(side: int, seed: int) -> float:
            rng, served = random.Random(seed), (old, new)[side]
            bodies = [{"temperature": 1.0, **make(rng)} for _ in range(count)]
            with watched(served):
                before = served.cpu_seconds()
                asyncio.run(load(served, path, bodies, 8))
                return (served.cpu_seconds() - before) * 1e3 / count

        return measure

    def text(rng: random.Random) -> str:
        return " ".join(rng.choice(("wake", "me", "at", "seven", "rain", "jazz", "lights")) for _ in range(40))

    chat: Callable[[random.Random], dict[str, Any]] = lambda rng: {  # noqa: E731
        "messages": [{"role": "user", "content": text(rng)}],
        "max_tokens": 16,
    }
    made = (
        row("/v1/completions", lambda rng: {"prompt": text(rng), "max_tokens": 32, "stream": True, "ignore_eos": True}),
        row("/v1/completions", lambda rng: {"prompt": text(rng), "max_tokens": 16, "ignore_eos": True}),
        row("/v1/chat/completions", chat),
    )
    return {f"{prefix}: {name}": measure for name, measure in zip(HTTP_ROWS, made, strict=True)}


def served_burst(old: Served, new: Served) -> Callable[[int, int], float]:
    """Return the row BURST: CPU seconds of all processes for 32 prompts of 1,088 tokens at once, 8 prefixes."""

    def measure(side: int, seed: int) -> float:
        rng, served = random.Random(seed), (old, new)[side]
        prefixes = [[rng.randrange(32_000) for _ in range(1024)] for _ in range(8)]
        prompts = [prefix + [rng.randrange(32_000) for _ in range(64)] for prefix in prefixes for _ in range(4)]
        bodies = [{"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True} for prompt in prompts]
        with watched(served):
            before = served.cpu_seconds()
            asyncio.run(load(served, "/v1/completions", bodies, 32))
            return served.cpu_seconds() - before

    return measure


def first_token(old: Served, new: Served, prompts: int) -> Callable[[int, int], float]:
    """Return a row of FIRST_TOKENS: wall milliseconds until the first token of a stream, the mean of ten one by one.

    `prompts`: which, so that no row sends those of another.
    """

    async def seconds(served: Served, prompt: list[int]) -> float:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session:
            began = time.perf_counter()
            async with session.post(f"{served.url}/v1/completions", json=body, headers=served.headers()) as response:
                assert (await response.content.readline()).startswith(b"data: {"), response.status
                taken = time.perf_counter() - began
                await response.read()
        return taken

    def measure(side: int, seed: int) -> float:
        rng, served = random.Random(f"{prompts} {seed}"), (old, new)[side]
        shared, own = random.Random(0).choices(range(32_000), k=900), partial(rng.choices, range(32_000), k=100)
        with watched(served):
            return sum(asyncio.run(seconds(served, shared + own())) for _ in range(10)) * 100

    return measure


@contextlib.contextmanager
def fake_replica() -> Generator[str]:
    """Run a replica that computes nothing."""
    words = [sys.executable, "-m", "headstart_lab.runners.fake_replica", "--ttft-ms", "1", "--token-ms", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def alternate(measure: Callable[[int, int], float], pairs: int, chunks: int) -> list[tuple[float, float]]:
    """Measure `pairs` pairs in turn, each as the mean of `chunks`."""
    for side in (0, 1):
        measure(side, 0)  # warms up caches, lazy imports and compiled kernels
    found: list[tuple[float, float]] = []
    for pair in range(pairs):
        sums = [0.0, 0.0]
        for turn in range(pair * chunks + 1, (pair + 1) * chunks + 1):
            for side in (0, 1) if turn % 2 else (1, 0):
                sums[side] += measure(side, turn) / chunks
        found.append((sums[0], sums[1]))
    return found


def judge(row: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    """Judge the ratio new / old of pairs."""
    ratios = [new / old for old, new in found]
    rng = random.Random(0)
    draws = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    low, high = draws[100], draws[3899]
    result = {"row": row, "old": median(old for old, _ in found), "new": median(new for _, new in found)}
    result |= {"ratio": median(ratios), "low": low, "high": high, "holds": high <= LIMIT, "pairs": found}
    print(
        f"{row:45} {result['old']:10.4g} {result['new']:10.4g}  {result['ratio']:.3f} [{low:.3f}-{high:.3f}]"
        f" {'' if high <= LIMIT else 'NOT WITHIN'}",
        file=sys.stderr,
        flush=True,
    )
    return result


def measured(options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Start all processes that the chosen rows need, and return the pairs of each."""
    more = dict(one.split("=", 1) for one in options.new_env)
    checkouts = (options.old, options.new)

    def is_chosen(*rows: str) -> bool:
        return not options.only or any(only in row for only in options.only for row in rows)

    def seeded(measure: Callable[[int, int], float]) -> Callable[[int, int], float]:
        return (lambda side, turn: measure(side, 2 * turn + side)) if options.one_server else measure

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def served(*arguments: list[str], name: str) -> tuple[Served, Served]:
            sides = [
                Served(checkout, arguments[i % len(arguments)], folder / f"{name}{i}", more if i else {})
                for i, checkout in enumerate(checkouts[options.one_server :], options.one_server)
            ]
            for side in sides:
                stack.callback(side.close)
            old, new = sides[0], copy.copy(sides[-1])
            old.is_sampled, new.is_sampled = (False, True) if options.one_server and more else (None, None)
            new.watched = options.new_watch
            return old, new

        rows: dict[str, Callable[[int, int], float]] = {}
        chunks = 1 if options.one_server and options.new_watch else CHUNKS  # a page is read for seconds
        count = options.requests // chunks
        if is_chosen(*IN_PROCESS):
            workers = [Worker(checkout, options.model) for checkout in checkouts]
            for worker in workers:
                stack.callback(worker.close)
            for row in IN_PROCESS:
                rows[row] = lambda side, seed, row=row: workers[side].measure(row, seed)
        if is_chosen(*(f"{face}: {what}" for face in ("server", "router") for what in HTTP_ROWS)):
            rows |= served_rows(*served(["serve"], name="server"), "server", count)
            # A replica for each side: a router that sees requests of another one there decides otherwise.
            routes = [["route", "--replica", stack.enter_context(fake_replica())] for _ in checkouts]
            rows |= served_rows(*served(*routes, name="router"), "router", 5 * count)
        if is_chosen(BURST, *FIRST_TOKENS):
            sizes = ["--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-memory", "1GiB"]
            servers = served(["serve", options.model, *sizes], name="burst")
            routers = served(*(["route", "--replica", server.url] for server in servers), name="in front")
            rows[BURST] = served_burst(*servers)
            rows |= {row: first_token(*(servers, routers)[i], i) for i, row in enumerate(FIRST_TOKENS)}
        return {
            row: alternate(seeded(measure), options.pairs, 1 if row in LONG else chunks)
            for row, measure in rows.items()
            if is_chosen(row)
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--starts", type=int, default=1, help="start all processes anew this often, PAIRS pairs each")
    parser.add_argument("--model", required=True, help="folder of llama-100m: headstart init-model --shape llama-100m")
    parser.add_argument("--requests", type=int, default=200, help="per side of a pair, over HTTP")
    parser.add_argument("--only", action="append", default=[], help="rows whose name contains this; may be repeated")
    parser.add_argument("--new-env", action="append", default=[], help="NAME=VALUE for the new server or router only")
    parser.add_argument("--new-watch", action="append", default=[], help="a path that is read there all the time")
    parser.add_argument(
        "--one-server",
        action="store_true",
        help="measure --new alone, read as --new-watch says or not; with --new-env, requests whose trace is recorded"
        " or not: processes of the same program differ by more than what these cost",
    )
    options = parser.parse_args()
    starts = [measured(options) for _ in range(options.starts)]
    results = [judge(row, [pair for start in starts for pair in start[row]]) for row in starts[0]]
    report = {"pairs": options.pairs, "starts": options.starts, "limit": LIMIT, "rows": results}
    print(json.dumps(report | {"valid": all(result["holds"] for result in results)}))
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
