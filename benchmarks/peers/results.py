"""Figures from trials: medians, spread, ratios with their intervals, floors; the keys of the final JSON document.

Times are in seconds, rates per second. A ratio is above 1 where Headstart is better, for times and for rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import mean, stdev
from typing import Any, NamedTuple

from floors import Ceilings, Floors, ModelSize
from journal import Entry, find
from poisson import COARSE, LOAD, THOROUGH, found_rate, slo_of
from roster import ROSTER

from headstart.measurement.machine import CONTENDED_ABOVE
from headstart.measurement.report import min_and_max
from headstart.workload.request_record import median
from headstart_lab.comparison import ROWS

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 % of Student's t, by degrees
REFERENCE = "vllm"
OPTIONAL = "openvino"  # in the document only if the journal has trials of it
_OTHERS = {
    "": {name: name for name in ("vllm", "llamacpp", "transformers", OPTIONAL)},
    "_int8": {"vllm": "vllm", "llamacpp": "llamacpp_q8"},
}  # by suffix: key of the document -> entrant


class Kind(NamedTuple):
    """The source and the format of a figure."""

    row: str  # the row whose trials have it
    is_rate: bool
    unit: str
    scale: float  # x the figure in seconds or per second


KINDS = {
    part.key: Kind(
        row,
        definition.is_rate,
        "tok/s" if definition.is_rate else "ms",
        1.0 if definition.is_rate else 1000.0,
    )
    for row, definition in ROWS.items()
    for part in definition.parts
} | {LOAD: Kind(LOAD, True, "requests/s", 1.0)}
for _key in ("rotations_cold", "shared_prefix", "twins"):
    KINDS[_key] = KINDS[_key]._replace(unit="s", scale=1.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """One figure of one entrant: a value per valid repetition, or the reason why there is none."""

    values: dict[int, float]
    cut_after: float | None = None
    problem: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.values.values()) if self.values else None


class Ratio(NamedTuple):
    """The factor by which Headstart is better: of medians, and the 95 % interval of the paired repetitions."""

    value: float
    low: float | None  # None: fewer than two pairs
    high: float | None


def figures_of(entries: Sequence[Entry], peer: str, key: str) -> Figures:
    """Return all valid values of one figure; of a repeated trial, the least contended one."""
    kind = KINDS[key]
    if kind.row == LOAD:
        return _rates(entries, peer)
    mine = [entry for entry in entries if entry.row == kind.row and entry.peer == peer]
    best = [find(mine, (kind.row, peer, number, None)) for number in sorted({entry.repetition for entry in mine})]
    known = {entry.repetition: value for entry in best if entry and (value := entry.figures.get(key)) is not None}
    cuts = [entry.cut_after for entry in mine if entry.cut_after is not None]
    problems = [problem for entry in mine for problem in entry.problems]
    return Figures(known, cuts[0] if cuts else None, problems[0] if problems and not known else None)


def ratio_of(ours: Figures, theirs: Figures, is_rate: bool) -> Ratio | None:
    """Return the factor by which the first is better; None if either has no value, or is 0."""
    if not ours.median or not theirs.median:
        return None
    value = ours.median / theirs.median if is_rate else theirs.median / ours.median
    both = [number for number in ours.values if theirs.values.get(number) and ours.values[number]]
    sign = 1 if is_rate else -1
    logs = [sign * log(ours.values[number] / theirs.values[number]) for number in both]
    if len(logs) < 2:
        return Ratio(value, None, None)
    half = quantile(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Ratio(value, exp(mean(logs) - half), exp(mean(logs) + half))


def quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution; beyond ten degrees within 0.01."""
    return _T[degrees - 1] if degrees <= len(_T) else 1.96 + 2.65 / degrees


def document(about: dict[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the final JSON document: `<figure>.<entrant>` and so on, then setup, machine and versions."""
    rates = about["ceilings"]
    ceilings = Ceilings(rates["bytes_per_s"], max(rates["bf16_flops"], rates.get("float32_flops", 0.0)))
    size = ModelSize.of(about["setup"]["config"])
    values: dict[str, Any] = {}
    has_optional = any(entry.peer == OPTIONAL for entry in entries)
    for suffix, ours, weight_bytes in (("", "ours", 2), ("_int8", "ours_int8", 1)):
        others = {key: peer for key, peer in _OTHERS[suffix].items() if peer != OPTIONAL or has_optional}
        floors = Floors(size, ceilings, weight_bytes).rows()
        for key in KINDS:
            values |= _values(entries, key, key + suffix, ours, others) | {f"{key}{suffix}.floor": floors[key]}
    losses = [
        f"{name.partition('.')[0]}: {value:.3f} against {_named(name)}"
        for name, value in values.items()
        if _is_loss(name, value)
    ]
    contended = [entry for entry in entries if (entry.other_cores or 0.0) > CONTENDED_ABOVE]
    return {
        "bench": "peers",
        **values,
        "losses": losses,
        "problems": _problems(about, entries),
        "slo_seconds": slo_of(entries, REFERENCE, 0),
        "trials": len(entries),
        "contended_trials": len(contended),
        **about,
    }


def _values(entries: Sequence[Entry], key: str, name: str, ours: str, others: dict[str, str]) -> dict[str, Any]:
    """Return the keys of one figure. `others`: key -> entrant."""
    kind, own = KINDS[key], figures_of(entries, ours, key)
    values: dict[str, Any] = {f"{name}.ours": own.median}
    found = {other: _best_form(entries, peer, key) for other, peer in others.items()}
    for other, figures in {"ours": own, **found}.items():
        values[f"{name}.{other}"] = figures.median
        if figures.values:
            values[f"{name}.{other}.spread"] = min_and_max(list(figures.values.values()))
            values[f"{name}.{other}.runs"] = len(figures.values)
        elif figures.cut_after is not None:
            values[f"{name}.{other}.cut_after"] = figures.cut_after
    for other, figures in found.items():
        ratio = ratio_of(own, figures, kind.is_rate)
        label = ratio_key(other)
        values[f"{name}.{label}"] = None if ratio is None else ratio.value
        if ratio is not None and ratio.low is not None:
            values[f"{name}.{label}.interval"] = [ratio.low, ratio.high]
    return values


def ratio_key(other: str) -> str:
    """Return the last part of the key of a ratio."""
    return "ratio" if other == REFERENCE else f"ratio_{other}"


def _best_form(entries: Sequence[Entry], peer: str, key: str) -> Figures:
    """Return one figure of a peer, in the set-up that is best for it."""
    forms = [peer, *(entrant.name for entrant in ROSTER.values() if entrant.form_of == peer)]
    found = [figures_of(entries, form, key) for form in forms]
    known = [figures for figures in found if figures.median is not None]
    best = max if KINDS[key].is_rate else min
    return best(known, key=lambda figures: figures.median or 0.0) if known else found[0]


def _rates(entries: Sequence[Entry], peer: str) -> Figures:
    """Return the highest rates found by a peer's searches."""
    mine = [entry for entry in entries if entry.row == LOAD and entry.peer == peer]
    entrant = ROSTER.get(peer)
    search = THOROUGH if entrant is None or entrant.is_thorough else COARSE
    found = {number: found_rate(entries, peer, number, search) for number in sorted({one.repetition for one in mine})}
    problems = [problem for entry in mine for problem in entry.problems]
    known = {number: rate for number, rate in found.items() if rate is not None}
    return Figures(known, None, problems[0] if problems and not known else None)


def _is_loss(name: str, value: Any) -> bool:
    is_ratio = name.partition(".")[2] in {ratio_key(other) for other in _OTHERS[""]}
    return is_ratio and value is not None and value < 1


def _named(name: str) -> str:
    """Return the title of the entrant that a ratio compares with."""
    row, _, label = name.partition(".")
    other = REFERENCE if label == "ratio" else label.removeprefix("ratio_")
    return ROSTER["llamacpp_q8" if other == "llamacpp" and row.endswith("_int8") else other].title


def _problems(about: dict[str, Any], entries: Sequence[Entry]) -> list[str]:
    """Return the failures that no later trial replaced, and the peers that never started."""
    found = [f"{name}: {peer['failed']}" for name, peer in about.get("peers", {}).items() if "failed" in peer]
    bad = [entry for entry in entries if entry.problems and find(entries, entry.key) is None]
    return found + [f"{entry.row}, {entry.peer}: {entry.problems[0]}" for entry in bad]
