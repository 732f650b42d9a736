"""Requests of `headstart lint`: of a file of lines, standard input, a server, or a trace of ids; and its picture."""

import codecs
import gzip
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.client_request import call_server
from headstart.core.errors import ConfigError
from headstart.reuse.log_report import IdTraceReport, LogReport
from headstart.reuse.logged_prompt import IdTracePrompt, ParsedLog, parse_log
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.recorded.trace_units import TraceUnits

if TYPE_CHECKING:
    from headstart.measurement.progress_bar import ProgressBar

PEEKED = 1 << 16  # bytes in which a trace shows its keys
STDIN = Path("-")
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def is_trace_path(path: Path) -> bool:
    """Return whether a path has traces: a folder, or a file of objects with block ids. Raises ConfigError."""
    if path.is_dir() or path == STDIN:
        return path.is_dir()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(PEEKED)
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return b'"hash_ids"' in head and (b'"input_length"' in head or b'"requests"' in head)


def read_trace_prompts(path: Path, block_size: int, bar: "ProgressBar") -> list[IdTracePrompt]:
    """Return the requests of a trace, numbered in order of arrival. Raises ConfigError."""

    def on_file(index: int, count: int) -> None:
        if index:
            bar.advance()
        else:
            bar.start_stage(f"reading {path.name}", count)

    trace = read_trace_path(path, TraceUnits(block_size, "ns"), on_file)  # the order of times needs no unit
    return [
        IdTracePrompt(number, request.hash_ids, request.length, trace.block_size, session=request.session)
        for number, request in enumerate(trace.requests, 1)
    ]


def fetch_recent_requests(url: str, last: int) -> list[Any]:
    """Return the last requests that a server keeps. Raises HeadstartError."""
    return call_server(url, "GET", f"/v1/cache/requests?last={last}")["data"]


def read_log_file(log: Path | None, before: list[Any], rules: Sequence[str] = ()) -> ParsedLog:
    """Return the requests of a file behind those `before` it, all after `rules` for prompts. Raises ConfigError.

    Bytes that are no UTF-8 are replaced, alike wherever they occur, and counted. A byte order mark is left out; UTF-16
    is read if it has one, as PowerShell writes it.
    """
    if log is None:
        return parse_log(_after_rules(before, rules))
    try:
        data = sys.stdin.buffer.read() if log == STDIN else log.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {log}: {error}") from error
    text = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8", "replace")
    found = parse_log(_after_rules([*before, *_entries(text)], rules))
    try:
        str(b"" if data.startswith(UTF_16) else data, "utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        num_lines = sum("\ufffd" in one for one in text.split("\n"))
        found.notes[f"bytes that are no UTF-8, the first at byte {error.start} (line {line}), count as one sign"] = (
            num_lines
        )
    return found


def _entries(text: str) -> list[Any]:
    """Return the lines of a text, or the entries of a JSON list; a text of one object over several lines is one."""
    body = text.strip("\ufeff \t\r\n")
    if (body[:1] in ("[", "{") and "\n" in body[: body.find("}")]) or body[:1] == "[":
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return text.split("\n")
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else [value]
    return text.split("\n")


def _after_rules(entries: list[Any], names: Sequence[str]) -> list[Any]:
    """Return the entries with their bodies after rules for prompts. Raises ConfigError for an unknown rule."""
    from headstart.config.options import ServerOptions, check_option_values
    from headstart.openai.canonical.canonical_body import canonicalize_log_line

    if not names:
        return entries
    check_option_values(ServerOptions(prompt_rule=tuple(names)))
    lines = (one if isinstance(one, str) else json.dumps(one) for one in entries)
    return [canonicalize_log_line(line, frozenset(names)) for line in lines]


def check_plot() -> None:
    """Raise ConfigError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'headstart[plots]'")


def write_lint_plot(report: LogReport | IdTraceReport, path: Path) -> None:
    """Write the picture; of ids, without causes. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    by_cause = isinstance(report, LogReport)
    figure = Figure(figsize=(10 if by_cause else 5, 4), layout="constrained")
    *others, right = figure.subplots(1, 2 if by_cause else 1, squeeze=False)[0]
    if isinstance(report, LogReport):
        (left,) = others
        names = [cost.cause for cost in report.causes][::-1]
        left.barh(names, [sum(cost.costs) for cost in report.causes][::-1])
        left.set_xlabel("tokens computed again (costs overlap)")
        left.set_title(f"avoidable: {100 * report.avoidable_share:.0f} % of the prompt tokens")
    right.plot([point.cache_tokens for point in report.curve], [100 * point.miss_ratio for point in report.curve])
    right.set_xscale("log", base=2)
    right.set_ylim(0, 105)
    right.set_xlabel("cache size, tokens (LRU)")
    right.set_ylabel("prompt tokens computed, %")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
