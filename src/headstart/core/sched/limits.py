"""Limits: all per-sequence constraints of a step, in two pure functions (requested by the reviewer of vLLM #19878)."""

from dataclasses import dataclass

from headstart.core.errors import ConfigError
from headstart.core.sched.step_time import MaxStepTime


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step. Raises ConfigError, which names the flags, for combinations that could stall."""

    max_batched_tokens: int = 2048  # token budget of a step, charged by `budget_cost`
    max_seqs: int = 256  # running sequences
    max_model_len: int = 4096  # prompt + output tokens of one sequence
    long_prefill_threshold: int = 0  # cap on a chunk while other sequences want the step too; 0: none
    align: int = 1  # non-final chunks end on a multiple of this; 1: anywhere
    charge_ceil: bool = False  # charge whole blocks of `align` tokens instead of exact tokens
    max_step_time: MaxStepTime | None = None  # maximum duration of a step with prompt tokens; None: unbounded

    def __post_init__(self) -> None:
        for name in ("max_batched_tokens", "max_seqs", "max_model_len", "align"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.long_prefill_threshold < 0:
            raise ConfigError(f"long_prefill_threshold is {self.long_prefill_threshold}; use 0 to switch it off")
        if 0 < self.long_prefill_threshold < self.align:
            raise ConfigError(
                f"--long-prefill-token-threshold {self.long_prefill_threshold} is smaller than --block-size "
                f"{self.align}: with --page-aligned-scheduling no capped chunk could end on a block boundary; "
                f"raise it to {self.align} or set it to 0"
            )
        if self.max_batched_tokens < self.max_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_batched_tokens} is smaller than --max-num-seqs {self.max_seqs}: "
                f"not even one token a step for each running sequence; raise it or lower --max-num-seqs"
            )
        if self.align > 1 and self.max_batched_tokens < self.max_seqs + self.align:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_batched_tokens} is smaller than --max-num-seqs {self.max_seqs} + "
                f"--block-size {self.align}: with --page-aligned-scheduling decodes could starve a prompt for ever; "
                f"raise it to {self.max_seqs + self.align} or lower --max-num-seqs"
            )


def chunk_len(want: int, start: int, budget: int, limits: Limits, *, alone: bool, cap: int | None = None) -> int:
    """Return how many of the `want` tokens it still needs from `start` on to compute now; 0: none in this step.

    All request-state limits are applied here. `alone` lifts the long-prefill cap: no other sequence is waiting. `cap`:
    the number of tokens the step has time for; None: any. A `cap` above 0 is raised to one aligned block.
    """
    if want == 1:
        return 1 if budget > 0 else 0  # usually a decode: there is nothing to cut
    n = want
    if limits.long_prefill_threshold and not alone:
        n = min(n, limits.long_prefill_threshold)
    if cap is not None:
        n = min(n, max(cap, limits.align) if cap > 0 else 0)
    if limits.charge_ceil:  # the largest that costs no more
        budget = max(start // limits.align * limits.align + budget // limits.align * limits.align - start, 0)
    n = min(n, budget)
    if n < want and limits.align > 1:
        n = (start + n) // limits.align * limits.align - start
    return max(n, 0)


def budget_cost(start: int, n: int, limits: Limits, *, decode: bool) -> int:
    """Return the budget cost of a chunk: `n` for a decode or with exact charging, else the whole blocks it touches."""
    if decode or not limits.charge_ceil:
        return n
    align = limits.align
    return -(-(start + n) // align) * align - start // align * align
