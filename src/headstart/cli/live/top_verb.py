"""`headstart top`: the cache of a running server, or the replicas of a router, in a terminal."""

import sys
import time
from textwrap import wrap
from typing import Annotated, Any

import typer

from headstart.cli.client_request import DEFAULT_URL, call_server
from headstart.core.errors import HeadstartError
from headstart.http.logs import escape_unprintable

MAX_RUNS = 60
COLUMNS, ROWS = 160, 200  # where stdout is not a terminal
EXAMPLES = """Examples:
  headstart top                                  the server on this machine's port 8000
  headstart top --url http://127.0.0.1:9000
  headstart top --once > cache.txt"""


def top(
    url: Annotated[str, typer.Option(metavar="URL", help="Address of the server or router.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Print once and stop; so if stdout is no terminal.")] = False,
    interval: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show the prefix cache of a running server at work: load, sources of prompts, losses by cause, and the tree.

    At a router: replicas and the last decisions. Ctrl-C ends it. The key is read from HEADSTART_ADMIN_API_KEY or
    HEADSTART_API_KEY.
    """
    if once or not sys.stdout.isatty():
        print("\n".join(_screen(url, COLUMNS, ROWS)))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(Text("\n".join(_patient(url, console.width, console.height)), no_wrap=True), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _patient(url: str, columns: int, rows: int) -> list[str]:
    """Return the screen, or why there is none: a server may come back."""
    try:
        return _screen(url, columns, rows)
    except HeadstartError as error:
        return [
            *wrap(escape_unprintable(str(error)), columns, break_on_hyphens=False),
            "",
            "trying again; Ctrl-C ends this",
        ]


def _screen(url: str, columns: int, rows: int) -> list[str]:
    from headstart.cli.live.top_text import render_screen

    figures: Any = call_server(url, "GET", "/v1/cache/live?frames=1", is_stream=True)
    is_fleet = isinstance(figures, dict) and figures.get("object") == "fleet.figures"
    tree = None if is_fleet else call_server(url, "GET", f"/v1/cache/tree?max_runs={MAX_RUNS}")
    return render_screen(url, figures, tree, columns=columns, rows=rows)
