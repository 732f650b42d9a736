"""Experiments as data, and the verbs made from them. The experiments' modules are imported when a verb runs."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from headstart.bench.cli import cli_run
from headstart.bench.cli.bench_flags import BenchTarget, VerbFlag, verb_signature
from headstart.model.setup.threads import configure_num_threads

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar
    from headstart.measurement.report import BenchmarkReport
    from headstart.measurement.runner import EngineSetup

FOLDER = "headstart_lab"
_OF_SETUP = ("model", "dtype", "threads", "seed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment as a verb: `run` gets a config from the flags named after its fields, and all others by name.

    With a flag `model` it gets a `setup` instead of model, dtype, threads (1) and seed. Threads are set before torch is
    imported.
    """

    name: str
    run: str  # module below headstart_lab:function
    config: str = ""  # class in the same module; empty: the function takes none
    flags: Mapping[str, VerbFlag] = dataclasses.field(default_factory=dict[str, VerbFlag])
    keeps: tuple[str, ...] = ()  # flags that count under --quick; all other fields are those of the module's QUICK
    caps: tuple[str, ...] = ()  # the same, up to the field of QUICK
    summary: str  # in the list of verbs
    help: str
    alias: str = ""  # former name of the verb

    def verb(self) -> Callable[..., None]:
        """Return a function whose signature and docstring typer turns into flags and help."""

        def run(**values: Any) -> None:
            _run(self, values)

        run.__doc__ = self.help
        run.__signature__ = verb_signature(self.flags)  # type: ignore[attr-defined]  # typer reads it
        return run

    def measure(self, values: Mapping[str, Any], *, is_quick: bool, bar: "ProgressBar") -> "BenchmarkReport":
        """Import the experiment and run it. Flags without a value (None, []) keep the config's."""
        path, _, function = self.run.partition(":")
        module = import_module(f"{FOLDER}.{path}")
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None and v != []}
        if self.config:
            config_class = getattr(module, self.config)
            fields = inspect.signature(config_class).parameters
            sizes = {name: given.pop(name) for name in fields if name in given}
            given["config"] = self._quick(module.QUICK, sizes) if is_quick else config_class(**sizes)
        return getattr(module, function)(**given, bar=bar)

    def _quick(self, quick: Any, sizes: Mapping[str, Any]) -> Any:
        kept = {name: sizes[name] for name in self.keeps if name in sizes}
        capped = {name: min(sizes[name], getattr(quick, name)) for name in self.caps}
        return dataclasses.replace(quick, **kept, **capped)


class Verb(NamedTuple):
    """A verb written by hand, whose docstring is its help."""

    name: str
    run: Callable[..., None]
    summary: str
    alias: str = ""  # former name

    def verb(self) -> Callable[..., None]:
        """Return the function."""
        return self.run


def add_verbs(app: typer.Typer, table: Iterable[Experiment | Verb]) -> None:
    """Add the verbs in the order of the table; a former name stays a hidden verb."""
    for row in table:
        verb = row.verb()
        app.command(row.name, short_help=row.summary)(verb)
        if row.alias:
            app.command(row.alias, short_help=f"Former name of {row.name}.", hidden=True)(verb)


def _run(experiment: Experiment, values: dict[str, Any]) -> None:
    """Run an experiment with the values of its flags, publish, exit."""
    is_quick, plot = values.pop("quick", False), values.pop("plot", None)
    if "model" in values:
        of_setup: dict[str, Any] = {"threads": 1}
        of_setup |= {name: values.pop(name) for name in _OF_SETUP if name in values}
        where = BenchTarget(asked_seed=of_setup.pop("seed"), plot=plot, **of_setup)

        def on_model(setup: "EngineSetup", bar: "ProgressBar") -> "BenchmarkReport":
            return experiment.measure({**values, "setup": setup}, is_quick=is_quick, bar=bar)

        cli_run.run_model_bench_and_exit(on_model, where)
        return

    def on_machine(bar: "ProgressBar") -> "BenchmarkReport":
        if "threads" in values:
            values["threads"] = configure_num_threads(values["threads"])
        return experiment.measure(values, is_quick=is_quick, bar=bar)

    cli_run.run_and_exit(on_machine, plot)
