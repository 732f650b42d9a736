"""Check of a calibrated profile: one workload on the real engine and in the simulator, side by side.

The workload was not part of the fit: Poisson arrivals, shared prefixes. Its rate is chosen in the simulator,
before anything is measured, so that the engine is busy for a given share of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headstart.core.engine import EngineInfo
from headstart.measurement.engine_runner import EngineRunner
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.report import Sheet
from headstart.sim.profile import Profile
from headstart.sim.sim_report import report
from headstart.sim.sim_request import SimRequest, from_job
from headstart.sim.simulation import Simulation
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord, summarize
from headstart.workload.synthetic import random_tokens, unit_arrivals

ROWS = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "e2e_p90")
BUSY = 0.5  # share of the time in steps
HALVINGS = 12  # of the search for the rate
GROUPS = 4


@dataclass(frozen=True, slots=True)
class Check:
    """Measured and predicted figures: seconds, and prompt tokens found in the cache."""

    rate: float  # requests per second
    measured: dict[str, float]
    predicted: dict[str, float]

    def document(self) -> dict[str, object]:
        return {"rate": self.rate, "measured": self.measured, "predicted": self.predicted}

    def sheet(self) -> Sheet:
        rows = [
            (
                name,
                1e3 * self.measured[name],
                1e3 * self.predicted[name],
                self.predicted[name] / self.measured[name] - 1,
            )
            for name in ROWS
        ]
        hits = (self.measured["cached_tokens"], self.predicted["cached_tokens"])
        rows.append(("cached tokens", *hits, hits[1] / max(hits[0], 1) - 1))
        title = f"an unseen workload at {self.rate:.3g} requests/s, in ms"
        return Sheet(title, ("", "measured", "predicted", "error"), tuple(rows))


def check_profile(runner: EngineRunner, profile: Profile, num_requests: int, rng: Random, bar: Bar = QUIET) -> Check:
    """Return what the simulator predicts for a new workload, and what the engine then does with it."""
    jobs = _jobs(runner.info, num_requests, rng)
    bar.stage("searching a rate of requests by simulation", HALVINGS)
    rate = _rate(jobs, profile, bar)
    due = [Job(job.prompt, job.output, job.at / rate) for job in jobs]
    predicted = Simulation(profile, 1).run([from_job(job) for job in due])
    bar.stage("checking the profile on an unseen workload", num_requests)
    runner.reset()
    trial = runner.run(due, bar=bar)
    return Check(rate, _figures(trial.records), _figures([one.record for one in predicted.records]))


def _jobs(info: EngineInfo, num: int, rng: Random) -> list[Job]:
    """Return jobs at one request per second: a prefix of a group, an own part, an answer of some length."""
    longest = min(info.max_model_len // 2, 1024)
    prefixes = [random_tokens(longest // 2, info.vocab_size, rng) for _ in range(GROUPS)]
    return [
        Job(
            rng.choice(prefixes) + random_tokens(rng.randint(8, longest // 2), info.vocab_size, rng),
            rng.randint(4, 32),
            at,
        )
        for at in unit_arrivals(num, rng)
    ]


def _rate(jobs: Sequence[Job], profile: Profile, bar: Bar) -> float:
    """Return the rate at which a simulated replica is busy for the share BUSY, by bisection in powers of two."""
    low, high = 1e-3, 1e4
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        asked = [SimRequest(job.at / middle, len(job.prompt), job.output, token_ids=job.prompt) for job in jobs]
        if report(Simulation(profile, 1).run(asked)).busy < BUSY:
            low = middle
        else:
            high = middle
        bar.advance()
    return low


def _figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    summary = summarize(records)
    assert summary.ttft is not None and summary.tpot is not None and summary.e2e is not None, "nothing was answered"
    return {
        "ttft_p50": summary.ttft.p50,
        "ttft_p90": summary.ttft.p90,
        "tpot_p50": summary.tpot.p50,
        "tpot_p90": summary.tpot.p90,
        "e2e_p90": summary.e2e.p90,
        "cached_tokens": summary.cached_tokens,
    }
