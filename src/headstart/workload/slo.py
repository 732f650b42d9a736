"""Slo: latency limits of a service, and the share of its work within them (goodput).

Goodput is the rate of requests that met every limit (DistServe, arXiv 2401.09670); a rate *holds* when the 90th
percentile of each limited latency lies within its limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from headstart.workload.request_record import RequestRecord, percentile

SHARE = 90
"""The percentile that must lie within a limit."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds; None: not limited."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __bool__(self) -> bool:
        """Return whether any latency is limited."""
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))

    @property
    def limits(self) -> list[tuple[str, float]]:
        """(name, limit in seconds) of each limited latency."""
        named = (("ttft", self.ttft), ("tpot", self.tpot), ("e2e", self.e2e))
        return [(name, limit) for name, limit in named if limit is not None]

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request succeeded within every limit. One output token has no time per output token."""
        return record.ok and not any(value > limit for value, limit in self._pairs(record))

    def goodput(self, records: Sequence[RequestRecord]) -> float:
        """Return the requests per second that met it, from the first arrival to the last token; 0 if none did."""
        met = [record for record in records if self.is_met(record)]
        ends = [record.finish for record in records if record.finish is not None]
        seconds = max(ends) - min(record.arrival for record in records) if ends else 0.0
        return len(met) / seconds if seconds > 0 else 0.0

    def attainment(self, records: Sequence[RequestRecord]) -> float:
        """Return the share of requests that met it, 0..1; failed ones did not. 1 if there are none."""
        return sum(self.is_met(record) for record in records) / len(records) if records else 1.0

    def is_met_at_percentile(self, records: Sequence[RequestRecord], share: float = SHARE) -> bool:
        """Return whether all succeeded and that percentile (the 90th) of every limited latency is within its limit."""
        if not all(record.ok for record in records):
            return False
        return all(
            percentile(values, share) <= limit
            for limit, values in ((limit, _known(records, name)) for name, limit in self.limits)
            if values
        )

    def _pairs(self, record: RequestRecord) -> list[tuple[float, float]]:
        """Return (latency, limit) of each limited, known latency."""
        found = [(_latency(record, name), limit) for name, limit in self.limits]
        return [(value, limit) for value, limit in found if value is not None]


class LatenessEarlyStop:
    """Returns for each finished record whether so many were late that the limit is certain to be missed.

    Passed to a runner as `give_up`, so that rates far above the sustainable one cost little time.
    """

    def __init__(self, count: int, slo: Slo) -> None:
        self.allowed = count - 1 - floor(SHARE / 100 * (count - 1))
        self._limits = dict(slo.limits)
        self._late = dict.fromkeys(self._limits, 0)

    def __call__(self, record: RequestRecord) -> bool:
        for name, limit in self._limits.items():
            value = _latency(record, name)
            self._late[name] += not record.ok or (value is not None and value > limit)
        return any(late > self.allowed for late in self._late.values())


def _latency(record: RequestRecord, name: str) -> float | None:
    return {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}[name]


def _known(records: Sequence[RequestRecord], name: str) -> list[float]:
    return [value for record in records if (value := _latency(record, name)) is not None]
