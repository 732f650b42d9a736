"""Prefix warmup: computes the prefixes of headstart.toml before a server is ready; a progress bar on a terminal."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headstart.openai.responses import Json
from headstart.server.prefix_requests import POLL_SECONDS, WARMING
from headstart.server.server_state import Model, ServerState


async def warm_prefixes(state: ServerState, model: Model) -> int:
    """Pin and compute the entries; return how many are computed. Failed entries are logged and do not stop the server.

    Raises EngineDeadError.
    """
    entries, engine, log = state.options.prefixes, state.engine, state.log
    if not entries:
        return 0
    start = time.monotonic()
    with _bar() as bar:
        task = bar.add_task("warming prefixes", total=None)
        await state.prefixes.load(entries, model.tokenizer, model.bounds)
        while True:
            listed = await state.prefixes.listed()
            total = sum(entry["tokens"] for entry in listed)
            bar.update(task, total=total, completed=min(engine.stats.counters.computed_tokens, total))
            if all(entry["state"] != WARMING for entry in listed):
                break
            await asyncio.sleep(POLL_SECONDS)
    for entry in listed:
        log.line(f"headstart: {_line(entry)}")
    warm = [entry for entry in listed if not entry["error"]]
    log.line(f"headstart: {len(warm)} of {len(listed)} prefixes are warm after {time.monotonic() - start:.1f} s")
    return len(warm)


def _line(entry: Json) -> str:
    if entry["error"]:
        return f"prefix {entry['name']!a} is not there: {entry['error']}"
    whose = f"for tenant {entry['tenant']}" if entry["tenant"] else "public"
    return f"prefix {entry['name']!a}: {entry['tokens']:,} tokens in {entry['blocks']:,} pinned blocks, {whose}"


@contextmanager
def _bar() -> Generator[Progress]:
    """Yield a progress bar on stderr that is removed at the end; disabled if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
