"""A server that computes nothing and knows whole prompts: its own and those of a folder that others share."""

from array import array
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headstart.measurement.runner import EngineSetup
from headstart_lab.runners.served_replica import Answer, Launch

Known = set[tuple[str, bytes]]  # key, prompt


def never_built(*_: object, **__: object) -> None:
    raise AssertionError("the lab of servers builds no engine in this process")


def setup_for(model: str) -> EngineSetup:
    """A stand-in with the facts that experiments on servers read."""
    return EngineSetup(never_built, model, "a label", "float32", threads=1)  # type: ignore[arg-type]


@dataclass
class MadeUpServer:
    """Has one fault at most: blind (to the folder), leak (to other keys), wrong (answers), miscount, failing."""

    folder: Known
    fault: str = ""
    own: Known = field(default_factory=set)
    counts: "Counter[str]" = field(default_factory=Counter)
    dtype: str = "float32"
    ready_seconds: float = 0.5

    def ask(self, prompt: "array[int]", *, key: str = "") -> Answer:
        name = ("" if self.fault == "leak" else key, prompt.tobytes())
        stored = name in self.folder and self.fault != "blind"
        cached = len(prompt) - 1 if name in self.own or stored else 0
        source = "shared" if name in self.own else "store"
        self.counts.update({"computed": len(prompt) - cached + (self.fault == "miscount"), source: cached})
        self.folder.add(name)
        self.own.add(name)
        token = "other" if self.fault == "wrong" and cached else "same"
        return Answer(0.1, (token,), len(prompt), cached, "HTTP 500" if self.fault == "failing" else None)

    def prompt_tokens(self, *, key: str = "") -> "Counter[str]":
        return Counter(self.counts)

    def cpu_seconds(self) -> float:
        return 0.0

    def kill(self) -> None:
        self.own.clear()


def replicas_with(fault: str) -> Callable[..., object]:
    """A stand-in for `replica.replica`: every folder is a set that lasts, every server has the fault."""
    folders: dict[Path, Known] = {}

    @contextmanager
    def replica(launch: Launch, store: Path) -> Generator[MadeUpServer]:
        store.mkdir(exist_ok=True)
        yield MadeUpServer(folders.setdefault(store, set()), fault)

    return replica
