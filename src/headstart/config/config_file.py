"""Options from four sources: flags override HEADSTART_* variables, these override headstart.toml, then the defaults.

Pure except for reading the file: argv and the environment are arguments. An invalid value or an unknown name in the
file raises ConfigError with the source, the value and the remedy; an unknown variable gives a warning.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from headstart.config.config_tables import read_tables
from headstart.config.interrupt import INTERRUPT_VARIABLE
from headstart.config.option_hints import hint_of
from headstart.config.options import EngineOptions, RouterOptions, ServerOptions, check_values, flag_fields, flag_of
from headstart.core.errors import ConfigError

FILE_NAME = "headstart.toml"
MAX_BYTES = 2**24
MAX_DOTS = 1_000  # before the first quote of a line: the parser's memory is quadratic in the parts of a key
PREFIX = "HEADSTART_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
DEBUG_VARIABLE = PREFIX + "DEBUG"
KERNELS_VARIABLE = PREFIX + "KERNELS"  # read by model/kernels/library.py
NO_OPTIONS = (CONFIG_VARIABLE, DEBUG_VARIABLE, KERNELS_VARIABLE, INTERRUPT_VARIABLE)
OPTION_CLASSES = (EngineOptions, ServerOptions, RouterOptions)

Options = TypeVar("Options", EngineOptions, ServerOptions, RouterOptions)
_TABLES = {
    field.metadata["table"]: field.name
    for options in OPTION_CLASSES
    for field in dataclasses.fields(options)
    if "table" in field.metadata
}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def all_fields() -> list[dataclasses.Field[Any]]:
    """Return every option that is a flag, the engine's first."""
    return [field for options in OPTION_CLASSES for field in flag_fields(options)]


def read_file(path: Path | None, folder: Path) -> dict[str, Any]:
    """Return the options in the file `path` by field name; without a path, those of `folder`/headstart.toml, if any.

    An invalid [[prefix]] is returned with its reason, since it must not stop a server. Raises ConfigError if a named
    file is missing or is not TOML, and for an unknown option or a value of the wrong type.
    """
    found = path or folder / FILE_NAME
    if path is None and not found.is_file():
        return {}
    try:
        content = tomllib.loads(_text(found))
    except OSError as error:
        raise ConfigError(f"cannot read {found}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{found} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{found} is nested too deeply; options are texts, numbers and lists of texts") from None
    known = _spellings()
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in _TABLES:
            values[_TABLES[key]] = read_tables(key, value, found)
            continue
        field = known.get(key.replace("-", "_"))
        if field is None:
            raise ConfigError(f"{found}: unknown option {key!r}{_nearest(key.replace('-', '_'), known)}")
        if field.name in values:
            raise ConfigError(f"{found}: {field.name} is given twice, once as {key!r}")
        values[field.name] = _from_toml(field, value, f"{found}: {key}")
    return values


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options in HEADSTART_* variables by field name, and a warning for each variable that is no option.

    Raises ConfigError for a value of the wrong type. Several keys are separated by commas. An empty value counts as
    unset.
    """
    known = _spellings()
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in NO_OPTIONS or not text:
            continue
        field = known.get(variable.removeprefix(PREFIX).lower())
        if field is None:
            near = _nearest(variable, [PREFIX + name.upper() for name in known])
            warnings.append(f"{variable} is not an option and has no effect{near}")
        else:
            values[field.name] = _from_text(field, text, variable)
    return values, warnings


def read_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return options given by name as text, by field name. Raises ConfigError for unknown names and wrong types."""
    known = _spellings()
    values: dict[str, Any] = {}
    for name, text in texts.items():
        field = known.get(name.replace("-", "_"))
        if field is None:
            raise ConfigError(f"unknown option {name!r}{_nearest(name.replace('-', '_'), known)}")
        values[field.name] = _from_text(field, text, name)
    return values


def settle(options: type[Options], *sources: Mapping[str, Any]) -> Options:
    """Return the options of one class; the first source with a value wins.

    Raises ConfigError for a value out of bounds. Names of other classes are skipped: the sources hold all options.
    """
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        for source in sources:
            if field.name in source:
                chosen[field.name] = source[field.name]
                break
    settled = options(**chosen)
    check_values(settled)
    return settled


def plain_type(field: dataclasses.Field[Any]) -> type:
    """Return the type of the field's value, or of its items for a tuple: str, int, float or bool."""
    annotation: Any = field.type
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    return get_args(annotation)[0] if takes_several(field) else annotation


def takes_several(field: dataclasses.Field[Any]) -> bool:
    """Return whether the option is a tuple of values."""
    return get_origin(field.type) is tuple


def _text(path: Path) -> str:
    """Return the content of a file. Raises ConfigError for content that needs too much memory to parse."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES >> 20} MiB; name large texts by file =")
    text = content.decode()
    for number, line in enumerate(text.splitlines(), 1):
        if line.partition('"')[0].partition("'")[0].count(".") > MAX_DOTS:
            raise ConfigError(f"{path}: line {number} has a name of more than {MAX_DOTS} parts; options have one")
    return text


def _spellings() -> dict[str, dataclasses.Field[Any]]:
    """Return all fields by name and alias, with underscores."""
    known = {field.name: field for field in all_fields()}
    return known | {f.metadata["alias"].replace("-", "_"): f for f in all_fields() if "alias" in f.metadata}


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = hint_of(flag_of(name.removeprefix(PREFIX).lower()))
    if hint is not None:
        return f"; {hint}"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; {flag_of('help')} lists the options"


def _from_toml(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    wanted, switch = plain_type(field), field.metadata.get("switch")
    if switch is not None and isinstance(value, bool):
        return switch[0] if value else switch[1]
    if field.metadata.get("json") and isinstance(value, dict):
        return json.dumps(value, default=str)
    if takes_several(field):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{where} is {_shown(field, value)}; it must be a text or a list of texts")
        return tuple(items)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:  # exact match: True is not a number here
        raise ConfigError(f"{where} is {_shown(field, value)}; it must be {_NAMES[wanted]}")
    return value


def _from_text(field: dataclasses.Field[Any], text: str, where: str) -> Any:
    wanted, switch = plain_type(field), field.metadata.get("switch")
    if switch is not None and text.lower() in _TRUE | _FALSE:
        return switch[0] if text.lower() in _TRUE else switch[1]
    if takes_several(field):
        return tuple(item for part in text.split(",") if (item := part.strip()))
    if wanted is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{where} is {text!r}; it must be 1 or 0, true or false")
        return text.lower() in _TRUE
    try:
        return wanted(text)
    except ValueError:
        raise ConfigError(f"{where} is {_shown(field, text)}; it must be {_NAMES[wanted]}") from None


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    return "(hidden)" if field.metadata.get("secret") else repr(value)


_NAMES = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
