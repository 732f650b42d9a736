"""vLLM with and without the plug-ins: times by turns, the store's restarts and faults, and equal tokens.

    PYTHONPATH=src:plugins/src python benchmarks/plugins/vllm_times.py scheduler --model MODEL > vllm_scheduler.json
    ... vllm_times.py store --model MODEL --folder /tmp/kv > vllm_store.json
    ... vllm_times.py tokens --model MODEL --dtype float32 --requests 500 --folder /tmp/kv > vllm_tokens.json

Runs in an environment with vLLM; `headstart init-model` makes a MODEL. Each engine is a process of its own, and one
computes at a time. Chunks are capped at 256 tokens. `wall` is in seconds, `cpu` in seconds of all threads. Folders are
FOLDER and FOLDER-FAULT, and must be new. The last line is JSON.
"""

import argparse
import errno
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Request = dict[str, Any]  # prompt, max_tokens, n
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
SETTINGS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 64,
    "long_prefill_token_threshold": 256,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 1_000,
}
OURS = {
    "scheduler_cls": "headstart_plugins.vllm.Scheduler",
    "additional_config": {"headstart": {"promised_blocks": True}},
}
ENGINES: dict[str, dict[str, Any]] = {"vllm": {}, "plug-in": OURS, "vllm again": {}}
FAULTS = {"full": errno.ENOSPC, "read-only": errno.EROFS}  # errors of each write of blocks, by the engine's store
SLOW_SECONDS = 0.5  # of each read of a slow one


def store_in(folder: str) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": "HeadstartConnector",
            "kv_connector_module_path": "headstart_plugins.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": folder, "size": "2GiB"},
        }
    }


# ------------------------------------------------------------------------------------------------------- an engine


def serve(options: dict[str, Any]) -> None:
    """Run jobs, one a line of stdin, in an engine of its own; print an answer for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _break_store(options.pop("fault", ""))
    transfer = options.pop("kv_transfer_config", None)
    if transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLMEngine.from_engine_args(EngineArgs(**SETTINGS, **options))
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        answer = _run(engine, str(number), job["requests"], job["at_once"])
        if transfer is not None:
            answer["written"] = _written()
        print(json.dumps(answer), file=answers, flush=True)


def _break_store(fault: str) -> None:
    """Let the system calls of the store in this process fail, or its reads take longer."""
    from headstart.store.files import FileSystemCalls

    read = FileSystemCalls.preadv, FileSystemCalls.pread

    def fail(*_: Any) -> int:
        raise OSError(FAULTS[fault], os.strerror(FAULTS[fault]))

    def slow_preadv(*args: Any) -> int:
        time.sleep(SLOW_SECONDS)
        return read[0](*args)

    def slow_pread(*args: Any) -> bytes:
        time.sleep(SLOW_SECONDS)
        return read[1](*args)

    if fault == "slow":
        FileSystemCalls.preadv, FileSystemCalls.pread = slow_preadv, slow_pread
    elif fault:
        FileSystemCalls.pwritev = fail


def _run(engine: Any, name: str, requests: list[Request], at_once: int) -> dict[str, Any]:
    """Serve requests, so many at a time in groups; `first`: seconds to the first token of each output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokens: list[list[list[int]]] = [[[] for _ in range(request.get("n", 1))] for request in requests]
    first = [[0.0] * len(outputs) for outputs in tokens]
    cached = [0] * len(requests)
    began, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(requests), at_once):
        sent = time.perf_counter()
        for i, request in list(enumerate(requests))[start : start + at_once]:
            n = request.get("n", 1)
            params = SamplingParams(
                n=n,
                temperature=0.0 if n == 1 else 1.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{name}-{i}", {"prompt_token_ids": request["prompt"]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                i = int(output.request_id.split("-")[1])
                cached[i] = max(cached[i], output.num_cached_tokens or 0)
                for part in output.outputs:
                    tokens[i][part.index] += part.token_ids
                    first[i][part.index] = first[i][part.index] or time.perf_counter() - sent
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"first": first, "tokens": tokens, "cached": cached, "wall": wall, "cpu": cpu}


def _written() -> int:
    """Return the blocks that were written, when none waits for it any more."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store, until = get_kv_transfer_group()._worker._store, time.monotonic() + 60
    while store.stats().num_pending and time.monotonic() < until:
        time.sleep(0.05)
    return store.stats().written_blocks


class Engine:
    """An engine in a process of its own."""

    def __init__(self, **options: Any) -> None:
        command = [sys.executable, __file__, "engine", "--options", json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**ENVIRONMENT, **os.environ}
        )

    def run(self, requests: list[Request], at_once: int = 1_000) -> dict[str, Any]:
        """Serve the requests. Raises ValueError if the process has ended."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"requests": requests, "at_once": at_once}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait()


# ------------------------------------------------------------------------------------------------------- the parts


def prompt(seed: object, num: int, vocabulary: int = 500) -> list[int]:
    rng = random.Random(f"{seed}")
    return [rng.randrange(10, vocabulary) for _ in range(num)]


def traffic(seed: int) -> dict[str, list[Request]]:
    """Return the requests of each kind of traffic; new ones for each seed."""
    prefix = prompt(f"prefix{seed}", 1_024)
    return {
        "16 behind a new prefix": [
            {"prompt": prefix + prompt(f"tail{seed}.{i}", 40), "max_tokens": 8} for i in range(16)
        ],
        "best of 8": [{"prompt": prompt(f"best{seed}", 1_064), "max_tokens": 16, "n": 8}],
        "nothing shared": [{"prompt": prompt(f"own{seed}.{i}", 400), "max_tokens": 24} for i in range(12)],
    }


def figures(answer: dict[str, Any]) -> dict[str, float]:
    firsts = sorted(first for outputs in answer["first"] for first in outputs)
    followers = firsts[1:]
    return {
        "wall": answer["wall"],
        "cpu": answer["cpu"],
        "ttft_mean": statistics.mean(firsts),
        "followers_p50": statistics.median(followers),
        "followers_p99": followers[int(0.99 * (len(followers) - 1))],
        "cached": sum(answer["cached"]),
    }


def compare_schedulers(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each kind of traffic by turns, as many rounds as fit; ratios are to vLLM in the same round."""
    engines = {name: Engine(model=args.model, dtype=args.dtype, **options) for name, options in ENGINES.items()}
    kinds = args.traffic or list(traffic(-1))
    for engine in engines.values():
        for kind in kinds:
            engine.run(traffic(-1)[kind])
    rows: list[dict[str, Any]] = []
    names, until = list(engines), time.monotonic() + args.seconds
    while time.monotonic() < until and len(rows) < args.rounds:
        turn = len(rows)
        row: dict[str, Any] = {}
        for kind in kinds:
            requests = traffic(turn)[kind]
            order = names[turn % len(names) :] + names[: turn % len(names)]
            row[kind] = {name: figures(engines[name].run(requests)) for name in order}
        rows.append(row)
        print(
            turn, {kind: {n: round(f["wall"], 3) for n, f in of.items()} for kind, of in row.items()}, file=sys.stderr
        )
    for engine in engines.values():
        engine.kill()
    summary: dict[str, Any] = {}
    for kind in rows[0]:
        for figure in ("wall", "cpu", "ttft_mean", "followers_p50", "followers_p99"):
            for name in names:
                values = [row[kind][name][figure] for row in rows]
                ratios = sorted(row[kind][name][figure] / row[kind]["vllm"][figure] for row in rows)
                found = [statistics.median(values), statistics.median(ratios), ratios[0], ratios[-1]]
                summary.setdefault(kind, {}).setdefault(figure, {})[name] = [round(value, 4) for value in found]
    return {"rounds": len(rows), "median, median ratio, its range": summary, "rows": rows}


def restart(args: argparse.Namespace) -> dict[str, Any]:
    """Measure TTFT without a store, with a new folder, and after kill -9; in other folders, whether answers go on."""
    requests = [{"prompt": prompt(i, args.length), "max_tokens": 8} for i in range(args.requests)]
    warm_up = [{"prompt": prompt("warm-up", args.length), "max_tokens": 8}]
    report: dict[str, Any] = {}

    def measure(name: str, **options: Any) -> list[list[list[int]]]:
        engine = Engine(model=args.model, dtype=args.dtype, **options)
        engine.run(warm_up)
        answer = engine.run(requests, at_once=1)
        engine.kill()
        firsts = [first for [first] in answer["first"]]
        report[name] = {
            "ttft_median": round(statistics.median(firsts), 4),
            "ttft_max": round(max(firsts), 4),
            "cached": sum(answer["cached"]),
            "written": answer.get("written"),
        }
        print(name, report[name], file=sys.stderr)
        return answer["tokens"]

    tokens = measure("no store")
    runs = {"new folder": {}, "after kill -9": {}, "slow": {"fault": "slow"}}
    runs = {name: store_in(args.folder) | fault for name, fault in runs.items()}
    runs |= {name: store_in(f"{args.folder}-{name}") | {"fault": name} for name in FAULTS}
    for name, options in runs.items():
        found = measure(name, **options)
        report[name]["equal"] = sum(one == other for one, other in zip(tokens, found, strict=True))
    measure("no store again")
    return report


def same_tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Count requests with the same greedy tokens as without plug-ins: with the scheduler, and the store, twice."""
    stems = [prompt(f"stem{i}", 300) for i in range(10)]
    requests = [
        {"prompt": stems[i % 10][: 37 * (i % 9)] + prompt(i, 20 + i % 40), "max_tokens": 16}
        for i in range(args.requests)
    ]
    forms = {
        "vllm": {},
        "scheduler": OURS,
        "store": store_in(args.folder),
        "both, after kill -9": OURS | store_in(args.folder),
    }
    report: dict[str, Any] = {"requests": len(requests)}
    alone = None
    for name, options in [item for item in forms.items() if item[0] in (args.form or forms)]:
        engine = Engine(model=args.model, dtype=args.dtype, **options)
        answer = engine.run(requests, at_once=50)
        engine.kill()
        alone = alone or answer["tokens"]
        same = sum(one == other for one, other in zip(alone, answer["tokens"], strict=True))
        report[name] = {"same": same, "cached": sum(answer["cached"]), "written": answer.get("written")}
        print(name, report[name], file=sys.stderr)
    return report


PARTS = {"scheduler": compare_schedulers, "store": restart, "tokens": same_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "engine"])
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=240, help="scheduler: rounds begin until then")
    parser.add_argument("--rounds", type=int, default=1_000, help="scheduler: at most so many")
    parser.add_argument("--traffic", action="append", choices=traffic(0), help="scheduler: only this kind")
    parser.add_argument("--form", action="append", help="tokens: only this one of its forms, the first with `vllm`")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=1_024, help="store: tokens of a prompt")
    parser.add_argument("--folder", help="of the store")
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "engine":
        return serve(json.loads(args.options))
    settings = {name: getattr(args, name) for name in ("dtype", "requests", "length")}
    found = PARTS[args.part](args)
    print(json.dumps({"bench": f"vllm {args.part}", "model": Path(args.model).name, **settings, **found}))


if __name__ == "__main__":
    main()
