"""Cache hits of an engine behind `headstart route`, for recorded agent chats with mistakes, without and with rules.

The engine is anybody's with an OpenAI-compatible API and vLLM's `cache_salt`: a salt for each arm keeps their caches
apart. Requests go one after the other, the two arms in turn, one token each. JSON on stdout.

python -m headstart_lab.prompts.behind_router ENGINE_URL MODEL TRACE... > behind_router.json
"""

import argparse
import copy
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

from headstart_lab.prompts.agent_chats import Body, agent, bodies_of, recorded_chats
from headstart_lab.prompts.agent_replay import CASES

SKIPPED = ("none", "none, all reasoning sent back", "timestamp first (reported only)")


def call(url: str, body: Body | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return answer.read(), answer.headers


def engine_counts(engine: str) -> dict[str, float]:
    """Return the engine's own counters of its prefix cache, in tokens."""
    text = call(f"{engine}/metrics")[0].decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        for name in ("prefix_cache_queries", "prefix_cache_hits"):
            if line.startswith((f"vllm:{name}_total", f"vllm:{name}{{")):
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def router(engine: str, port: int, rules: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    flags = [flag for rule in rules for flag in ("--prompt-rule", rule)]
    command = [sys.executable, "-m", "headstart", "route", "--replica", engine, "--port", str(port), *flags]
    process = subprocess.Popen(
        [*command, "--tokenizer", "none", "--access-log", "none"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the router ended with {process.returncode}; is port {port} free?")
        try:
            call(f"http://127.0.0.1:{port}/health")
            time.sleep(0.5)
            if process.poll() is None:
                return process
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the router does not come up")


class Arm:
    """One router and what the engine did for it."""

    def __init__(self, engine: str, port: int, rules: tuple[str, ...]) -> None:
        self._engine, self._url, self._salt = engine, f"http://127.0.0.1:{port}", uuid4().hex
        self._process = router(engine, port, rules)
        self.prompt_tokens = self.cached_tokens = self.queries = self.hits = 0
        self.seconds = 0.0
        self.header = ""

    def send(self, body: Body, model: str) -> None:
        before, began = engine_counts(self._engine), time.monotonic()
        sent = {**body, "model": model, "max_tokens": 1, "temperature": 0, "cache_salt": self._salt}
        data, headers = call(f"{self._url}/v1/chat/completions", sent)
        self.seconds += time.monotonic() - began
        usage = json.loads(data)["usage"]
        after = engine_counts(self._engine)
        self.header = headers.get("x-headstart-prompt-rules", "")
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.queries += int(after.get("prefix_cache_queries", 0) - before.get("prefix_cache_queries", 0))
        self.hits += int(after.get("prefix_cache_hits", 0) - before.get("prefix_cache_hits", 0))

    def close(self) -> dict[str, Any]:
        self._process.terminate()
        self._process.wait()
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "engine_queries": self.queries,
            "engine_hits": self.hits,
            "hit_rate": round(self.hits / self.queries, 4) if self.queries else None,
            "seconds": round(self.seconds, 1),
            "header": self.header,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine")
    parser.add_argument("model")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--conversations", type=int, default=2, help="at most, of each trace")
    parser.add_argument("--max-calls", type=int, default=6, help="of each conversation")
    parser.add_argument("--max-chars", type=int, default=20_000, help="of a request; longer ones are left out")
    parser.add_argument("--port", type=int, default=9300)
    parser.add_argument("--documents", type=int, default=5, help="in the system prompt; also scales rules and tools")
    parser.add_argument("--cases", nargs="*", help="default: all")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (mistake, rules) in CASES.items():
        if name in SKIPPED or (given.cases and name not in given.cases):
            continue
        arms = [Arm(given.engine, given.port, ()), Arm(given.engine, given.port + 1, rules)]
        num_requests = 0
        try:
            for path in given.traces:
                rng = Random("agent")
                own = agent(rng, given.documents)
                for seed, recorded in enumerate(list(recorded_chats(path))[: given.conversations]):
                    bodies = copy.deepcopy(bodies_of(recorded[: given.max_calls], rng, own))
                    mistake(bodies, Random(f"mistake {seed}"))
                    for body in bodies:
                        if len(json.dumps(body)) <= given.max_chars:
                            num_requests += 1
                            for arm in arms:
                                arm.send(body, given.model)
        finally:
            off, on = (arm.close() for arm in arms)
        found[name] = {"rules": rules, "requests": num_requests, "off": off, "on": on}
        print(name, off["hit_rate"], on["hit_rate"], off["computed_tokens"], on["computed_tokens"], file=sys.stderr)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
