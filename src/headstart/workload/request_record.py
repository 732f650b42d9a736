"""Per-request records and their summary: the one definition of TTFT, TPOT and percentiles for benches and simulator.

Times are seconds on the caller's clock. Latencies count from `arrival`, the moment the request was *due*: a client that
is behind its own schedule must not make the server look faster.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished or failed request."""

    request_id: str
    arrival: float
    first_token: float | None  # None: it failed before that
    finish: float | None  # time of the last token; None: it failed before that
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    longest_gap: float = 0.0  # seconds between two successive outputs, the maximum
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.finish is not None

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """Time to the last token."""
        return None if self.finish is None else self.finish - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None if there are fewer than two."""
        if self.first_token is None or self.finish is None or self.output_tokens < 2:
            return None
        return (self.finish - self.first_token) / (self.output_tokens - 1)


class Percentiles(NamedTuple):
    """A distribution summarized, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(NamedTuple):
    """The summary of many records. Failed requests count in `errors` only."""

    requests: int
    errors: int
    seconds: float  # from the first arrival to the last token
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Percentiles | None  # None: no request has one
    tpot: Percentiles | None
    e2e: Percentiles | None
    longest_gap: Percentiles | None

    @property
    def cached_share(self) -> float:
        """Cached prompt tokens / prompt tokens; 0 if there were none."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def output_rate(self) -> float:
        """Output tokens per second; 0 if no time passed."""
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0


def percentile(values: Iterable[float], q: float) -> float:
    """Return the q-th percentile, q in 0..100, linearly interpolated (numpy's default). ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of no values")
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q}; it must lie in 0..100")
    position = (len(ordered) - 1) * q / 100
    low = floor(position)
    if low == position:
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (position - low)


def median(values: Iterable[float]) -> float:
    """Return the 50th percentile."""
    return percentile(values, 50)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the summary of a distribution; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Percentiles(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summarize_records(records: Sequence[RequestRecord]) -> Summary:
    """Return the summary of all records of one run."""
    done = [record for record in records if record.ok]
    ends = [record.finish for record in done if record.finish is not None]
    return Summary(
        requests=len(records),
        errors=len(records) - len(done),
        seconds=max(ends) - min(record.arrival for record in records) if ends else 0.0,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        ttft=percentiles(_known(record.ttft for record in done)),
        tpot=percentiles(_known(record.tpot for record in done)),
        e2e=percentiles(_known(record.e2e for record in done)),
        longest_gap=percentiles(record.longest_gap for record in done if record.output_tokens > 1),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
