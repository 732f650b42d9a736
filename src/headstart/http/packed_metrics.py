"""Counters and histograms with their values in arrays; prometheus_client keeps each value as a Python float.

Python allocates a new float in any arena (1 MiB) with free space. Floats created under high memory use would keep
otherwise empty arenas from being returned to the system. Not thread-safe.
"""

import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of Prometheus' text format
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")


def method_label(method: str) -> str:
    """Return the label value of an HTTP method, from a closed set."""
    return method if method in _METHODS else "other"


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an Accept header names OpenMetrics, the text format that has exemplars."""
    return "application/openmetrics-text" in accept


def metrics_content_type(accept: str) -> str:
    """Return the content type of `expose`."""
    return openmetrics.CONTENT_TYPE_LATEST if accepts_openmetrics(accept) else CONTENT_TYPE


def expose_metrics(accept: str, *parts: Collector) -> bytes:
    """Return the metrics of all parts: in OpenMetrics' text format if `accept` names it, else in Prometheus' own."""
    whole = _Chain(parts)
    if accepts_openmetrics(accept):
        return openmetrics.generate_latest(whole, ALLOWUTF8)  # the other modes replace colons in names
    return generate_latest(whole)


class _Chain(Collector):
    def __init__(self, parts: Iterable[Collector]) -> None:
        self._parts = tuple(parts)

    def collect(self) -> Iterable[Metric]:
        for part in self._parts:
            yield from part.collect()


class Histogram(Collector):
    """A histogram with one label set; exposes the same text as prometheus_client's.

    Each bucket has the last traced value as its exemplar.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: dict[str, str]) -> None:
        """`bounds`: the upper bound of each bucket, ascending and without infinity, which the attribute ends with."""
        self._name, self._text, self._labels = name, text, labels
        self.bounds = (*bounds, inf)
        self._counts = array("q", bytes(8 * len(self.bounds)))  # per bucket, not cumulative
        self._sum = array("d", (0.0,))
        self._exemplars: dict[int, Exemplar] = {}  # by bucket

    @property
    def counts(self) -> tuple[int, ...]:
        """The values counted by bucket; not cumulative."""
        return tuple(self._counts)

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count one value, of the trace with this id if there is one."""
        bucket = bisect_left(self.bounds, value)
        self._counts[bucket] += 1
        self._sum[0] += value
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        total, buckets = 0, list[tuple[str, float] | tuple[str, float, Exemplar]]()
        for bucket, (bound, count) in enumerate(zip(self.bounds, self._counts, strict=True)):
            total += count
            named, exemplar = (floatToGoString(bound), float(total)), self._exemplars.get(bucket)
            buckets.append(named if exemplar is None else (*named, exemplar))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum[0])
        yield family


class MetricFamilyFactory(NamedTuple):
    """Constructors of metric families of one model with one sample, or one for each value of a label."""

    model: str
    prefix: str = "headstart:"

    def make_gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge."""
        return self._filled(GaugeMetricFamily(self.prefix + name, text, labels=("model_name",)), {"": value})

    def make_counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter."""
        return self._filled(CounterMetricFamily(self.prefix + name, text, labels=("model_name",)), {"": value})

    def labelled_counter(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a counter by the values of a label."""
        return self._filled(CounterMetricFamily(self.prefix + name, text, labels=("model_name", label)), values)

    def labelled_gauge(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a gauge by the values of a label."""
        return self._filled(GaugeMetricFamily(self.prefix + name, text, labels=("model_name", label)), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
        for label, value in values.items():
            family.add_metric([self.model, label] if label else [self.model], value)
        return family


def histogram_quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value below which that share of the counted values is, interpolated in its bucket; None without any.

    In the last bucket, which has no upper bound, it is the lower one.
    """
    left = share * sum(counts)
    if not left:
        return None
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count and left <= count:
            return lower if bound == inf else lower + (bound - lower) * left / count
        left -= count
        lower = lower if bound == inf else bound
    return lower


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
