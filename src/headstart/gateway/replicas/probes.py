"""Parsers of replicas' answers to probes: models, cache, load. Headstart, vLLM and SGLang are supported.

No input is trusted: every value is bounded, and the time per page is linear in its length.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headstart.openai.request_json import parse_json
from headstart.router.endpoint import ReplicaReport

MAX_LINE = 65_536  # characters of a line of metrics; longer ones are skipped
MAX_WANTED = 4 * MAX_LINE  # characters of all lines that are used; further ones are skipped
MAX_BLOCK_SIZE = 65_536  # tokens; a larger value counts as not reported
MAX_NUM_BLOCKS = 2**31 - 1  # of one replica; IndexBlockBudget limits the index
MAX_DEFAULT_TOKENS = 2**31 - 1  # of an answer whose request sets no limit
MAX_STEP_TOKENS = 2**20  # new tokens of a step; a larger value counts as not reported
MAX_LOAD = 1e6  # requests waiting or running
MAX_CARDS = 4_096  # models and adapters of one replica
MAX_ID = 4_096  # characters of a model's name, which may be a path
_KIND = re.compile(r"^(headstart|vllm|sglang):\w", re.MULTILINE)
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_CACHE = "vllm:cache_config_info"
_ADAPTERS = "vllm:lora_requests_info"
_WANTED = (*_WAITING, *_RUNNING, *_USAGE, _CACHE, _ADAPTERS)
_LINE = re.compile(rf"^(?:{'|'.join(_WANTED)})[{{ ].*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of /v1/models."""

    id: str
    parent: str | None = None  # of an adapter: its base model
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as the replica returned it

    @property
    def default_max_tokens(self) -> int:
        """The maximum number of output tokens of a request that sets none; 0: the replica does not report it."""
        defaults = self.fields.get("default_sampling_params")
        return min(_whole(defaults.get("max_tokens")), MAX_DEFAULT_TOKENS) if isinstance(defaults, Mapping) else 0

    @property
    def max_model_len(self) -> int:
        """The context length in tokens; 0: the replica does not report it."""
        return _whole(self.fields.get("max_model_len"))

    @property
    def tokenizer_digest(self) -> str:
        """The digest of a tokenizer whose token ids it takes (tokenizer/handed_tokens.py); "": none."""
        found = self.fields.get("tokenizer")
        return found if isinstance(found, str) and self.fields.get("owned_by") == "headstart" else ""

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of a step; 0: the replica does not report it."""
        found = _whole(self.fields.get("max_num_batched_tokens"))
        return found if found <= MAX_STEP_TOKENS else 0


@dataclass(frozen=True, slots=True)
class ScrapedMetrics:
    """The values of one scrape. `num_blocks` and `block_size` (tokens) 0: not reported."""

    kind: str = ""  # headstart, vllm, sglang; empty: another engine
    block_size: int = 0
    num_blocks: int = 0
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    max_adapters: int = 0

    def to_replica_report(self, at: float) -> ReplicaReport:
        """Return the load in the router's type; `at` in seconds on its clock."""
        return ReplicaReport(
            at, self.waiting, self.running, self.kv_usage, self.adapters, self.waiting_adapters, self.max_adapters
        )


def parse_metrics(text: str, rank: str = "") -> ScrapedMetrics:
    """Parse a page of Prometheus text; missing values are 0.

    Values of several engines of one server are summed, or those of the data-parallel `rank` are read.
    """
    sums: dict[str, float] = {}
    labels: dict[str, dict[str, str]] = {}
    for sample in _wanted_samples(text):
        if rank and sample.labels.get("engine", sample.labels.get("dp_rank", rank)) != rank:
            continue
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        if sample.name in (_CACHE, _ADAPTERS):
            labels[sample.name] = sample.labels
    cache, lora = labels.get(_CACHE, {}), labels.get(_ADAPTERS, {})
    kinds = {found[1] for found in _KIND.finditer(text)}
    kind = next((kind for kind in ("headstart", "vllm", "sglang") if kind in kinds), "")
    usage = _first(sums, _USAGE)
    return ScrapedMetrics(
        kind,
        _block_size(cache.get("block_size")),
        min(_whole(cache.get("num_gpu_blocks")), MAX_NUM_BLOCKS),
        int(min(max(_first(sums, _WAITING), 0.0), MAX_LOAD)),
        int(min(max(_first(sums, _RUNNING), 0.0), MAX_LOAD)),
        min(max(usage, 0.0), 1.0),
        _names(lora.get("running_lora_adapters")),
        _names(lora.get("waiting_lora_adapters")),
        min(_whole(lora.get("max_lora")), MAX_CARDS),
    )


def _wanted_samples(text: str) -> Iterator[Sample]:
    """Yield the samples that are used; lines that are invalid, or too long, are skipped one by one."""
    left = MAX_WANTED
    for found in _LINE.finditer(text):
        line = found[0]
        if len(line) > min(MAX_LINE, left):
            continue
        left -= len(line)
        with suppress(ValueError):
            for family in text_string_to_metric_families(line + "\n"):
                yield from family.samples


def parse_models(document: Any) -> tuple[ModelCard, ...]:
    """Return the entries of a /v1/models answer; invalid ones are skipped."""
    entries = document.get("data") if isinstance(document, dict) else None
    found: list[ModelCard] = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and _is_name(entry.get("id")):
            parent = entry.get("parent")
            found.append(ModelCard(entry["id"], parent if _is_name(parent) else None, entry))
            if len(found) == MAX_CARDS:
                break
    return tuple(found)


def metrics_in_cards(cards: tuple[ModelCard, ...]) -> ScrapedMetrics | None:
    """Return the engine and cache size in model cards; None: not included."""
    for card in cards:
        size = _block_size(card.fields.get("block_size"))
        blocks = min(_whole(card.fields.get("num_gpu_blocks")), MAX_NUM_BLOCKS)
        if size and blocks:
            kind = card.fields.get("owned_by")
            return ScrapedMetrics(kind if kind in ("headstart", "vllm", "sglang") else "", size, blocks)
    return None


def parse_json_or_none(body: bytes) -> Any:
    """Return the decoded document; None if it is invalid or nested too deeply."""
    try:
        return parse_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_sglang_cache_size(document: Any) -> tuple[int, int]:
    """Return SGLang's page size and number of pages, from /get_server_info; zeros for missing values."""
    if not isinstance(document, dict):
        return 0, 0
    states = document.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    size = _block_size(document.get("page_size")) or 1
    tokens = _whole(document.get("max_total_num_tokens")) or _whole(inner.get("max_total_num_tokens"))
    return (size, min(tokens // size, MAX_NUM_BLOCKS)) if tokens else (0, 0)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_ID


def _block_size(value: object) -> int:
    size = _whole(value)
    return size if size <= MAX_BLOCK_SIZE else 0


def _first(sums: Mapping[str, float], names: tuple[str, ...]) -> float:
    value = next((sums[name] for name in names if name in sums), 0.0)
    return value if value == value and abs(value) < 1e12 else 0.0  # no NaN, no infinity


def _whole(value: object) -> int:
    try:
        return max(int(value), 0) if isinstance(value, int | str) else 0
    except ValueError:
        return 0


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name for part in (text or "").split(",") if (name := part.strip()))
