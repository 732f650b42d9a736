"""Check the router's index built from a real vLLM's KV events against its `cached_tokens`, on this CPU.

    python benchmarks/peers/kv_events_vllm.py --environments .peers
    python benchmarks/peers/kv_events_vllm.py --url http://127.0.0.1:8000 --events tcp://127.0.0.1:5557 \
        --replay tcp://127.0.0.1:5558            # one that runs already, with --enable-prompt-tokens-details

Run with Headstart's own interpreter. Prompts of random tokens behind shared prefixes, with and without a cache salt,
are sent to vLLM one after the other; before each one the consumer's index predicts how many tokens vLLM takes from its
cache. The pool is smaller than the prefixes, so blocks are evicted and computed again. At intervals, prompts come eight
at a time. At the end a second consumer connects late and must have the same index. The last line of stdout is one JSON
document; `--capture` saves the first batches as received, one per line, in hexadecimal.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from random import Random
from typing import Any

import httpx
import zmq

from headstart import bundled
from headstart.gateway.kv_events.kv_event_consumer import KVEventConsumer
from headstart.gateway.kv_events.kv_event_decoding import domain_of_cache_salt
from headstart.gateway.replicas.replica_address import ReplicaAddress
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.router.index.kv_event_index import ReplicaKVEventIndex
from headstart.router.routing_request import RoutingPrompt, router_root

MODEL = "intent"
BLOCK = 32  # vLLM refuses 16 on a CPU
POOL = 96  # blocks
PREFIX = 6 * BLOCK  # tokens that the prompts of one group share
SALTS = (None, "amber", "birch")
VOCABULARY = range(10, 1500)
START_SECONDS, STEP_SECONDS = 600.0, 60.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def start(python: Path, folder: Path, port: int) -> "tuple[subprocess.Popen[bytes], ReplicaAddress]":
    """Start vLLM on the bundled model; its output goes to a file in `folder`."""
    model = Path(bundled.__file__).parent / MODEL
    address = ReplicaAddress(f"http://127.0.0.1:{port}", f"ipc://{folder}/events", f"ipc://{folder}/replay")
    events = {"enable_kv_cache_events": True, "endpoint": address.events, "replay_endpoint": address.replay}
    arguments = ["--model", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(POOL), "--max-model-len", "1024"]
    arguments += ["--max-num-seqs", "8", "--enforce-eager", "--enable-prompt-tokens-details"]
    arguments += ["--kv-events-config", json.dumps(events)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | ENVIRONMENT
    with (folder / "log").open("wb") as log:
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *arguments]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), address


class Trial:
    """One vLLM, its consumer, and the observations."""

    def __init__(self, address: ReplicaAddress, client: httpx.AsyncClient, seed: int) -> None:
        self.address, self.client, self.rng = address, client, Random(seed)
        self.consumer = self.listener()
        self.groups = [self.tokens(PREFIX) for _ in range(4)]
        self.past: list[tuple[list[int], str | None]] = []
        self.rows: list[dict[str, int]] = []

    def listener(self) -> KVEventConsumer:
        def root(adapter: str | None, domain: bytes) -> Any:
            return router_root(MODEL, adapter=adapter, domain=domain)

        return KVEventConsumer(self.address, ReplicaKVEventIndex(BLOCK, root), kind="vllm")

    def tokens(self, count: int) -> list[int]:
        return [self.rng.choice(VOCABULARY) for _ in range(count)]

    def prompt(self) -> tuple[list[int], str | None]:
        """Return a prompt behind a shared prefix, an earlier prompt again, or an unrelated one."""
        kind = self.rng.random()
        if kind < 0.2 and self.past:
            return self.rng.choice(self.past[-12:])
        prefix = self.rng.choice(self.groups)[: self.rng.randrange(PREFIX + 1)] if kind < 0.9 else []
        made = (prefix + self.tokens(self.rng.randrange(1, 5 * BLOCK)), self.rng.choice(SALTS))
        self.past.append(made)
        return made

    def names(self, prompt: list[int], salt: str | None) -> list[Any]:
        return RoutingPrompt(array("i", prompt), router_root(MODEL, domain=domain_of_cache_salt(salt))).block_hashes(
            BLOCK
        )

    def predicted(self, prompt: list[int], salt: str | None) -> int:
        """Return the predicted tokens. The last token is always computed, and therefore its whole block."""
        hit = self.consumer.index.num_cached_prefix_blocks(self.names(prompt, salt), 0.0) * BLOCK
        return min(hit, (len(prompt) - 1) // BLOCK * BLOCK)

    async def ask(self, prompt: list[int], salt: str | None, max_tokens: int = 1) -> int:
        """Send a prompt and return its cached tokens, as reported by vLLM."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self.client.post("/v1/completions", json=body | ({"cache_salt": salt} if salt else {}))
        answer.raise_for_status()
        return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    async def one(self) -> None:
        """Predict and send one prompt, record both figures, and wait until the events of its blocks have arrived."""
        prompt, salt = self.prompt()
        predicted = self.predicted(prompt, salt)
        cached = await self.ask(prompt, salt)
        self.rows.append({"tokens": len(prompt), "predicted": predicted, "cached": cached, "salted": int(bool(salt))})
        names = self.names(prompt, salt)
        await until(
            lambda: self.consumer.index.num_cached_prefix_blocks(names, 0.0) == len(names), "the events of a request"
        )

    async def burst(self) -> None:
        """Send eight prompts at once with answers of two blocks, and wait until no events arrive."""
        await asyncio.gather(*(self.ask(*self.prompt(), 2 * BLOCK) for _ in range(8)))
        await self.quiet()

    async def quiet(self) -> None:
        """Wait until no batch has come for a second; by then the consumer has requested missing ones."""
        await until(lambda: time.monotonic() - (self.consumer.last_heard or 0.0) > 1.0, "quiet")


async def until(condition: Any, what: str) -> None:
    end = time.monotonic() + STEP_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"timed out waiting for {what}")
        await asyncio.sleep(0.002)


async def ready(client: httpx.AsyncClient, process: "subprocess.Popen[bytes] | None") -> str:
    """Wait until it serves; return its version."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and (process is None or process.poll() is None):
        try:
            return str((await client.get("/version")).json()["version"])
        except httpx.HTTPError:
            await asyncio.sleep(0.5)
    raise TimeoutError("vLLM did not start")


async def run(
    address: ReplicaAddress, process: "subprocess.Popen[bytes] | None", args: argparse.Namespace
) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=address.url, timeout=STEP_SECONDS) as client:
        version = await ready(client, process)
        say(f"vLLM {version} is ready")
        trial = Trial(address, client, args.seed)
        listening = [asyncio.create_task(trial.consumer.run())]
        try:
            for number in range(args.requests):
                if number % 20 == 19:
                    await trial.burst()
                await trial.one()
            await trial.quiet()
            late = trial.listener()
            listening.append(asyncio.create_task(late.run()))
            await until(lambda: late.counts["batches"] == trial.consumer.counts["batches"], "the replay")
            same = all(
                late.index.num_cached_prefix_blocks(names, 0.0)
                == trial.consumer.index.num_cached_prefix_blocks(names, 0.0)
                for names in (trial.names(*past) for past in trial.past)
            )
            counts, blocks = trial.consumer.counts, len(trial.consumer.index)
            after_reset = None
            if (await client.post("/reset_prefix_cache")).is_success:
                last = trial.tokens(3 * BLOCK + 1)  # vLLM publishes the reset with the next step it computes
                await trial.ask(last, None)
                await until(lambda: trial.predicted(last, None) == 3 * BLOCK, "the events of the last request")
                after_reset = len(trial.consumer.index)
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)
    if args.capture:
        args.capture.write_text("".join(f"{payload.hex()}\n" for payload in replayed(address, args.captured)))
    wrong = [row for row in trial.rows if row["predicted"] != row["cached"]]
    problems = [f"{len(wrong)} of {len(trial.rows)} predictions are wrong"] if wrong else []
    problems += [] if same else ["the index of the late consumer differs"]
    problems += [] if after_reset in (None, 3) else [f"{after_reset} blocks are known after a reset and a request of 3"]
    problems += [] if counts["removed"] else ["nothing was evicted"]
    return {
        "bench": "peers/kv_events_vllm",
        "requests": len(trial.rows),
        "exact": len(trial.rows) - len(wrong),
        "wrong": wrong[:20],
        "with_hit": sum(row["cached"] > 0 for row in trial.rows),
        "salted_with_hit": sum(row["cached"] > 0 and row["salted"] for row in trial.rows),
        "prompt_tokens": sum(row["tokens"] for row in trial.rows),
        "cached_tokens": sum(row["cached"] for row in trial.rows),
        "blocks_known": blocks,
        "blocks_in_pool": POOL,
        "blocks_after_reset_and_one_request": after_reset,
        "late_consumer_knows_the_same": same,
        "counts": counts,
        "late_counts": late.counts,
        "valid": not problems,
        "problems": problems,
        "seed": args.seed,
        "vllm": version,
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def replayed(address: ReplicaAddress, count: int) -> list[bytes]:
    """Return the first batches, as published."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    found: list[bytes] = []
    try:
        assert address.replay is not None
        sock.connect(address.replay)
        sock.send_multipart((b"", bytes(8)))
        while sock.poll(round(STEP_SECONDS * 1000)):
            frames = sock.recv_multipart()
            if not frames[-1] or len(found) == count:
                break
            found.append(frames[-1])
    finally:
        context.destroy(linger=0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where setup.sh put vLLM's")
    parser.add_argument("--url", help="of one that runs already, with blocks of 32 tokens, serving `intent`")
    parser.add_argument("--events")
    parser.add_argument("--replay")
    parser.add_argument("--port", type=int, default=18763)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capture", type=Path, help="keeps the first batches in this file")
    parser.add_argument("--captured", type=int, default=12, help="so many of them")
    args = parser.parse_args()
    if args.url:
        document = asyncio.run(run(ReplicaAddress(args.url, args.events, args.replay), None, args))
    else:
        with tempfile.TemporaryDirectory() as folder:  # socket paths must be short
            say("starting vLLM; that takes a minute")
            process, address = start(args.environments / "vllm" / "bin" / "python", Path(folder), args.port)
            try:
                document = asyncio.run(run(address, process, args))
            except Exception:
                say((Path(folder) / "log").read_text(errors="replace")[-40000:])
                raise
            finally:
                process.terminate()
                process.wait()
    print(json.dumps(document))
    return 0 if document["valid"] else 1


if __name__ == "__main__":
    sys.exit(main())
