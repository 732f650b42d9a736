"""Compare hybrids with Transformers' `generate` in float32, and the checkpoints of core/ with states that are hashes.

    OMP_NUM_THREADS=1 python benchmarks/hybrid/oracle.py lfm2 --requests 3000 --journal lfm2.jsonl

Each line of the journal is a run of 40 requests (400 for `core`); a run is one seed, so the command goes on where it
was ended. Every fifth run of a family is in a child process that is killed by signal 9 three times. The last line of
stdout is the sum of all, as JSON; the exit code is 1 if a token was wrong.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "core")]

from checking import next_token, repeating_token  # noqa: E402
from model.tiny import HYBRIDS, make_checkpoint  # noqa: E402
from oracle_hybrids import compare_hybrid  # noqa: E402
from oracle_killed import compare_killed  # noqa: E402
from states import random_run  # noqa: E402
from test_drafted_checkpoints import DRAFTS  # noqa: E402

from headstart.model.kernels.library import cpu_model  # noqa: E402

FIRST_SEED = 60_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=[*HYBRIDS, "core"])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args()
    is_core = options.family == "core"
    runs = list(map(json.loads, options.journal.read_text().splitlines())) if options.journal.exists() else []
    with tempfile.TemporaryDirectory() as name, options.journal.open("a") as journal:
        room = Path(name)
        model = room if is_core else make_checkpoint(options.family, room / options.family, std=0.2)
        while sum(run["requests"] for run in runs) < options.requests:
            seed, began = FIRST_SEED + len(runs), time.process_time()
            counts = states_of_hashes(seed) if is_core else tokens(model, room / f"kv-{seed}", seed)
            runs.append({"seed": seed, **counts, "cpu_seconds": round(time.process_time() - began, 2)})
            journal.write(json.dumps(runs[-1]) + "\n")
            journal.flush()
            print(seed, runs[-1]["requests"], runs[-1].get("wrong", []), file=sys.stderr)
    total = {"runs": len(runs)} | {
        key: sum((run[key] for run in runs), start=type(runs[0][key])()) for key in runs[0] if key != "seed"
    }
    versions = {package: version(package) for package in ("torch", "transformers")}
    print(json.dumps({"family": options.family, **total, "versions": versions, "cpu": cpu_model()}))
    sys.exit(bool(total.get("wrong")))


def tokens(model: Path, room: Path, seed: int) -> dict:
    """Return the counts of a run of the real model."""
    killed = seed % 5 == 4
    tally = (compare_killed if killed else compare_hybrid)(model, room, seed, 40)
    return {**asdict(tally), "killed": 3 * killed}


def states_of_hashes(seed: int) -> dict:
    """Return the counts of a run of core/ alone, which raises an AssertionError at the first wrong state."""
    kind, shelf = seed % 3, {}
    model = repeating_token if kind == 1 else next_token
    executor, cached = random_run(seed, 400, shelf if kind == 2 else None, DRAFTS if kind == 1 else None, model)
    chunks = [chunk for batch in executor.batches for chunk in batch.chunks]
    written = sum(len(chunk.saves) for chunk in chunks)
    drafts = sum(chunk.num_drafts for chunk in chunks)
    loaded = cached if kind == 2 else 0
    return {"requests": 400, "states_read": executor.num_reads, "states_written": written, "drafts": drafts,
            "cached_tokens": cached - loaded, "store_tokens": loaded}  # fmt: skip


if __name__ == "__main__":
    main()
