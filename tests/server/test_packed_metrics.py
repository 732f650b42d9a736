"""Counters and histograms in arrays: prometheus_client's own text, and nothing that pins memory."""

import subprocess
import sys

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st

from headstart.http.packed_metrics import Counter, Histogram, histogram_quantile

CHILD = """
import gc
from prometheus_client import CollectorRegistry
from headstart.http.packed_metrics import Histogram

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

histograms = [Histogram(f"h{i}", "", [float(b) for b in range(20)], {}) for i in range(14)]
before, held = resident(), []
for bound in range(21):
    held.append([float(i) for i in range(100_000)])  # 2.4 MB of small objects
    for histogram in histograms:
        histogram.observe(bound + 0.5)
grown = resident() - before
del held
gc.collect()
print(grown >> 20, (resident() - before) >> 20)
"""


@given(values=st.lists(st.sampled_from((0, 0.5, 1, 1.5, 2, 7, 1e9)) | st.floats(0, 9, width=16)))
def test_a_histogram_is_exposed_as_prometheus_client_does(values: list[float]) -> None:
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    packed = Histogram("a:b_seconds", "Some text.", (0.5, 1, 2.5), {"model_name": "m"})
    ours.register(packed)
    family = prometheus_client.Histogram(
        "a:b_seconds", "Some text.", ("model_name",), buckets=(0.5, 1, 2.5), registry=theirs
    )
    own = family.labels("m")
    for value in values:
        packed.observe(value)
        own.observe(value)
    expected = [line for line in prometheus_client.generate_latest(theirs).splitlines() if b"_created" not in line]
    assert prometheus_client.generate_latest(ours).splitlines() == expected


def test_a_counter_shows_every_label_set_it_was_given() -> None:
    registry = prometheus_client.CollectorRegistry()
    counter = Counter("a:b", "Some text.", ("x", "y"))
    registry.register(counter)
    counter.add(("1", "2"), 0)
    counter.add(("3", "4"))
    counter.add(("3", "4"), 5)
    assert prometheus_client.generate_latest(registry).decode().splitlines()[2:] == [
        'a:b_total{x="1",y="2"} 0.0',
        'a:b_total{x="3",y="4"} 6.0',
    ]


def test_what_is_counted_while_much_memory_is_used_keeps_none_of_it() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    grown, kept = map(int, ended.stdout.split())
    assert grown > 40 and kept < 5, f"{grown} MiB were used and {kept} are kept"


def test_a_quantile_is_interpolated_in_its_bucket() -> None:
    histogram = Histogram("h", "", [1.0, 2.0], {})
    assert histogram_quantile(histogram.bounds, histogram.counts, 0.5) is None
    for value in (0.5, 1.5, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == (1, 2, 1)
    found = [histogram_quantile(histogram.bounds, histogram.counts, share) for share in (0.125, 0.25, 0.5, 0.75, 1.0)]
    assert found == [0.5, 1.0, 1.5, 2.0, 2.0]
