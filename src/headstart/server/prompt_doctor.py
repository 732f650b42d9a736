"""AvoidableTextEstimator: an online estimate of the prompt tokens whose prefill was avoidable, by cause and by tenant.

Examining a prompt takes milliseconds, so prompts are sampled: one is examined, on a thread, if the CPU time spent so
far is less than a share of what server and engine have used. Only counts leave this module.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.core.batch import PromptTokenBreakdown
from headstart.openai.engine_requests import RequestOrigin, salted_domain
from headstart.reuse.near_prompts import MAX_BYTES, PromptWindow, WindowEntry, measure_avoidable_text
from headstart.server.request_limits import bytes_of_json_value

WINDOW_BYTES = 16 << 20  # of the latest prompts
FREE_SECONDS = 0.05  # of CPU time that may be spent before any is earned


@dataclass(slots=True)
class AvoidableCounts:
    """The prompts that were examined, in tokens; per cause those behind its first occurrence, so they overlap."""

    num_requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0  # of these, but for those in evicted blocks: no cause has more
    avoidable_tokens: int = 0
    causes: Counter[str] = field(default_factory=Counter[str])  # replaced, so that samples may keep it

    @property
    def share(self) -> float | None:
        """Avoidable tokens over all prompt tokens of the sample; None without any."""
        return self.avoidable_tokens / self.prompt_tokens if self.prompt_tokens else None


class AvoidableTextEstimator:
    """The estimate of one server. `cpu_seconds` returns the CPU time that server and engine have used."""

    def __init__(self, cpu_share: float, cpu_seconds: Callable[[], float]) -> None:
        """`cpu_share` 0: nothing is examined."""
        self.counts = AvoidableCounts()
        self.tenants: dict[str, AvoidableCounts] = {}
        self.spent_seconds = 0.0
        self._share = cpu_share
        self._cpu_seconds = cpu_seconds
        self._window = PromptWindow(WINDOW_BYTES)
        self._examining: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a prompt is being examined."""
        return self._examining is not None

    def build_window_entry(
        self,
        origin: RequestOrigin,
        salt: str | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        tokens: int,
    ) -> WindowEntry | None:
        """Return a prompt for `remember_prompt`; None if prompts are not examined, or it is too large. Thread-safe."""
        num_bytes = bytes_of_json_value((messages, tools), MAX_BYTES) if self._share else 0
        if not self._share or num_bytes > MAX_BYTES:
            return None
        group = origin.tenant.encode() + b"\0" + salted_domain(origin.domain, salt)
        return WindowEntry(group, messages, tools, num_tokens=tokens, num_bytes=num_bytes)

    def remember_prompt(self, entry: WindowEntry) -> None:
        """Keep a prompt for comparisons with later ones."""
        self._window.add(entry)

    def examine_finished(
        self, tenant: str, entry: WindowEntry, breakdown: PromptTokenBreakdown, num_evicted: int
    ) -> None:
        """Examine an answered request's prompt if there is CPU time to spend; on a thread, one at a time."""
        if self.is_busy or self.spent_seconds >= FREE_SECONDS + self._share * self._cpu_seconds():
            return
        earlier = self._window.earlier_in_group(entry)
        self._examining = asyncio.get_running_loop().create_task(
            self._examine(tenant, entry, earlier, breakdown, num_evicted)
        )

    async def _examine(
        self,
        tenant: str,
        entry: WindowEntry,
        earlier: Sequence[WindowEntry],
        breakdown: PromptTokenBreakdown,
        num_evicted: int,
    ) -> None:
        def work() -> tuple[int, Any, float]:
            begun = time.thread_time()
            num_chars, found = measure_avoidable_text(entry, earlier, breakdown.num_cached)
            return num_chars, found, time.thread_time() - begun

        try:
            num_chars, found, seconds = await asyncio.to_thread(work)
        finally:
            self._examining = None
        self.spent_seconds += seconds
        limit = max(breakdown.computed - num_evicted, 0)
        scale = entry.num_tokens / num_chars if num_chars else 0.0
        tokens = min(int(found.num_chars * scale), limit)
        causes = {cause: min(int(chars * scale), limit) for cause, (chars, _) in found.causes.items()}
        for counts in (self.counts, *([self.tenants.setdefault(tenant, AvoidableCounts())] if tenant else [])):
            counts.num_requests += 1
            counts.prompt_tokens += entry.num_tokens
            counts.computed_tokens += limit
            counts.avoidable_tokens += tokens
            counts.causes = counts.causes + Counter(causes)
