"""Requests in the shapes of Claude Code and Codex, 20 turns each, through our router to another engine.

    PYTHONPATH=src:tests python benchmarks/agentx/shapes.py --engine vllm=http://127.0.0.1:8332 >shapes.json

The shapes are those of tests/server/test_agent_turns.py; texts are made longer, so that a turn has more than a block.
The router has `--prompt-rule inline_system`; the engine should have a chat template that refuses system messages in
mid-conversation (strict.jinja). *Possible*: each prompt begins with the whole one before it. `--direct` leaves out the
router, `--plain` images, items and tools that only the vendors' servers can read, custom tools, and arguments that were
cut; it also asks for no tool calls, for which vLLM needs a parser. The last line of stdout is one JSON document.
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
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from server.test_agent_turns import AGENTS, CUT, TURNS

from headstart.measurement.machine import print_document

MARK = re.compile(r"mark-\d\d-\w")
WORDS = "".join(f" line {number} of the file," for number in range(6))
PATHS = ("image", "input_image", "image_url", "server_tool_use", "web_search_tool_result", "redacted_thinking")
ITEMS_OF_VENDORS = ("web_search_call", "local_shell_call", "local_shell_call_output", "compaction", "reasoning")
ITEMS = (*ITEMS_OF_VENDORS, "custom_tool_call", "custom_tool_call_output")
Json = dict[str, Any]


def request_of(agent: str, turns: int, plain: bool) -> Json:
    """Return the request of a turn with longer texts."""
    body = AGENTS[agent][1](turns)
    if plain:
        body = without_vendors(body) | {"tool_choice": {"type": "none"} if "messages" in body else "none"}
        body["tools"] = [
            tool for tool in body["tools"] if tool.get("type", "function") == "function" or "input_schema" in tool
        ]
        body["tools"] = [tool for tool in body["tools"] if not tool.get("type", "").startswith("web_search")]
    text = json.dumps(body)
    if plain:
        text = text.replace(json.dumps(CUT), '"{}"')
    text = MARK.sub(lambda found: found[0] + WORDS, text)
    return json.loads(text) | {"model": "model"}


def without_vendors(value: Any) -> Any:
    """Return a value without parts and items that only the vendor's servers can read."""
    if isinstance(value, list):
        kept = [one for one in value if not (isinstance(one, dict) and one.get("type") in (*PATHS, *ITEMS))]
        return [without_vendors(one) for one in kept]
    return {key: without_vendors(one) for key, one in value.items()} if isinstance(value, dict) else value


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
def routed(engine: str) -> Generator[str]:
    """Yield the address of a router in front of the engine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headstart", "route", "--replica", engine, "--port", str(port)]
    command += ["--prompt-rule", "inline_system", "--tokenizer", "none", "--access-log", "none"]
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


def run(agent: str, engine: str, url: str, plain: bool) -> Json:
    """Send the turns of one agent; return what was refused, and what the engine found."""
    path, refused, prompts, errors = AGENTS[agent][0], 0, list[int](), list[str]()
    if "prompt" in counters(engine):  # vLLM's own route, in its mode for developers
        post(f"{engine}/reset_prefix_cache", {})
    before, start = 0, counters(engine)
    possible = 0
    for turns in range(1, TURNS + 1):
        earlier = counters(engine)
        status, answer = post(f"{url}{path}", request_of(agent, turns, plain))
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
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    rows: list[Json] = []
    for name, _, engine in (one.partition("=") for one in args.engine):
        for agent in ("claude code", "codex"):
            if args.direct:
                row = run(agent, engine, engine, args.plain)
            else:
                with routed(engine) as url:
                    row = run(agent, engine, url, args.plain)
            rows.append({"engine": name, "router": not args.direct, "plain": args.plain, **row})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print_document({"bench": "agents' request shapes", "turns": TURNS, "rows": rows})


if __name__ == "__main__":
    main()
