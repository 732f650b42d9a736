"""EngineRunner: an Engine in this process as a Runner."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine, EngineInfo
from headstart.core.request import Request, SamplingParams
from headstart.measurement.engines import Setup, describe
from headstart.measurement.inprocess import Run, drive
from headstart.measurement.progress_bar import QUIET, Bar
from headstart.measurement.runner import Trial
from headstart.workload.jobs import Job, Waits
from headstart.workload.request_record import RequestRecord


class EngineRunner:
    """A runner that steps one engine, and checks reported cached tokens against its count of computed ones."""

    def __init__(self, engine: Engine, info: EngineInfo, model: str, label: str = "headstart") -> None:
        self.engine = engine
        self.info = info
        self.label = label
        self.vocab_size = info.vocab_size
        self.about: dict[str, Any] = {
            "model": model,
            "max_model_len": info.max_model_len,
            "settings": {**describe(info), "threads": info.threads},
        }
        self._runs = 0

    @classmethod
    def build(cls, setup: Setup, options: EngineOptions) -> "EngineRunner":
        """Load a model; `close` frees it."""
        engine, info = setup.build(options)
        return cls(engine, info, setup.label)

    def reset(self) -> bool:
        return self.engine.reset_prefix_cache()

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int = 0,
        bar: Bar = QUIET,
        give_up: Callable[[RequestRecord], bool] | None = None,
    ) -> Trial:
        due = [inf if job.after else job.at for job in jobs]
        requests, waits = self._requests(jobs), Waits(jobs)
        run = drive(self.engine, requests, due=due, waits=waits, concurrency=concurrency, bar=bar, give_up=give_up)
        seconds = max((record.finish for record in run.records if record.finish is not None), default=run.seconds)
        return Trial(run.records, seconds, is_cut=run.given_up, problems=_problems(run))

    def close(self) -> None:
        self.engine.close()

    def _requests(self, jobs: Sequence[Job]) -> list[Request]:
        self._runs += 1
        return [Request(f"run{self._runs}-{index}", job.prompt, _sampling(job)) for index, job in enumerate(jobs)]


def _sampling(job: Job) -> SamplingParams:
    chosen = job.sampling
    return SamplingParams(max_tokens=job.output, temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k)


def _problems(run: Run) -> list[str]:
    """Return the problems of the run, except failed requests: those are in the records."""
    return [] if run.errors else run.problems("in process")
