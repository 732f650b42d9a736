"""Prompt tokens computed by a real server for recorded agent chats with a mistake, with its rule off and on.

Starts `headstart serve` twice for each mistake and sends the same requests, one after the other, one token each; the
figures are those of /v1/cache/stats. `headstart lint --against` then asks each server for causes. JSON on stdout.

python -m headstart_lab.prompts.served_replay MODEL_FOLDER TRACE > served_replay.json
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from headstart_lab.prompts.agent_chats import Body, agent, bodies_of, recorded_chats
from headstart_lab.prompts.agent_replay import CASES
from headstart_lab.prompts.behind_router import call

NAMES = ("billing header first", "tools shuffled", "schemas serialized anew", "tool results serialized anew")


def serve(model: Path, rules: tuple[str, ...], log: Path) -> "tuple[subprocess.Popen[bytes], str]":
    """Start a server; return its process and its URL."""
    flags = [flag for rule in rules for flag in ("--prompt-rule", rule)]
    command = [sys.executable, "-m", "headstart", "serve", str(model), "--port", "0", "--threads", "1"]
    command += ["--kv-cache-memory", "1GiB", "--tool-call-parser", "hermes", "--prompt-log-size", str(64 << 20)]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--heartbeat-timeout", "120", *flags], stdout=file, stderr=file)
    while process.poll() is None:
        found = re.search(r" at (http://\S+)/v1", log.read_text(encoding="utf-8"))
        if found is not None:
            return process, found[1]
        time.sleep(0.2)
    raise SystemExit(log.read_text(encoding="utf-8"))


def measure(model: Path, rules: tuple[str, ...], bodies: list[Body], scratch: Path) -> dict[str, Any]:
    process, url = serve(model, rules, scratch / "log")
    try:
        for body in bodies:
            call(f"{url}/v1/chat/completions", {**body, "model": model.name, "max_tokens": 1, "temperature": 0})
        tokens = json.loads(call(f"{url}/v1/cache/stats")[0])["prompt_tokens"]
        lint = [sys.executable, "-m", "headstart", "lint", "--against", url, "--json"]
        report = json.loads(subprocess.run(lint, check=True, capture_output=True).stdout)
    finally:
        process.terminate()
        process.wait()
    return {
        "prompt_tokens": tokens["total"],
        "computed_tokens": tokens["computed"],
        "doctor": {one["cause"]: one["tokens"] for one in report["causes"]},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--max-calls", type=int, default=6)
    parser.add_argument("--documents", type=int, default=5, help="in the system prompt; also scales rules and tools")
    parser.add_argument("--cases", nargs="*", help="default: all")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name in given.cases or NAMES:
        mistake, rules = CASES[name]
        rng = Random("agent")
        own = agent(rng, given.documents)
        bodies: list[Body] = []
        for seed, recorded in enumerate(list(recorded_chats(given.trace))[: given.conversations]):
            chat = copy.deepcopy(bodies_of(recorded[: given.max_calls], rng, own))
            mistake(chat, Random(f"mistake {seed}"))
            bodies += chat
        with tempfile.TemporaryDirectory() as scratch:
            off, on = (measure(given.model, chosen, bodies, Path(scratch)) for chosen in ((), rules))
        found[name] = {"rules": rules, "requests": len(bodies), "off": off, "on": on}
        print(name, off, on, file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
