"""Cost of diagnostics per request: python -m headstart_lab.prompts.overhead [--model DIR] > overhead.json.

One server (switched_server.py) gets the same warm chats in three arms, a batch each in turns: `off`, `control`, which
is off as well, and `on`. All six orders of the arms take turns. Per batch: CPU time per request (of all threads of the
server's processes, as the scheduler counts it), that without the engine's process, which does the same work in every
arm and varies more than the features cost, and the elapsed time to the first token as a client sees it. Reported are,
against `off`: the median of the paired differences, which a busy machine disturbs least, and the share of the sums with
its 95 % interval. `control` shows what the experiment finds where there is nothing. `parts` is the CPU time of what the
features add to a request, measured in this process.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from headstart.core.request import SamplingParams
from headstart.openai.engine_requests import RequestOrigin
from headstart.openai.generation_params import GenerationParams
from headstart.reuse.cache_comparison import compare_prompts, fingerprint_prompt
from headstart.server.apis.answer_diagnosis import FingerprintCache, chat_source_hashes
from headstart.server.prompt_doctor import AvoidableTextEstimator

ARMS = {"off": signal.SIGUSR1, "control": signal.SIGUSR1, "on": signal.SIGUSR2}
RULES = "".join(f"Rule {number}: answer the reader of the library in one short sentence. " for number in range(60))
WARM_UP = 100  # requests per arm
PATIENCE = 600.0


class Served:
    """A server whose features can be switched, and its tree of processes."""

    def __init__(self, stack: ExitStack, model: str | None, flags: str, folder: Path) -> None:
        log = stack.enter_context((folder / "log").open("w+b"))
        command = [sys.executable, str(Path(__file__).with_name("switched_server.py")), *([model] if model else [])]
        command += ["--port", "0", "--access-log", "none", "--stats-interval", "0", *flags.split()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # no thread spins for work
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        stack.callback(self._stop)
        deadline, found = time.monotonic() + PATIENCE, None
        while found is None:
            assert self.process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.2)
            found = re.search(r" at (http://\S+)/v1", Path(log.name).read_text())
        self.client = stack.enter_context(httpx.Client(base_url=found[1], timeout=PATIENCE))
        self.last_id: str | None = None

    def switch(self, arm: str) -> None:
        """Serve an arm's requests from now on."""
        self.last_id = None
        self.process.send_signal(ARMS[arm])
        time.sleep(0.02)

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the process and all its descendants so far, and that without the engine's."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
        tree = {self.process.pid}
        while more := {child for child, parent in parents.items() if parent in tree} - tree:
            tree |= more
        seconds = {pid: _cpu_seconds(pid) for pid in tree}
        engine = next(pid for pid in tree if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return sum(seconds.values()), sum(seconds.values()) - seconds[engine]

    def first_token_seconds(self, question: str, *, compares: bool) -> float:
        """Send a chat whose rules are cached; return the elapsed time to its first token."""
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
        if compares and self.last_id is not None:
            body["prompt_cache_options"] = {"comparison_response_id": self.last_id}
        start, first = time.perf_counter(), 0.0
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {") and not first:
                    first = time.perf_counter() - start
                    self.last_id = json.loads(line[6:])["id"]
        return first

    def num_fingerprints(self) -> int:
        """Return the number of prompts that the present arm has kept for comparisons."""
        found = re.search(r"^headstart:fingerprints\S* (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def _stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def _cpu_seconds(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def batch(served: Served, arm: str, number: int, size: int, *, compares: bool) -> tuple[float, ...]:
    """Return CPU time, that of the front and time to the first token per request, in milliseconds."""
    served.switch(arm)
    before = served.cpu_seconds()
    firsts = [
        served.first_token_seconds(f"Question {number}.{index}: which book is it?", compares=compares)
        for index in range(size)
    ]
    spent = (after - since for after, since in zip(served.cpu_seconds(), before, strict=True))
    return *(seconds / size * 1e3 for seconds in spent), median(firsts) * 1e3


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
    orders = list(permutations(ARMS))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = Served(stack, args.model, args.on, folder)
        for turn, arm in enumerate(ARMS):
            batch(served, arm, -1 - turn, WARM_UP, compares=args.compare)
        for number in range(args.rounds):
            for turn, arm in enumerate(orders[number % len(orders)]):
                question = len(ARMS) * number + turn  # a new one in each batch, as long as the others
                found[arm].append(batch(served, arm, question, args.size, compares=args.compare))
        num_kept = {arm: served.switch(arm) or served.num_fingerprints() for arm in ARMS}
    assert num_kept["off"] == 0 < num_kept["on"] or "--diagnostics-size 0" in args.on, num_kept  # the switch works
    result: dict[str, Any] = {"rounds": args.rounds, "requests_per_batch": args.size, "flags": args.on}
    result["compares"] = args.compare
    for index, figure in enumerate(("cpu_ms_per_request", "front_cpu_ms_per_request", "warm_first_token_ms")):
        off = [values[index] for values in found["off"]]
        result[figure] = {"off": round(median(off), 3)}
        for arm in ("on", "control"):
            pairs = [(values[index], other) for values, other in zip(found[arm], off, strict=True)]
            result[figure][arm] = {
                "median": round(median(first for first, _ in pairs), 3),
                "median_difference": round(median(first - second for first, second in pairs), 3),
                "share_of_sums": [round(share, 4) for share in share_of_sums(pairs)],
            }
    result["load_average"] = os.getloadavg()
    return result


def share_of_sums(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Return what `on` adds, as a share of `off`, over all batches, and its 95 % interval by bootstrap."""

    def share(drawn: list[tuple[float, float]]) -> float:
        return sum(on for on, _ in drawn) / sum(off for _, off in drawn) - 1

    rng = Random(0)
    found = sorted(share(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return share(pairs), found[50], found[1949]


def in_process() -> list[dict[str, Any]]:
    """Return the CPU time of what every request pays, in microseconds: medians of 200 prompts of each length.

    `shape` is before the first token (hashes of messages, and the prompt's place in the doctor's window); `fingerprint`
    is before the last; `comparison` is before the first, of requests that ask for one.
    """
    rows: list[dict[str, Any]] = []
    rng, params, origin = Random(1), GenerationParams(SamplingParams()), RequestOrigin("id")
    for num_tokens in (1024, 4096, 16384):
        memory, doctor = FingerprintCache(16 << 20), AvoidableTextEstimator(0.003, lambda: 0.0)
        times: dict[str, list[float]] = {"shape": [], "fingerprint": [], "comparison": []}
        for number in range(200):
            rules, question = "".join(rng.choices("abcdefgh ", k=4 * num_tokens)), f"Question {number}"
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
            token_ids = array("i", rng.choices(range(30000), k=num_tokens))
            start = time.process_time_ns()
            shape = chat_source_hashes(messages, params, b"")
            if (entry := doctor.build_window_entry(origin, None, messages, (), num_tokens)) is not None:
                doctor.remember_prompt(entry)
            times["shape"].append(time.process_time_ns() - start)
            start = time.process_time_ns()
            kept = fingerprint_prompt(shape, token_ids)
            memory.put("", str(number), kept)
            times["fingerprint"].append(time.process_time_ns() - start)
            start = time.process_time_ns()
            compare_prompts("id", kept, shape, token_ids)
            times["comparison"].append(time.process_time_ns() - start)
        medians = {name: round(median(values) / 1e3, 1) for name, values in times.items()}
        rows.append({"prompt_tokens": num_tokens, "microseconds": medians, "fingerprint_bytes": kept.num_bytes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="model folder; default: the bundled model")
    parser.add_argument(
        "--on", default="", help="options of headstart serve for the arm with the features on: --prompt-rule=..."
    )
    parser.add_argument("--compare", action="store_true", help="compare each prompt with the one before")
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--size", type=int, default=10, help="requests per batch")
    parser.add_argument("--parts-only", action="store_true", help="CPU time of the parts in this process; no server")
    args = parser.parse_args()
    parts = {"parts": in_process()}
    print(json.dumps(parts if args.parts_only else parts | measure(args), indent=1))


if __name__ == "__main__":
    main()
