"""Flags shared by verbs of `headstart bench`, and the target that they describe. Free of torch, like bench_cli.py."""

import functools
import inspect
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

Dtype = Annotated[str, typer.Option(help="auto | bfloat16 | float32. auto: the checkpoint's.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0: as many as the cgroup grants cores.")]
Runs = Annotated[int, typer.Option(min=1, help="Repetitions; figures are medians, the spread is in the JSON.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller repetitions: a quick check, not a figure.")]
Plot = Annotated[Path | None, typer.Option(metavar="PNG", help="Also draw the result into this file.")]
Against = Annotated[str, typer.Option(metavar="URL", help="Measure this OpenAI endpoint instead of a local engine.")]
Named = Annotated[
    str,
    typer.Option(
        "--model",
        help="Folder, hub id or shape (tiny, llama-100m); with --against the name to send.",
        show_default=False,
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.", show_default=False)]
VocabSize = Annotated[int, typer.Option(min=2, help="With --against: prompts are random token ids below this.")]
Timeout = Annotated[float, typer.Option(min=1, help="With --against: seconds a request may take.")]
NewSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of prompts and arrivals. Default: 0; with --against a new one, for new prompts."),
]
Quantization = Annotated[str, typer.Option(help="none | int8 | int4.")]
Caching = Annotated[bool, typer.Option("--caching/--no-caching", help="Prefix caching of the local engine.")]
SloTtft = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the time to the first token.")]
SloTpot = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the time per output token.")]
SloE2e = Annotated[float | None, typer.Option(min=0, metavar="MS", help="Limit of the end-to-end latency.")]


class VerbFlag(NamedTuple):
    """A flag: its annotation for typer (`Annotated[type, typer.Option(...)]`) and default; without one, required."""

    annotation: Any
    default: Any = inspect.Parameter.empty

    def to_inspect_parameter(self, name: str) -> inspect.Parameter:
        """Return the parameter of a verb."""
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=self.annotation)


def verb_signature(flags: Mapping[str, VerbFlag], own: Iterable[inspect.Parameter] = ()) -> inspect.Signature:
    """Return the signature of a verb with its `own` parameters first."""
    parameters = [*own, *(each.to_inspect_parameter(name) for name, each in flags.items())]
    return inspect.Signature(parameters)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """The target: an engine in this process, or the server at `against`; and the file of the plot."""

    model: str
    against: str = ""
    api_key: str = ""
    vocab_size: int = 512
    timeout: float = 300.0
    dtype: str = "auto"
    threads: int = 0
    quantization: str = "none"
    caching: bool = True
    asked_seed: int | None = None
    plot: Path | None = None

    @property
    def is_in_process(self) -> bool:
        return not self.against

    def with_default_model(self) -> "BenchTarget":
        """Return the same with a model of random weights if none is named."""
        return replace(self, model=self.model or "tiny")

    def choose_seed(self) -> int:
        """Return the requested seed, else 0, or a new one where prompts must be new to be cold."""
        if self.asked_seed is not None:
            return self.asked_seed
        return 0 if self.is_in_process else secrets.randbelow(2**31)


_FIRST = {"model": VerbFlag(Named, ""), "against": VerbFlag(Against, "")}
_LAST = {
    "asked_seed": VerbFlag(NewSeed, None),
    "plot": VerbFlag(Plot, None),
    "threads": VerbFlag(Threads, 0),
    "dtype": VerbFlag(Dtype, "auto"),
    "quantization": VerbFlag(Quantization, "none"),
    "caching": VerbFlag(Caching, True),
    "api_key": VerbFlag(ApiKey, ""),
    "vocab_size": VerbFlag(VocabSize, 512),
    "timeout": VerbFlag(Timeout, 300),
}


def add_target_flags(*skip: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the flags of a target, but those in `skip`, to a verb and passes it as `where`."""
    first, last = ({name: each for name, each in part.items() if name not in skip} for part in (_FIRST, _LAST))

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def wrapper(**arguments: Any) -> None:
            target = {name: arguments.pop(name) for name in (*first, *last)}
            verb(**arguments, where=BenchTarget(**target))

        own = [p for p in inspect.signature(verb).parameters.values() if p.name != "where"]
        required = [p for p in own if p.default is inspect.Parameter.empty]
        optional = [p for p in own if p not in required]
        flags = [
            *required,
            *verb_signature(first).parameters.values(),
            *optional,
            *verb_signature(last).parameters.values(),
        ]
        wrapper.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]  # typer reads it
        return wrapper

    return decorate
