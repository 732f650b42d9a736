"""Jobs: requests by their token ids, lengths and due times; a workload before it is served.

Not here: the runners that serve them (`measurement/runner.py`) and the records of the results (`request_record.py`).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.common_prefix import common_prefix_length


@dataclass(frozen=True, slots=True)
class TokenSampling:
    """The sampling of a job's tokens. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are no limits."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = TokenSampling()


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send: exactly `output` tokens are generated, whatever they are."""

    prompt: "array[int]"  # token ids
    output: int  # tokens
    at: float = 0.0  # seconds after the start at which it is due
    sampling: TokenSampling = GREEDY
    after: tuple[int, ...] = ()  # indices of the jobs whose answers it needs: it is due a pause after the last of them
    pause: float = 0.0  # seconds


class JobDependencies:
    """The jobs of a list that are due after others."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._num_awaited = [len(job.after) for job in jobs]
        self._waiting: dict[int, list[int]] = {}
        for index, job in enumerate(jobs):
            for before in job.after:
                self._waiting.setdefault(before, []).append(index)

    def release_dependents(self, index: int, now: float) -> list[tuple[float, int]]:
        """Return the jobs that wait for no other one once `index` has ended, each with the time when it is due."""
        found: list[tuple[float, int]] = []
        for waiting in self._waiting.pop(index, ()):
            self._num_awaited[waiting] -= 1
            if not self._num_awaited[waiting]:
                found.append((now + self._jobs[waiting].pause, waiting))
        return found


def jobs_from_prompts(
    prompts: "Iterable[array[int]]", output: int, due: Sequence[float] | None = None, sampling: TokenSampling = GREEDY
) -> list[Job]:
    """Return one job per prompt; `due`: when each arrives, in seconds (None: all at once).

    Raises:
        ValueError: `due` has another length than `prompts`.
    """
    found = list(prompts)
    times = [0.0] * len(found) if due is None else due
    return [Job(prompt, output, at, sampling) for prompt, at in zip(found, times, strict=True)]


def perfect_cache_prefill_tokens(prompts: "Sequence[array[int]]") -> int:
    """Return the prefill tokens that a perfect, infinite cache computes for these prompts in order, starting empty.

    Every distinct prefix once, token by token; of a prompt that an earlier one contains, its last token, which yields
    the logits. This is the denominator of prefill redundancy. It ignores blocks: engines share whole blocks only, so
    the redundancy they can reach is slightly above 1.
    """
    ordered = sorted((prompt.tobytes(), index, prompt.itemsize) for index, prompt in enumerate(prompts))
    total, before = 0, b""
    for position, (tokens, index, size) in enumerate(ordered):
        total += (len(tokens) - common_prefix_length(before, tokens) // size * size) // size
        total += _is_contained(ordered, position, tokens, index)
        before = tokens
    return total


def _is_contained(ordered: list[tuple[bytes, int, int]], position: int, tokens: bytes, index: int) -> bool:
    """Return whether an earlier prompt begins with all of these tokens; equal prompts are adjacent in `ordered`."""
    if position and ordered[position - 1][0] == tokens:
        return True
    for longer, at, _ in ordered[position + 1 :]:
        if not longer.startswith(tokens):
            return False
        if at < index:
            return True
    return False
