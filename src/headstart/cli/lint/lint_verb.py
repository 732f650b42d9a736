"""`headstart lint`: what the prompts of a log lose of their prefix reuse, and why. Needs no server and no torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headstart.core.errors import ConfigError

LAST = 200
MANY = 500  # requests that may take seconds to compare
EXAMPLES = """Examples:
  headstart lint requests.jsonl                   bodies of requests to any OpenAI-compatible engine, one per line
  headstart lint requests.jsonl --plot reuse.png  with a picture: costs by cause, miss ratio over cache size
  headstart lint - --json < requests.jsonl
  headstart lint vllm.log                         vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG
  headstart lint --against http://127.0.0.1:8000  the last requests of a server with --prompt-log-size"""


def lint(
    log: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="JSONL, a log, a trace with ids; a folder of sessions; '-': stdin."),
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
    trace_block_size: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens per id of a trace. 0: by the lengths of its prompts.")
    ] = 0,
) -> None:
    """Report which prompts recompute text that earlier prompts had, what causes it, and how to mend it.

    Lines are bodies of chat completions, completions, responses or messages, in order of arrival; objects that hold
    one as "body" or "request"; or what LiteLLM and vLLM log. Tokens are estimated as four characters. All lines count
    as one tenant's. A trace of ids has no text: its report names no causes. A server shows a key its own tenant's
    requests only; the key is read from HEADSTART_ADMIN_API_KEY or HEADSTART_API_KEY.
    """
    from headstart.cli.lint.log_source import (
        check_plot,
        fetch_recent_requests,
        is_trace_path,
        read_log_file,
        read_trace_prompts,
        write_lint_plot,
    )
    from headstart.measurement.progress_bar import progress_bar
    from headstart.openai.canonical.nonces import nonce_rule_of_prompt_line
    from headstart.reuse.log_report import id_trace_report, id_trace_report_text, lint_report, lint_report_text
    from headstart.reuse.logged_prompt import ParsedLog

    if log is None and against is None:
        raise ConfigError("name a FILE, or a server with --against URL")
    if plot is not None:
        check_plot()
    with progress_bar() as bar:
        if log is not None and is_trace_path(log):
            if against is not None:
                raise ConfigError(f"{log} is a trace of ids, which cannot be compared with the texts of a server")
            found = ParsedLog(id_prompts=read_trace_prompts(log, trace_block_size, bar))
        else:
            found = read_log_file(
                log, [] if against is None else fetch_recent_requests(against, last), prompt_rule or []
            )
        notes = found.notes_as_sentences()
        if not found.prompts and not found.id_prompts:
            told = "".join(f"; {note}" for note in notes)
            expected = "a line is a JSON body with messages, input or prompt"
            raise ConfigError(f"{log or against} holds no request: {expected}{told}")
        num_requests = len(found.prompts or found.id_prompts)
        if num_requests > MANY:
            bar.start_stage("comparing requests", num_requests)
        if found.prompts:
            report = lint_report(found.prompts, found.num_skipped, notes, nonce_rule_of_prompt_line, bar.advance)
            text = lint_report_text(report)
        else:
            report = id_trace_report(found.id_prompts, found.num_skipped, notes, bar.advance)
            text = id_trace_report_text(report)
    if plot is not None:
        write_lint_plot(report, plot)
    print(json.dumps(report.as_dict()) if as_json else text)
