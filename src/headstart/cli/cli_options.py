"""Command-line flags generated from the fields of options.py, and option values from flags, environment and file."""

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart import __version__
from headstart.config.config_file import (
    CONFIG_VARIABLE,
    FILE_NAME,
    all_option_fields,
    is_multi_valued,
    option_value_type,
    read_config_file,
    read_environment,
)
from headstart.config.options import OptionClass, flag_fields, flag_name
from headstart.gguf.gguf_reader import has_gguf_suffix

Sources = tuple[Mapping[str, Any], ...]
"""Option values by field name; the first source with a value wins."""

COMPLETION_VARIABLE = "_HEADSTART_COMPLETE"  # set by the scripts that --install-completion installs
MAX_METAVAR = 60  # characters of choices in the left column of the help; more are listed in its text
_METAVARS = {str: "TEXT", int: "N", float: "X"}
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help=f"Read options from FILE ({CONFIG_VARIABLE}; default: ./{FILE_NAME} if there is one).",
    ),
]


def print_starting_line() -> None:
    """Print a line on a terminal, since the imports that follow take seconds."""
    if sys.stderr.isatty():
        print(f"Headstart {__version__} is starting", file=sys.stderr, flush=True)


def add_option_flags(
    *classes: OptionClass, skip: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a flag per field of `classes` to a verb and passes their values as `sources`."""
    options = [field for options in classes for field in flag_fields(options) if field.name not in skip]

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def wrapper(**arguments: Any) -> None:
            given = {field.name: arguments.pop(field.name) for field in options}
            flags = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v not in (None, [])}
            surroundings = _surroundings(arguments.pop("config"))
            verb(**arguments, sources=(flags, *surroundings))

        own = [p for p in inspect.signature(verb).parameters.values() if p.name != "sources"]
        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG)
        parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), config, *map(_parameter, options)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return wrapper

    return decorate


def add_values_to_switches(arguments: list[str], flags: Collection[str]) -> list[str]:
    """Return the arguments with explicit values for options also usable as switches: `--access-log`, `--no-access-log`.

    Only options in `flags` are expanded.
    """
    switches = {
        flag_name(f.name): f.metadata
        for f in all_option_fields()
        if "switch" in f.metadata and flag_name(f.name) in flags
    }
    off = {f"--no-{flag.removeprefix('--')}": flag for flag in switches}
    expanded: list[str] = []
    for position, word in enumerate(arguments):
        if word == "--":
            return [*expanded, *arguments[position:]]
        following = arguments[position + 1 : position + 2]
        if word in off:
            word = f"{off[word]}={switches[off[word]]['switch'][1]}"
        elif word in switches and (not following or following[0].startswith("-")):
            word = f"{word}={switches[word]['switch'][0]}"
        expanded.append(word)
    return expanded


def _surroundings(config: Path | None) -> Sources:
    """Return the options of environment and file; print a warning on stderr for each unknown variable."""
    environment, warnings = read_environment(os.environ)
    for warning in warnings:
        print(f"headstart: warning: {warning}", file=sys.stderr)
    named = os.environ.get(CONFIG_VARIABLE)
    return environment, read_config_file(config or (Path(named) if named else None), Path.cwd())


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """Return the parameter for typer. Its default is None, to distinguish a flag that was not given."""
    plain, metadata = option_value_type(field), field.metadata
    flags = [flag_name(field.name)]
    if "alias" in metadata:
        flags.append("--" + metadata["alias"])
    if plain is bool:
        flags = [f"{flags[0]}/{flag_name('no_' + field.name)}"]
    metavar, text = None if plain is bool else _METAVARS[plain], metadata["help"]
    if "choices" in metadata:
        metavar = "|".join(metadata["choices"])
        if len(metavar) > MAX_METAVAR:
            metavar, text = "NAME", f"{text} One of {', '.join(metadata['choices'])}."
    option = typer.Option(
        *flags,
        help=text + _default_text(field.default),
        rich_help_panel=metadata["group"],
        metavar=metavar,
        show_default=False,
        autocompletion=_completion(metadata["choices"]) if "choices" in metadata else None,
    )
    annotation: Any = list[str] if is_multi_valued(field) else plain
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option]
    )


def complete_model_path(incomplete: str) -> list[str]:
    """Return completions of a folder or GGUF file for zsh and fish; bash completes files itself if none are offered."""
    if os.environ.get(COMPLETION_VARIABLE, "").endswith("bash"):
        return []
    start = incomplete.rpartition("/")[2]
    prefix = incomplete[: len(incomplete) - len(start)]
    try:
        found = sorted(Path(prefix or ".").expanduser().iterdir())
        entries = [
            f"{path.name}/" if path.is_dir() else path.name for path in found if path.is_dir() or has_gguf_suffix(path)
        ]
    except (OSError, RuntimeError):
        return []
    return [f"{prefix}{name}" for name in entries if name.startswith(start) and (start or name[0] != ".")]


def _completion(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a function that completes a value from `choices` in the shell."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _default_text(default: Any) -> str:
    if default is None or default in ("", ()):
        return ""
    if isinstance(default, bool):
        return " [on]" if default else " [off]"
    return f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
