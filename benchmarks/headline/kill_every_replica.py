"""Kill every replica, by a Poisson clock, under sessions of agents: what is computed again, and how long answers take.

    python benchmarks/headline/kill_every_replica.py --model llama-100m --kill replicas --plot kill.png >kill.json

Replicas with separate folders and one redis-server of its own (append-only file on) behind a router. At random moments
all replicas are killed with SIGKILL and started again (`--kill replicas`), the Redis server with them (`all`), or it
alone, for DOWN_SECONDS (`tier`). Each session sends its whole history again in every turn, and repeats a turn that
failed. At the end a new replica with an empty folder gets the next turn of each session directly. The last line of
stdout is JSON.
"""

import argparse
import asyncio
import json
import secrets
import shutil
import signal
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
from typing import Any

import httpx

from headstart.core.cache.hashing import BlockHash, extend_block_hashes, root_hash
from headstart.model.weights.init_model import write_random_model
from headstart.model.weights.shapes import SHAPES
from headstart_lab.bootstrap import interval
from headstart_lab.router.failover_processes import Served, pauses, quiet_ports, router_command

BLOCK = 16
VOCABULARY = 500
SYSTEM, TURN, LONGEST = 512, 160, 2560  # tokens: of a prompt that sessions share, of a turn, of a history
OUTPUT = 16
THINK = 2.0  # seconds between turns, the mean
GROUPS = 4  # of sessions that share a system prompt
WINDOW = 60.0  # seconds after a restart
PATIENCE = 120.0  # seconds
DOWN_SECONDS = 15.0  # of a tier that is killed alone
KILLS = ("replicas", "all", "tier")


@dataclass
class Turn:
    """One answer. `least`: tokens that a perfect cache would have computed; `at`: seconds of the run, at its begin.

    Its begin is that of the attempt that was answered; `waited`: seconds from the first attempt to that one.
    """

    at: float
    waited: float
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
    redis_port: int
    redis: "subprocess.Popen[bytes] | None" = None
    replicas: list[Served] = field(default_factory=list)
    router: Served | None = None
    num_added: int = 0  # replicas: each has a folder of its own

    def __post_init__(self) -> None:
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
        name = f"replica{self.num_added}"
        self.num_added += 1
        words = [sys.executable, "-m", "headstart", "serve", self.model, "--port", str(port), "--no-access-log"]
        words += ["--threads", str(self.threads), "--num-blocks", "4096", "--kv-store-secret", str(self.secret)]
        words += ["--kv-store", f"{self.folder / name},redis://127.0.0.1:{self.redis_port}/0"]
        self.replicas.append(Served(name, words, self.folder))
        return self.replicas[-1]

    def kill(self, which: str) -> None:
        if which != "replicas" and self.redis is not None:
            self.redis.kill()
        for replica in self.replicas if which != "tier" else ():
            replica.kill()
        if which != "replicas" and self.redis is not None:
            self.redis.wait()

    def end_at_sigterm(self) -> None:
        """Kill all processes when this one is to end: an event loop would first wait for threads that wait for them."""

        def end(number: int, frame: object) -> None:
            self.end()
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, end)

    def end(self) -> None:
        self.kill("all")
        if self.router is not None:
            self.router.kill()

    async def computed(self, client: httpx.AsyncClient) -> int:
        """Return the prompt tokens that the living replicas have computed, also for requests that are not answered."""
        answers = await asyncio.gather(*(client.get(f"{one.url}/v1/cache/stats") for one in self.replicas))
        return sum(answer.json()["prefill_tokens"] for answer in answers)


class Ideal:
    """A perfect cache: it knows every whole block of all prompts so far."""

    def __init__(self) -> None:
        self._known: set[BlockHash] = set()

    def least(self, prompt: "array[int]") -> int:
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, prompt, BLOCK, root_hash(b""))
        known = next((n for n, one in enumerate(hashes) if one not in self._known), len(hashes))
        self._known.update(hashes)
        return max(len(prompt) - known * BLOCK, 1)


async def ask(client: httpx.AsyncClient, url: str, prompt: "array[int]", text: str = "") -> tuple[float, int]:
    """Return the seconds to the first token, and the tokens of the prompt computed. Raises httpx.HTTPError.

    `text`: the prompt as one, for routers that take no token ids, and want the name of a model.
    """
    body = {
        "prompt": prompt.tolist(),
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"prompt": text, "model": "model"} if text else {}
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
    failed: list[float] = field(default_factory=list)  # when attempts failed

    def tokens(self, num: int) -> "array[int]":
        return array("i", (self.rng.randrange(5, VOCABULARY) for _ in range(num)))

    async def run(self, number: int, system: "array[int]", client: httpx.AsyncClient) -> None:
        history = array("i", system)
        while time.monotonic() < self.ends_at:
            if len(history) + TURN > LONGEST:
                history = array("i", system)
            history += self.tokens(TURN)
            first, tries = time.monotonic() - self.began, 0
            while True:
                tries += 1
                at = time.monotonic() - self.began
                try:
                    ttft, computed = await ask(client, self.url, history)
                    break
                except httpx.HTTPError:
                    self.failed.append(time.monotonic() - self.began)
                    await asyncio.sleep(0.2)
                    if time.monotonic() > self.ends_at + PATIENCE:
                        return
            self.last[number] = array("i", history)
            least = self.ideal.least(history)
            self.turns.append(Turn(at, at - first, len(history), computed, least, ttft, tries))
            await asyncio.sleep(self.rng.expovariate(1 / THINK))


async def cold_seconds_per_token(client: httpx.AsyncClient, url: str, rng: Random) -> float:
    """Return the median over new prompts of half the longest length: with it, a cold TTFT of any prompt is known."""
    found: list[float] = []
    for _ in range(8):
        prompt = array("i", (rng.randrange(5, VOCABULARY) for _ in range(LONGEST // 2)))
        found.append((await ask(client, url, prompt))[0] / len(prompt))
    return statistics.median(found[1:])


async def measure(fleet: Fleet, options: argparse.Namespace, ports: list[int]) -> dict[str, object]:
    rng = Random(options.seed)
    fleet.start_redis()
    for port in ports[2:]:
        fleet.add(port).start()
    for replica in fleet.replicas:
        await asyncio.to_thread(replica.wait_ready)
    urls = [replica.url for replica in fleet.replicas]
    router = fleet.router = Served("router", router_command(urls, ports[0], fleet.folder / "decisions"), fleet.folder)
    router.start()
    try:
        await asyncio.to_thread(router.wait_ready)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
            cold = await cold_seconds_per_token(client, urls[0], rng)
            already = await fleet.computed(client)
            began = time.monotonic()
            load = Sessions(router.url, rng, began, began + options.seconds)
            systems = [load.tokens(SYSTEM) for _ in range(GROUPS)]
            agents = [load.run(n, systems[n % GROUPS], client) for n in range(options.sessions)]
            running = asyncio.gather(*agents)
            kills, computed = await kill_by_clock(fleet, options, load, client)
            await running
            computed += await fleet.computed(client) - already
            further = [await scale_out(fleet, ports[1], load, client) for _ in range(options.further)]
            return report(load, kills, cold, computed) | summary(further)
    finally:
        router.kill()


async def kill_by_clock(
    fleet: Fleet, options: argparse.Namespace, load: Sessions, client: httpx.AsyncClient
) -> tuple[list[tuple[float, float]], int]:
    """Kill and start at random moments; return when each kill was, when all were ready again, and tokens computed.

    The tokens are those that killed processes had computed, as they reported in the last moment before.
    """
    kills: list[tuple[float, float]] = []
    computed, clock = 0, Random(f"{options.seed}/kills")
    for pause in pauses(clock, options.mean_seconds, load.ends_at - WINDOW):
        await asyncio.sleep(pause)
        computed += await fleet.computed(client) if options.kill != "tier" else 0
        killed_at = time.monotonic() - load.began
        fleet.kill(options.kill)
        if options.kill == "tier":
            await asyncio.sleep(DOWN_SECONDS)
        if options.kill != "replicas":
            fleet.start_redis()
        if options.kill != "tier":
            for replica in fleet.replicas:
                replica.start()
            for replica in fleet.replicas:
                await asyncio.to_thread(replica.wait_ready)
        kills.append((killed_at, time.monotonic() - load.began))
    return kills, computed


def report(load: Sessions, kills: list[tuple[float, float]], cold: float, computed: int) -> dict[str, object]:
    """Return the figures. A turn counts for the last kill before its begin; `between`: all other turns."""

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
            "longest_wait_s": max(turn.waited for turn in turns),
        }

    after, down = [list[Turn]() for _ in kills], [list[Turn]() for _ in kills]
    between: list[Turn] = []
    for turn in load.turns:
        number = max((n for n, (killed, _) in enumerate(kills) if killed <= turn.at), default=None)
        if number is not None and turn.at < kills[number][1]:
            down[number].append(turn)
        elif number is not None and turn.at < kills[number][1] + WINDOW:
            after[number].append(turn)
        else:
            between.append(turn)
    return {
        "all": figures(load.turns),
        "after_restart": figures([turn for turns in after for turn in turns]),
        "while_down": figures([turn for turns in down for turn in turns]),
        "between": figures(between),
        "kills": [{"killed_s": k, "ready_s": r, **figures(t)} for (k, r), t in zip(kills, after, strict=True)],
        "failed_attempts": len(load.failed),
        "failed_attempts_while_up": sum(not any(k - 1 <= at <= r + 1 for k, r in kills) for at in load.failed),
        "redundancy_with_lost_work": computed / sum(turn.least for turn in load.turns),
        "cold_ms_per_token": 1e3 * cold,
        "series": [[round(t.at, 2), t.prompt_tokens, t.computed, t.least, round(t.ttft, 4)] for t in load.turns],
    }


async def scale_out(fleet: Fleet, port: int, load: Sessions, client: httpx.AsyncClient) -> dict[str, object]:
    """Send the next turn of each session to a new replica with an empty folder, then another next turn: it is warm.

    At last the latter again, without a new token: from the pool alone. `turns`: tokens, and both TTFTs in ms. The
    replica ends then, so the next one finds no more than this one.
    """
    replica = fleet.add(port)
    replica.start()
    await asyncio.to_thread(replica.wait_ready)
    await ask(client, replica.url, load.tokens(LONGEST // 2))  # the first steps of a process are slower
    turns = [[history + load.tokens(TURN) for history in load.last.values()] for _ in range(2)]
    found = [[await ask(client, replica.url, prompt) for prompt in prompts] for prompts in (*turns, turns[1])]
    first, warm, again = (statistics.median(ttft for ttft, _ in answers) for answers in found)
    computed, least = sum(tokens for _, tokens in found[0]), sum(load.ideal.least(prompt) for prompt in turns[0])
    figures: dict[str, object] = {"ttft_ms": 1e3 * first, "warm_ms": 1e3 * warm, "in_pool_ms": 1e3 * again}
    fleet.replicas.pop().kill()
    figures["turns"] = [
        [len(prompt), round(1e3 * one, 1), round(1e3 * other, 1)]
        for prompt, (one, _), (other, _) in zip(turns[0], found[0], found[1], strict=True)
    ]
    return {"ttft_over_warm": first / warm, "redundancy": computed / least, **figures}


def summary(further: list[dict[str, Any]]) -> dict[str, object]:
    """Return what further replicas took; `ttft_over_warm` is the median of all pairs of turns, with its 95 %."""
    pairs = [[one / warm] for replica in further for _, one, warm in replica["turns"]]
    found = {"ttft_over_warm": statistics.median(pair[0] for pair in pairs), "pairs": len(pairs)}
    found |= {"ttft_over_warm_95": interval(pairs, statistics.median, Random(0))}
    return {"scale_out": found | {"replicas": further}}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw redundancy and TTFT over the time of the run, each kill from its moment to the end of the restart."""
    from matplotlib.figure import Figure  # takes a second, and only drawing needs it

    figure = Figure(figsize=(10.0, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    turns, cold = found["series"], found["cold_ms_per_token"]
    for axes in (above, below):
        for number, kill in enumerate(found["kills"]):
            label = f"killed ({found['kill']}) to ready again" if not number else None
            axes.axvspan(kill["killed_s"], kill["ready_s"], color="tab:red", alpha=0.25, label=label)
    draw_turns(above, below, turns, cold)
    above.axhline(1.05, color="black", linestyle=":", label="aim: 1.05")
    above.set(title=f"{found['replicas']} replicas, {found['model']}", ylabel="tokens computed / perfect cache's")
    above.set_ylim(0.0, 1.2)
    below.set(ylabel="s", xlabel="s of the run", yscale="log")
    for axes in (above, below):
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)


def draw_turns(above: Any, below: Any, turns: list[list[float]], cold: float) -> None:
    """Draw redundancy and TTFT of turns, as in `series`, over time. `cold`: ms for each token of a new prompt."""
    turns, width = sorted(turns), 10.0
    at, means = [turn[0] for turn in turns], list[float]()
    for second in at:
        near = [turn for turn in turns if second - width < turn[0] <= second]
        means.append(sum(turn[2] for turn in near) / sum(turn[3] for turn in near))
    above.plot(at, [turn[2] / turn[3] for turn in turns], ".", color="tab:blue", alpha=0.4, label="turn")
    above.plot(at, means, color="tab:blue", label=f"last {width:.0f} s")
    below.plot(at, [turn[4] for turn in turns], ".", color="tab:orange", label="TTFT")
    below.plot(at, [cold * turn[1] / 1e3 for turn in turns], ".", color="grey", alpha=0.4, label="cold, no load")


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
    parser.add_argument("--further", type=int, default=1, help="new replicas at the end, one after the other")
    parser.add_argument("--kill", choices=KILLS, default="replicas", help="the processes that are killed")
    parser.add_argument("--plot", type=Path, help="draw redundancy and TTFT over time into this file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headstart-kill-")))
        redis_port, *ports = quiet_ports(options.replicas + 3)
        fleet = Fleet(model_folder(options.model, folder), options.threads, folder, redis_port)
        stack.callback(fleet.end)
        fleet.end_at_sigterm()
        found = asyncio.run(measure(fleet, options, ports))
    document = {"benchmark": "kill_every_replica", **vars(options), "plot": None, **found}
    if options.plot is not None:
        draw(document, options.plot)
    del document["plot"]
    print(json.dumps(document))


def model_folder(name: str, folder: Path) -> str:
    """Return a folder with random weights for the name of a shape, else the name."""
    return str(write_random_model(name, folder / "model", progress=False)) if name in SHAPES else name


if __name__ == "__main__":
    main()
