"""Harm the way to the Redis server of the store: TTFT beside that of a server without a store, and the engine's waits.

    python benchmarks/headline/harm_the_tier.py --model llama-100m >harm.json

Two servers, one without a store and without a prefix cache, one whose store is a redis-server behind a proxy that
delays every byte, loses some, or limits their rate. All prompts are in Redis and none in the pool; each goes to one
server and then to the other, the first of a pair by turns. Calls of the engine's thread into the store are timed in its
process. An answer that is an error ends the run. The last line of stdout is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
from kill_every_replica import Fleet, ask, model_folder

from headstart.cli import build_engine as cli_engine
from headstart.cli import main as cli
from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.store.disk import SingleTierStore
from headstart_lab.router.failover_processes import Served, quiet_ports

CALLS = ("contains", "should_write", "expected_load_seconds", "begin_load", "cancel_load", "poll_loads")
CALLS += ("release_loaded", "offer_block", "mark_used", "set_pinned_blocks", "discard_corrupt", "stats")
CALLS_FILE = "STORE_CALLS_FILE"  # an environment variable
LONG_CALL = 0.002  # seconds
PAUSE = 6.0  # seconds after a change of the way, so that a store in a pause may try again


class Way(NamedTuple):
    """The harm to bytes on their way from the server to its client."""

    delay: float = 0.0  # seconds, of every byte
    loss: float = 0.0  # share of pieces of 64 KiB that come late, as sent again by TCP, or cut the connection
    bytes_per_s: float = 0.0  # 0: no limit


WAYS = {
    "healthy": Way(),
    "delay 0.1 s": Way(delay=0.1),
    "delay 1 s": Way(delay=1.0),
    "delay 5 s": Way(delay=5.0),
    "loss": Way(loss=0.1),
    "10 KB/s": Way(bytes_per_s=10e3),
    "healthy again": Way(),
}


@dataclass
class HarmingProxy:
    """Between clients and a port on this machine."""

    to: int
    rng: Random
    way: Way = WAYS["healthy"]
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def serve(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.close()
            return
        for source, target, harmed in ((reader, to_server, False), (from_server, writer, True)):
            task = asyncio.create_task(self._pump(source, target, harmed))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, harmed: bool) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)
        sender = asyncio.create_task(self._send(pieces, target, harmed))
        with suppress(OSError):
            while data := await source.read(1 << 16):
                due, way = time.monotonic() + (self.way.delay if harmed else 0.0), self.way
                if harmed and way.loss and self.rng.random() < way.loss:
                    if self.rng.random() < 0.1:
                        break
                    due += self.rng.choice((0.2, 0.6, 1.4))
                await pieces.put((due, data))
        await pieces.put((0.0, b""))
        await sender

    async def _send(self, pieces: "asyncio.Queue[tuple[float, bytes]]", to: asyncio.StreamWriter, harmed: bool) -> None:
        with suppress(OSError):
            while (piece := await pieces.get())[1]:
                await asyncio.sleep(max(piece[0] - time.monotonic(), 0.0))
                for start in range(0, len(piece[1]), 1000) if harmed and self.way.bytes_per_s else (None,):
                    part = piece[1] if start is None else piece[1][start : start + 1000]
                    if start is not None and (rate := self.way.bytes_per_s):
                        await asyncio.sleep(len(part) / rate)
                    to.write(part)
                    await to.drain()
        to.close()
        while pieces.qsize():  # so that the reader of a closed connection ends
            pieces.get_nowait()


def build_engine(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """Return the engine, whose calls into the store are timed; in the engine process, which finds this by its name."""
    path, longest = Path(os.environ[CALLS_FILE]), dict[str, float]()
    counts, long_cpu_ms = {"calls": 0, "long": 0}, list[float]()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                counts["calls"] += 1
                if seconds > LONG_CALL:
                    counts["long"] += 1
                    long_cpu_ms.append(1e3 * (time.thread_time() - cpu))
                if seconds > longest.get(name, 0.0) or seconds > LONG_CALL or counts["calls"] % 1000 == 0:
                    longest[name] = max(longest.get(name, 0.0), seconds)
                    longest_ms = {n: 1e3 * s for n, s in longest.items()}
                    path.write_text(json.dumps({**counts, "long_cpu_ms": long_cpu_ms, "longest_ms": longest_ms}))

        return run

    for name in CALLS:
        setattr(SingleTierStore, name, timed(name, getattr(SingleTierStore, name)))
    return _build(options)


_build = cli_engine.build_engine


def serve() -> None:
    """Do what `headstart` would with these arguments, with timed calls."""
    cli_engine.build_engine = build_engine
    sys.exit(cli.main(sys.argv[1:]))


async def measure(fleet: Fleet, options: argparse.Namespace, ports: list[int], calls: Path) -> dict[str, Any]:
    rng = Random(options.seed)
    fleet.start_redis()
    proxy = HarmingProxy(fleet.redis_port, rng)
    listener = await proxy.serve(ports[0])
    words = [fleet.model, "--no-access-log", "--threads", str(fleet.threads), "--num-blocks", "8192"]
    plain_words = [sys.executable, "-m", "headstart", "serve", *words, "--no-enable-prefix-caching"]
    store_words = [sys.executable, "-c", "from harm_the_tier import serve; serve()", "serve", *words]
    store_words += ["--kv-store", f"redis://127.0.0.1:{ports[0]}/0", "--kv-store-secret", str(fleet.secret)]
    plain = Served("plain", [*plain_words, "--port", str(ports[1])], fleet.folder)
    stored = Served("stored", [*store_words, "--port", str(ports[2])], fleet.folder)
    fleet.replicas += [plain, stored]
    for server in fleet.replicas:
        server.start()
    for server in fleet.replicas:
        await asyncio.to_thread(server.wait_ready)
    prompts = [
        array("i", (rng.randrange(5, 500) for _ in range(options.prompt_tokens + 1))) for _ in range(options.prompts)
    ]
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=120.0) as client:
        for prompt in prompts:
            await ask(client, stored.url, prompt)
        await asyncio.sleep(3.0)
        for name in options.ways:
            proxy.way = WAYS[name]
            await asyncio.sleep(PAUSE if found else 0.0)
            found[name] = await compare(client, plain.url, stored.url, prompts)
            found[name]["calls"] = json.loads(calls.read_text())
            print(name, found[name], file=sys.stderr)
    listener.close()
    harmed = [found[name] for name in options.ways if WAYS[name] != Way()]
    if not harmed:
        return {"ways": found}
    ratios = sorted(ratio for one in harmed for ratio in one["ratios"])
    stored_all, plain_all = (sorted(ms for one in harmed for ms in one[side]) for side in ("stored_ms", "plain_ms"))
    return {
        "ways": found,
        "harmed_ttft_p99_over_plain_p99": at_share(stored_all, 0.99) / at_share(plain_all, 0.99),
        "harmed_ttft_median_over_plain": at_share(ratios, 0.5),
    }


async def compare(client: httpx.AsyncClient, plain: str, stored: str, prompts: "list[array[int]]") -> dict[str, Any]:
    """Return the TTFTs of both servers in ms, and the share of tokens that the store gave."""
    (await client.post(f"{stored}/reset_prefix_cache")).raise_for_status()
    sides: dict[str, list[tuple[float, int]]] = {plain: [], stored: []}
    for number, prompt in enumerate(prompts):
        for url in (plain, stored) if number % 2 else (stored, plain):
            sides[url].append(await ask(client, url, prompt))
    ms = {name: [1e3 * ttft for ttft, _ in sides[url]] for name, url in (("plain_ms", plain), ("stored_ms", stored))}
    ratios = sorted(b / a for a, b in zip(ms["plain_ms"], ms["stored_ms"], strict=True))
    computed = sum(tokens for _, tokens in sides[stored]) / sum(map(len, prompts))
    figures = {f"ratio_p{n}": at_share(ratios, n / 100) for n in (50, 90, 100)}
    return {"computed_share": computed, **figures, **ms, "ratios": ratios}


def at_share(values: list[float], share: float) -> float:
    """Return the value below which this share of sorted values lies."""
    return values[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-100m", help="folder, or the name of a shape with random weights")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-harm-")))
        redis_port, *ports = quiet_ports(4)
        calls = folder / "calls.json"
        here = str(Path(__file__).resolve().parent)
        os.environ |= {CALLS_FILE: str(calls), "PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        fleet = Fleet(model_folder(options.model, folder), options.threads, folder, redis_port)
        stack.callback(fleet.end)
        fleet.end_at_sigterm()
        found = asyncio.run(measure(fleet, options, ports, calls))
    print(json.dumps({"benchmark": "harm_the_tier", **vars(options), **found}))


if __name__ == "__main__":
    main()
