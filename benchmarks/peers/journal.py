"""The journal of a comparison: one JSON object a line, written after every trial, so that a killed run goes on later.

The first line says what is compared (`about`); each other one is a trial. A last line that was cut off is dropped.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, str, int, float | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial of one peer: a repetition of a row, or one rate of a search."""

    row: str
    peer: str
    repetition: int
    rate: float | None = None  # requests per second, if this is a point of a search
    figures: dict[str, float | None] = field(default_factory=dict[str, float | None])
    redundancy: dict[str, float | None] = field(default_factory=dict[str, float | None])
    elapsed: float = 0.0  # seconds that the trial took in all, warm-up included
    cpu_seconds: float | None = None  # of the driver meanwhile: what says most on a machine that others use
    other_cores: float | None = None  # that others burnt meanwhile; None: not known
    cut_after: float | None = None  # seconds after which it was given up
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return (self.row, self.peer, self.repetition, self.rate)

    @property
    def is_good(self) -> bool:
        """Whether it has figures that count."""
        return not self.problems and self.cut_after is None


def find(entries: Iterable[Entry], key: Key) -> Entry | None:
    """The least contended good trial of that key, else one that was given up, else None: what failed does not count."""
    found = [entry for entry in entries if entry.key == key and not entry.problems]
    good = [entry for entry in found if entry.is_good]
    return min(good or found, key=lambda entry: entry.other_cores or 0.0, default=None)


class Journal:
    """Trials on file and in memory; those of a failed driver are tried again by a later run, all others are kept."""

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        """Opens the file; `resume` goes on with what is there, else it starts over. ValueError: of another setup."""
        self.path = path
        self.entries: list[Entry] = []
        self.about = about
        if resume and path.exists():
            before, self.entries = read(path)
            if before.get("setup") != about.get("setup"):
                raise ValueError(
                    f"{path} is of another setup: {before.get('setup')}; leave --resume out, or name another"
                )
            self.about = {**before, "peers": {**before.get("peers", {}), **about.get("peers", {})}}
        self._rewrite()

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def note_peer(self, name: str, about: dict[str, Any]) -> None:
        """Notes versions and settings of a peer, once it has told them, or beside them why it failed later."""
        peers = self.about.setdefault("peers", {})
        peers[name] = {**peers.get(name, {}), **about} if "failed" in about else about
        self._rewrite()

    def note_ceilings(self, ceilings: dict[str, float]) -> None:
        """The better of these and those noted before: a ceiling is what the machine can do when nothing else runs."""
        before = self.about.get("ceilings", {})
        self.about["ceilings"] = {name: max(value, before.get(name, value)) for name, value in ceilings.items()}
        self._rewrite()

    def _rewrite(self) -> None:
        lines = [json.dumps({"about": self.about}), *(json.dumps(asdict(entry)) for entry in self.entries)]
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text("\n".join(lines) + "\n", encoding="utf-8")
        scratch.replace(self.path)


def read(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """(what is compared, all trials); a torn last line is left out. Raises ValueError for what is no journal."""
    lines = list(_objects(path))
    if not lines or "about" not in lines[0]:
        raise ValueError(f"{path} is no journal of a comparison")
    entries = [Entry(**{**line, "problems": tuple(line["problems"])}) for line in lines[1:]]
    return lines[0]["about"], entries


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is no JSON") from None
