"""The plan of a comparison: repetitions by row and entrant, time limits, room in a driver, and the remaining time."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from roster import Entrant, Room

from headstart.workload.synthetic import INTENT
from headstart_lab.comparison import ROWS, SAMPLED

POISSON = "poisson"
ROW_NAMES = (*ROWS, POISSON)
LONG = ("rotations", "decode_distinct", "shared_prefix")
GIVE_UP_AFTER = 60.0  # seconds for one repetition of a row by an entrant that is not thorough
THOROUGH_GIVE_UP_AFTER = 300.0
MOST_ROOM = Room(streams=40, prompts=64, context=2304)
WARM_UP_TOKENS = 512  # at most, of a request of a warm-up
CONTEXT_STEP = 256  # tokens: llama.cpp rounds the size of a sequence up to it
_GUESSES = {
    "single_stream": 5.0,
    "warm_ttft": 2.0,
    "cold_ttft": 2.0,
    "long_ttft": 3.0,
    "rotations": 22.0,
    "decode_shared": 6.0,
    **dict.fromkeys(SAMPLED, 8.0),
    "decode_distinct": 25.0,
    "shared_prefix": 10.0,
    "twins": 5.0,
    "poisson": 25.0,  # one rate
}
_SLOWER = 4.0  # assumed factor for the time of the others


class Repetitions(NamedTuple):
    """The repetitions of a row."""

    short: int
    long: int

    def of(self, row: str) -> int:
        return self.long if row in LONG else self.short


THOROUGH = Repetitions(5, 3)
OTHERS = Repetitions(3, 1)
ONCE = Repetitions(1, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a comparison.

    `overrides` are repetitions of single rows; for an entrant that is not thorough, at most its usual number.
    """

    entrants: tuple[Entrant, ...]
    rows: tuple[str, ...]
    thorough: Repetitions = THOROUGH
    others: Repetitions = OTHERS
    searches: int = 1  # of the highest rate
    overrides: Mapping[str, int] = field(default_factory=dict[str, int])
    limit: float | None = None  # seconds after which any repetition is ended early; None: that of the entrant

    def repetitions(self, row: str, entrant: Entrant) -> int:
        """Return the repetitions of the row by this entrant; for the highest rate, the number of searches."""
        if (entrant.rows and row not in entrant.rows) or (row in SAMPLED and not entrant.samples):
            return 0
        if row == POISSON:
            return self.overrides.get(row, self.searches) if entrant.is_thorough else 1
        usual = (self.thorough if entrant.is_thorough else self.others).of(row)
        asked = self.overrides.get(row, usual)
        return asked if entrant.is_thorough else min(asked, usual)

    def turns(self, row: str) -> Iterator[tuple[int, Entrant]]:
        """Yield (repetition, entrant) in the order A B C A B C, without entrants that have had all repetitions."""
        most = max((self.repetitions(row, entrant) for entrant in self.entrants), default=0)
        for repetition in range(most):
            for entrant in self.entrants:
                if repetition < self.repetitions(row, entrant):
                    yield repetition, entrant

    @property
    def room(self) -> Room:
        """The room that all rows need."""
        found = [room_of(row) for row in self.rows]
        return Room(*(max(sizes) for sizes in zip(*found, strict=True))) if found else MOST_ROOM

    def limit_of(self, entrant: Entrant) -> float:
        """Return the seconds after which a repetition is ended early."""
        return self.limit or limit_of(entrant)


def room_of(row: str) -> Room:
    """Return the room that one repetition of a row needs, `MOST_ROOM` at most."""
    if row == POISSON:  # any number of requests may be in flight
        return MOST_ROOM._replace(context=_round_up(INTENT.shared + INTENT.own + INTENT.output))
    scenario = ROWS[row].build(1000, Random(0))
    at_once = max(phase.concurrency or len(phase.jobs) for phase in scenario.phases)
    prompts = sum(len(phase.jobs) for phase in scenario.phases)
    return Room(
        min(at_once, MOST_ROOM.streams),
        min(prompts, MOST_ROOM.prompts),
        _round_up(max(scenario.longest, WARM_UP_TOKENS)),
    )


def _round_up(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def limit_of(entrant: Entrant) -> float:
    """Return the default of a time limit, in seconds."""
    return THOROUGH_GIVE_UP_AFTER if entrant.is_thorough else GIVE_UP_AFTER


class Estimate:
    """An estimate of the remaining time: from earlier trials of the same kind, otherwise a default."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], list[float]] = {}

    def note(self, row: str, peer: str, elapsed: float) -> None:
        self._taken.setdefault((row, peer), []).append(elapsed)

    def seconds(self, left: Iterable[tuple[str, Entrant]]) -> float:
        """Return the estimate for these (row, entrant), one repetition each."""
        return sum(self._one(row, entrant) for row, entrant in left)

    def _one(self, row: str, entrant: Entrant) -> float:
        taken = self._taken.get((row, entrant.name))
        if taken:
            return sum(taken) / len(taken)
        return _GUESSES[row] if entrant.is_thorough else min(_SLOWER * _GUESSES[row], limit_of(entrant))
