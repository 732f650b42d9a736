"""AIPerf replays recorded sessions of coding agents on running servers, by turns; what was found in their caches?

    PYTHONPATH=src:lab/src python benchmarks/agentx/agentx.py --sessions FOLDER --model FOLDER --aiperf ENVIRONMENT \
        --server headstart=http://127.0.0.1:8311:16 --server vllm=http://127.0.0.1:8312:32 >run.json

Sessions are those of kv-cache-tester (AgentX, `*.json.gz`). AIPerf's scenario `inferencex-agentx-mvp` replays them,
with lengths and times divided by `--divisor`, the first requests of each, and without sessions that exceed `--context`;
that breaks its rules on duration and corpus, hence `--unsafe-override`. The number behind a URL is the size of blocks.

The prompts are those that AIPerf has sent, from its own record, rendered and tokenised here. *Possible*: tokens that a
prompt begins with as any prompt sent before it. *Belady*: hits of the best eviction in a pool of `--pool` tokens, with
the same prompts in this order. A server without
/reset_prefix_cache (llama-server) has to be new, and is measured once. The last line of stdout is one JSON document.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from array import array
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from headstart.common_prefix import common_prefix_length
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.workload.belady import belady_hit_blocks_per_request

REPOSITORY, REVISION = "agentx/model", "0" * 40  # of the tokenizer, in a hub cache that AIPerf reads offline
SEED, LIMIT = 7, 600  # seconds of one run of AIPerf, its start included
ID_TOKENS = 64
SECONDS = ("t", "api_time", "think_time", "ttft")
Json = dict[str, Any]


def scaled(request: Json, divisor: int) -> Json:
    """Return a request or a sub-agent with lengths and times divided."""
    found = request | {key: request[key] / divisor for key in SECONDS if request.get(key) is not None}
    if request["type"] != "subagent":
        return found | {key: max(request[key] // divisor, 1) for key in ("in", "out")}
    found["requests"] = [scaled(inner, divisor) for inner in request["requests"]]
    if request.get("duration_ms") is not None:
        found["duration_ms"] = request["duration_ms"] // divisor
    return found


def prepare(args: argparse.Namespace, folder: Path) -> Json:
    """Write the sessions that AIPerf reads; return what was cut."""
    cut = {"sessions": 0, "too_long": 0, "requests": 0, "requests_left_out": 0}
    for path in sorted(args.sessions.glob("*.json.gz")):
        session = json.loads(gzip.decompress(path.read_bytes()))
        requests = [scaled(request, args.divisor) for request in session["requests"][: args.requests]]
        flat = [inner for request in requests for inner in request.get("requests", [request])]
        if max(one["in"] + one["out"] for one in flat) > args.context:
            cut["too_long"] += 1
            continue
        if cut["sessions"] == args.num_sessions:
            break
        cut["requests_left_out"] += len(session["requests"]) - len(requests)
        session |= {"requests": requests, "block_size": ID_TOKENS // args.divisor}
        session |= {key: session.get(key, 0) // args.divisor for key in ("tool_tokens", "system_tokens")}
        (folder / path.name.removesuffix(".gz")).write_text(json.dumps(session), encoding="utf-8")
        cut["sessions"] += 1
        cut["requests"] += len(requests)
    return cut


def make_hub(model: Path, folder: Path) -> None:
    """Make a cache of the hub that holds the model's tokenizer: AIPerf refuses a folder when it is offline."""
    root = folder / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = root / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION, encoding="utf-8")
    for path in model.glob("*.json"):
        (snapshot / path.name).symlink_to(path.resolve())


def replay(args: argparse.Namespace, url: str, room: Path, out: Path) -> list[Json]:
    """Run AIPerf and return its records, in the order in which requests were sent."""
    offline = {"HF_HUB_CACHE": str(room / "hub"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    words = [str(args.aiperf / "bin" / "aiperf"), "profile", "--url", url, "--model", args.name]
    words += ["--tokenizer", REPOSITORY, "--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    words += ["--scenario", "inferencex-agentx-mvp", "--unsafe-override", "--custom-dataset-type", "weka-trace"]
    words += ["--input-file", str(room / "sessions"), "--concurrency", str(args.concurrency)]
    words += ["--trajectory-start-min-ratio", "0", "--trajectory-start-max-ratio", "0", "--no-gpu-telemetry"]
    words += ["--benchmark-duration", str(args.seconds), "--benchmark-grace-period", "20"]
    words += ["--extra-inputs", "ignore_eos:true", "--random-seed", str(SEED)]
    words += ["--ui", "none", "--export-level", "raw", "--output-artifact-dir", str(out)]
    with (room / "aiperf.log").open("ab") as log:
        subprocess.run(words, env=os.environ | offline, stdout=log, stderr=log, timeout=LIMIT, check=False)
    lines = (out / "profile_export_raw.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return sorted(records, key=lambda one: one["metadata"]["request_start_ns"])


def figures(record: Json) -> Json:
    """Return seconds to the first token and the reported tokens of one record; without an end of the answer: failed."""
    first, usage = None, {}
    for answer in record["responses"] or []:
        for packet in answer.get("packets", []):
            if packet["name"] != "data" or packet["value"] == "[DONE]":
                continue
            event = json.loads(packet["value"])
            usage = event.get("usage") or usage
            if first is None and any(choice["delta"].get("content") for choice in event.get("choices", [])):
                first = (answer["perf_ns"] - record["start_perf_ns"]) / 1e9
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    is_failed = record["status"] != 200 or first is None or not usage
    return {"failed": is_failed, "ttft": first, "cached": cached, "prompt": usage.get("prompt_tokens", 0)}


def blocks(tokens: "array[int]", size: int, ids: dict[tuple[int, bytes], int]) -> list[int]:
    """Return ids of the full blocks that can be found: the last token is always computed."""
    path: list[int] = []
    for start in range(0, (len(tokens) - 1) // size * size, size):
        key = (path[-1] if path else -1, tokens[start : start + size].tobytes())
        path.append(ids.setdefault(key, len(ids)))
    return path


def summary(records: list[Json], tokenizer: Any, size: int, pool: int) -> Json:
    """Return the figures of one run."""
    prompts: list[array[int]] = []
    possible, ids = 0, dict[tuple[int, bytes], int]()
    for record in records:
        rendered = tokenizer.apply_chat_template(
            record["payload"]["messages"], add_generation_prompt=True, return_dict=False
        )
        tokens = array("i", rendered)
        common = max((common_prefix_length(tokens, other) for other in prompts), default=0)
        possible += min(common, len(tokens) - 1)
        prompts.append(tokens)
    rows = [figures(record) for record in records]
    good = [row for row in rows if not row["failed"]]
    paths = [blocks(tokens, size, ids) for tokens in prompts]
    best = size * sum(belady_hit_blocks_per_request(paths, pool // size)) if pool else None
    cached = sum(row["cached"] for row in good)
    whole = size * sum(map(len, paths)) - size * len(ids)
    ttft = sorted(row["ttft"] for row in good)
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "rendered_otherwise": sum(row["prompt"] != len(one) for row, one in zip(rows, prompts, strict=True)),
        "prompt_tokens": sum(map(len, prompts)),
        "distinct_tokens": size * len(ids),
        "possible_tokens": possible,
        "possible_in_blocks": whole,
        "cached_tokens": cached,
        "cached_of_possible": round(cached / possible, 4),
        "belady_tokens": best,
        "cached_of_belady": best and round(cached / best, 4),
        "ttft_p50": round(median(ttft), 4),
        "ttft_p90": round(ttft[len(ttft) * 9 // 10], 4),
        "ttft_mean": round(sum(ttft) / len(ttft), 4),
    }


def reset(url: str) -> None:
    for _ in range(50):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/reset_prefix_cache", method="POST"), timeout=20):
                return
        except urllib.error.HTTPError as error:
            assert error.code == 404, f"{url} does not clear its cache"
            return
        except OSError:  # requests that AIPerf has cancelled may still be running
            time.sleep(0.2)
    raise TimeoutError(f"{url} does not clear its cache")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, required=True, help="recorded sessions")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model that is served")
    parser.add_argument("--name", default="model", help="its served name")
    parser.add_argument("--aiperf", type=Path, required=True, help="environment with aiperf 0.13")
    parser.add_argument("--server", action="append", required=True, help="NAME=http://HOST:PORT:BLOCK_SIZE")
    parser.add_argument("--divisor", type=int, default=16)
    parser.add_argument("--num-sessions", type=int, default=24)
    parser.add_argument("--requests", type=int, default=30, help="first ones of each session")
    parser.add_argument("--context", type=int, default=10_000, help="tokens of prompt and answer")
    parser.add_argument("--concurrency", type=int, default=8, help="sessions at a time")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--pool", type=int, default=0, help="tokens of the servers' pools, for Belady's figure")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    runs: list[Json] = []
    with tempfile.TemporaryDirectory() as scratch:
        room = Path(scratch)
        (room / "sessions").mkdir()
        make_hub(args.model, room / "hub")
        cut = prepare(args, room / "sessions")
        for number in range(args.repeat):
            for name, _, rest in (server.partition("=") for server in args.server):
                url, _, size = rest.rpartition(":")
                reset(url)
                out = room / f"{name}-{number}"
                records = replay(args, url, room, out)
                own = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
                theory = {
                    key: round(own[key]["avg"], 2)
                    for key in ("theoretical_prefix_cache_hit", "overall_usage_prompt_cache_read_pct")
                }
                runs.append({"server": name, **summary(records, tokenizer, int(size), args.pool), "aiperf": theory})
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int)}
    print(
        json.dumps(
            {"settings": settings, "cut": cut, "runs": runs, "machine": describe_machine(), **describe_versions()}
        )
    )


if __name__ == "__main__":
    main()
