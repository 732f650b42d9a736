"""No verb takes an option that does nothing there: what a verb starts reads it, or the verb refuses it by name."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import main as cli
from headstart.cli.route import route
from headstart.cli.serve import OF_RAY, serve
from headstart.config.config_file import all_option_fields, option_value_type
from headstart.config.options import flag_name

SRC = Path(cli.__file__).parents[1]
NAMES = {field.name for field in all_option_fields()}
OF_ENGINE = ("cli/build_engine.py", "engine")
OF_SERVER = ("http", "openai/bounds.py", "server")
OF_ROUTER = ("cli/route.py", "gateway", "http")
RAY = "gateway/ray"
DOCUMENTED = {"enable_auto_tool_choice"}  # accepted without effect, as its help says
COMMON = {"replicas", "on"}  # they choose what `serve` starts
VERBS = {name: verb for name, verb in cli.VERBS.items() if name not in ("serve", "route", "generate")}


def options_read(source: str) -> Iterator[str]:
    """Yield the options that Python code reads from a value that is named as options are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in NAMES:
            base = node.value
            name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            if name.lstrip("_") in ("options", "server_options", "router_options", "server", "router", "engine"):
                yield node.attr


def read_by(*parts: str, but: str = "-") -> set[str]:
    files = [path for part in parts for path in ([SRC / part] if part.endswith(".py") else (SRC / part).rglob("*.py"))]
    assert files
    kept = [path for path in files if not path.is_relative_to(SRC / but)]
    return {name for path in kept for name in options_read(path.read_text(encoding="utf-8"))}


def flags_of(verb: Any) -> set[str]:
    return NAMES & inspect.signature(verb).parameters.keys()


def test_route_takes_the_options_that_a_router_reads() -> None:
    assert flags_of(route) == read_by(*OF_ROUTER, but=RAY)


def test_serve_takes_no_option_without_a_reader() -> None:
    read = read_by(*OF_ENGINE, *OF_SERVER, *OF_ROUTER, "cli/replicas.py", "cli/serve.py")
    assert flags_of(serve) - read == DOCUMENTED


def test_engines_read_all_options_of_an_engine() -> None:
    from headstart.cli.generate import generate

    assert flags_of(generate) - read_by(*OF_ENGINE, "model") == set()


@pytest.mark.parametrize("name", sorted(flags_of(serve) - read_by(*OF_ENGINE, *OF_SERVER) - DOCUMENTED - COMMON))
def test_a_server_alone_refuses_the_options_of_a_router(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/model", *argument(name)]) == 2
    remedy = "--on ray" if name in OF_RAY else "--replicas 2"
    assert f"{flag_name(name)} " in (shown := capsys.readouterr().err) and remedy in shown, shown


@pytest.mark.parametrize(
    "name", sorted(flags_of(serve) - read_by(*OF_ENGINE, *OF_SERVER, *OF_ROUTER, but=RAY) - DOCUMENTED - COMMON)
)
def test_replicas_on_this_machine_refuse_the_options_of_ray(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/model", "--replicas", "2", *argument(name)]) == 2
    assert f"{flag_name(name)} " in (shown := capsys.readouterr().err) and "--on ray" in shown, shown


def test_ray_refuses_a_socket(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "/no/such/model", "--on", "ray", "--uds", "/s"]) == 2
    assert "--uds is not used with --on ray" in capsys.readouterr().err


def test_a_router_refuses_prefixes_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.toml"
    file.write_text('[[prefix]]\nname = "intent"\ntext = "You are"\n')
    assert cli.main(["route", "--config", str(file)]) == 2
    assert "[[prefix]] has no effect" in (shown := capsys.readouterr().err) and "POST /v1/prefixes" in shown


def test_a_router_names_the_keys_of_its_file_that_it_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no other one; that there are no replicas is an error of its own, after that."""
    read = flags_of(route)
    for name in sorted(NAMES):
        field, value = next(field for field in all_option_fields() if field.name == name), argument(name)[1:]
        text = "true" if isinstance(field.default, bool) else f'"{value[0]}"' if takes_text(field) else value[0]
        file = tmp_path / "router.toml"
        file.write_text(f"replica = []\n{name} = {text}\n" if name != "replica" else "replica = []\n")
        assert cli.main(["route", "--config", str(file)]) == 2
        warned = f"of no effect on a router: {name}\n" in capsys.readouterr().err
        assert warned == (name not in read), name


def takes_text(field: Any) -> bool:
    return "choices" in field.metadata or option_value_type(field) is str


def argument(name: str) -> list[str]:
    """Return the words that give an option a valid value."""
    field = next(field for field in all_option_fields() if field.name == name)
    if "choices" in field.metadata:
        return [flag_name(name), field.metadata["choices"][0]]
    if isinstance(field.default, bool):
        return [flag_name(name)]
    return [flag_name(name), str(int(max(field.metadata.get("minimum", 0), 1)))]


def functions(verb: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a verb and of the verbs below it."""
    if verb.callback is not None:
        yield verb.name or "", inspect.unwrap(verb.callback)
    for below in getattr(verb, "commands", {}).values():
        yield from functions(below)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_verb_reads_each_of_its_parameters(verb: str) -> None:
    for name, function in functions(VERBS[verb].command(verb)):
        assert unread(function) == set(), name


def unread(function: Any) -> set[str]:
    """Return the parameters of a function that its body does not name."""
    code = function.__code__
    own = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))
    return own - {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_an_option_that_is_read_is_found() -> None:
    assert list(options_read("self._options.page; options.port; other.uds; options.port = 1; options.nothing")) == [
        "page",
        "port",
    ]


def test_a_parameter_that_is_not_read_is_found() -> None:
    def verb(first: int, *, second: int = 0, third: int = 0) -> int:
        return first + second

    assert unread(verb) == {"third"}
