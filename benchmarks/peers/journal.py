"""The journal of a comparison: one JSON object per line, written after every trial, so that a killed run can go on.

The first line describes the comparison (`about`); each other line is a trial. An incomplete last line is dropped.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, str, int, float | None]
SAME_MACHINE = ("cpu", "arch", "cores", "bf16")  # trials of one journal have these in common
OTHERWISE = "name another --output, or discard its trials with --restart"


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial of one peer: a repetition of a row, or one rate of a search."""

    row: str
    peer: str
    repetition: int
    rate: float | None = None  # requests per second, if this is a point of a search
    figures: dict[str, float | None] = field(default_factory=dict[str, float | None])
    redundancy: dict[str, float | None] = field(default_factory=dict[str, float | None])
    elapsed: float = 0.0  # total seconds of the trial, including warm-up
    cpu_seconds: float | None = None  # of the driver during the trial: the most reliable figure on a busy machine
    other_cores: float | None = None  # used by other processes in the meantime; None: unknown
    cut_after: float | None = None  # seconds after which the trial was ended early
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.row, self.peer, self.repetition, self.rate)

    @property
    def is_good(self) -> bool:
        """Return whether its figures count."""
        return not self.problems and self.cut_after is None


def find(entries: Iterable[Entry], key: Key) -> Entry | None:
    """Return the least contended good trial of the key, else one that was ended early, else None."""
    found = [entry for entry in entries if entry.key == key and not entry.problems]
    good = [entry for entry in found if entry.is_good]
    return min(good or found, key=lambda entry: entry.other_cores or 0.0, default=None)


class Journal:
    """Trials in a file and in memory. A later run repeats those of a failed driver and keeps all others."""

    def __init__(self, path: Path, about: dict[str, Any], *, restart: bool = False) -> None:
        """Open the file and keep its trials; `restart` discards them.

        Raises ValueError if they are of another setup or machine.
        """
        self.path = path
        self.entries: list[Entry] = []
        self.about = about
        if not restart and path.exists():
            before, self.entries = read(path)
            if before.get("setup") != about.get("setup"):
                raise ValueError(f"{path} is of another setup: {before.get('setup')}; {OTHERWISE}")
            if _differ(before.get("machine", {}), about.get("machine", {})):
                raise ValueError(f"{path} is of another machine: {before['machine']}; {OTHERWISE}")
            self.about = {**before, "peers": {**before.get("peers", {}), **about.get("peers", {})}}
        self._rewrite()

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def note_peer(self, name: str, about: dict[str, Any]) -> None:
        """Record the versions and settings of a peer, or, in addition, the reason for its failure."""
        peers = self.about.setdefault("peers", {})
        peers[name] = {**peers.get(name, {}), **about} if "failed" in about else about
        self._rewrite()

    def note_ceilings(self, ceilings: dict[str, float]) -> None:
        """Keep the higher of these and the recorded ceilings: a ceiling is the maximum of an idle machine."""
        before = self.about.get("ceilings", {})
        self.about["ceilings"] = {name: max(value, before.get(name, value)) for name, value in ceilings.items()}
        self._rewrite()

    def _rewrite(self) -> None:
        lines = [json.dumps({"about": self.about}), *(json.dumps(asdict(entry)) for entry in self.entries)]
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
        scratch.replace(self.path)


def read(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """Return (description, all trials), without an incomplete last line. Raises ValueError if it is no journal."""
    lines = list(_objects(path))
    if not lines or "about" not in lines[0]:
        raise ValueError(f"{path} is no journal of a comparison")
    entries = [Entry(**{**line, "problems": tuple(line["problems"])}) for line in lines[1:]]
    return lines[0]["about"], entries


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two descriptions of a machine are of different ones, by the parts that both have."""
    return any(one[name] != other[name] for name in SAME_MACHINE if name in one and name in other)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is no JSON") from None
