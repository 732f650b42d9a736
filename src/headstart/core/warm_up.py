"""Warm-up: steps of a dummy request, run before the first real one to measure step durations."""

from array import array

from headstart.core.batch import Batch, Chunk
from headstart.core.executor import Executor
from headstart.core.request import SamplingParams
from headstart.core.sched.step_time import StepTimes
from headstart.core.speculation.draft_length import DecodeCost

PROMPT_TOKENS = 64
NUM_DECODES = 3
DRAFT_LENGTHS = (0, 1, 3, 7, 15)
DRAFT_ROUNDS = 8
DRAFT_SECONDS = 0.5  # after which no further round begins
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
            chunk = _chunk(tokens[:end], start, num_prompt, blocks, sampling)
            elapsed = executor.execute(Batch((chunk,))).elapsed
            if is_again:
                times.learn(0 if start else num_prompt, 1 if start else 0, elapsed)
    executor.execute(Batch((), (_NAME,)))
    executor.zero_blocks(list(blocks))  # in case it was not finite


def measure_drafts(executor: Executor, cost: DecodeCost, *, max_tokens: int) -> None:
    """Run decodes with drafts of several lengths on an executor not in use yet, and record their durations in `cost`.

    `max_tokens` is the longest sequence. The blocks that are written are cleared again. Nothing is run in a pool
    or by a model that is too small for it.
    """
    size, longest = executor.block_size, 1 + DRAFT_LENGTHS[-1]
    if longest + 1 > min((executor.num_blocks - 1) * size, max_tokens):
        return
    blocks = tuple(range(1, 1 + -(-(longest + 1) // size)))
    sampling = SamplingParams(temperature=0.0)
    tokens = array("i", bytes(4 * (longest + 1)))
    executor.execute(Batch((_chunk(tokens[:1], 0, 1, blocks, sampling),)))
    seconds = 0.0
    for is_again in (False, *(True,) * DRAFT_ROUNDS):  # the first round includes one-time costs of the process
        if is_again and seconds > DRAFT_SECONDS and cost.is_measured:
            break
        for length in DRAFT_LENGTHS:
            chunk = _chunk(tokens[: 2 + length], 1, 1, blocks, sampling)._replace(
                num_logits=1 + length, history=tokens[:2]
            )
            elapsed = executor.execute(Batch((chunk,))).elapsed
            seconds += elapsed
            if is_again:
                cost.learn(1 + length, elapsed)
    executor.execute(Batch((), (_NAME,)))
    executor.zero_blocks(list(blocks))


def _chunk(
    tokens: "array[int]", start: int, num_prompt_tokens: int, blocks: tuple[int, ...], sampling: SamplingParams
) -> Chunk:
    """Return the last chunk of `tokens`, from `start` on."""
    return Chunk(
        request_id=_NAME,
        token_ids=tokens[start:],
        start=start,
        block_ids=blocks,
        write_from=start,
        num_logits=1,
        sampling=sampling,
        num_prompt_tokens=num_prompt_tokens,
        history=tokens,
    )
