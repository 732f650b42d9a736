"""A comparison: every row by every entrant in turn, each trial recorded when it ends.

A driver that dies is restarted for the next row and its row recorded as failed; after three deaths it is left out.
One that does not answer in time is killed, and its trial recorded as given up.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from journal import Entry, Journal, Key, find
from peer import START_SECONDS, GivenUpError, LateError, Peer, PeerError
from plan import MOST_ROOM, POISSON, Estimate, Plan
from poisson import ALONE, COARSE, LOAD, THOROUGH, measure_alone, measure_load, next_rate, slo_of, time_of
from roster import ROSTER, SPIN_COUNT, Entrant, Room, command_of, variables_of

from headstart.measurement.machine import CONTENDED_ABOVE, ContentionMeter
from headstart_lab.comparison import Outcome, measure_row

DEATHS = 3
FUTILE = 3  # consecutive contended repetitions after which nothing is repeated any more
REFERENCE = "vllm"  # its unloaded latency sets the limit of the highest rate


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of the drivers: their environments, the model, the folder of their logs.

    If they are not `resident`, each is started for its turn and the one before is stopped: for models of which memory
    does not hold all at once. A turn is then one repetition of all rows.
    """

    environments: Path
    model: str
    threads: int
    logs: Path
    spin_count: int = SPIN_COUNT
    room: Room = MOST_ROOM
    start_limit: float = START_SECONDS
    resident: bool = True


class Comparison:
    """A run of a plan. `say` receives one line per trial."""

    def __init__(
        self, plan: Plan, journal: Journal, site: Site, *, retries: int = 1, say: "Callable[[str], None]"
    ) -> None:
        self._plan, self._journal, self._site, self._say = plan, journal, site, say
        self._retries = retries
        self._peers: dict[str, Peer] = {}
        self._deaths = dict.fromkeys((entrant.name for entrant in plan.entrants), 0)
        self._futile = 0
        self._told = ""
        self._estimate = Estimate()
        for entry in journal.entries:
            self._estimate.note(entry.row, entry.peer, entry.elapsed)

    def start(self) -> None:
        """Start every driver that has trials left, one after the other: none loads while another is measured."""
        if not self._site.resident:
            return
        for entrant in self._plan.entrants:
            if any(self._is_due(row, entrant) for row in self._plan.rows):
                self._peer(entrant)

    def run(self) -> None:
        """Serve everything that the journal does not have yet."""
        failed: set[tuple[str, str]] = set()
        turns = self._turns()
        for index, (row, repetition, entrant) in enumerate(turns):
            if (row, entrant.name) in failed:
                continue
            self._progress(row, [(other, one) for other, _, one in turns[index:]])
            entry = self._trial(row, entrant, repetition, lambda peer, n=repetition, r=row: measure_row(r, peer, n))
            if entry is None or not entry.is_good:
                failed.add((row, entrant.name))  # a trial that failed or was too slow once is not repeated
        if POISSON in self._plan.rows:
            self._run_poisson(set())

    def close(self) -> None:
        """Stop all drivers."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def kill(self) -> None:
        """End all drivers at once, whatever they do."""
        for peer in self._peers.values():
            peer.kill()
        self._peers.clear()

    def _is_due(self, row: str, entrant: Entrant) -> bool:
        """Return whether the journal lacks a trial of the row by this entrant; for a search, always."""
        if row == POISSON:
            return self._plan.repetitions(row, entrant) > 0
        for repetition in range(self._plan.repetitions(row, entrant)):
            found = find(self._journal.entries, (row, entrant.name, repetition, None))
            if found is None or not found.is_good:
                return found is None
        return False

    def _run_poisson(self, failed: set[str]) -> None:
        most = max((self._plan.repetitions(POISSON, entrant) for entrant in self._plan.entrants), default=0)
        for repetition in range(most):
            entrants = [one for one in self._plan.entrants if repetition < self._plan.repetitions(POISSON, one)]
            for entrant in entrants:
                self._trial(ALONE, entrant, repetition, lambda peer, n=repetition: measure_alone(peer, n))
            slo = slo_of(self._journal.entries, REFERENCE, repetition)
            if slo is None:
                self._say(f"{POISSON}: no limit is known without {REFERENCE}'s latency alone; left out")
                return
            while self._search_round(entrants, repetition, slo, failed):
                pass

    def _search_round(self, entrants: list[Entrant], repetition: int, slo: float, failed: set[str]) -> bool:
        """Measure one more rate for every entrant whose search has not ended; return False if all have ended."""
        went_on = False
        for entrant in entrants:
            search = THOROUGH if entrant.is_thorough else COARSE
            rate = next_rate(self._journal.entries, entrant.name, repetition, search)
            if rate is None or entrant.name in failed:
                continue
            went_on = True

            def load(peer: Peer, rate: float = rate) -> Outcome:
                return measure_load(peer, repetition, rate, slo)

            limit = time_of(rate, slo)
            entry = self._trial(LOAD, entrant, repetition, load, rate=rate, limit=limit)
            if entry is None or entry.problems:
                failed.add(entrant.name)
        return went_on

    def _trial(
        self,
        row: str,
        entrant: Entrant,
        repetition: int,
        serve: Callable[[Peer], Outcome],
        *,
        rate: float | None = None,
        limit: float | None = None,
    ) -> Entry | None:
        """Return one trial, from the journal if recorded; repeat it if contended. None: no driver."""
        key: Key = (row, entrant.name, repetition, rate)
        found = find(self._journal.entries, key)
        if found is not None:
            return found
        tries, last = 0, None
        while tries <= self._retries and (peer := self._peer(entrant)) is not None:
            tries += 1
            last = self._measure(Entry(*key), peer, serve, limit or self._plan.limit_of(entrant))
            self._journal.add(last)
            self._estimate.note(row, entrant.name, last.elapsed)
            self._say(describe(last))
            is_contended = (last.other_cores or 0.0) > CONTENDED_ABOVE
            self._futile = self._futile + 1 if is_contended else 0
            if not last.is_good or not is_contended or self._futile >= FUTILE:
                break
        return find(self._journal.entries, key) or last

    def _measure(self, blank: Entry, peer: Peer, serve: Callable[[Peer], Outcome], limit: float) -> Entry:
        """Measure one trial on a running peer; the peer is removed if its driver died."""
        meter, cpu, start = ContentionMeter(), peer.cpu_seconds(), time.monotonic()
        meter.start()
        peer.deadline = start + limit
        try:
            outcome = serve(peer)
        except GivenUpError:
            return replace(blank, elapsed=time.monotonic() - start, cut_after=limit)
        except LateError:
            self._bury(blank.peer)
            return replace(blank, elapsed=time.monotonic() - start, cut_after=limit)
        except PeerError as error:
            self._bury(blank.peer)
            return replace(blank, elapsed=time.monotonic() - start, problems=(str(error),))
        used = peer.cpu_seconds() - cpu
        return replace(
            blank,
            cpu_seconds=used,
            figures=outcome.figures,
            redundancy=outcome.redundancy,
            elapsed=time.monotonic() - start,
            other_cores=meter.cores_used_by_others(used),
            problems=outcome.problems,
        )

    def _peer(self, entrant: Entrant) -> Peer | None:
        """Return the running driver, started if necessary; None if it has died too often."""
        if entrant.name in self._peers:
            return self._peers[entrant.name]
        if self._deaths[entrant.name] >= DEATHS:
            return None
        site = self._site
        if not site.resident:
            self.close()
        command = command_of(entrant, site.environments, site.model, site.threads, site.room)
        self._say(f"starting {entrant.name}")
        try:
            peer = Peer(
                command,
                site.logs / f"{entrant.name}.log",
                variables_of(entrant, site.threads, site.spin_count),
                start_limit=site.start_limit,
            )
        except PeerError as error:
            self._deaths[entrant.name] = DEATHS  # a driver that fails to start once is not tried again
            self._journal.note_peer(entrant.name, {"failed": str(error)})
            self._say(f"{entrant.name} is left out: {error}")
            return None
        self._journal.note_peer(entrant.name, peer.about)
        self._peers[entrant.name] = peer
        return peer

    def _bury(self, name: str) -> None:
        self._deaths[name] += 1
        self._peers.pop(name).close()

    def _progress(self, row: str, left: list[tuple[str, Entrant]]) -> None:
        searches = list(self._plan.turns(POISSON)) if POISSON in self._plan.rows else []
        points = [(POISSON, entrant) for _, entrant in searches for _ in range(6 if entrant.is_thorough else 3)]
        text = f"{row}: about {self._estimate.seconds([*left, *points]) / 60:.0f} min are left"
        if text != self._told:
            self._told = text
            self._say(text)

    def _turns(self) -> list[tuple[str, int, Entrant]]:
        """Return (row, repetition, entrant) of all trials but the searches, in order.

        Row by row, and in each A B C A B C; drivers that are not resident serve all rows of a repetition in one turn.
        """
        rows = [row for row in self._plan.rows if row != POISSON]
        turns = [(row, repetition, entrant) for row in rows for repetition, entrant in self._plan.turns(row)]
        if self._site.resident:
            return turns
        order = {entrant.name: place for place, entrant in enumerate(self._plan.entrants)}
        return sorted(turns, key=lambda turn: (turn[1], order[turn[2].name]))


def describe(entry: Entry) -> str:
    """Return one line of text about a trial."""
    name = f"{entry.row} {entry.repetition + 1}" + ("" if entry.rate is None else f" at {entry.rate:.3g}/s")
    if entry.problems:
        text = f"FAILED: {entry.problems[0]}"
    elif entry.cut_after is not None:
        text = f"given up after {entry.cut_after:.0f} s"
    else:
        text = ", ".join(f"{key} {value:.4g}" for key, value in entry.figures.items() if value is not None)
    busy = "" if (entry.other_cores or 0.0) <= CONTENDED_ABOVE else f"  (others: {entry.other_cores:.2f} cores)"
    return f"{name:<22} {entry.peer:<13} {text}  [{entry.elapsed:.0f} s]{busy}"


def say(line: str) -> None:
    """Print progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def entrants_named(names: list[str]) -> tuple[Entrant, ...]:
    """Return the named entrants in the order of the roster. Raises KeyError."""
    wanted = {ROSTER[name].name for name in names}
    return tuple(entrant for entrant in ROSTER.values() if entrant.name in wanted)
