"""Skipped: what a request contained and its prompt does not, for the header of the answer and the metrics."""

import re
from collections import Counter
from collections.abc import Iterable

from headstart.openai.forms.treatments import TREATMENTS, UNREADABLE, NameKind, NameTreatment, strip_date_suffix

SKIPPED_HEADER = "x-headstart-skipped"
"""The response header that names what was left out of the prompt: `tool.web_search=1, part.image=2`."""

SkippedCounts = tuple[tuple[str, int], ...]
"""Names such as `tool.web_search`, sorted, each with its number."""

MAX_NAMED = 32  # in the header
_OTHER = "other"
_PLAIN = re.compile(r"[A-Za-z0-9_]{1,64}")
KNOWN = (
    *sorted({f"{row.place}.{row.name}" for row in TREATMENTS if row.treatment is NameTreatment.SKIPPED}),
    *(f"{NameKind.PART}.{kind}" for kind in dict.fromkeys(UNREADABLE.values())),
    f"{NameKind.ITEM}.reasoning",
    f"{NameKind.TOOL}.tool_search",
    *(f"{NameKind.FIELD}.{name}" for name in ("reasoning_effort", "effort", "thinking", "think")),
    *(f"{place}.{_OTHER}" for place in NameKind),
)
"""The names in the metrics."""


class SkippedNames:
    """The collector of one request."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, place: NameKind, name: object) -> None:
        """Count a name; one that is no plain word counts as `other`."""
        plain = strip_date_suffix(name) if isinstance(name, str) else ""
        self._counts[f"{place}.{plain if _PLAIN.fullmatch(plain) else _OTHER}"] += 1

    def has_kind(self, place: NameKind) -> bool:
        """Return whether anything of this kind was left out."""
        return any(name.startswith(f"{place}.") for name in self._counts)

    def counts(self) -> SkippedCounts:
        """Return the names so far."""
        return tuple(sorted(self._counts.items()))


def skipped_header(counts: Iterable[tuple[str, int]]) -> str:
    """Return the value of SKIPPED_HEADER; beyond MAX_NAMED names, the number of the others."""
    named = [f"{name}={count}" for name, count in counts]
    more = len(named) - MAX_NAMED
    return ", ".join(named if more <= 0 else [*named[:MAX_NAMED], f"{_OTHER}={more}"])


def skipped_name_label(name: str) -> str:
    """Return the name in the metrics: clients choose names, so all that are not KNOWN share one per place."""
    return name if name in _KNOWN else f"{name.partition('.')[0]}.{_OTHER}"


_KNOWN = frozenset(KNOWN)
