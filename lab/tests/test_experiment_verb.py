"""The table of experiments: every verb exists, and its flags have the defaults of the config that they set."""

import inspect
from importlib import import_module
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from headstart.bench.cli.bench_cli import app
from headstart_lab.cli import lab_cli
from headstart_lab.cli.experiment_verb import FOLDER, Experiment
from headstart_lab.cli.lab_cli import BENCH, LAB

EXPERIMENTS = [row for row in (*BENCH, *LAB) if isinstance(row, Experiment)]
ALIASES = {"twins": "shared-burst", "stall": "decode-stall", "order": "queue-cost", "siblings": "shared-store"}
VERBS = ["rotations", "intent", "twins", "shared-prefix", "decode", "prefill", "trace", "fleet"]
LAB_VERBS = [
    *("repeat", "scan", "fairness", "pinned", "page-aligned", "stall", "order", "scheduler", "restart", "siblings"),
    *("pick", "proxy", "route", "predict", "precise", "failover", "int8", "linears", "write-behind"),
]


def lookup(experiment: Experiment) -> tuple[Any, Any]:
    """(the function, the config class or None) of an experiment."""
    path, _, function = experiment.run.partition(":")
    module = import_module(f"{FOLDER}.{path}")
    return getattr(module, function), getattr(module, experiment.config) if experiment.config else None


@pytest.mark.parametrize("words", [*([verb] for verb in VERBS), *(["lab", verb] for verb in LAB_VERBS)], ids=" ".join)
def test_every_verb_and_every_former_name_shows_its_help(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert ("--seed" in result.output) is (words[-1] not in ("route", "predict", "proxy"))


def test_help_lists_the_verbs_in_the_order_of_the_table() -> None:
    bench: Any = typer.main.get_command(lab_cli.app)
    lab = bench.commands["lab"]
    for group, table in ((bench, BENCH), (lab, LAB)):
        shown = [name for name, command in group.commands.items() if not command.hidden and name != "lab"]
        assert shown == [row.name for row in table]
        for name, command in group.commands.items():
            assert command.hidden is (name in ALIASES)
            now = group.commands[ALIASES.get(name, name)]
            assert command.help == now.help and [p.opts for p in command.params] == [p.opts for p in now.params]
    assert ALIASES.keys() <= bench.commands.keys() | lab.commands.keys()


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_each_flag_is_a_field_with_the_same_default_or_an_argument_of_the_function(experiment: Experiment) -> None:
    run, config = lookup(experiment)
    fields = dict(inspect.signature(config).parameters) if config else {}
    arguments = inspect.signature(run).parameters
    of_setup = {"model", "dtype", "threads", "seed"} if "model" in experiment.flags else set()
    for name, flag in experiment.flags.items():
        if name in of_setup | {"quick", "plot"}:
            continue
        assert name in fields or name in arguments, name
        if name in fields and flag.default is not None and name != "threads":
            assert flag.default == fields[name].default, name
    assert ("setup" in arguments) is ("model" in experiment.flags) and "bar" in arguments
    assert ("config" in arguments) is bool(config)


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if "quick" in e.flags], ids=lambda e: e.name)
def test_quick_keeps_only_the_flags_that_the_table_names(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config = lookup(experiment)
    module = import_module(run.__module__)
    received: dict[str, Any] = {}
    monkeypatch.setattr(module, run.__name__, lambda **arguments: received.update(arguments))
    marks = {name: 10**9 for name in experiment.flags if name in inspect.signature(config).parameters}
    experiment.measure(marks, is_quick=True, bar=None)  # type: ignore[arg-type]
    found = {name: getattr(received["config"], name) for name in marks}
    assert found == {name: marks[name] if name in experiment.keeps else getattr(module.QUICK, name) for name in marks}
    if experiment.caps:
        experiment.measure(dict.fromkeys(marks, 1), is_quick=True, bar=None)  # type: ignore[arg-type]
        assert [getattr(received["config"], name) for name in experiment.caps] == [1] * len(experiment.caps)
