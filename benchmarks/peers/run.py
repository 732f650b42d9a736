"""Measure Headstart and its peers on the same workloads, in turn, on this machine, and redraw the tables.

    python benchmarks/peers/run.py --environments .peers
    python benchmarks/peers/run.py --peers ours,vllm --rows twins,poisson

Run with Headstart's own interpreter; setup.sh makes the environments of the others. Progress is on stderr, the last
line of stdout is one JSON document, which is also written to `--output`. The trials that `--output` has are kept, and
those that it lacks are measured. SIGTERM and SIGINT end the drivers and draw the tables of the trials so far.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from comparison import Comparison, Site, entrants_named, say
from journal import Journal
from peer import START_SECONDS
from plan import ONCE, OTHERS, ROW_NAMES, THOROUGH, Plan
from processor import multiplies_bf16
from roster import HERE, ROSTER, SPIN_COUNT, variables_of
from table import draw_all

from headstart.bench.cli.cli_run import resolve_or_create_bench_model
from headstart.measurement.machine import describe_machine

ARCHITECTURE = "llama-100m"
INTERRUPTED = 130  # exit code


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart" / "bench-models"
    model = resolve_or_create_bench_model(args.model, cache)
    overrides = {row: int(number) for row, _, number in (text.partition("=") for text in args.repetitions)}
    plan = Plan(
        entrants_named(args.peers),
        tuple(row for row in ROW_NAMES if row in args.rows),
        ONCE if args.quick else THOROUGH,
        ONCE if args.quick else OTHERS,
        overrides=overrides,
        limit=args.limit,
    )
    logs = args.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    setup = {"model": Path(args.model).name, "threads": args.threads, "spin_count": args.spin_count, "config": config}
    machine = describe_machine() | {"bf16": multiplies_bf16()}  # CPUs of one name differ in it
    try:
        journal = Journal(args.output / "trials.jsonl", {"setup": setup, "machine": machine}, restart=args.restart)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    room = plan.room._replace(kv_gib=args.kv_gib)
    site = Site(
        args.environments,
        model,
        args.threads,
        logs,
        spin_count=args.spin_count,
        room=room,
        start_limit=args.start_limit,
        resident=args.resident,
    )
    comparison = Comparison(plan, journal, site, retries=args.retries, say=say)
    is_over = False
    try:
        say("measuring the ceilings of this machine")
        journal.note_ceilings(ceilings(args.threads))
        comparison.start()
        comparison.run()
        journal.note_ceilings(ceilings(args.threads))
        is_over = True
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        comparison.kill()
        if "ceilings" not in journal.about:
            return INTERRUPTED
    finally:
        comparison.close()
    document = draw_all(args.output, page=args.page)
    print(json.dumps(document), flush=True)
    if not is_over:
        return INTERRUPTED
    return 1 if document["problems"] else 0


def interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, once: `timeout` sends its signal twice, and the second would end the drawing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def ceilings(threads: int) -> dict[str, float]:
    """Return the result of ceilings.py, run as a separate process."""
    variables = {name: value for name, value in variables_of(ROSTER["ours"], threads).items() if value is not None}
    command = [sys.executable, str(HERE / "ceilings.py"), "--threads", str(threads)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="folder of setup.sh")
    parser.add_argument("--model", default=ARCHITECTURE, help="a shape of `headstart init-model`, or a folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spin-count", type=int, default=SPIN_COUNT, help="of idle OpenMP threads, for all")
    useful = [name for name, entrant in ROSTER.items() if not (entrant.without_bf16 and multiplies_bf16())]
    parser.add_argument("--peers", type=_names(ROSTER), default=useful, help="of " + ",".join(ROSTER))
    parser.add_argument("--rows", type=_names(ROW_NAMES), default=list(ROW_NAMES), help="of " + ",".join(ROW_NAMES))
    parser.add_argument("--repetitions", action="append", default=[], metavar="ROW=N", help="other than the default")
    parser.add_argument("--retries", type=int, default=1, help="of a trial disturbed by other processes")
    parser.add_argument("--quick", action="store_true", help="every row once: a quick check, not a figure")
    parser.add_argument("--restart", action="store_true", help="discard the trials that --output has")
    parser.add_argument("--limit", type=float, help="seconds of a trial, for all (300; those that are not thorough 60)")
    parser.add_argument("--start-limit", type=float, default=START_SECONDS, help="seconds of a start and its warm-up")
    parser.add_argument("--kv-gib", type=int, default=3, help="GiB of each KV pool: Headstart, vLLM, OpenVINO")
    parser.add_argument("--no-resident", dest="resident", action="store_false", help="one driver at a time in memory")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of journal, results and logs")
    parser.add_argument("--page", type=Path, help="page whose generated part is written, such as docs/benchmarks.md")
    return parser.parse_args()


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names. It raises ArgumentTypeError for an unknown name."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
