"""Kill every replica, by a Poisson clock, under sessions of agents: what is computed again, and how long answers take.

    python benchmarks/headline/kill_every_replica.py --model llama-100m --replicas 4 [--kill-tier] >kill.json

Replicas with separate folders and one redis-server of its own (append-only file on) behind a router. All replicas are
killed with SIGKILL at random moments, with --kill-tier the Redis server too, and started again. Each session sends its
whole history again in every turn, and repeats a turn that failed. Tokens of failed turns are in no answer and do not
count. At the end a new replica with an empty folder gets the last prompts directly. The last line of stdout is JSON.
"""

import argparse
import asyncio
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx

from headstart.core.cache.hashing import BlockHash, extend_hashes, root_hash
from headstart.model.weights.init_model import init_model
from headstart.model.weights.shapes import SHAPES
from headstart_lab.router.failover_processes import Served, quiet_ports, router_command

BLOCK = 16
VOCABULARY = 500
SYSTEM, TURN, LONGEST = 512, 160, 2560  # tokens: of a prompt that sessions share, of a turn, of a history
OUTPUT = 16
THINK = 1.0  # seconds between turns, the mean
GROUPS = 4  # of sessions that share a system prompt
WINDOW = 60.0  # seconds after a restart
PATIENCE = 120.0  # seconds


@dataclass
class Turn:
    """One answer. `least`: tokens that a perfect cache would have computed; `at`: seconds of the run, at its begin."""

    at: float
    prompt_tokens: int
    computed: int
    least: int
    ttft: float
    num_tries: int


@dataclass
class Fleet:
    """The processes of one run; its maker kills them."""

    model: str
    threads: int
    folder: Path
    redis: "subprocess.Popen[bytes] | None" = None
    replicas: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.redis_port,) = quiet_ports(1)
        self.secret = self.folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)

    def start_redis(self) -> None:
        program = shutil.which("redis-server")
        assert program is not None, "install redis-server"
        words = [program, "--port", str(self.redis_port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        words += ["--save", "", "--appendonly", "yes", "--maxmemory", "4gb", "--maxmemory-policy", "volatile-lru"]
        self.redis = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def add(self, port: int) -> Served:
        name = f"replica{len(self.replicas)}"
        words = [sys.executable, "-m", "headstart", "serve", self.model, "--port", str(port), "--no-access-log"]
        words += ["--threads", str(self.threads), "--num-blocks", "4096", "--kv-store-secret", str(self.secret)]
        words += ["--kv-store", f"{self.folder / name},redis://127.0.0.1:{self.redis_port}/0"]
        self.replicas.append(Served(name, words, self.folder))
        return self.replicas[-1]

    def kill(self, *, tier: bool) -> None:
        for replica in self.replicas:
            replica.kill()
        if tier and self.redis is not None:
            self.redis.kill()
            self.redis.wait()


class Ideal:
    """A perfect cache: it knows every whole block of all prompts so far."""

    def __init__(self) -> None:
        self._known: set[BlockHash] = set()

    def least(self, prompt: "array[int]") -> int:
        hashes: list[BlockHash] = []
        extend_hashes(hashes, prompt, BLOCK, root_hash(b""))
        known = next((n for n, one in enumerate(hashes) if one not in self._known), len(hashes))
        self._known.update(hashes)
        return max(len(prompt) - known * BLOCK, 1)


async def ask(client: httpx.AsyncClient, url: str, prompt: "array[int]") -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens of the prompt computed. Raises httpx.HTTPError."""
    body = {"prompt": prompt.tolist(), "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
    began, ttft, cached = time.monotonic(), 0.0, -1
    async with client.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                ttft = ttft or time.monotonic() - began
            elif event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    if cached < 0:
        raise httpx.ReadError("the stream ended without usage")
    return ttft, len(prompt) - cached


@dataclass
class Sessions:
    """Agents before one URL until `ends_at`."""

    url: str
    rng: Random
    began: float
    ends_at: float
    ideal: Ideal = field(default_factory=Ideal)
    turns: list[Turn] = field(default_factory=list)
    last: "dict[int, array[int]]" = field(default_factory=dict)

    def tokens(self, num: int) -> "array[int]":
        return array("i", (self.rng.randrange(5, VOCABULARY) for _ in range(num)))

    async def run(self, number: int, system: "array[int]", client: httpx.AsyncClient) -> None:
        history = array("i", system)
        while time.monotonic() < self.ends_at:
            if len(history) + TURN > LONGEST:
                history = array("i", system)
            history += self.tokens(TURN)
            at, tries = time.monotonic() - self.began, 0
            while True:
                tries += 1
                try:
                    ttft, computed = await ask(client, self.url, history)
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.2)
                    if time.monotonic() > self.ends_at + PATIENCE:
                        return
            self.last[number] = array("i", history)
            self.turns.append(Turn(at, len(history), computed, self.ideal.least(history), ttft, tries))
            await asyncio.sleep(self.rng.expovariate(1 / THINK))


async def cold_seconds_per_token(client: httpx.AsyncClient, url: str, rng: Random) -> float:
    """Return the median over new prompts of half the longest length: with it, a cold TTFT of any prompt is known."""
    found: list[float] = []
    for _ in range(8):
        prompt = array("i", (rng.randrange(5, VOCABULARY) for _ in range(LONGEST // 2)))
        found.append((await ask(client, url, prompt))[0] / len(prompt))
    return statistics.median(found[1:])


async def measure(fleet: Fleet, options: argparse.Namespace) -> dict[str, object]:
    rng, ports = Random(options.seed), quiet_ports(options.replicas + 2)
    fleet.start_redis()
    for port in ports[: options.replicas]:
        fleet.add(port).start()
    for replica in fleet.replicas:
        await asyncio.to_thread(replica.wait_ready)
    urls = [replica.url for replica in fleet.replicas]
    router = Served("router", router_command(urls, ports[-1], fleet.folder / "decisions"), fleet.folder)
    router.start()
    try:
        await asyncio.to_thread(router.wait_ready)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
            cold = await cold_seconds_per_token(client, urls[0], rng)
            began = time.monotonic()
            load = Sessions(router.url, rng, began, began + options.seconds)
            systems = [load.tokens(SYSTEM) for _ in range(GROUPS)]
            agents = [load.run(n, systems[n % GROUPS], client) for n in range(options.sessions)]
            running = asyncio.gather(*agents)
            kills = await kill_by_clock(fleet, options, load)
            await running
            return report(load, kills, cold) | await scale_out(fleet, ports[-2], load, client)
    finally:
        router.kill()


async def kill_by_clock(fleet: Fleet, options: argparse.Namespace, load: Sessions) -> list[tuple[float, float]]:
    """Kill and start everything at random moments; return when each kill was, and when all were ready again."""
    kills: list[tuple[float, float]] = []
    clock = Random(f"{options.seed}/kills")
    while True:
        await asyncio.sleep(clock.expovariate(1 / options.mean_seconds))
        if time.monotonic() > load.ends_at - WINDOW:
            return kills
        killed_at = time.monotonic() - load.began
        fleet.kill(tier=options.kill_tier)
        if options.kill_tier:
            fleet.start_redis()
        for replica in fleet.replicas:
            replica.start()
        for replica in fleet.replicas:
            await asyncio.to_thread(replica.wait_ready)
        kills.append((killed_at, time.monotonic() - load.began))


def report(load: Sessions, kills: list[tuple[float, float]], cold: float) -> dict[str, object]:
    def figures(turns: list[Turn]) -> dict[str, object]:
        if not turns:
            return {"turns": 0}
        ratios = sorted(turn.ttft / (cold * turn.prompt_tokens) for turn in turns)
        return {
            "turns": len(turns),
            "redundancy": sum(turn.computed for turn in turns) / sum(turn.least for turn in turns),
            "ttft_ms": 1e3 * statistics.median(turn.ttft for turn in turns),
            "ttft_over_cold": statistics.median(ratios),
            "ttft_over_cold_p99": ratios[int(0.99 * len(ratios))],
            "repeated": sum(turn.num_tries > 1 for turn in turns),
        }

    after = [[turn for turn in load.turns if ready <= turn.at < ready + WINDOW] for _, ready in kills]
    return {
        "all": figures(load.turns),
        "after_restart": figures([turn for turns in after for turn in turns]),
        "kills": [{"killed_s": k, "ready_s": r, **figures(t)} for (k, r), t in zip(kills, after, strict=True)],
        "cold_ms_per_token": 1e3 * cold,
        "series": [[round(t.at, 2), t.prompt_tokens, t.computed, t.least, round(t.ttft, 4)] for t in load.turns],
    }


async def scale_out(fleet: Fleet, port: int, load: Sessions, client: httpx.AsyncClient) -> dict[str, object]:
    """Send the last prompt of each session twice to a new replica with an empty folder: from the tier, then warm."""
    replica = fleet.add(port)
    replica.start()
    await asyncio.to_thread(replica.wait_ready)
    first = [await ask(client, replica.url, prompt) for prompt in load.last.values()]
    again = [await ask(client, replica.url, prompt) for prompt in load.last.values()]
    seconds, warm = (statistics.median(ttft for ttft, _ in found) for found in (first, again))
    computed = sum(tokens for _, tokens in first) / sum(map(len, load.last.values()))
    return {"scale_out": {"ttft_over_warm": seconds / warm, "computed_share": computed}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="llama-100m", help="folder, hub id, or the name of a shape with random weights"
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the load")
    parser.add_argument("--mean-seconds", type=float, default=120.0, help="between kills")
    parser.add_argument("--kill-tier", action="store_true", help="kill the Redis server with the replicas")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-kill-")))
        fleet = Fleet(model_folder(options.model, folder), options.threads, folder)
        stack.callback(fleet.kill, tier=True)
        found = asyncio.run(measure(fleet, options))
    print(json.dumps({"benchmark": "kill_every_replica", **vars(options), **found}))


def model_folder(name: str, folder: Path) -> str:
    """Return a folder with random weights for the name of a shape, else the name."""
    return str(init_model(name, folder / "model", progress=False)) if name in SHAPES else name


if __name__ == "__main__":
    main()
