"""The flags by which `simulate` and `plan` name a workload, and values given as lists or durations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.core.errors import ConfigError

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.sim.sim_request import SimRequest
    from headstart.workload.recorded.trace_files import TraceOptions
    from headstart.workload.traces import Trace as OpenedTrace

Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="PATH", help="A Mooncake, Bailian, agent or Azure trace; a folder of sessions."),
]
TraceBlockSize = Annotated[
    int, typer.Option(metavar="N", min=0, help="Tokens per id of the trace. 0: by the lengths of its prompts.")
]
TraceTimeUnit = Annotated[
    str, typer.Option(metavar="UNIT", help="Of the trace: s, ms, us, ns. Default: the format's, if it is possible.")
]
DivideLengths = Annotated[int, typer.Option(metavar="N", min=1, help="Divide all lengths of a trace with ids by N.")]
SkipAbove = Annotated[
    int, typer.Option(metavar="N", min=0, help="Leave out longer prompts, or sessions that have one; 0: none.")
]
SessionsAtOnce = Annotated[
    int, typer.Option(metavar="N", min=0, help="Sessions of the trace at a time; 0: all as recorded.")
]
Decisions = Annotated[
    Path | None,
    typer.Option("--decisions", metavar="FILE", help="Instead: replay the log of `headstart route --decision-log`."),
]
Synthetic = Annotated[
    str | None,
    typer.Option("--synthetic", metavar="NAME", help="Instead: decode-heavy or hot-documents, at --rate."),
]
Rate = Annotated[
    float, typer.Option(metavar="X", min=0.001, help="With --synthetic: requests per second, times --speed.")
]
Count = Annotated[int, typer.Option("--requests", metavar="N", min=0, help="Use N requests; 0: all (synthetic: 2000).")]
Skip = Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the first N requests.")]
Scenario = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Failures, slow replicas, autoscaling, offload tier: TOML or JSON."),
]
Blocks = Annotated[
    str,
    typer.Option(
        metavar="N,...", help="KV blocks per replica; 5%: of the workload's distinct blocks; 0: the profile's."
    ),
]
ProfileName = Annotated[
    str,
    typer.Option(
        metavar="NAME,...",
        help="reference, serial, MODEL@2xGPU from datasheets (not measured), or a file of `simulate calibrate`.",
    ),
]
SYNTHETIC_COUNT = 2000


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """A named workload. Calling it with (speed, seed) gives its requests; picklable."""

    trace: Path | None
    decisions: Path | None
    synthetic: str | None
    rate: float
    count: int
    skip: int
    options: "TraceOptions | None" = None
    opened: "OpenedTrace | None" = None

    def __post_init__(self) -> None:
        given = [one for one in (self.trace, self.decisions, self.synthetic) if one is not None]
        if len(given) != 1:
            raise ConfigError(f"give one of --trace, --decisions and --synthetic; {len(given)} were given")
        if not isfinite(self.rate):
            raise ConfigError(f"--rate {self.rate}: a finite number of requests per second")

    @property
    def label(self) -> str:
        if self.synthetic is not None:
            return f"{self.synthetic} at {self.rate:g}/s"
        path = self.trace or self.decisions
        assert path is not None
        return path.name

    @property
    def report_facts(self) -> dict[str, Any]:
        """The facts that a report states of an opened trace."""
        return {} if self.options is None or self.opened is None else {"trace": self.options.report_facts(self.opened)}

    def with_loaded_trace(self, bar: "ProgressBar") -> "WorkloadChoice":
        """Return the workload with its trace file read, if it has one. Raises ConfigError."""
        from headstart.workload.recorded.trace_files import TraceOptions

        if self.trace is None:
            return self
        options = self.options or TraceOptions()

        def on_file(index: int, count: int) -> None:
            if index:
                bar.advance()
            else:
                bar.start_stage(f"reading {self.label}", count)

        return replace(self, options=options, opened=options.read(self.trace, on_file))

    def __call__(self, speed: float, seed: int) -> "Sequence[SimRequest]":
        """Return the requests. Raises ConfigError for a file that cannot be read."""
        from headstart.measurement.progress_bar import QUIET
        from headstart.sim import sim_workload
        from headstart.sim.sim_request import requests_from_trace

        if not 0 < speed < inf:
            raise ConfigError(f"--speed {speed}: a finite number above 0")
        if self.synthetic is not None:
            count = self.count or SYNTHETIC_COUNT
            return sim_workload.synthetic_requests(self.synthetic, self.rate * speed, count, seed)
        if self.trace is not None:
            opened = self.opened or self.with_loaded_trace(QUIET).opened
            assert opened is not None
            return sim_workload.slice_and_rebase_requests(
                requests_from_trace(opened, speed=speed), self.skip, self.count
            )
        assert self.decisions is not None
        return sim_workload.read_decision_log_requests(self.decisions, speed=speed, skip=self.skip, count=self.count)


def trace_options_of_flags(
    block_size: int, time_unit: str, divide_lengths: int, skip_above: int, sessions_at_once: int
) -> "TraceOptions":
    """Return the options of a trace from their flags. Raises ConfigError."""
    from headstart.workload.recorded.trace_files import TraceOptions
    from headstart.workload.recorded.trace_units import TraceUnits

    return TraceOptions(TraceUnits(block_size, time_unit), divide_lengths, skip_above, sessions_at_once)


def parse_number_list(flag: str, text: str, convert: Callable[[str], float]) -> list[float]:
    """Return the numbers of a list with commas. Raises ConfigError."""
    try:
        found = [convert(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: a number or several with commas, such as 4,8") from None
    if not all(0 <= value < inf for value in found):
        raise ConfigError(f"{flag} {text}: numbers must be finite and not negative")
    return found


def parse_pool_sizes(flag: str, text: str) -> tuple[list[int], list[float]]:
    """Return the numbers of a list such as 2930,5%: counts, and shares of a whole from parts in per cent.

    Raises ConfigError.
    """
    parts = text.split(",")
    shares = [part[:-1] for part in parts if part.endswith("%")]
    counts = [part for part in parts if not part.endswith("%")]
    return (
        [int(value) for value in parse_number_list(flag, ",".join(counts), int)] if counts else [],
        [value / 100 for value in parse_number_list(flag, ",".join(shares), float)] if shares else [],
    )


def parse_name_list(flag: str, text: str) -> list[str]:
    """Return the names of a list with commas. Raises ConfigError."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ConfigError(f"{flag} {text!r}: a name or several with commas")
    return found


def parse_duration(flag: str, text: str | None) -> float | None:
    """Return a duration such as 500ms, 2s or 0.5 (seconds); None for None. Raises ConfigError."""
    if text is None:
        return None
    number, scale = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        found = float(number) * scale
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{flag} {text}: a duration above 0, such as 500ms or 2s")
    return found
