"""Step times: bounds the duration of steps, by limiting prompt tokens according to measured durations.

A step lasts as long as all of its tokens, so a chunk of 2,048 prompt tokens delays every running decode by seconds, and
no message is read meanwhile. The time per token depends on the model and the machine, so it is measured: the duration
of pure decode steps by their number of decodes, and the time that a prompt token adds. For traced requests it also
records the chunks of their prompts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headstart.core.batch import Chunk, PrefillChunkTiming, RequestStepOutput
from headstart.core.request import Request

DECODE_STEPS = 6.0  # bound of a step with prompt tokens, in pure decode steps
LEAST_SECONDS = 0.03  # lower limit of the bound: shorter gaps are not noticed
MOST_SECONDS = 0.3  # messages are read between steps: an aborted request ends within two
LEAST_TOKENS = 16
MAX_PREFILL_CHUNKS = 48  # recorded of one prompt; later ones count with the last
_UP, _DOWN = 0.25, 0.5  # weights of a step slower, or not slower, than expected: delays only add
_TRUSTED = 2.0  # an outlier counts as at most this many times slower or faster than expected


@dataclass(frozen=True, slots=True)
class MaxStepTime:
    """The longest step with prompt tokens, in seconds: --max-step-time.

    None: DECODE_STEPS times the duration of its decodes alone, at least LEAST_SECONDS, and at most MOST_SECONDS. Where
    more prompts wait than decodes run, it is larger by the root of their ratio: short steps delay many prompts for few
    decodes.
    """

    seconds: float | None = None
    least_tokens: int = LEAST_TOKENS  # minimum of prompt tokens in a step; the limit is a multiple of it


class StepTimes:
    """The measured step durations of an engine, in seconds."""

    def __init__(self, bound: MaxStepTime | None) -> None:
        """Begin without measurements. `bound` None: steps are unlimited; durations are still measured."""
        self.bound = bound
        self.seconds_per_token = 0.0  # added to a step by one more prompt token; 0: not known yet
        self._decode_seconds: list[float] = []  # of 2**(i - 1) to 2**i - 1 decodes at index i; 0: not known yet

    def decode_step_seconds(self, num_decodes: int) -> float:
        """Return the duration of a step of `num_decodes` decodes, as measured for the closest number; 0 if never."""
        known = self._decode_seconds
        at = min(num_decodes.bit_length(), len(known) - 1)
        below = next((seconds for seconds in known[at::-1] if seconds), 0.0) if at >= 0 else 0.0
        return below or next((seconds for seconds in known if seconds), 0.0)

    def marginal_decode_seconds(self, num_decodes: int) -> float:
        """Return the time that one more decode adds to a step of `num_decodes`; 0 while nothing is known."""
        many, one = (
            self.decode_step_seconds(num_decodes),
            self._decode_seconds[1] if len(self._decode_seconds) > 1 else 0.0,
        )
        return max(many - one, 0.0) / (num_decodes - 1) if one and num_decodes > 1 else many / max(num_decodes, 1)

    def expected_seconds(self, num_prompt_tokens: int, num_decodes: int) -> float:
        """Return the expected duration of a step; 0 while nothing is known."""
        decodes = self.decode_step_seconds(num_decodes) if num_decodes else 0.0
        return decodes + num_prompt_tokens * self.seconds_per_token

    def max_prompt_tokens(self, num_decodes: int, num_prompts: int = 1) -> int | None:
        """Return the number of prompt tokens that the next step has time for beside its decodes; None: no bound.

        `num_prompts`: prompts that are in prefill or waiting.
        """
        if self.bound is None or not self.seconds_per_token:
            return None
        decodes = self.expected_seconds(0, num_decodes)
        seconds = self.bound.seconds
        if seconds is None:
            seconds = MOST_SECONDS
            if num_decodes:
                usual = max(DECODE_STEPS * decodes, LEAST_SECONDS)
                seconds = min(usual * max(num_prompts / num_decodes, 1.0) ** 0.5, MOST_SECONDS)
        num = int((seconds - decodes) / self.seconds_per_token)
        least = self.bound.least_tokens
        return max(num // least, 1) * least

    def learn(self, num_prompt_tokens: int, num_decodes: int, elapsed: float) -> None:
        """Update from one step that took `elapsed`; 0 is ignored."""
        if elapsed <= 0:
            return
        if not num_prompt_tokens:
            known, at = self._decode_seconds, num_decodes.bit_length()
            known.extend([0.0] * (at + 1 - len(known)))
            known[at] = _moved(known[at], elapsed)
        elif num_prompt_tokens >= LEAST_TOKENS:
            if not self.seconds_per_token:
                left = elapsed - self.expected_seconds(0, num_decodes)
                self.seconds_per_token = (left if left > 0 else elapsed) / num_prompt_tokens
            # relative to the whole step: a difference would turn a small delay of a short chunk into a high rate
            seen = self.seconds_per_token * elapsed / self.expected_seconds(num_prompt_tokens, num_decodes)
            self.seconds_per_token = _moved(self.seconds_per_token, seen)


def _moved(old: float, seen: float) -> float:
    """Move `old` towards `seen`, by a bounded factor, so that one outlier does not move it far."""
    if not old:
        return seen
    factor = min(max(seen / old, 1 / _TRUSTED), _TRUSTED)
    return old * factor ** (_UP if factor > 1 else _DOWN)


class TracedRequestPrefills:
    """The chunks in which the prompts of traced requests are computed, until all of the prompt is."""

    def __init__(self) -> None:
        self._chunks: dict[str, list[PrefillChunkTiming]] = {}

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def add_request_if_traced(self, request: Request) -> None:
        """Record the chunks of a request, if it is traced."""
        if request.is_traced:
            self._chunks[request.request_id] = []

    def remove(self, request_id: str) -> None:
        """Forget a request. Unknown ones are ignored."""
        self._chunks.pop(request_id, None)

    def record_and_attach_timings(
        self, chunks: Iterable[Chunk], planned_at: float, elapsed: float, outputs: list[RequestStepOutput]
    ) -> list[RequestStepOutput]:
        """Note a step that has ended; return its outputs, with the chunks of the prompts that are complete."""
        for chunk in chunks:
            found = self._chunks.get(chunk.request_id)
            if found is not None:
                one = PrefillChunkTiming(planned_at, elapsed, len(chunk.token_ids))
                if len(found) == MAX_PREFILL_CHUNKS:
                    last = found.pop()
                    until = planned_at + elapsed - last.planned_at
                    one = PrefillChunkTiming(last.planned_at, until, last.num_tokens + one.num_tokens)
                found.append(one)
        return [self._with_chunks(output) for output in outputs]

    def _with_chunks(self, output: RequestStepOutput) -> RequestStepOutput:
        if output.breakdown is None and output.finish_reason is None:
            return output
        found = self._chunks.pop(output.request_id, None)
        return output if found is None else output._replace(prefill=tuple(found))
