"""Warm-up: steps of a dummy request, run before the first real one to measure step durations."""

from array import array

from headstart.core.batch import Batch, Chunk
from headstart.core.executor import Executor
from headstart.core.request import SamplingParams
from headstart.core.sched.step_time import StepTimes

PROMPT_TOKENS = 64
NUM_DECODES = 3
_NAME = "warm-up"


def measure_steps(executor: Executor, times: StepTimes, *, max_tokens: int) -> None:
    """Run a short prompt and some decodes on an executor not in use yet, and record their durations in `times`.

    `max_tokens` is the longest sequence. The blocks that are written are cleared again. Nothing is run in a pool
    or by a model that is too small for it.
    """
    size = executor.block_size
    room = min((executor.num_blocks - 1) * size, max_tokens)
    num_prompt = min(PROMPT_TOKENS, room - NUM_DECODES)
    if num_prompt < 1:
        return
    blocks = tuple(range(1, 1 + -(-(num_prompt + NUM_DECODES) // size)))
    tokens = array("i", bytes(4 * (num_prompt + NUM_DECODES)))
    sampling = SamplingParams(max_tokens=NUM_DECODES, temperature=0.0)
    starts = [0, *range(num_prompt, num_prompt + NUM_DECODES)]
    for is_again in (False, True):  # the first pass includes one-time costs of the process
        for start in starts:
            end = start + 1 if start else num_prompt
            chunk = Chunk(
                request_id=_NAME,
                token_ids=tokens[start:end],
                start=start,
                block_ids=blocks,
                write_from=start,
                num_logits=1,
                sampling=sampling,
                num_prompt_tokens=num_prompt,
                history=tokens,
            )
            elapsed = executor.execute(Batch((chunk,))).elapsed
            if is_again:
                times.learn(0 if start else num_prompt, 1 if start else 0, elapsed)
    executor.execute(Batch((), (_NAME,)))
    executor.zero_blocks(list(blocks))  # in case it was not finite
