"""Hit rate and TTFT of LiteLLM's strategies, of the plug-in and of `headstart route`, over the same two replicas.

    python benchmarks/plugins/litellm_routing.py --headstart .venv/bin/headstart [--quick] > litellm.json

Runs in an environment with headstart-plugins[litellm]; `--headstart` is the command of one with an engine, which serves
the bundled model. Requests of shared system prompts with own questions, drawn by Zipf; the cache of a replica is
as large as these. Strategies take turns within each round, on emptied caches. The last stdout line is JSON. Hit rates
are firm on a busy machine, times are not.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
# LiteLLM pins prompts of 1,024 tokens and more; these are shorter, so that its affinity takes part.
os.environ.setdefault("MINIMUM_PROMPT_CACHE_TOKEN_COUNT", "100")

import litellm

from headstart_plugins.litellm.callback import PrefixRouting

MODEL = "headstart-intent"
PROMPTS, PROMPT_WORDS, NUM_BLOCKS = 8, 220, 320
STARTING = 600  # seconds
WORDS = ["train", "ticket", "city", "leaves", "noon", "platform", "nine", "arrives", "late", "evening", "rain"]


def started(stack: ExitStack, command: list[str]) -> str:
    """Start a server until the stack is closed; return its address when it answers."""
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r" at (http://\S+)/v1", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"{command} did not start:\n{log.read_text(errors='replace')}")


def traffic(num: int, seed: int) -> list[list[dict[str, Any]]]:
    """Return the messages of requests: a shared system prompt, marked for caches, and a question."""
    rng = random.Random(seed)
    prompts = [f"Rules {n}. " + " ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for n in range(PROMPTS)]
    chosen = rng.choices(prompts, weights=[1 / (n + 1) for n in range(PROMPTS)], k=num)
    marked = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in chosen]
    return [
        [{"role": "system", "content": [part]}, {"role": "user", "content": f"question {n}"}]
        for n, part in enumerate(marked)
    ]


def deployments(urls: list[str]) -> list[dict[str, Any]]:
    fixed = {"model": f"openai/{MODEL}", "api_key": "none"}
    return [{"model_name": "m", "litellm_params": {**fixed, "api_base": f"{url}/v1"}} for url in urls]


async def measured(router: litellm.Router, requests: list[list[dict[str, Any]]], at_once: int) -> dict[str, Any]:
    """Send the requests, so many at a time; return the shares of cached tokens and the times to the first token."""
    gate, ttfts, counts = asyncio.Semaphore(at_once), [], [0, 0, 0]

    async def send(messages: list[dict[str, Any]]) -> None:
        async with gate:
            start, first = time.monotonic(), 0.0
            usage = {"include_usage": True}
            stream = await router.acompletion(
                model="m", messages=messages, max_tokens=2, stream=True, stream_options=usage
            )
            async for chunk in stream:
                first = first or time.monotonic() - start
                if getattr(chunk, "usage", None):
                    counts[0] += chunk.usage.prompt_tokens_details.cached_tokens
                    counts[1] += chunk.usage.prompt_tokens
                    counts[2] += 1
            ttfts.append(first)

    await asyncio.gather(*map(send, requests))
    assert counts[2] == len(requests), f"{counts[2]} of {len(requests)} answers had a usage"
    ms = sorted(1e3 * ttft for ttft in ttfts)
    return {
        "hit_rate": round(counts[0] / counts[1], 4),
        "prompt_tokens": counts[1],
        "ttft_p50_ms": round(statistics.median(ms), 1),
        "ttft_p99_ms": round(ms[min(len(ms) - 1, int(0.99 * len(ms)))], 1),
    }


def run(name: str, replicas: list[str], headstart: str, requests: Any, at_once: int) -> dict[str, Any]:
    """Measure one strategy on emptied caches."""
    for url in replicas:
        urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")).read()
    litellm.callbacks = []
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        urls = replicas
        if name == "headstart route":
            words = [word for url in replicas for word in ("--replica", url)]
            urls = [started(stack, [headstart, "route", *words, "--port", "0"])]
        elif name == "plug-in":
            litellm.callbacks = [PrefixRouting()]
        elif name == "prompt-caching affinity":
            options = {"optional_pre_call_checks": ["prompt_caching"]}
        else:
            options = {"routing_strategy": name}
        return asyncio.run(measured(litellm.Router(model_list=deployments(urls), **options), requests, at_once))


STRATEGIES = ("simple-shuffle", "least-busy", "prompt-caching affinity", "plug-in", "headstart route")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headstart", default="headstart")
    parser.add_argument("--replica", action="append", default=[], help="URL of a running replica; two or more")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of 40 requests")
    asked = parser.parse_args()
    num, rounds = (40, 1) if asked.quick else (asked.requests, asked.rounds)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        serve = [asked.headstart, "serve", "--port", "0", "--num-blocks", str(NUM_BLOCKS)]
        replicas = asked.replica or [started(stack, serve) for _ in range(2)]
        for turn in range(rounds):
            order = STRATEGIES[turn % len(STRATEGIES) :] + STRATEGIES[: turn % len(STRATEGIES)]
            for name in order:
                row = run(name, replicas, asked.headstart, traffic(num, turn), asked.at_once)
                rows.append({"round": turn, "strategy": name, **row})
                print(rows[-1], file=sys.stderr, flush=True)
    means = {
        name: round(statistics.mean(row["hit_rate"] for row in rows if row["strategy"] == name), 4)
        for name in STRATEGIES
    }
    settings = {"requests": num, "rounds": rounds, "at_once": asked.at_once, "replicas": len(replicas)}
    settings |= {"prompts": PROMPTS, "num_blocks": NUM_BLOCKS, "model": MODEL, "litellm": "1.110.2"}
    print(json.dumps({"bench": "litellm routing", **settings, "hit_rates": means, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
