"""The text of a LogReport, for people."""

from headstart.explain.lint.log_report import CauseCost, LogReport


def report_text(report: LogReport) -> str:
    """Return the report as lines of text."""
    total = report.prompt_tokens or 1
    lines = [
        f"{report.num_requests} requests with about {report.prompt_tokens:,} prompt tokens"
        + (f"; {report.num_skipped} lines without a request" if report.num_skipped else ""),
        *report.notes,
        f"reused in an infinite cache: {report.reused_tokens:,} ({100 * report.reused_tokens / total:.0f} %)",
        f"computed: {report.computed_tokens:,}, of which {report.avoidable_tokens:,} were avoidable "
        f"({100 * report.avoidable_share:.0f} % of all); redundancy {report.redundancy:.2f}, 1 is best",
        "",
    ]
    for cost in report.causes:
        lines += _cause_lines(cost)
    if not report.causes:
        lines += ["No avoidable prefill was found.", ""]
    elif len(report.causes) > 1:
        lines += ["Costs of several causes overlap: one that is left costs what stands behind it.", ""]
    lines.append("cache size in tokens: share of prompt tokens computed")
    lines += [f"  {point.cache_tokens:>12,}: {100 * point.miss_ratio:5.1f} %" for point in report.curve[4:]]
    return "\n".join(lines)


def _cause_lines(cost: CauseCost) -> list[str]:
    plain = cost.as_dict()
    change = cost.change
    lines = [
        f"{cost.cause}: {plain['tokens_per_request']:,} tokens on each of {len(cost.costs)} requests, "
        f"{plain['tokens']:,} in all",
        f"  mend:  {plain['remedy']}",
        f"  first: line {cost.line}, {change.path}, character {change.at}, against line {cost.against}",
    ]
    if change.this or change.that:
        lines += [f"    that: {_shown(change.that)}", f"    this: {_shown(change.this)}"]
    return [*lines, ""]


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 60 else f"{text[:60]!a}..."
