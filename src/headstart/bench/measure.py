"""Measurement of a scenario on a runner: each phase in turn, and its prefill redundancy.

The client computes prefill redundancy: (tokens it sent - cached tokens reported) / tokens that a perfect, infinite
cache would have computed of the same prompts after all earlier ones. The only input from the server is the usage of
each request, so the figure exists for any stack. Where a stack does not report cached tokens, the figure is None,
never 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.measurement.runner import JobRunner, JobsResult
from headstart.workload.jobs import perfect_cache_prefill_tokens
from headstart.workload.request_record import RequestRecord
from headstart.workload.scenarios import WorkloadPhase, WorkloadScenario

GiveUp = Callable[[RequestRecord], bool]


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of one phase."""

    phase: WorkloadPhase
    trial: JobsResult
    ideal: int  # prompt tokens that a perfect, infinite cache computes in this phase

    @property
    def computed_prompt_tokens(self) -> int | None:
        """Return the prompt tokens computed, as seen by the client; None if not reported or a request failed."""
        whole = not self.trial.is_cut and all(record.ok for record in self.trial.records)
        return self.trial.computed_prompt_tokens if whole else None

    @property
    def redundancy_factor(self) -> float | None:
        """Return the computed prompt tokens / the least number possible; None where `computed` is None."""
        return (
            None if self.computed_prompt_tokens is None or not self.ideal else self.computed_prompt_tokens / self.ideal
        )

    @property
    def problems(self) -> list[str]:
        """Return the reasons why the figures of this phase are invalid; empty if they are valid."""
        errors = self.trial.errors
        found = [f"{self.phase.name}: {problem}" for problem in self.trial.problems]
        if errors and not self.trial.is_cut:
            head = f"{self.phase.name}: {len(errors)} of {len(self.trial.records)} requests failed"
            found.append(f"{head}, the first with: {errors[0]}")
        if self.computed_prompt_tokens is not None and self.computed_prompt_tokens < self.ideal:
            found.append(
                f"{self.phase.name}: {self.computed_prompt_tokens} prompt tokens computed, but at least {self.ideal} "
                f"are needed: the prompts were known already (another --seed?), or cached tokens are misreported"
            )
        return found


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The result of a scenario. `phases` excludes the phases that only prepare, which are in `prepared`."""

    scenario: WorkloadScenario
    phases: tuple[PhaseResult, ...]
    prepared: tuple[PhaseResult, ...]
    was_reset: bool  # the runner cleared its prefix cache before; prompts are new in both cases

    def __getitem__(self, name: str) -> PhaseResult:
        """Return the first measured phase with that name. Raises KeyError."""
        for result in self.phases:
            if result.phase.name == name:
                return result
        raise KeyError(name)

    @property
    def problems(self) -> list[str]:
        return [problem for result in (*self.prepared, *self.phases) for problem in result.problems]


def measure_scenario(
    runner: JobRunner, scenario: WorkloadScenario, bar: ProgressBar = QUIET, give_up: GiveUp | None = None
) -> ScenarioResult:
    """Serve all phases in turn; `give_up` may end the measured ones early.

    Clears the prefix cache first, where the runner can. Continues after a failed phase and reports its problems.
    """
    was_reset = runner.try_clear_prefix_cache()
    results: list[PhaseResult] = []
    for phase, ideal in zip(scenario.phases, _ideals(scenario), strict=True):
        bar.start_stage(f"{runner.label}: {scenario.name}, {phase.name}", len(phase.jobs))
        watch = give_up if phase.is_measured else None
        trial = runner.run(phase.jobs, concurrency=phase.concurrency, bar=bar, give_up=watch)
        results.append(PhaseResult(phase, trial, ideal))
    return ScenarioResult(
        scenario,
        phases=tuple(result for result in results if result.phase.is_measured),
        prepared=tuple(result for result in results if not result.phase.is_measured),
        was_reset=was_reset,
    )


def _ideals(scenario: WorkloadScenario) -> list[int]:
    """Return the least prompt tokens to compute in each phase, given all earlier phases."""
    totals = [0]
    prompts = [job.prompt for job in scenario.phases[0].jobs[:0]]
    for phase in scenario.phases:
        prompts += [job.prompt for job in phase.jobs]
        totals.append(perfect_cache_prefill_tokens(prompts))
    return [after - before for before, after in pairwise(totals)]
