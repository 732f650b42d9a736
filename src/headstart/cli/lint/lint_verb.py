"""`headstart lint`: what the prompts of a log lose of their prefix reuse, and why. Needs no server and no torch."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headstart.core.errors import ConfigError

LAST = 200
EXAMPLES = """Examples:
  headstart lint requests.jsonl                   bodies of requests to any OpenAI-compatible engine, one per line
  headstart lint requests.jsonl --plot reuse.png  with a picture: costs by cause, miss ratio over cache size
  headstart lint - --json < requests.jsonl
  headstart lint --against http://127.0.0.1:8000  the last requests of a server with --prompt-log-size"""


def lint(
    log: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="JSONL: a request body per line; '-': stdin.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server, whose last requests come before those of FILE, if any."),
    ] = None,
    last: Annotated[int, typer.Option(help="How many of the server's requests.", min=1, max=1000)] = LAST,
    prompt_rule: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Apply this rule first: what it would mend. Repeat for several."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON document.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a picture (PNG).")] = None,
) -> None:
    """Report which prompts recompute text that earlier prompts had, what causes it, and how to mend it.

    Lines are bodies of chat completions, completions, responses or messages, in order of arrival; or objects that hold
    one as "body" or "request". Tokens are estimated as four characters. All lines count as one tenant's. A server shows
    a key its own tenant's requests only; the key is read from HEADSTART_ADMIN_API_KEY or HEADSTART_API_KEY.
    """
    from headstart.cli.lint.lint_plot import check_plot, write_plot
    from headstart.explain.lint.log_report import report_log
    from headstart.explain.lint.logged_prompt import read_log
    from headstart.explain.lint.report_text import report_text

    if log is None and against is None:
        raise ConfigError("name a FILE, or a server with --against URL")
    if plot is not None:
        check_plot()
    lines = [] if against is None else _lines_of_server(against, last)
    if log is not None:
        lines += _lines_of_file(log)
    prompts, num_skipped = read_log(_after_rules(lines, prompt_rule or []))
    if not prompts:
        raise ConfigError(f"{log or against} holds no request: a line is a JSON body with messages, input or prompt")
    report = report_log(prompts, num_skipped)
    if plot is not None:
        write_plot(report, plot)
    print(json.dumps(report.as_dict()) if as_json else report_text(report))


def _after_rules(lines: list[str], names: list[str]) -> list[str]:
    """Return the lines with their bodies after rules for prompts. Raises ConfigError for an unknown rule."""
    from headstart.config.options import ServerOptions, check_values
    from headstart.openai.canonical.canonical_body import canonical_line

    if not names:
        return lines
    check_values(ServerOptions(prompt_rule=tuple(names)))
    return [canonical_line(line, frozenset(names)) for line in lines]


def _lines_of_file(log: Path) -> list[str]:
    try:
        text = sys.stdin.read() if str(log) == "-" else log.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {log}: {error}") from error
    return text.splitlines()


def _lines_of_server(url: str, last: int) -> list[str]:
    from headstart.cli.client_request import call_server

    return [json.dumps(kept) for kept in call_server(url, "GET", f"/v1/cache/requests?last={last}")["data"]]
