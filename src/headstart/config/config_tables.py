"""The tables of headstart.toml: [[tenant]], where an error stops the server, and [[prefix]], where it does not.

An invalid tenant could expose one customer's cache to another. An invalid prefix only costs time: it is kept with its
reason, so that the server reports it and serves the rest. Keys are never part of a message.
"""

from pathlib import Path
from typing import Any

from headstart.config.options import PrefixEntry, TenantEntry
from headstart.core.errors import ConfigError

_CONTENTS = ("text", "file", "messages")


def read_tables(key: str, value: object, path: Path) -> tuple[TenantEntry, ...] | tuple[PrefixEntry, ...]:
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
