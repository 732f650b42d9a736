"""Requests in the shapes of Claude Code and Codex, 20 turns each, through our router to another engine.

    PYTHONPATH=src:tests python benchmarks/agentx/shapes.py --engine vllm=http://127.0.0.1:8332 >shapes.json

The shapes are those of tests/server/test_agent_turns.py with longer texts, so that a turn has more than a block, and
without images, which no engine without an encoder of images reads; Claude Code's last message states the tokens that
are left, another number in each turn. The router has the rules RULES; the engine should have a chat template that
refuses system messages in mid-conversation (strict.jinja), and a parser of tool calls. `--direct` leaves out the
router, `--rule` chooses others. *Possible*: each prompt begins with the whole one before it. The last line of stdout
is one JSON document.
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from server.test_agent_turns import AGENTS, TURNS

from headstart.measurement.machine import print_figures_with_machine

MARK = re.compile(r"mark-\d\d-\w")
WORDS = "".join(f" line {number} of the file," for number in range(6))
RULES = ("inline_system", "token_counts", "billing_header", "plain_items")
IMAGES = ("image", "input_image", "image_url")
Json = dict[str, Any]


def request_of(agent: str, turns: int) -> Json:
    """Return the request of a turn with longer texts and without images."""
    body = without_images(AGENTS[agent][1](turns))
    if agent == "claude code":
        user = next(message for message in reversed(body["messages"]) if message["role"] == "user")
        user["content"].append(
            {"type": "text", "text": f"<total_tokens>{90_000 - 1_234 * turns} tokens left</total_tokens>"}
        )
    return json.loads(MARK.sub(lambda found: found[0] + WORDS, json.dumps(body))) | {"model": "model"}


def without_images(value: Any) -> Any:
    """Return a value without parts that are images."""
    if isinstance(value, list):
        return [without_images(one) for one in value if not (isinstance(one, dict) and one.get("type") in IMAGES)]
    return {key: without_images(one) for key, one in value.items()} if isinstance(value, dict) else value


def post(url: str, body: Json) -> tuple[int, Json]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read() or "{}")
    except urllib.error.HTTPError as error:
        return error.code, {"error": error.read().decode(errors="replace")[:300]}


def counters(engine: str) -> Json:
    """Return the engine's own counts of prompt tokens: all that were looked up, and those found in its cache."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Json = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        match name.split("{")[0]:
            case "vllm:prefix_cache_queries_total":
                found["prompt"] = found.get("prompt", 0.0) + float(value)
            case "vllm:prefix_cache_hits_total":
                found["cached"] = found.get("cached", 0.0) + float(value)
            case "llamacpp:prompt_tokens_total":
                found["computed"] = float(value)
            case _:
                pass
    return found


@contextmanager
def routed(engine: str, rules: Sequence[str]) -> Generator[str]:
    """Yield the address of a router in front of the engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headstart", "route", "--replica", engine, "--port", str(port)]
    command += [word for rule in rules for word in ("--prompt-rule", rule)]
    command += ["--tokenizer", "none", "--access-log", "none"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def run(agent: str, engine: str, url: str) -> Json:
    """Send the turns of one agent; return what was refused, and what the engine found."""
    path, refused, prompts, errors = AGENTS[agent][0], 0, list[int](), list[str]()
    if "prompt" in counters(engine):  # vLLM's own route, in its mode for developers
        post(f"{engine}/reset_prefix_cache", {})
    before, start = 0, counters(engine)
    possible = 0
    for turns in range(1, TURNS + 1):
        earlier = counters(engine)
        status, answer = post(f"{url}{path}", request_of(agent, turns))
        if status != 200:
            refused += 1
            errors.append(f"turn {turns}: {status} {answer.get('error')}"[:300])
            continue
        usage = answer["usage"]
        length = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        length += usage.get("cache_read_input_tokens") or 0
        length = int(counters(engine).get("prompt", 0) - earlier.get("prompt", 0)) or length
        possible += min(before, length - 1)
        before = length
        prompts.append(length)
    end = counters(engine)
    spent = {key: int(end[key] - start[key]) for key in end}
    cached = spent["cached"] if "cached" in spent else sum(prompts) - spent["computed"]
    share = round(cached / possible, 4) if possible else None
    return {
        "agent": agent,
        "refused": refused,
        "prompt_tokens": sum(prompts),
        "possible": possible,
        "cached": cached,
        "cached_of_possible": share,
        "last_prompt": prompts[-1:],
        "errors": errors[:2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", required=True, help="NAME=URL, with /metrics")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--rule", action="append", default=[], help="of the router; default: RULES")
    args = parser.parse_args()
    rows: list[Json] = []
    for name, _, engine in (one.partition("=") for one in args.engine):
        for agent in ("claude code", "codex"):
            if args.direct:
                row = run(agent, engine, engine)
            else:
                with routed(engine, args.rule or RULES) as url:
                    row = run(agent, engine, url)
            rules = None if args.direct else args.rule or RULES
            rows.append({"engine": name, "rules": rules, **row})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_figures_with_machine({"bench": "agents' request shapes", "turns": TURNS, "rows": rows})


if __name__ == "__main__":
    main()
