"""`headstart prefix list | add | remove`: the pinned prefixes of a running server, over HTTP."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headstart.cli.client_request import DEFAULT_URL, call_server
from headstart.cli.help_text import PanelHelpCommand
from headstart.core.errors import ConfigError, HeadstartError
from headstart.http.logs import escape_unprintable

POLL_SECONDS = 0.2
_ROUTE = "/v1/prefixes"
_ADD_EXAMPLES = """Examples:
  headstart prefix add intent --file prompts/intent.txt
  headstart prefix add support --messages system.json --tenant acme
  HEADSTART_ADMIN_API_KEY=secret headstart prefix add short "You are a helpful assistant." --url http://host:8000"""

app = typer.Typer(
    help="Show and change the prefixes that a running server keeps pinned. The administrator's key comes from "
    "HEADSTART_ADMIN_API_KEY.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="The server's answer as JSON.")]


@app.command("list", cls=PanelHelpCommand)
def list_prefixes(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the pinned prefixes with their hits and saved tokens."""
    answer = call_server(url, "GET", _ROUTE)
    _show(answer, answer["data"], as_json)


@app.command(cls=PanelHelpCommand, epilog=_ADD_EXAMPLES)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Up to 64 letters, digits, '.', '_' and '-'.")],
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="The prefix itself; '-': all of stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="A text file, used unchanged.")] = None,
    messages: Annotated[
        Path | None, typer.Option("--messages", metavar="FILE", help="JSON: a list of chat messages.")
    ] = None,
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Visible to this tenant only.", show_default=False)
    ] = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is computed.")] = True,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Pin and compute a text or a conversation, so that even the first request that begins with it hits."""
    if sum(source is not None for source in (text, file, messages)) != 1:
        raise ConfigError("give exactly one of TEXT, --file and --messages")
    body: dict[str, Any] = {"name": name, "tenant": tenant, "wait": False}
    if messages is not None:
        body["messages"] = _messages(messages)
    else:
        body["text"] = _read(file) if file is not None else sys.stdin.read() if text == "-" else text
    answer = call_server(url, "POST", _ROUTE, body)
    answer = _wait_until_warm(answer, url) if wait else answer
    _show(answer, [answer], as_json)


@app.command(cls=PanelHelpCommand)
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `headstart prefix list` shows it.")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Unpin a prefix: its blocks become evictable."""
    answer = call_server(url, "DELETE", f"{_ROUTE}/{quote(name, safe='')}")
    print(json.dumps(answer) if as_json else f"{name} is no longer pinned")


def _wait_until_warm(entry: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the entry of a prefix once it is computed. Raises HeadstartError if that fails or if it is removed."""
    with Console(stderr=True).status(f"computing {entry['tokens']:,} tokens"):
        while entry["state"] == "warming":
            time.sleep(POLL_SECONDS)
            listed = {other["name"]: other for other in call_server(url, "GET", _ROUTE)["data"]}
            if entry["name"] not in listed:
                raise HeadstartError(f"prefix {entry['name']!r} was removed while it was computed")
            entry = listed[entry["name"]]
    if entry["state"] == "failed":
        raise HeadstartError(f"prefix {entry['name']!r} could not be computed: {entry['error']}")
    return entry


def _show(answer: dict[str, Any], prefixes: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("name", "tenant", "state", box=None, header_style="bold")
    for column in ("tokens", "blocks", "hits", "tokens saved", "last used"):
        table.add_column(column, justify="right")
    for entry in prefixes:
        counts = (f"{entry[key]:,}" for key in ("tokens", "blocks", "hits", "tokens_saved"))
        texts = (
            Text(escape_unprintable(text)) for text in (entry["name"], entry["tenant"] or "public", entry["state"])
        )
        table.add_row(*texts, *counts, format_age(entry["last_used"]))
    Console().print(table if prefixes else "no prefix is pinned; headstart prefix add NAME --file FILE pins one")
    for entry in prefixes:
        if entry["error"]:
            print(escape_unprintable(f"{entry['name']}: {entry['error']}"))


def format_age(used: float | None) -> str:
    """Return a time (seconds since 1970) as text relative to now; "never" for None."""
    if used is None:
        return "never"
    seconds = max(time.time() - used, 0.0)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _messages(path: Path) -> object:
    try:
        return json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
