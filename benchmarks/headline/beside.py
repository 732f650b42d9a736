"""Cold burst, scan, kills, rolling restart and scale-out: ours, and two other systems with what they keep.

    python benchmarks/headline/beside.py --system headstart --model m3 >beside_headstart.json

Every system gets the same sessions of agents, each of which sends its whole history in every turn and repeats what
failed. `headstart`: replicas with folders of their own and one Redis server, behind a router. `vllm`: replicas behind
sglang-router; without a GPU it keeps nothing outside its process. `llama.cpp`: llama-server, which has no router, so
the client asks by session; it saves the slot of a session after each turn (`--slot-save-path`, one folder for all), and
restores it before a turn for which the server has it no more. The last line of stdout is JSON.

    python benchmarks/headline/beside.py --draw beside_*.json --plot beside.png
"""

import argparse
import asyncio
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
from kill_every_replica import LONGEST, OUTPUT, SYSTEM, TURN, VOCABULARY, Fleet, Ideal, ask, draw_turns
from tokenizers import Tokenizer

from headstart_lab.router.failover_processes import pauses, quiet_ports, router_command

PATIENCE = 240.0  # seconds
END_SECONDS = 10.0  # for SIGTERM, before SIGKILL
SCAN_TOKENS, AT_ONCE = 1280, 4
PAUSE = 1.0  # seconds between turns, the mean


@dataclass
class Turn:
    phase: str
    prompt_tokens: int
    computed: int
    least: int
    ttft: float
    at: float  # when the attempt began that was answered, in seconds of the run
    waited: float  # seconds from the first attempt to that one
    failed: int  # attempts


class Process:
    """A server that is started again with the same command; `start_number` counts its starts."""

    def __init__(self, command: list[str], port: int, folder: Path, environment: dict[str, str]) -> None:
        self.command, self.url, self.start_number = command, f"http://127.0.0.1:{port}", 0
        self._environment, self._log = {**os.environ, **environment}, folder / f"{port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.start_number += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, to all its processes if it is SIGKILL, and wait."""
        if self._process is not None and self._process.poll() is None:
            kill = os.killpg if number == signal.SIGKILL else os.kill
            kill(self._process.pid, number)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    async def ready(self, client: httpx.AsyncClient) -> None:
        for _ in range(int(PATIENCE / 0.1)):
            try:
                if (await client.get(f"{self.url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
        raise TimeoutError(f"not ready: {self._log.read_text()[-2000:]}")


@dataclass
class System:
    """The processes of a system; the last of `replicas` is the further one, which is started at the end."""

    name: str
    replicas: list[Process]
    router: Process | None
    fleet: Fleet | None = None
    owners: dict[tuple[str, int, int], int] = field(default_factory=dict)  # (url, start, slot) -> session
    saved: set[int] = field(default_factory=set)  # sessions
    words: Tokenizer | None = None  # for a router that takes texts only

    def ids(self) -> list[int]:
        """Return the ids that prompts are made of: any, or those of words that stay a token each in every text."""
        if self.words is None:
            return list(range(5, VOCABULARY))
        texts = {number: self.words.decode([number]) for number in range(5, VOCABULARY)}
        words = {number: text for number, text in texts.items() if text.startswith(" ") and text[1:].isalpha()}
        return [number for number, text in words.items() if self.words.encode(text).ids == [number]]

    async def ask(
        self, client: httpx.AsyncClient, session: int, prompt: "array[int]", at: Process | None
    ) -> tuple[float, int]:
        """Return TTFT in seconds and computed tokens. `at`: that replica. `session` -1: a scan. Raises HTTPError."""
        if self.name != "llama.cpp":
            front = at or self.router
            assert front is not None
            text = "" if self.words is None else self.words.decode(prompt.tolist())
            return await ask(client, front.url, prompt, text)
        server = at or self.replicas[session % (len(self.replicas) - 1)]
        return await self._ask_slot(client, server, session, prompt)

    async def _ask_slot(
        self, client: httpx.AsyncClient, server: Process, session: int, prompt: "array[int]"
    ) -> tuple[float, int]:
        slot = session // (len(self.replicas) - 1) % 2 if session >= 0 else len(prompt) % 2
        began, ttft, cached = time.monotonic(), 0.0, -1
        place = (server.url, server.start_number, slot)
        if session in self.saved and self.owners.get(place) != session:
            await client.post(f"{server.url}/slots/{slot}?action=restore", json={"filename": f"{session}.bin"})
        self.owners[place] = session
        body = {"prompt": prompt.tolist(), "n_predict": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"cache_prompt": True, "id_slot": slot}
        async with client.stream("POST", f"{server.url}/completion", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    ttft = ttft or time.monotonic() - began
                    cached = event["timings"]["cache_n"] if event.get("stop") else cached
        if cached < 0:
            raise httpx.ReadError("the stream ended early")
        if session >= 0:
            saved = await client.post(f"{server.url}/slots/{slot}?action=save", json={"filename": f"{session}.bin"})
            self.saved |= {session} if saved.is_success else set()
        return ttft, len(prompt) - cached

    def end(self) -> None:
        for one in (*self.replicas, *([self.router] if self.router else [])):
            one.end()
        if self.fleet is not None:
            self.fleet.end()


def headstart(options: argparse.Namespace, folder: Path, ports: list[int]) -> System:
    fleet = Fleet(options.model, 1, folder, ports[0])
    fleet.start_redis()
    found: list[Process] = []
    for port in ports[2:]:
        words = [sys.executable, "-m", "headstart", "serve", options.model, "--port", str(port), "--no-access-log"]
        words += ["--threads", "1", "--num-blocks", str(options.tokens // 16), "--kv-store-secret", str(fleet.secret)]
        words += ["--kv-store", f"{folder / str(port)},redis://127.0.0.1:{ports[0]}/0"]
        found.append(Process(words, port, folder, {"OMP_NUM_THREADS": "1"}))
    words = router_command([one.url for one in found[:-1]], ports[1], folder / "decisions")
    return System("headstart", found, Process(words, ports[1], folder, {}), fleet)


def vllm(options: argparse.Namespace, folder: Path, ports: list[int]) -> System:
    found: list[Process] = []
    for port in ports[2:]:
        words = [
            *shlex.split(options.engine),
            "--model",
            options.model,
            "--served-model-name",
            "model",
            "--port",
            str(port),
        ]
        words += ["--host", "127.0.0.1", "--block-size", "32", "--num-gpu-blocks-override", str(options.tokens // 32)]
        words += [
            "--max-num-seqs",
            "16",
            "--max-model-len",
            "4096",
            "--dtype",
            "bfloat16",
            "--enable-prompt-tokens-details",
        ]
        found.append(Process(words, port, folder, {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}))
    words = [
        *shlex.split(options.router),
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(ports[1]),
        "--policy",
        "cache_aware",
    ]
    words += ["--worker-urls", *(one.url for one in found[:-1]), "--worker-startup-check-interval", "1"]
    words += ["--prometheus-port", str(ports[0]), "--log-level", "warn"]
    words += ["--cb-timeout-duration-secs", "5"]  # with 60, a replica that is well again in 25 s gets no requests
    tokenizer = Tokenizer.from_file(f"{options.model}/tokenizer.json")
    return System("vllm", found, Process(words, ports[1], folder, {}), words=tokenizer)


def llamacpp(options: argparse.Namespace, folder: Path, ports: list[int]) -> System:
    (folder / "slots").mkdir()
    found: list[Process] = []
    for port in ports[2:]:
        words = [*shlex.split(options.engine), "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--threads", "1", "--ctx-size", str(options.tokens), "--parallel", "2", "--slots"]
        words += ["--slot-save-path", f"{folder / 'slots'}/", "--no-webui"]
        found.append(Process(words, port, folder, {}))
    return System("llama.cpp", found, None)


@dataclass
class Run:
    """Sessions of one system, whose turns are recorded under the phase that is on when they begin."""

    system: System
    client: httpx.AsyncClient
    rng: Random
    num_sessions: int
    began: float = field(default_factory=time.monotonic)
    phase: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)  # and when each began
    ideal: Ideal = field(default_factory=Ideal)
    turns: list[Turn] = field(default_factory=list)
    histories: "list[array[int]]" = field(default_factory=list)
    is_ending: bool = False

    def __post_init__(self) -> None:
        self._ids = self.system.ids()
        systems = [self.tokens(SYSTEM) for _ in range(4)]
        self.histories = [array("i", systems[n % 4]) for n in range(self.num_sessions)]
        self._systems = [systems[n % 4] for n in range(self.num_sessions)]

    def tokens(self, num: int) -> "array[int]":
        return array("i", self.rng.choices(self._ids, k=num))

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.phases.append((phase, time.monotonic() - self.began))

    async def turn(self, session: int, at: Process | None = None) -> None:
        if len(self.histories[session]) + TURN > LONGEST:
            self.histories[session] = array("i", self._systems[session])
        self.histories[session] += self.tokens(TURN)
        phase, prompt, began, failed = self.phase, self.histories[session], time.monotonic(), 0
        while True:
            again = time.monotonic()
            try:
                ttft, computed = await self.system.ask(self.client, session, prompt, at)
                break
            except (httpx.HTTPError, json.JSONDecodeError):
                failed += 1
                await asyncio.sleep(0.2)
                if time.monotonic() - began > 2 * PATIENCE:
                    raise
        least = self.ideal.least(prompt)
        self.turns.append(Turn(phase, len(prompt), computed, least, ttft, again - self.began, again - began, failed))

    async def keep_on(self, session: int) -> None:
        while not self.is_ending:
            await self.turn(session)
            await asyncio.sleep(self.rng.expovariate(1 / PAUSE))

    async def during(self, phase: str, what: Callable[[], Awaitable[None]]) -> None:
        """Run `what` while all sessions go on."""
        self.is_ending = False
        self.begin(phase)
        running = [asyncio.create_task(self.keep_on(n)) for n in range(self.num_sessions)]
        await what()
        self.is_ending = True
        await asyncio.gather(*running)
        print(phase, len(self.turns), file=sys.stderr)

    async def one_each(self, phase: str, at: Process | None = None, *, at_once: bool = False) -> None:
        self.begin(phase)
        for group in [range(self.num_sessions)] if at_once else [[n] for n in range(self.num_sessions)]:
            await asyncio.gather(*(self.turn(n, at) for n in group))
        print(phase, len(self.turns), file=sys.stderr)


async def measure(system: System, options: argparse.Namespace, client: httpx.AsyncClient) -> dict[str, object]:
    rng = Random(options.seed)
    *replicas, further = system.replicas
    starts: list[float] = []

    async def start(*which: Process) -> None:
        began = time.monotonic()
        for one in which:
            one.start()
        await asyncio.gather(*(one.ready(client) for one in which))
        starts.append(time.monotonic() - began)

    await start(*replicas)
    if system.router is not None:
        await start(system.router)
        await asyncio.sleep(2.0)
    run = Run(system, client, rng, options.sessions)
    colds: list[float] = []
    for number in range(9):
        prompt = run.tokens(SCAN_TOKENS)
        colds.append((await system.ask(client, -1, prompt, replicas[number % len(replicas)]))[0] / len(prompt))
    cold = statistics.median(colds[len(replicas) :])
    await run.one_each("cold burst", at_once=True)
    await run.during("steady", lambda: asyncio.sleep(options.seconds))
    queue = [run.tokens(SCAN_TOKENS + n % 2) for n in range(options.scan)]

    async def scan(number: int) -> None:
        while queue:
            await system.ask(client, -1, queue.pop(), None if system.router else replicas[number % len(replicas)])

    run.begin("scan")
    await asyncio.gather(*(scan(n) for n in range(AT_ONCE)))
    await run.one_each("after a scan")

    async def kill_all() -> None:
        for one in replicas:
            one.end()
        await start(*replicas)
        await asyncio.sleep(options.seconds)

    async def rolling() -> None:
        for one in replicas:
            await asyncio.to_thread(one.end, signal.SIGTERM)
            await start(one)
            await asyncio.sleep(1.0)

    async def by_clock() -> None:
        clock, until = Random(f"{options.seed}/kills"), time.monotonic() + options.clock_seconds
        for pause in pauses(clock, options.mean_seconds, until):
            await asyncio.sleep(pause)
            one = clock.choice(replicas)
            one.end()
            await start(one)
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    await run.during("all killed", kill_all)
    await run.during("rolling restart", rolling)
    await run.during("killed by a clock", by_clock)
    if options.further:
        await start(further)
        for _ in range(3):
            await system.ask(client, -1, run.tokens(SCAN_TOKENS), further)
        await run.one_each("further replica", further)
        await run.one_each("further replica, warm", further)
    phases = dict.fromkeys(turn.phase for turn in run.turns)
    found = {phase: figures([turn for turn in run.turns if turn.phase == phase], cold) for phase in phases}
    run.begin("")
    series = [
        [round(turn.at, 3), turn.prompt_tokens, turn.computed, turn.least, round(turn.ttft, 5)] for turn in run.turns
    ]
    begins = [[phase, round(at, 3)] for phase, at in run.phases]
    return {"phases": found, "cold_ms_per_token": 1e3 * cold, "starts_s": starts, "begins": begins, "series": series}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw redundancy and TTFT of each system over the time of its run, with the phases."""
    from matplotlib.figure import Figure  # takes a second, and only drawing needs it

    figure = Figure(figsize=(14.0, 4.0 * len(runs)), layout="constrained")
    names = list(dict.fromkeys(phase for run in runs for phase, _ in run["begins"] if phase))
    figure.suptitle("   ".join(f"{number} {name}" for number, name in enumerate(names, 1)), fontsize=10)
    for run, (above, below) in zip(runs, figure.subplots(2 * len(runs), 1).reshape(-1, 2), strict=True):
        draw_turns(above, below, run["series"], run["cold_ms_per_token"])
        begins = run["begins"]
        for number, ((phase, start), (_, end)) in enumerate(itertools.pairwise(begins)):
            for axes in (above, below):
                axes.axvspan(start, end, color="tab:red" if "kill" in phase else "grey", alpha=0.08 * (1 + number % 2))
                axes.set_xlim(begins[0][1], begins[-1][1])
            place = above.get_xaxis_transform()
            above.text((start + end) / 2, 0.86, names.index(phase) + 1, transform=place, ha="center", fontsize=8)
        figures = run["phases"].values()
        failed, waited = sum(one["failed_attempts"] for one in figures), max(one["longest_wait_s"] for one in figures)
        above.set_title(
            f"{run['system']}, {run['replicas']} replicas: {failed} failed attempts, wait at most {waited:.0f} s"
        )
        above.set(ylabel="tokens computed / least", yscale="symlog", ylim=(0.0, 100.0))
        below.set(ylabel="s", xlabel="s of the run", yscale="log", ylim=(0.005, 20.0))
        for axes in (above, below):
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=80)


def figures(turns: list[Turn], cold: float) -> dict[str, float]:
    ratios = sorted(turn.ttft / (cold * turn.prompt_tokens) for turn in turns)
    return {
        "turns": len(turns),
        "redundancy": sum(turn.computed for turn in turns) / sum(turn.least for turn in turns),
        "computed_tokens": sum(turn.computed for turn in turns),
        "ttft_ms": 1e3 * statistics.median(turn.ttft for turn in turns),
        "ttft_over_cold": statistics.median(ratios),
        "ttft_over_cold_p99": ratios[int(0.99 * len(ratios))],
        "failed_attempts": sum(turn.failed for turn in turns),
        "longest_wait_s": max(turn.waited for turn in turns),
    }


SYSTEMS = {"headstart": headstart, "vllm": vllm, "llama.cpp": llamacpp}


async def run_system(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="headstart-beside-", ignore_cleanup_errors=True) as name:
        system = SYSTEMS[options.system](options, Path(name), quiet_ports(options.replicas + 3))
        try:
            kept = 0 if options.system == "llama.cpp" else None  # llama-server ends connections without a word
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
            async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as client:
                return await measure(system, options, client)
        finally:
            system.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, default="headstart")
    parser.add_argument("--model", default="m3", help="folder; llama.cpp: GGUF file")
    parser.add_argument("--engine", default="", help="command that starts an engine of another system")
    parser.add_argument("--router", default="sglang-router", help="command of vllm's router")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of the KV of each replica")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--scan", type=int, default=60, help="new prompts")
    parser.add_argument("--seconds", type=float, default=12.0, help="of the steady phase, and after all were killed")
    parser.add_argument("--clock-seconds", type=float, default=40.0, help="in which replicas are killed one by one")
    parser.add_argument("--mean-seconds", type=float, default=8.0, help="between these kills")
    parser.add_argument("--further", action=argparse.BooleanOptionalAction, default=True, help="start another replica")
    parser.add_argument("--plot", type=Path, help="draw redundancy and TTFT over time into this file")
    parser.add_argument("--draw", type=Path, nargs="+", help="run nothing: draw these results of runs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.draw:
        draw([json.loads(path.read_text()) for path in options.draw], options.plot)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = asyncio.run(run_system(options))
    hidden = {"model": Path(options.model).name, "engine": None, "router": None, "plot": None}
    document = {"benchmark": "beside", **vars(options), **hidden, **found}
    if options.plot is not None:
        draw([document], options.plot)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
