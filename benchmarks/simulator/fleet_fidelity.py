"""Compare a simulated fleet with real replicas behind a real router on the two cores of a machine; see README.md.

    fleet_fidelity.py overhead alone.json MODEL > overhead.json                 # front ends, router, client at idle
    fleet_fidelity.py predict alone.json beside.json overhead.json MODEL > predictions.json
    fleet_fidelity.py measure predictions.json MODEL > measured.json            # the runs of `headstart bench fleet`
    fleet_fidelity.py compare predictions.json measured.json > fleet-fidelity.json

`alone.json` is a profile calibrated while the other core is idle, `beside.json` while it calibrates too. MODEL is a
folder or a shape. The requests are those of `headstart bench fleet` with the same seed, sizes and rates.

Cores are shared as follows; nothing of it is fitted to a fleet. A core is slower while the other one is busy, by the
ratio of both profiles for one request of the workload. Front ends, router and client take their measured CPU time per
request and per token, as a constant share of both cores. Steps share the rest equally (sim/sim_fleet.py).
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import psutil
from fidelity import simulated, tpot, ttft, with_overhead

from headstart.bench.cli.cli_run import resolve_or_create_bench_model
from headstart.bench.streamed_request import EndpointTarget
from headstart.engine.assembly import build_engine
from headstart.measurement.machine import describe_machine, describe_versions
from headstart.measurement.progress_bar import progress_bar
from headstart.measurement.runner import EngineSetup
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import read_profile_file
from headstart.sim.sim_fleet import FleetOptions
from headstart.sim.sim_request import request_from_job
from headstart.sim.step_cost import StepWork
from headstart.sim.sweep import SimulationConfig
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord, percentile
from headstart_lab.router.fleet import WARM_UPS, measure_fleet, replica_launch, send_all
from headstart_lab.router.fleet_trial import BASELINE, BLOCK_SIZE, TITLES, FleetConfig, Trial
from headstart_lab.router.fleet_workload import Question, Words, make_questions
from headstart_lab.runners.route_process import Entrant, running_router
from headstart_lab.runners.served_replica import replica

CORES = 2
SEED = 1  # of texts and arrivals; the figures in benchmarks/fleet are of seed 0
NOISE_SEEDS = 5  # simulations of each run, averaged
MODELS = Path.home() / ".cache/headstart/bench-models"
CONFIG = FleetConfig(
    policies=("cost", "least-load", "round-robin"),
    decode_output=64,
    high_rate=3.1,  # those of benchmarks/fleet/three-runs.json: 0.7 of what round robin bears
    low_rate=2.4,
    decode_rate=3.9,
)
SHORT, LONG = 8, 64  # output tokens of the requests that the overhead is measured with
FIGURES: dict[str, Callable[[Trial], float]] = {
    "ttft_mean_ms": lambda trial: mean(trial.ttfts),
    "ttft_p50_ms": lambda trial: percentile(trial.ttfts, 50),
    "ttft_p90_ms": lambda trial: percentile(trial.ttfts, 90),
    "tpot_p90_ms": lambda trial: percentile(trial.tpots, 90),
    "e2e_mean_ms": lambda trial: mean(trial.latencies),
    "hit_rate": lambda trial: trial.hit_rate,
}


@dataclass(frozen=True, slots=True)
class Overhead:
    """Time that a single request takes in addition to its simulated steps, in seconds."""

    step: float  # added to each step
    first: float  # once, before the first token
    request_cpu: float  # CPU time of front end, router and client
    token_cpu: float  # the same for each output token


def setup_of(model: str, seed: int) -> EngineSetup:
    """Return the setup of `headstart bench fleet` for a folder or a shape."""
    return EngineSetup(build_engine, resolve_or_create_bench_model(model, MODELS), model, threads=1, seed=seed)


def fleet_profile(profile: ReplicaProfile, config: FleetConfig) -> ReplicaProfile:
    """Return the profile with the pool and the context of the fleet's replicas."""
    return replace(profile, num_blocks=config.pool_blocks - 1, max_model_len=config.context)


def measure_overhead(profile: ReplicaProfile, setup: EngineSetup, num: int) -> Overhead:
    """Return the overhead of `num` short and `num` long random requests, one at a time, through the router."""
    words, rng = Words.of_model(setup.model), Random("overhead")
    batches = [
        [_question(words, rng.randint(256, CONFIG.context - 2 * LONG), output, rng) for _ in range(num)]
        for output in (SHORT, LONG)
    ]
    real: list[RequestRecord] = []
    cpu: list[float] = []
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        launch = replica_launch(setup, CONFIG, Path(scratch))
        replicas = [stack.enter_context(replica(launch, None)) for _ in range(CONFIG.replicas)]
        entrant = Entrant(BASELINE, policy=BASELINE, flags=("--tokenizer", setup.model))
        router = stack.enter_context(running_router(entrant, [one.url for one in replicas], Path(scratch)))
        target = EndpointTarget(router.url, replicas[0].served_model())
        fronts = [psutil.Process(one.pid) for one in replicas]

        def cpu_seconds() -> float:
            times = [front.cpu_times() for front in fronts]
            return sum(one.user + one.system for one in times) + router.cpu_seconds() + process_time()

        asyncio.run(send_all(target, [_warm_up(words)] * WARM_UPS, 1))
        for questions in batches:
            before = cpu_seconds()
            replies = asyncio.run(send_all(target, questions, 1))
            cpu.append((cpu_seconds() - before) / num)
            real += [reply.record for reply in replies]
    assert all(record.ok for record in real), [record.error for record in real if record.error]
    jobs = [question.job for questions in batches for question in questions]
    quiet = replace(fleet_profile(profile, CONFIG), noise=0.0)
    step = _median_difference(tpot, real, quiet, jobs)
    first = _median_difference(ttft, real, with_overhead(quiet, step), jobs)
    token_cpu = max((cpu[1] - cpu[0]) / (LONG - SHORT), 0.0)
    return Overhead(step, first, cpu[0] - SHORT * token_cpu, token_cpu)


def _question(words: Words, num_tokens: int, output: int, rng: Random) -> Question:
    text = words.draw(num_tokens, rng)
    return Question("".join(text), Job(words.ids(text), output), group=-1)


def _warm_up(words: Words) -> Question:
    return _question(words, BLOCK_SIZE // 2, 2, Random(0))


def _median_difference(
    seconds: Callable[[RequestRecord], float],
    real: Sequence[RequestRecord],
    profile: ReplicaProfile,
    jobs: Sequence[Job],
) -> float:
    """Return the median of real - simulated; every job is simulated alone."""
    alone = [simulated(profile, [replace(job, at=0.0)])[0] for job in jobs]
    return median(seconds(one) - seconds(other) for one, other in zip(real, alone, strict=True))


def slowdown_of(alone: ReplicaProfile, beside: ReplicaProfile, config: FleetConfig, kind: str) -> float:
    """Return the factor by which one request of a workload takes longer while the other core is busy; at least 1."""
    shape = config.shapes[kind]
    prompt = shape.shared + shape.own
    works = [StepWork(new=prompt, pairs=prompt * prompt / 2), *[StepWork(streams=1, resident=prompt)] * shape.output]
    return max(sum(map(beside.cost.seconds, works)) / sum(map(alone.cost.seconds, works)), 1.0)


def speeds_of(slowdown: float, others: float) -> tuple[float, float]:
    """Return the speed of each step while one runs, and while two run.

    `others`: cores that front ends, router and client use. While one step runs, they use the other core.
    """
    return 1.0 - others + others / slowdown, (CORES - others) / CORES / slowdown


def simulate(simulation: SimulationConfig, questions: Sequence[Question], warm_up: Question, first: float) -> Trial:
    """Return the run of one policy, without its warm-ups; `first` is added to the time before the first token."""
    warm = [replace(warm_up.job, at=0.1 * number) for number in range(WARM_UPS)]
    jobs = [*warm, *(replace(one.job, at=one.job.at + 1.0) for one in questions)]
    records = [one.record for one in simulation.run_new_fleet([request_from_job(job) for job in jobs]).records]
    counted = [record for record in records if int(record.request_id) >= WARM_UPS]
    return Trial(tuple(replace(record, arrival=record.arrival - first) for record in counted), ())


def predict(
    alone: ReplicaProfile, beside: ReplicaProfile, overhead: Overhead, config: FleetConfig, setup: EngineSetup
) -> dict[str, Any]:
    """Return the predicted figures of each workload, policy and run."""
    words = Words.of_model(setup.model)
    profile = with_overhead(fleet_profile(alone, config), overhead.step)
    assert profile.cost.seconds(StepWork(streams=1)) > 0, f"a step takes {overhead.step} s less than calibrated"
    found: dict[str, Any] = {}
    for kind in config.kinds:
        rate = config.rates[kind]
        runs = [
            make_questions(words, config, kind, rate, Random(f"{setup.seed}/{kind}/{run}"))
            for run in range(config.runs)
        ]
        tokens = mean(question.job.output for questions in runs for question in questions)
        others = rate * (overhead.request_cpu + overhead.token_cpu * tokens)
        slowdown = slowdown_of(alone, beside, config, kind)
        options = FleetOptions(speeds=speeds_of(slowdown, others))
        base = SimulationConfig(profile, config.replicas, options=options)
        policies: dict[str, list[dict[str, float]]] = {}
        for policy in config.policies:
            policies[policy] = []
            for questions in runs:
                trials = [
                    simulate(replace(base, policy=policy, seed=seed), questions, _warm_up(words), overhead.first)
                    for seed in range(NOISE_SEEDS)
                ]
                policies[policy].append({name: mean(map(of, trials)) for name, of in FIGURES.items()})
        found[kind] = {"others": others, "slowdown": slowdown, "speeds": options.speeds, "policies": policies}
    return found


def measure(config: FleetConfig, setup: EngineSetup) -> dict[str, Any]:
    """Return the measured figures of each workload, policy and run."""
    with progress_bar() as bar:
        measured = measure_fleet(setup, config, bar)
    failed = [error for kind in measured.trials.values() for runs in kind.values() for t in runs for error in t.errors]
    assert not failed, failed[0]
    return {
        "workloads": {
            kind: {
                policy: [{name: of(trial) for name, of in FIGURES.items()} for trial in runs]
                for policy, runs in policies.items()
            }
            for kind, policies in measured.trials.items()
        },
        "contention": measured.log.as_dict(),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def compare(predictions: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per workload, policy and figure; `error` compares the means of all runs."""
    rows: list[dict[str, Any]] = []
    for kind, policies in measured["workloads"].items():
        for policy, runs in policies.items():
            for name in FIGURES:
                expected = [run[name] for run in predictions["workloads"][kind]["policies"][policy]]
                real = [run[name] for run in runs]
                error = mean(expected) - mean(real)
                if name != "hit_rate":
                    error /= mean(real)
                rows.append(
                    {
                        "workload": kind,
                        "policy": policy,
                        "figure": name,
                        "predicted": expected,
                        "measured": real,
                        "error": error,  # relative; of hit rates the difference
                    }
                )
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows as Markdown to stderr: predicted mean of the runs / each real run (difference)."""
    names = {"ttft_mean_ms": "TTFT mean", "ttft_p50_ms": "p50", "ttft_p90_ms": "p90", "tpot_p90_ms": "TPOT p90"}
    names |= {"e2e_mean_ms": "e2e mean", "hit_rate": "hits"}
    lines = [f"| workload | policy | {' | '.join(names.values())} |", "|---" * (2 + len(names)) + "|"]
    for start in range(0, len(rows), len(names)):
        cells = []
        for row in rows[start : start + len(names)]:
            show = "{:.3f}" if row["figure"] == "hit_rate" else "{:.3g}" if mean(row["measured"]) < 100 else "{:,.0f}"
            real = ", ".join(map(show.format, row["measured"]))
            unit = f"{100 * row['error']:+.1f} " + ("points" if row["figure"] == "hit_rate" else "%")
            cells.append(f"{show.format(mean(row['predicted']))} / {real} ({unit})")
        lines.append(f"| {TITLES[rows[start]['workload']]} | {rows[start]['policy']} | {' | '.join(cells)} |")
    print("\n".join(lines), file=sys.stderr)


def parse() -> argparse.Namespace:
    """Return the stage and its arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    for stage, names in (
        ("overhead", ("alone", "model")),
        ("predict", ("alone", "beside", "overhead", "model")),
        ("measure", ("predictions", "model")),
        ("compare", ("predictions", "measured")),
    ):
        one = stages.add_parser(stage)
        for name in names:
            one.add_argument(name)
    stages.choices["overhead"].add_argument("--requests", type=int, default=30, help="of each output length")
    stages.choices["predict"].add_argument("--runs", type=int, default=3)
    stages.choices["predict"].add_argument("--prompts", type=int, default=5, help="requests per group")
    return parser.parse_args()


def main() -> None:
    """Run one of the four stages."""
    arguments = parse()

    def read(name: str) -> Any:
        return json.loads(Path(getattr(arguments, name)).read_text())

    if arguments.stage == "overhead":
        alone = read_profile_file(Path(arguments.alone))
        result: Any = asdict(measure_overhead(alone, setup_of(arguments.model, SEED), arguments.requests))
    elif arguments.stage == "predict":
        config = replace(CONFIG, runs=arguments.runs, prompts=arguments.prompts)
        alone, beside = (read_profile_file(Path(getattr(arguments, name))) for name in ("alone", "beside"))
        overhead = read("overhead")
        found = predict(alone, beside, Overhead(**overhead), config, setup_of(arguments.model, SEED))
        result = {"seed": SEED, "config": asdict(config), "overhead": overhead, "workloads": found}
    elif arguments.stage == "measure":
        predictions = read("predictions")
        result = measure(FleetConfig(**predictions["config"]), setup_of(arguments.model, predictions["seed"]))
    else:
        predictions, measured = read("predictions"), read("measured")
        rows = compare(predictions, measured)
        print_table(rows)
        result = {"comparison": rows, **measured, "workloads": predictions["workloads"]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
