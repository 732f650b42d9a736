"""Options from four sources: flags override HEADSTART_* variables, these override headstart.toml, then the defaults.

Pure except for reading the file: argv and the environment are arguments. An invalid value or an unknown name in the
file raises ConfigError with the source, the value and the remedy; an unknown variable gives a warning.

The tables of headstart.toml: [[tenant]], where an error stops the server, and [[prefix]], where it does not.

An invalid tenant could expose one customer's cache to another. An invalid prefix only costs time: it is kept with its
reason, so that the server reports it and serves the rest. Keys are never part of a message.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from headstart.config.interrupt import INTERRUPT_VARIABLE
from headstart.config.option_hints import hint_for_unknown_flag
from headstart.config.options import (
    EngineOptions,
    PrefixEntry,
    RouterOptions,
    ServerOptions,
    TenantEntry,
    check_option_values,
    flag_fields,
    flag_name,
)
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
_CONTENTS = ("text", "file", "messages")


def parse_entry_tables(key: str, value: object, path: Path) -> tuple[TenantEntry, ...] | tuple[PrefixEntry, ...]:
    """Return the [[`key`]] tables of the file `path`: tenants or prefixes. Raises ConfigError."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{path}: {key} must be written as [[{key}]], one table for each")
    if key == "tenant":
        return tuple(_tenant(table, f"{path}: [[tenant]] {number}") for number, table in enumerate(value, 1))
    return tuple(_prefix(table, number, path.parent) for number, table in enumerate(value, 1))


def _tenant(table: dict[str, Any], where: str) -> TenantEntry:
    name, keys = table.get("name"), table.get("api_keys")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where} needs a name, such as name = "acme"')
    if isinstance(keys, str):
        keys = [keys]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"{where} ({name}) needs api_keys, a list of texts")
    if unknown := sorted(table.keys() - {"name", "api_keys"}):
        raise ConfigError(f"{where} ({name}) has {unknown[0]!r}; a tenant has name and api_keys")
    return TenantEntry(name, tuple(keys))


def _prefix(table: dict[str, Any], number: int, folder: Path) -> PrefixEntry:
    """Return one entry; if it is invalid, its `error` holds the reason."""
    name, tenant = table.get("name"), table.get("tenant", "")
    if not isinstance(name, str) or not name:
        return PrefixEntry(f"#{number}", error="it has no name; give it one, it stands for the prefix everywhere")
    if not isinstance(tenant, str):
        return PrefixEntry(name, error=f"tenant is {tenant!r}; it must be the name of a [[tenant]]")
    if unknown := sorted(table.keys() - {"name", "tenant", *_CONTENTS}):
        return PrefixEntry(name, tenant, error=f"unknown key {unknown[0]!r}; a prefix has name, tenant and its content")
    given = [key for key in _CONTENTS if key in table]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        return PrefixEntry(name, tenant, error=f"it needs exactly one of text, file and messages, and has {found}")
    content = table[given[0]]
    if given == ["messages"]:
        if not isinstance(content, list) or not content or not all(isinstance(message, dict) for message in content):
            return PrefixEntry(
                name, tenant, error='messages must be a list such as [{role = "system", content = "..."}]'
            )
        return PrefixEntry(name, tenant, messages=tuple(content))
    if not isinstance(content, str) or not content:
        return PrefixEntry(name, tenant, error=f"{given[0]} must be a text in quotes, and not empty")
    return PrefixEntry(name, tenant, text=content) if given == ["text"] else _from_file(name, tenant, folder / content)


def _from_file(name: str, tenant: str, path: Path) -> PrefixEntry:
    try:
        return PrefixEntry(name, tenant, text=path.expanduser().read_bytes().decode("utf-8"))
    except OSError as error:
        return PrefixEntry(name, tenant, error=f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        return PrefixEntry(name, tenant, error=f"{path} is not valid UTF-8 at byte {error.start}")


def all_option_fields() -> list[dataclasses.Field[Any]]:
    """Return every option that is a flag, the engine's first."""
    return [field for options in OPTION_CLASSES for field in flag_fields(options)]


def read_config_file(path: Path | None, folder: Path) -> dict[str, Any]:
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
            values[_TABLES[key]] = parse_entry_tables(key, value, found)
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


def parse_option_texts(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return options given by name as text, by field name. Raises ConfigError for unknown names and wrong types."""
    known = _spellings()
    values: dict[str, Any] = {}
    for name, text in texts.items():
        field = known.get(name.replace("-", "_"))
        if field is None:
            raise ConfigError(f"unknown option {name!r}{_nearest(name.replace('-', '_'), known)}")
        values[field.name] = _from_text(field, text, name)
    return values


def merge_option_sources(options: type[Options], *sources: Mapping[str, Any]) -> Options:
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
    check_option_values(settled)
    return settled


def option_value_type(field: dataclasses.Field[Any]) -> type:
    """Return the type of the field's value, or of its items for a tuple: str, int, float or bool."""
    annotation: Any = field.type
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    return get_args(annotation)[0] if is_multi_valued(field) else annotation


def is_multi_valued(field: dataclasses.Field[Any]) -> bool:
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
    known = {field.name: field for field in all_option_fields()}
    return known | {f.metadata["alias"].replace("-", "_"): f for f in all_option_fields() if "alias" in f.metadata}


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = hint_for_unknown_flag(flag_name(name.removeprefix(PREFIX).lower()))
    if hint is not None:
        return f"; {hint}"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; {flag_name('help')} lists the options"


def _from_toml(field: dataclasses.Field[Any], value: Any, where: str) -> Any:
    wanted, switch = option_value_type(field), field.metadata.get("switch")
    if switch is not None and isinstance(value, bool):
        return switch[0] if value else switch[1]
    if field.metadata.get("json") and isinstance(value, dict):
        return json.dumps(value, default=str)
    if is_multi_valued(field):
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
    wanted, switch = option_value_type(field), field.metadata.get("switch")
    if switch is not None and text.lower() in _TRUE | _FALSE:
        return switch[0] if text.lower() in _TRUE else switch[1]
    if is_multi_valued(field):
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
