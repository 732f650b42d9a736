"""Metrics of prompts beside the engine: rules that applied, fingerprints for comparisons, the doctor's sample."""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headstart.explain.lint.causes import CAUSES
from headstart.http.packed_metrics import Families
from headstart.openai.canonical.prompt_rules import PLACEMENT_TEXTS, RULE_TEXTS, AppliedRules
from headstart.openai.diagnostics.fingerprint_memory import FingerprintMemory
from headstart.openai.forms.skipped import KNOWN, SkippedCounts, metric_label
from headstart.server.prompt_doctor import PromptDoctor


class PromptCollector(Collector):
    """Requests by the rules that applied and by what was left out; fingerprints and the doctor's sample, if watched."""

    def __init__(self, model_name: str) -> None:
        self._families = Families(model_name)
        self._rules = dict.fromkeys(RULE_TEXTS | PLACEMENT_TEXTS, 0)
        self._skipped = dict.fromkeys(KNOWN, 0)
        self.fingerprints: FingerprintMemory | None = None
        self.doctor: PromptDoctor | None = None

    def add(self, applied: AppliedRules, skipped: SkippedCounts) -> None:
        """Count a request."""
        for rule, _ in applied:
            self._rules[rule] += 1
        for name, count in skipped:
            self._skipped[metric_label(name)] += count

    def collect(self) -> Iterable[Metric]:
        families, memory = self._families, self.fingerprints
        text = "Requests that a rule for prompts changed, or reported about."
        yield families.counters("prompt_rules", text, "rule", self._rules)
        text = "Fields, tools, items, parts and reasoning of requests that were left out of prompts (docs/agents.md)."
        yield families.counters("skipped", text, "kind", self._skipped)
        if self.doctor is None:  # the model is still loading
            return
        text, num_bytes = "Fingerprints of prompts kept for comparisons.", 0 if memory is None else memory.num_bytes
        yield families.gauge("fingerprints", text, 0 if memory is None else len(memory))
        yield families.gauge("fingerprint_bytes", "Memory held for fingerprints.", num_bytes)
        counts = self.doctor.counts
        text = "Prompt tokens of the sample that was examined."
        yield families.counter("examined_prompt_tokens", text, counts.prompt_tokens)
        text = "Of those, computed tokens that other prompts with the same text would have spared."
        yield families.counter("avoidable_tokens", text, counts.avoidable_tokens)
        text = "Avoidable tokens by cause: those behind its first occurrence in a prompt, so causes overlap."
        causes = {cause: counts.causes[cause] for cause in CAUSES}
        yield families.counters("avoidable_tokens_by_cause", text, "cause", causes)
        text = "Avoidable tokens, to all prompt tokens of the sample: 0 is best."
        yield families.gauge("avoidable_share", text, counts.share or 0.0)
