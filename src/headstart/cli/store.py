"""`headstart store stat | verify | clear`: inspect stored blocks in a folder or in Redis, also while in use."""

import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headstart.cli.help_text import PanelHelpCommand
from headstart.cli.prefix import format_age
from headstart.core.errors import ConfigError
from headstart.measurement.progress_bar import progress_bar
from headstart.store import inspect
from headstart.store.tiers.tier import TierError, parse_tier_places

_MIB = 2**20
_UNHARMED = frozenset({"version"})  # written by another version of Headstart, which can read it
_MEANINGS = {
    "corrupt": "blocks are not what was written",
    "mismatch": "blocks are not those that their entries name",
    "io": "blocks could not be read",
    "entry": "entries are damaged",
    "cut": "its end is missing",
    "short": "it is too short to be a segment",
    "magic": "it is no segment at all",
    "checksum": "its header is damaged",
    "lengths": "its header has invalid lengths",
    "flags": "its header has invalid lengths",
    "swapped": "it has the name of another segment",
    "version": "it was written by another version of Headstart",
    "unsafe": "it is no regular file, or another user's",
    "unreadable": "it cannot be read",
    "value-short": "values are cut",
    "value-magic": "values are no blocks",
    "value-checksum": "values are not what was written",
}
PASSWORD_VARIABLE = "HEADSTART_KV_STORE_PASSWORD"
_VERIFY_EXAMPLES = """Example:
  headstart store verify ~/kv && echo sound"""

app = typer.Typer(
    help="Inspect, check and clear stored blocks (--kv-store), in a folder or in Redis. Servers may keep using them. "
    f"The password of Redis is read from {PASSWORD_VARIABLE}.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Place = Annotated[str, typer.Argument(metavar="DIR|URL", help="The folder or the URL of --kv-store.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.command(cls=PanelHelpCommand)
def stat(place: Place, as_json: AsJson = False) -> None:
    """Show the stored blocks by model.

    One row for all blocks of the same weights, dtype and block size: their number, size, and last use. In Redis they
    are sealed: a row is a secret and a model, and there is nothing more to see.
    """
    if _is_url(place):
        _stat_server(place, as_json)
        return
    with _opened(place) as folder:
        found = inspect.stat_folder(folder)
    if as_json:
        models = [_model(shape) for shape in found.shapes]
        whole = {"folder": str(folder), "bytes": found.num_bytes, "files": found.num_files}
        print(json.dumps({**whole, "models": models, "odd": found.odd}))
        return
    table = Table("model", box=None, header_style="bold")
    for column in ("blocks", "of tokens", "tokens", "size", "files", "last used"):
        table.add_column(column, justify="right", no_wrap=True)
    for shape in found.shapes:
        tokens = shape.shape.block_size
        counts = (f"{shape.num_blocks:,}", str(tokens), f"{shape.num_blocks * tokens:,}", _size(shape.num_bytes))
        table.add_row(
            shape.shape.fingerprint.hex()[:12], *counts, f"{shape.num_segments:,}", format_age(shape.newest_use)
        )
    Console().print(table if found.shapes else "no blocks are stored")
    print(f"{folder}: {_size(found.num_bytes)}, files: {found.num_files:,}")
    for reason, count in sorted(found.odd.items()):
        print(f"left aside: {count:,} x {_MEANINGS.get(reason, reason)}")


@app.command(cls=PanelHelpCommand, epilog=_VERIFY_EXAMPLES)
def verify(place: Place, as_json: AsJson = False) -> None:
    """Read every block and check it. Exit code 1 if anything is damaged.

    Damaged blocks are never served, even if this command did not find them. In Redis it finds
    damage; a forged block is found when it is loaded, with the secret.
    """
    if _is_url(place):
        _verify_server(place, as_json)
        return
    with _opened(place) as folder, _bar(f"reading {folder}") as progress:
        report = inspect.verify_folder(folder, progress)
    harmed = [name for name, counts in report.bad.items() if counts.keys() - _UNHARMED]
    if as_json:
        counts = {"blocks": report.num_good, "bytes": report.num_bytes, "bad": report.bad}
        print(json.dumps({"folder": str(folder), "sound": not harmed, **counts}))
    else:
        for name, counts in sorted(report.bad.items()):
            for reason, count in sorted(counts.items()):
                print(f"{folder / name}: {_MEANINGS.get(reason, reason)}" + (f" ({count:,})" if count > 1 else ""))
        print(f"{report.num_good:,} blocks, {_size(report.num_bytes)}, are sound; damaged files: {len(harmed):,}")
        if harmed:
            print("damaged blocks are never served; delete their files, or leave them to eviction by the store")
    if harmed:
        raise typer.Exit(1)


@app.command(cls=PanelHelpCommand)
def clear(
    place: Place,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the stored blocks of every model; in Redis those of every secret too.

    The secret of the tenants' isolation domains is kept. Servers that use the blocks keep those in memory.
    """
    if _is_url(place):
        _clear_server(place, yes, as_json)
        return
    with _opened(place) as folder:
        if not yes:
            found = inspect.stat_folder(folder)
            _confirm(f"remove {_size(found.num_bytes)} of blocks (files: {found.num_files:,}) from {folder}? [y/N]")
        num_files, num_bytes = inspect.clear_folder(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": num_files, "bytes": num_bytes}))
    else:
        print(f"removed {_size(num_bytes)} of blocks (files: {num_files:,}) from {folder}")


@contextmanager
def _opened(place: str) -> Generator[Path]:
    """Yield the folder. Raises ConfigError if it is not a store, and for operating system errors."""
    folder = Path(place).expanduser()
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name the one that --kv-store names")
        if not (folder / "secret").exists() and not inspect.stat_folder(folder).num_files:
            raise ConfigError(f"{folder} is no store: it holds neither blocks nor the secret of one")
        yield folder
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error


@contextmanager
def _bar(label: str) -> Generator[Callable[[int, int], None]]:
    """Yield a progress callback for `inspect.verify` that shows a bar in MiB on stderr."""
    with progress_bar() as bar:
        shown: list[int] = []

        def show(done: int, total: int) -> None:
            if not shown:
                bar.start_stage(f"{label}, MiB", -(-total // _MIB))
                shown.append(0)
            bar.advance(-(-done // _MIB) - shown[0])
            shown[0] = -(-done // _MIB)

        yield show


def _is_url(place: str) -> bool:
    """Return whether a server is meant. Raises ConfigError for both at once, and for an unusable URL."""
    folder, url = parse_tier_places(place)
    if url is not None and folder is not None:
        raise ConfigError("name the folder or the URL, one at a time")
    return url is not None


@contextmanager
def _linked(url: str) -> "Generator[tuple[ModuleType, Any]]":
    """Yield the module redis_inspect and a connection for it. Raises ConfigError for what the server does not do."""
    redis_inspect = import_module("headstart.store.tiers.redis_inspect")
    link = redis_inspect.open_inspection_link(url, os.environ.get(PASSWORD_VARIABLE))
    try:
        yield redis_inspect, link
    except TierError as error:
        raise ConfigError(f"{url}: {error}") from error
    finally:
        link.close()


def _stat_server(url: str, as_json: bool) -> None:
    with _linked(url) as (redis_inspect, link):
        found = redis_inspect.stat_redis(link)
    if as_json:
        models = [{"space": s.space, "blocks": s.num_blocks, "bytes": s.num_bytes} for s in found.spaces]
        print(json.dumps({"url": url, "bytes": found.num_bytes, "blocks": found.num_blocks, "models": models}))
        return
    for space in found.spaces:
        print(f"{space.space}: {space.num_blocks:,} blocks, {_size(space.num_bytes)}")
    print(f"{url}: {found.num_blocks:,} blocks, {_size(found.num_bytes)}")


def _verify_server(url: str, as_json: bool) -> None:
    with _linked(url) as (redis_inspect, link), progress_bar() as bar:
        bar.start_stage(f"reading {url}, keys", 1)
        found = redis_inspect.verify_redis(link)
        bar.advance(1)
    if as_json:
        counts = {"blocks": found.num_blocks, "bytes": found.num_bytes, "bad": found.bad}
        print(json.dumps({"url": url, "sound": not found.bad, **counts}))
    else:
        for reason, count in sorted(found.bad.items()):
            print(f"{url}: {_MEANINGS[reason]} ({count:,})")
        print(f"{found.num_blocks:,} blocks, {_size(found.num_bytes)}, are sound; damaged: {found.bad.total():,}")
    if found.bad:
        raise typer.Exit(1)


def _clear_server(url: str, yes: bool, as_json: bool) -> None:
    with _linked(url) as (redis_inspect, link):
        if not yes:
            found = redis_inspect.stat_redis(link)
            _confirm(f"remove {_size(found.num_bytes)} of blocks ({found.num_blocks:,}) from {url}? [y/N]")
        num_blocks = redis_inspect.clear_redis(link)
    print(json.dumps({"url": url, "blocks": num_blocks}) if as_json else f"removed {num_blocks:,} blocks from {url}")


def _confirm(question: str) -> None:
    """Ask for confirmation. Raises ConfigError if stdin is not a terminal, typer.Exit if the answer is not yes."""
    if not sys.stdin.isatty():
        raise ConfigError("clear asks for confirmation, and stdin is not a terminal; use --yes")
    print(question, end=" ", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("nothing was removed", file=sys.stderr)
        raise typer.Exit


def _model(stats: inspect.ShapeStats) -> dict[str, Any]:
    return {
        "model": stats.shape.fingerprint.hex(),
        "block_size": stats.shape.block_size,
        "block_bytes": stats.shape.block_bytes,
        "blocks": stats.num_blocks,
        "bytes": stats.num_bytes,
        "segments": stats.num_segments,
        "oldest_use": stats.oldest_use,
        "newest_use": stats.newest_use,
    }


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
