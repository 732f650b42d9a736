"""The highest Poisson rate of every peer, all with the same draw of arrivals; the searches are interleaved.

A search is a function of the points measured so far (`headstart.bench.rate_report`): it restarts for every point and
stops at the first rate that is not in the journal. So peers take turns, and a killed run resumes where it stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from journal import Entry, find
from peer import GivenUpError, Peer
from roster import ROSTER

from headstart.bench.rate_report import RateSearchConfig, cached_prefix_workload, measure_rate, search_highest_rate
from headstart.workload.request_record import percentile
from headstart.workload.slo import SHARE, Slo
from headstart_lab.comparison import Outcome, unloaded_e2e

ALONE, LOAD = "poisson_alone", "poisson"
HELD, P90 = "held", "p90"
SLO_FACTOR = 4  # x the reference's unloaded latency
ARRIVALS = 20.0  # seconds per rate, at least


@dataclass(frozen=True, slots=True)
class Search:
    """The precision of a peer's search."""

    start: float  # requests per second
    precision: float
    max_points: int


THOROUGH = Search(start=4.0, precision=1.08, max_points=9)
COARSE = Search(start=1.0, precision=1.3, max_points=4)


class _WantedError(Exception):
    """A rate that must be measured first."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.rate = rate


def next_rate(entries: Sequence[Entry], peer: str, repetition: int, search: Search) -> float | None:
    """Return the rate to measure next, in requests per second; None: the search has ended."""
    try:
        _search(entries, peer, repetition, search)
    except _WantedError as wanted:
        return wanted.rate
    return None


def found_rate(entries: Sequence[Entry], peer: str, repetition: int, search: Search) -> float | None:
    """Return the highest rate that held, 0 if none did; None: the search has not ended."""
    try:
        return _search(entries, peer, repetition, search)
    except _WantedError:
        return None


def _search(entries: Sequence[Entry], peer: str, repetition: int, search: Search) -> float:
    def holds(rate: float) -> bool:
        entry = find(entries, (LOAD, peer, repetition, rate))
        if entry is None:
            raise _WantedError(rate)
        return bool(entry.figures.get(HELD))

    return search_highest_rate(holds, search.start, precision=search.precision, max_points=search.max_points)


def slo_of(entries: Sequence[Entry], reference: str, repetition: int) -> float | None:
    """Return the latency limit for nine of ten requests: a multiple of the reference's unloaded latency, if known.

    Of several set-ups of the reference the fastest counts: where the CPU has no bf16 instructions, vLLM in float32.
    """
    forms = [reference, *(entrant.name for entrant in ROSTER.values() if entrant.form_of == reference)]
    found = [find(entries, (ALONE, form, repetition, None)) for form in forms]
    alone = [value for entry in found if entry is not None and (value := entry.figures.get(ALONE)) is not None]
    return SLO_FACTOR * min(alone) if alone else None


def measure_alone(peer: Peer, repetition: int) -> Outcome:
    """Measure the latency of an unloaded request behind a cached prefix."""
    alone = unloaded_e2e(peer, repetition)
    problems = () if alone is not None else ("no request alone came through",)
    return Outcome({ALONE: alone}, {}, {}, {}, problems)


def measure_load(peer: Peer, repetition: int, rate: float, slo: float) -> Outcome:
    """Measure whether a rate holds. It does not if the peer is far behind long after the last arrival."""
    try:
        point = measure_rate(peer, cached_prefix_workload(), Slo(e2e=slo), rate, _config(repetition))
    except GivenUpError:
        return Outcome({HELD: 0.0, P90: None}, {}, {}, {}, ())
    known = [record.e2e for record in point.result.trial.records if record.e2e is not None]
    p90 = percentile(known, SHARE) if known else None
    return Outcome({HELD: float(point.holds), P90: p90}, {LOAD: point.result.redundancy_factor}, {}, {}, ())


def time_of(rate: float, slo: float) -> float:
    """Return the seconds that one rate may take: its arrivals with a margin, and a wait far beyond the limit."""
    config = _config(0)
    return 1.4 * max(config.min_requests, ceil(rate * config.seconds)) / rate + 3 * slo + 5


def _config(repetition: int) -> RateSearchConfig:
    return RateSearchConfig(seconds=ARRIVALS, min_requests=16, seed=repetition)
