"""Counters and histograms with their values in arrays; prometheus_client keeps each value as a Python float.

Python allocates a new float in any arena (1 MiB) with free space. Floats created under high memory use would keep
otherwise empty arenas from being returned to the system. Not thread-safe.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus' text format
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


def method_label(method: str) -> str:
    """Return the label value of an HTTP method, from a closed set."""
    return method if method in _METHODS else "other"


class Histogram(Collector):
    """A histogram with one label set; exposes the same text as prometheus_client's."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: dict[str, str]) -> None:
        """`bounds`: the upper bound of each bucket, ascending and without infinity."""
        self._name, self._text, self._labels = name, text, labels
        self._bounds = (*bounds, inf)
        self._counts = array("q", bytes(8 * len(self._bounds)))  # per bucket, not cumulative
        self._sum = array("d", (0.0,))

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum[0] += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum[0])
        yield family


class Counter(Collector):
    """A counter by label values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[tuple[str, ...], array[int]] = {}

    def add(self, values: tuple[str, ...], amount: int = 1) -> None:
        """Add `amount` for these label values; 0 makes the series exist."""
        if values not in self._counts:
            self._counts[values] = array("q", (0,))
        self._counts[values][0] += amount

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count[0])
        yield family
