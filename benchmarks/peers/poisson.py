"""The highest Poisson rate of every peer, all by the same draw of arrivals, their searches interleaved point by point.

A search is a function of the points measured so far (`headstart.bench.load_search`): it is begun anew for every point
and ends at the first rate that the journal does not know. So peers take turns, and a killed run goes on where it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from journal import Entry, find
from peer import GivenUpError, Peer

from headstart.bench.comparison import Outcome, unloaded_e2e
from headstart.bench.load_search import highest_rate
from headstart.bench.rate import RateConfig, behind_prefix, measure_rate
from headstart.workload.request_record import percentile
from headstart.workload.slo import SHARE, Slo

ALONE, LOAD = "poisson_alone", "poisson"
HELD, P90 = "held", "p90"
SLO_FACTOR = 4  # x the reference's latency alone
ARRIVALS = 20.0  # seconds per rate, at least


@dataclass(frozen=True, slots=True)
class Search:
    """How finely a peer is searched."""

    start: float  # requests per second
    precision: float
    max_points: int


THOROUGH = Search(start=4.0, precision=1.08, max_points=9)
COARSE = Search(start=1.0, precision=1.3, max_points=4)


class _WantedError(Exception):
    """A rate that has to be measured first."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.rate = rate


def next_rate(entries: Sequence[Entry], peer: str, repetition: int, search: Search) -> float | None:
    """The rate to measure next, in requests per second; None: the search is over."""
    try:
        _search(entries, peer, repetition, search)
    except _WantedError as wanted:
        return wanted.rate
    return None


def found_rate(entries: Sequence[Entry], peer: str, repetition: int, search: Search) -> float | None:
    """The highest rate that held, 0 if none did; None: the search is not over."""
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

    return highest_rate(holds, search.start, precision=search.precision, max_points=search.max_points)


def slo_of(entries: Sequence[Entry], reference: str, repetition: int) -> float | None:
    """Seconds within which nine of ten requests must end: a multiple of the reference's latency alone, if known."""
    entry = find(entries, (ALONE, reference, repetition, None))
    alone = None if entry is None else entry.figures.get(ALONE)
    return None if alone is None else SLO_FACTOR * alone


def measure_alone(peer: Peer, repetition: int) -> Outcome:
    """Latency of a request that is alone, behind a cached prefix."""
    alone = unloaded_e2e(peer, repetition)
    problems = () if alone is not None else ("no request alone came through",)
    return Outcome({ALONE: alone}, {}, {}, {}, problems)


def measure_load(peer: Peer, repetition: int, rate: float, slo: float) -> Outcome:
    """Whether a rate holds. A peer that is far from done long after the last arrival does not hold it."""
    try:
        point = measure_rate(peer, behind_prefix(), Slo(e2e=slo), rate, _config(repetition))
    except GivenUpError:
        return Outcome({HELD: 0.0, P90: None}, {}, {}, {}, ())
    known = [record.e2e for record in point.result.trial.records if record.e2e is not None]
    p90 = percentile(known, SHARE) if known else None
    return Outcome({HELD: float(point.holds), P90: p90}, {LOAD: point.result.redundancy}, {}, {}, ())


def time_of(rate: float, slo: float) -> float:
    """Seconds that one rate may take: its arrivals, with some luck to spare, and a wait that nobody would call held."""
    config = _config(0)
    return 1.4 * max(config.min_requests, ceil(rate * config.seconds)) / rate + 3 * slo + 5


def _config(repetition: int) -> RateConfig:
    return RateConfig(seconds=ARRIVALS, min_requests=16, seed=repetition)
