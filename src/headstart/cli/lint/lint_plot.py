"""The picture of `headstart lint`: costs by cause, and the miss ratio over the size of the cache."""

from importlib.util import find_spec
from pathlib import Path

from headstart.core.errors import ConfigError
from headstart.reuse.log_report import IdReport, LogReport


def check_plot() -> None:
    """Raise ConfigError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install 'headstart[plots]'")


def write_plot(report: LogReport | IdReport, path: Path) -> None:
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
