"""Cost of history and diagnostics per request: python benchmarks/prompts/overhead.py [--model DIR] > overhead.json.

Two servers run at the same time, one with `--off` flags and one with `--on` flags, and get the same warm chats in turns
(A B A B, a batch each; the first of a pair alternates). Per batch: CPU time of the server's processes (user + system,
all of the tree) per request, and the elapsed time to the first token as a client sees it. Reported are the medians over
batches, the median of the paired differences, which a busy machine disturbs least, and the share that the features add
to the sums, with its 95 % interval: CPU time counts in ticks, so single batches are coarse. Flags of the canonicaliser
can be added to `--on`. `parts` is the CPU time of what the features add to a request, measured in this process.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from array import array
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from headstart.core.request import SamplingParams
from headstart.openai.diagnostics.cache_comparison import compare_prompts
from headstart.openai.diagnostics.fingerprint_memory import FingerprintMemory
from headstart.openai.diagnostics.prompt_fingerprint import fingerprint, shape_of
from headstart.openai.engine_requests import Origin
from headstart.openai.generation_params import GenerationParams
from headstart.server.prompt_doctor import PromptDoctor

OFF = "--history-size 0 --diagnostics-size 0 --doctor-share 0"
TICK = os.sysconf("SC_CLK_TCK")
RULES = "".join(f"Rule {number}: answer the reader of the library in one short sentence. " for number in range(60))
PATIENCE = 600.0


class Served:
    """One server process and its tree."""

    def __init__(self, stack: ExitStack, model: str | None, flags: str, folder: Path) -> None:
        log = stack.enter_context((folder / f"log{len(flags)}").open("w+b"))
        command = [sys.executable, "-m", "headstart", "serve", *([model] if model else [])]
        command += ["--port", "0", "--access-log", "none", "--stats-interval", "0", *flags.split()]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(self._stop)
        deadline, found = time.monotonic() + PATIENCE, None
        while found is None:
            assert self.process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.2)
            found = re.search(r" at (http://\S+)/v1", Path(log.name).read_text())
        self.client = stack.enter_context(httpx.Client(base_url=found[1], timeout=PATIENCE))
        self.last_id: str | None = None

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process and all its descendants so far."""
        parents: dict[int, int] = {}
        times: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(stat.parent.name)] = int(fields[1])
            times[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
        tree = {self.process.pid}
        while more := {child for child, parent in parents.items() if parent in tree} - tree:
            tree |= more
        return sum(times[pid] for pid in tree if pid in times) / TICK

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

    def _stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def batch(served: Served, number: int, size: int, *, compares: bool) -> tuple[float, float]:
    """Return CPU time and time to the first token per request, in milliseconds."""
    before = served.cpu_seconds()
    firsts = [
        served.first_token_seconds(f"Question {number}.{index}: which book is it?", compares=compares)
        for index in range(size)
    ]
    return (served.cpu_seconds() - before) / size * 1e3, median(firsts) * 1e3


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: Served(stack, args.model, flags, folder) for name, flags in (("off", OFF), ("on", args.on))}
        for served in servers.values():
            batch(served, -1, args.size, compares=False)
        found: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        for number in range(args.rounds):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                compares = name == "on" and args.compare
                found[name].append(batch(servers[name], number, args.size, compares=compares))
    result: dict[str, Any] = {"rounds": args.rounds, "requests_per_batch": args.size, "on": args.on, "off": OFF}
    for index, figure in enumerate(("cpu_ms_per_request", "warm_first_token_ms")):
        pairs = [(on[index], off[index]) for on, off in zip(found["on"], found["off"], strict=True)]
        off = median(second for _, second in pairs)
        difference = median(first - second for first, second in pairs)
        result[figure] = {
            "off": round(off, 3),
            "on": round(median(first for first, _ in pairs), 3),
            "median_difference": round(difference, 3),
            "difference_share": round(difference / off, 4),
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
    rng, params, origin = Random(1), GenerationParams(SamplingParams()), Origin("id")
    for num_tokens in (1024, 4096, 16384):
        memory, doctor = FingerprintMemory(16 << 20), PromptDoctor(0.003, lambda: 0.0)
        times: dict[str, list[float]] = {"shape": [], "fingerprint": [], "comparison": []}
        for number in range(200):
            rules, question = "".join(rng.choices("abcdefgh ", k=4 * num_tokens)), f"Question {number}"
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": question}]
            token_ids = array("i", rng.choices(range(30000), k=num_tokens))
            start = time.process_time_ns()
            shape = shape_of(messages, params, b"")
            doctor.note(origin, None, messages, (), num_tokens)
            times["shape"].append(time.process_time_ns() - start)
            start = time.process_time_ns()
            kept = fingerprint(shape, token_ids)
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
        "--on", default="", help="flags of the server that has the features on, such as --prompt-rule=..."
    )
    parser.add_argument("--compare", action="store_true", help="compare each prompt of that server with the one before")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--size", type=int, default=20, help="requests per batch; CPU time counts in ticks of 10 ms")
    parser.add_argument("--parts-only", action="store_true", help="CPU time of the parts in this process; no server")
    args = parser.parse_args()
    parts = {"parts": in_process()}
    print(json.dumps(parts if args.parts_only else parts | measure(args), indent=1))


if __name__ == "__main__":
    main()
