"""Compare the simulator with a real server on this machine: predict first, then measure; see README.md.

    headstart simulate calibrate MODEL --threads 1 --out profile.json
    fidelity.py overhead profile.json MODEL > overhead.json        # HTTP and process border, at idle
    fidelity.py predict profile.json overhead.json > predictions.json
    fidelity.py measure predictions.json MODEL > fidelity.json

The engine runs on the first core, the HTTP front end and the client on the others.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from headstart.bench.endpoint_runner import EndpointRunner
from headstart.bench.streamed_request import EndpointTarget
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import read_profile_file
from headstart.sim.sim_report import fleet_report
from headstart.sim.sim_request import request_from_job
from headstart.sim.step_cost import AdditiveCost
from headstart.sim.sweep import SimulationConfig
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord, summarize_records
from headstart.workload.synthetic import random_tokens, unit_poisson_arrivals
from headstart_lab.runners.served_replica import Launch, replica

VOCAB = 32_000
BUSY = 0.3  # share of the time in steps at the simple load; measured is twice the rate
LIMITS = {"ttft_p50": 0.15, "ttft_p90": 0.15, "tpot_p90": 0.20, "cached_tokens": 0.01}
FIGURES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p90", "cached_tokens", "prompt_tokens")


@dataclass(frozen=True, slots=True)
class Workload:
    """Poisson arrivals of prompts of `groups` shared prefixes; lengths in tokens, own parts and outputs in a range."""

    groups: int
    shared: int
    own: tuple[int, int]
    output: tuple[int, int]
    requests: int

    def jobs(self, seed: str) -> list[Job]:
        """Return the jobs at one request per second."""
        rng = Random(seed)
        prefixes = [random_tokens(self.shared, VOCAB, rng) for _ in range(self.groups)]
        return [
            Job(rng.choice(prefixes) + random_tokens(rng.randint(*self.own), VOCAB, rng), rng.randint(*self.output), at)
            for at in unit_poisson_arrivals(self.requests, rng)
        ]


WORKLOADS = {
    "shared-prefix": Workload(groups=8, shared=1024, own=(32, 96), output=(16, 48), requests=120),
    "intent": Workload(groups=1, shared=900, own=(60, 140), output=(20, 40), requests=120),
    "many-prefixes": Workload(groups=40, shared=512, own=(16, 256), output=(8, 64), requests=120),
}


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return latencies in seconds and numbers of tokens."""
    assert all(record.error is None for record in records), [record.error for record in records if record.error]
    found = summarize_records(records)
    assert found.ttft is not None and found.tpot is not None and found.e2e is not None
    latencies = (found.ttft.p50, found.ttft.p90, found.tpot.p50, found.tpot.p90, found.e2e.p90)
    return dict(zip(FIGURES, (*latencies, found.cached_tokens, found.prompt_tokens), strict=True))


def simulated(profile: ReplicaProfile, jobs: Sequence[Job]) -> list[RequestRecord]:
    """Return the records of one simulated replica."""
    return [
        one.record
        for one in SimulationConfig(profile, 1, "least-load")
        .run_new_fleet([request_from_job(job) for job in jobs])
        .records
    ]


@contextmanager
def server(model: str, profile: ReplicaProfile) -> Generator[EndpointRunner]:
    """Start a server with the profile's pool: the engine on the first core, everything else on the others."""
    cores = sorted(os.sched_getaffinity(0))
    flags = ("--threads", "1", "--num-blocks", str(profile.num_blocks + 1))
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(model, Path(folder), (*flags, "--max-num-seqs", str(profile.max_seqs)))
        with replica(launch, None) as running:
            busiest = max(psutil.Process(running.pid).children(recursive=True), key=lambda one: one.memory_info().rss)
            os.sched_setaffinity(busiest.pid, {cores[0]})
            for task in psutil.Process(busiest.pid).threads():
                os.sched_setaffinity(task.id, {cores[0]})
            for pid in (running.pid, os.getpid()):
                for task in psutil.Process(pid).threads():
                    os.sched_setaffinity(task.id, set(cores[1:]) or {cores[0]})
            try:
                with closing(EndpointRunner.connect(EndpointTarget(running.url), VOCAB, Random(0))) as runner:
                    yield runner
            finally:
                os.sched_setaffinity(0, set(cores))


def with_overhead(profile: ReplicaProfile, step: float) -> ReplicaProfile:
    """Return a profile whose steps take `step` seconds longer."""
    cost = profile.cost
    assert isinstance(cost, AdditiveCost)
    return replace(profile, cost=replace(cost, step=cost.step + step))


def measure_overhead(profile: ReplicaProfile, model: str) -> dict[str, float]:
    """Return the seconds that one request, alone, takes longer than simulated: per step, and once before its first."""
    rng = Random("overhead")
    jobs = [Job(random_tokens(rng.randint(16, 768), VOCAB, rng), 24) for _ in range(60)]
    with server(model, profile) as runner:
        runner.run(jobs[:10], concurrency=1)
        real = runner.run(jobs[10:], concurrency=1).records
    alone = [simulated(replace(profile, noise=0.0), [job])[0] for job in jobs[10:]]
    pairs = list(zip(real, alone, strict=True))
    step = median(tpot(one) - tpot(other) for one, other in pairs)
    first = median(ttft(one) - ttft(other) for one, other in pairs) - step
    return {"step": step, "first": first}


def ttft(record: RequestRecord) -> float:
    """Return a record's time to first token in seconds."""
    assert record.first_token is not None
    return record.first_token - record.arrival


def tpot(record: RequestRecord) -> float:
    """Return a record's seconds per output token after the first."""
    assert record.first_token is not None and record.finish is not None
    return (record.finish - record.first_token) / (record.output_tokens - 1)


def rate_of(jobs: Sequence[Job], profile: ReplicaProfile) -> float:
    """Return the rate, in requests per second, at which a simulated replica is busy for the share BUSY."""
    low, high = 1e-2, 1e3
    for _ in range(14):
        middle = (low * high) ** 0.5
        fleet = SimulationConfig(profile, 1, "least-load").run_new_fleet(
            [request_from_job(replace(job, at=job.at / middle)) for job in jobs]
        )
        low, high = (middle, high) if fleet_report(fleet).busy < BUSY else (low, middle)
    return low


def predict(profile: ReplicaProfile, overhead: dict[str, float]) -> dict[str, Any]:
    """Return the rate and the predicted figures of each workload."""
    adjusted = with_overhead(profile, overhead["step"])
    found: dict[str, Any] = {}
    for name, workload in WORKLOADS.items():
        jobs = workload.jobs(name)
        rate = 2 * rate_of(jobs, adjusted)
        predicted = figures(simulated(adjusted, [replace(job, at=job.at / rate) for job in jobs]))
        for key in ("ttft_p50", "ttft_p90", "e2e_p90"):
            predicted[key] += overhead["first"]
        found[name] = {"workload": asdict(workload), "rate": rate, "predicted": predicted}
    return found


def compare(predicted: dict[str, float], runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return error, spread of the runs and verdict of each judged figure; errors are relative to the mean run."""
    found: dict[str, Any] = {}
    for key, limit in LIMITS.items():
        values = [run[key] for run in runs]
        mean = sum(values) / len(values)
        error, spread = predicted[key] / mean - 1, (max(values) - min(values)) / mean
        found[key] = {"error": error, "spread": spread, "within": abs(error) <= max(limit, spread)}
    return found


def main() -> None:
    """Run one of the three stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    for stage, names in (
        ("overhead", ("profile", "model")),
        ("predict", ("profile", "overhead")),
        ("measure", ("predictions", "model")),
    ):
        one = stages.add_parser(stage)
        for name in names:
            one.add_argument(name)
    stages.choices["measure"].add_argument("--runs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.stage == "overhead":
        result: Any = measure_overhead(read_profile_file(Path(arguments.profile)), arguments.model)
    elif arguments.stage == "predict":
        overhead = json.loads(Path(arguments.overhead).read_text())
        profile = read_profile_file(Path(arguments.profile))
        result = {"profile": arguments.profile, "overhead": overhead, "workloads": predict(profile, overhead)}
    else:
        result = json.loads(Path(arguments.predictions).read_text())
        profile = read_profile_file(Path(arguments.predictions).parent / Path(result["profile"]).name)
        for name, entry in result["workloads"].items():
            jobs = [replace(job, at=job.at / entry["rate"]) for job in WORKLOADS[name].jobs(name)]
            entry["runs"] = []
            for _ in range(arguments.runs):
                with server(arguments.model, profile) as runner:
                    entry["runs"].append(figures(runner.run(jobs).records))
            entry["comparison"] = compare(entry["predicted"], entry["runs"])
            print(name, json.dumps(entry["comparison"]), file=sys.stderr)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
