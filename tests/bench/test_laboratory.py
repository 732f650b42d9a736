"""`headstart bench` without the laboratory: its verbs are listed, and refused with the command that installs it."""

import pytest
from typer.testing import CliRunner

from headstart.bench.cli import laboratory
from headstart.bench.cli.bench_cli import LAB
from headstart.bench.cli.bench_cli import app as bench
from headstart.cli import main as cli


@pytest.fixture(autouse=True)
def without_laboratory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory, "entry_points", lambda **_: ())


@pytest.mark.parametrize(
    "words", [*([name] for name in LAB), ["lab", "scheduler", "--runs", "1"], ["fleet", "--replicas", "2", "extra"]]
)
def test_its_verbs_are_refused_in_one_line_that_names_the_command(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    shown = capsys.readouterr()
    [line] = shown.err.splitlines()
    assert shown.out == "" and line.endswith("is not installed; in a checkout: pip install -e lab")
    assert f"headstart bench {words[0]} is part of" in line


def test_the_list_of_verbs_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    without = CliRunner().invoke(bench, ["--help"]).output
    monkeypatch.undo()
    assert without == CliRunner().invoke(bench, ["--help"]).output


def test_their_help_says_it_too() -> None:
    result = CliRunner().invoke(bench, ["lab", "--help"])
    assert result.exit_code == 0 and "pip install -e lab" in " ".join(result.output.split())


@pytest.mark.parametrize("flags", [["--accuracy"], ["--schema"], ["--no-load"], ["--accuracy", "--no-load"]])
def test_the_accuracy_of_answers_is_refused_where_it_is_asked_for(flags: list[str]) -> None:
    result = CliRunner().invoke(bench, ["intent", *flags])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.strip().endswith("pip install -e lab")


def test_an_unknown_verb_is_no_verb_of_the_laboratory() -> None:
    assert "No such command" in CliRunner().invoke(bench, ["flet"]).output
