"""Metrics of prompts beside the engine: rules that applied, fingerprints for comparisons."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.openai.canonical.prompt_rules import PLACEMENT_TEXTS, RULE_TEXTS, AppliedRules
from headstart.openai.forms.skipped import KNOWN, SkippedCounts, metric_label
from headstart.reuse.causes import CAUSES
from headstart.server.apis.answer_diagnosis import FingerprintMemory
from headstart.server.prompt_doctor import PromptDoctor


class FingerprintCollector(Collector):
    """The size of a FingerprintMemory; zeros if there is none."""

    def __init__(self, memory: FingerprintMemory | None, model_name: str) -> None:
        self._memory = memory
        self._model = [model_name]

    def collect(self) -> Iterable[Metric]:
        memory = self._memory
        rows = {
            "fingerprints": ("Fingerprints of prompts kept for comparisons.", 0 if memory is None else len(memory)),
            "fingerprint_bytes": ("Memory held for fingerprints.", 0 if memory is None else memory.num_bytes),
        }
        for name, (text, value) in rows.items():
            gauge = GaugeMetricFamily(f"headstart:{name}", text, labels=("model_name",))
            gauge.add_metric(self._model, value)
            yield gauge


class RuleCounts(Collector):
    """The number of requests that each rule for prompts applied to."""

    def __init__(self, name: str, model_name: str) -> None:
        self._name = name
        self._model_name = model_name
        self._counts = dict.fromkeys(RULE_TEXTS | PLACEMENT_TEXTS, 0)

    def add(self, applied: AppliedRules) -> None:
        """Count a request."""
        for rule, _ in applied:
            self._counts[rule] += 1

    def collect(self) -> Iterable[Metric]:
        text = "Requests that a rule for prompts changed, or reported about."
        family = CounterMetricFamily(self._name, text, labels=("model_name", "rule"))
        for rule, count in self._counts.items():
            family.add_metric([self._model_name, rule], count)
        yield family


class SkippedTotals(Collector):
    """The number of fields, tools, items and parts that were left out of prompts, by name."""

    def __init__(self, name: str, model_name: str) -> None:
        self._name = name
        self._model_name = model_name
        self._counts = dict.fromkeys(KNOWN, 0)

    def add(self, skipped: SkippedCounts) -> None:
        """Count a request."""
        for name, count in skipped:
            self._counts[metric_label(name)] += count

    def collect(self) -> Iterable[Metric]:
        text = "Fields, tools, items, parts and reasoning of requests that were left out of prompts (docs/agents.md)."
        family = CounterMetricFamily(self._name, text, labels=("model_name", "kind"))
        for name, count in self._counts.items():
            family.add_metric([self._model_name, name], count)
        yield family


class DoctorCollector(Collector):
    """The sample of a PromptDoctor, and the avoidable share in it."""

    def __init__(self, doctor: PromptDoctor, model_name: str) -> None:
        self._doctor = doctor
        self._model = [model_name]

    def collect(self) -> Iterable[Metric]:
        counts, labels = self._doctor.counts, ("model_name",)
        rows = {
            "examined_prompt_tokens": ("Prompt tokens of the sample that was examined.", counts.prompt_tokens),
            "avoidable_tokens": (
                "Of those, computed tokens that other prompts with the same text would have spared.",
                counts.avoidable_tokens,
            ),
        }
        for name, (text, value) in rows.items():
            family = CounterMetricFamily(f"headstart:{name}", text, labels=labels)
            family.add_metric(self._model, value)
            yield family
        text = "Avoidable tokens by cause: those behind its first occurrence in a prompt, so causes overlap."
        causes = CounterMetricFamily("headstart:avoidable_tokens_by_cause", text, labels=("model_name", "cause"))
        for cause in CAUSES:
            causes.add_metric([*self._model, cause], counts.causes[cause])
        yield causes
        text = "Avoidable tokens, to all prompt tokens of the sample: 0 is best."
        share = GaugeMetricFamily("headstart:avoidable_share", text, labels=labels)
        share.add_metric(self._model, counts.share or 0.0)
        yield share
