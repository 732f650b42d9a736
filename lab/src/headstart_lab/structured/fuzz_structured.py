"""Fuzz structured output on a running server: fuzz_structured.py [--requests 10000] [--report FILE].

Starts `headstart serve` with the bundled model, once for each format of tool calls, and sends hostile and random JSON
schemas, regular expressions, Lark grammars and tool lists, several at once. Beside them a second client in a process of
its own (gaps.py) streams unconstrained text and measures the gaps between its events: an engine step that a grammar
delays, delays that stream. The same client runs alone before, for comparison.

A run is valid if no response is a 5xx or a lost connection, neither engine nor HTTP process uses more than 0.5 s of CPU
time in any gap (the gap is that long, unless other work takes the machine's cores), no cached block is distrusted
(`headstart:evictions_total{cause="failed"}` is 0), memory grows by no more than 300 MB over its value after 300
requests, and nothing is running or waiting afterwards. Exits with 1 otherwise. The last line of stdout is JSON.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from headstart_lab.structured.checks import Answer
from headstart_lab.structured.hostile_grammars import Case, handmade
from headstart_lab.structured.random_grammars import drawn, random_schema
from headstart_lab.structured.serving import PROMPT, Running, metric_sum, metrics, post_chat, schema_request, serving

MAX_GAP = 0.5  # seconds of CPU time of one process
MAX_GROWTH = 300e6  # bytes
WARMING = 300  # requests before memory is compared
FAMILIES = ("hermes", "llama3_json", "mistral", "pythonic")  # of tool calls
MAX_BODY = 3_900_000  # bytes; larger bodies are refused before they are read


class Memory(threading.Thread):
    """A thread that polls the resident bytes of a process and its children."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._root = psutil.Process(pid)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.02):
            self.poll()

    def poll(self) -> int:
        """Return the resident bytes now."""
        total = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        self.peak = max(self.peak, total)
        return total

    def stop(self) -> None:
        self._stopped.set()


def request_of(case: Case, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the kind of a request with this grammar, and its body."""
    sampling = {"max_tokens": rng.choice((1, 16, 64)), "temperature": rng.choice((0, 1)), "seed": rng.randrange(99)}
    if case.kind == "json":
        try:
            schema = json.loads(case.text)
        except (ValueError, RecursionError):
            schema = case.text  # a text in place of a schema
        kinds = (
            schema_request(schema, **sampling),
            {"messages": PROMPT, "structured_outputs": {"json": schema}, **sampling},
            _tools_request(schema, rng) | sampling,
        )
        body = rng.choices(kinds, (0.3, 0.2, 0.5))[0]
        return "tools" if "tools" in body else "json", body
    field = "regex" if case.kind == "regex" else "grammar"
    return case.kind, {"messages": PROMPT, "structured_outputs": {field: case.text}, **sampling}


def _tools_request(schema: Any, rng: random.Random) -> dict[str, Any]:
    def tool(number: int, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters, "strict": True}}

    tools = [tool(0, schema), *(tool(n, random_schema(rng, 2)) for n in range(1, rng.choice((1, 2, 5, 40))))]
    named = {"type": "function", "function": {"name": rng.choice(("tool_0", "unknown"))}}
    return {"messages": PROMPT, "tools": tools, "tool_choice": rng.choice(("auto", "required", "none", named))}


class Fuzz:
    """One run against one server."""

    def __init__(self, server: Running) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.failures: list[dict[str, str]] = []
        self.slowest: list[tuple[float, str]] = []
        self._url = server.url

    async def send(self, bodies: Iterator[tuple[Case, str, bytes]], at_once: int) -> None:
        """Send the requests, `at_once` at a time."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:

            async def work() -> None:
                for case, kind, body in bodies:
                    if len(body) > MAX_BODY:
                        continue
                    began = time.perf_counter()
                    answers = await post_chat(session, self._url, body)
                    self._note(case, kind, answers, time.perf_counter() - began)

            await asyncio.gather(*(work() for _ in range(at_once)))

    def _note(self, case: Case, kind: str, answers: list[Answer], seconds: float) -> None:
        self.slowest = sorted([*self.slowest, (round(seconds, 3), case.name)])[-10:]
        for answer in answers:
            outcome = str(answer.status) + (f" {answer.finish_reason}" if answer.finish_reason else "")
            self.statuses.setdefault(kind, Counter())[outcome] += 1
            if answer.status >= 500 or answer.status == 0:
                self.failures.append({"case": case.name, "text": case.text[:400], "answer": answer.text[:300]})


def requests(rng: random.Random, count: int) -> Iterator[tuple[Case, str, bytes]]:
    """Yield every hand-made case once, then random ones, with the kinds and bodies of their requests."""
    fixed = handmade()[:count]
    for case in [*fixed, *drawn(rng, count - len(fixed))]:
        kind, body = request_of(case, rng)
        yield case, kind, json.dumps(body).encode()


@asynccontextmanager
async def measured_gaps(server: Running) -> AsyncIterator[dict[str, Any]]:
    """Run gaps.py beside the block; its report is in the yielded dictionary afterwards."""
    report: dict[str, Any] = {}
    script = str(Path(__file__).parent / "gaps.py")
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, server.url, str(server.engine_pid), str(server.pid), **pipes
    )
    try:
        yield report
    finally:
        output, _ = await process.communicate(b"")
    report |= json.loads(output)


async def fuzz(server: Running, count: int, seed: int, at_once: int) -> dict[str, Any]:
    """Return the report of one run."""
    run, memory = Fuzz(server), Memory(server.pid)
    async with measured_gaps(server) as alone:
        await asyncio.sleep(10)
    await Fuzz(server).send(requests(random.Random(-1), WARMING), at_once)
    await asyncio.sleep(1)
    base = memory.poll()
    memory.peak = base
    memory.start()
    async with measured_gaps(server) as gaps:
        await asyncio.sleep(1)
        began = time.monotonic()
        await run.send(requests(random.Random(seed), count), at_once)
        seconds = time.monotonic() - began
    await asyncio.sleep(2)
    memory.stop()
    text = metrics(server.url)
    return {
        "requests": sum(sum(counts.values()) for counts in run.statuses.values()),
        "seconds": round(seconds, 1),
        "statuses": {kind: dict(sorted(counts.items())) for kind, counts in sorted(run.statuses.items())},
        "failures": run.failures[:40],
        "num_failures": len(run.failures),
        "slowest_requests": run.slowest,
        "gaps_ms": gaps,
        "gaps_ms_alone": alone,
        "distrusted_blocks": metric_sum(text, "headstart:evictions_total", 'cause="failed"'),
        "unfinished": sum(metric_sum(text, f"vllm:num_requests_{state}") for state in ("running", "waiting")),
        "growth_mb": round((memory.peak - base) / 1e6, 1),
    }


def is_valid(report: dict[str, Any]) -> bool:
    """Return whether the run was as it should be; the conditions are in the module's docstring."""
    gaps = report["gaps_ms"]
    return not (
        report["num_failures"]
        or gaps["failures"]
        or max(gaps["engine"]["max"], gaps["server"]["max"]) > MAX_GAP * 1e3
        or gaps["count"] == 0
        or report["distrusted_blocks"]
        or report["unfinished"]
        or report["growth_mb"] * 1e6 > MAX_GROWTH
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--model", default="", help="a model folder; default: the bundled model")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only this one; --report keeps the others")
    parser.add_argument("--report", type=Path, help="also write the report here")
    options = parser.parse_args()
    families: list[str] = options.family or [*FAMILIES]
    runs: dict[str, dict[str, Any]] = {}
    if options.report and options.report.exists() and options.family:
        runs = json.loads(options.report.read_text(encoding="utf-8"))["runs"]
    for family in families:
        flags = ("--no-access-log", "--tool-call-parser", family)
        count, seed = options.requests // len(families), options.seed + FAMILIES.index(family)
        with tempfile.TemporaryDirectory() as room, serving(options.model, Path(room) / "log", *flags) as server:
            run = asyncio.run(fuzz(server, count, seed, options.at_once))
        print(f"{family}: {'valid' if is_valid(run) else 'not valid'}", file=sys.stderr)
        runs[family] = {"date": date.today().isoformat(), "llguidance": version("llguidance"), **run}
    document = {
        "valid": all(map(is_valid, runs.values())),
        "requests": sum(run["requests"] for run in runs.values()),
        "max_engine_cpu_ms": max(run["gaps_ms"]["engine"]["max"] for run in runs.values()),
        "runs": runs,
    }
    if options.report:
        options.report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in document.items() if key != "runs"}))
    return 0 if document["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
