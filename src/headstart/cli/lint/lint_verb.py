"""`headstart lint`: what the prompts of a log lose of their prefix reuse, and why. Needs no server and no torch."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headstart.core.errors import ConfigError

EXAMPLES = """Examples:
  headstart lint requests.jsonl                   bodies of requests to any OpenAI-compatible engine, one per line
  headstart lint requests.jsonl --plot reuse.png  with a picture: costs by cause, miss ratio over cache size
  headstart lint - --json < requests.jsonl"""


def lint(
    log: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL: a request body per line; '-': stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON document.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a picture (PNG).")] = None,
) -> None:
    """Report which prompts recompute text that earlier prompts had, what causes it, and how to mend it.

    Lines are bodies of chat completions, completions, responses or messages, in order of arrival; or objects that hold
    one as "body" or "request". Tokens are estimated as four characters. All lines count as one tenant's.
    """
    from headstart.cli.lint.lint_plot import check_plot, write_plot
    from headstart.explain.lint.log_report import report_log
    from headstart.explain.lint.logged_prompt import read_log
    from headstart.explain.lint.report_text import report_text

    if plot is not None:
        check_plot()
    try:
        text = sys.stdin.read() if str(log) == "-" else log.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {log}: {error}") from error
    prompts, num_skipped = read_log(text.splitlines())
    if not prompts:
        raise ConfigError(f"{log} holds no request: a line is a JSON body with messages, input or prompt")
    report = report_log(prompts, num_skipped)
    if plot is not None:
        write_plot(report, plot)
    print(json.dumps(report.as_dict(), ensure_ascii=False) if as_json else report_text(report))
