"""The Runner protocol: one interface for an engine in this process, an OpenAI endpoint and a peer in another process.

One definition of every workload measures all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.measurement.progress_bar import QUIET, ProgressBar
from headstart.workload.jobs import Job
from headstart.workload.request_record import RequestRecord, median

BuildEngine = Callable[..., tuple[Engine, EngineInfo]]
"""`assembly.build_engine`, or a fake with the same signature: (options, *, charge_cached=False)."""

BUNDLED = "bundled intent model"
"""The name of the packaged model in reports."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The inputs of every benchmark on an engine."""

    build: BuildEngine
    model: str  # folder or hub id; empty: the bundled model
    label: str  # name of the model in the report
    dtype: str = "auto"
    threads: int = 0
    seed: int = 0
    quantization: str = "none"

    def options(self, *, num_blocks: int, max_batched_tokens: int = 2048, caching: bool = True) -> EngineOptions:
        """Return engine options with an explicit pool size."""
        return EngineOptions(
            model=self.model,
            dtype=self.dtype,
            threads=self.threads,
            num_gpu_blocks_override=num_blocks,
            max_num_batched_tokens=max_batched_tokens,
            enable_prefix_caching=caching,
            seed=self.seed,
            quantization=self.quantization,
        )


def describe_engine(info: EngineInfo) -> dict[str, object]:
    """Return the engine's entries of a report."""
    return {
        "dtype": info.dtype,
        "device": info.device,
        "attention_backend": info.attention_backend,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "vocab_size": info.vocab_size,
    }


@dataclass(slots=True)
class JobsResult:
    """The results of a list of jobs, in order."""

    records: list[RequestRecord]  # times in seconds after the start
    seconds: float  # from the start to the last token
    is_cut: bool = False  # `give_up` ended the run: records are those finished by then
    reports_cached: bool = True  # False: cached tokens are not reported; 0 in the records has no meaning
    problems: list[str] = field(default_factory=list[str])  # problems other than the errors of the records

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    @property
    def computed_prompt_tokens(self) -> int | None:
        """Return the prompt tokens computed, from outside: sent minus reported as cached. None: not reported."""
        if not self.reports_cached:
            return None
        return sum(record.prompt_tokens - record.cached_tokens for record in self.records if record.ok)

    @property
    def concurrent_decode_rate(self) -> float | None:
        """Return the output tokens per second while all streams decode: after the last first token. None: no such time.

        A stream's tokens count as evenly spread between its first and its last.
        """
        done = [record for record in self.records if record.ok and record.output_tokens > 1]
        if not done:
            return None
        start = max(record.first_token or 0.0 for record in done)
        end = max(record.finish or 0.0 for record in done)
        tokens = 0.0
        for record in done:
            first, last = record.first_token or 0.0, record.finish or 0.0
            if last > first:
                tokens += (record.output_tokens - 1) * max(last - start, 0.0) / (last - first)
        return tokens / (end - start) if end > start else None

    @property
    def median_ttft(self) -> float | None:
        """Return the median seconds to the first token; None: nothing finished."""
        known = [record.ttft for record in self.records if record.ok and record.ttft is not None]
        return median(known) if known else None

    @property
    def median_tpot(self) -> float | None:
        """Return the median over the requests of the mean seconds per token after the first."""
        known = [record.tpot for record in self.records if record.ok and record.tpot is not None]
        return median(known) if known else None


class JobRunner(Protocol):
    """A target that serves jobs, one run at a time: `run` returns when all jobs have ended."""

    label: str  # short name for tables
    vocab_size: int  # prompts are drawn from ids below this
    about: dict[str, Any]  # for the report: versions, settings; model and max_model_len where they are known

    def try_clear_prefix_cache(self) -> bool:
        """Clear the prefix cache; False: not supported, so prompts must be new to be cold."""
        ...

    def run(
        self,
        jobs: Sequence[Job],
        *,
        concurrency: int = 0,
        bar: ProgressBar = QUIET,
        give_up: Callable[[RequestRecord], bool] | None = None,
    ) -> JobsResult:
        """Serve all jobs: each at its arrival time, or in order with at most `concurrency` in flight.

        `give_up` receives every finished record and may end the run early.
        """
        ...

    def close(self) -> None:
        """Release everything the runner started. Idempotent."""
        ...
