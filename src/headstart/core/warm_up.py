"""Warm-up: steps of dummy requests, run before the first real one to measure step durations or the memory of a step."""

from array import array

from headstart.core.batch import Batch, Chunk
from headstart.core.executor import Executor
from headstart.core.request import SamplingParams
from headstart.core.sched.step_time import StepTimes
from headstart.core.speculation.draft_length import DecodeCostModel

PROMPT_TOKENS = 64
NUM_DECODES = 3
DRAFT_LENGTHS = (0, 1, 4, 7, 15)
DRAFT_CONTEXT = 1024  # tokens that decodes with drafts attend to, as far as there is room
DRAFT_ROUNDS = 8
DRAFT_SECONDS = 0.5  # after which no further round begins
_NAME = "warm-up"


def measure_step_times(executor: Executor, times: StepTimes, *, max_tokens: int) -> None:
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


def measure_draft_cost(executor: Executor, cost: DecodeCostModel, *, max_tokens: int, state_pages: int = 0) -> None:
    """Run decodes with drafts of several lengths on an executor not in use yet, and set `cost` from their durations.

    `max_tokens` is the longest sequence. The context, and a recurrent state of `state_pages` blocks, are zeros, not
    computed. The blocks that are written are cleared again. Nothing is run in a pool or by a model that is too small.
    """
    size, longest = executor.block_size, 1 + DRAFT_LENGTHS[-1]
    start = min(DRAFT_CONTEXT, (executor.num_blocks - 1 - state_pages) * size - longest, max_tokens - longest)
    if start < 1:
        return
    blocks = tuple(range(1, 1 + -(-(start + longest) // size)))
    state = tuple(range(1 + len(blocks), 1 + len(blocks) + state_pages))
    sampling = SamplingParams(temperature=0.0)
    tokens = array("i", bytes(4 * (start + longest)))
    executor.zero_blocks([*blocks, *state])
    seconds, least = 0.0, dict[int, float]()
    for is_again in (False, *(True,) * DRAFT_ROUNDS):  # the first round includes one-time costs of the process
        if is_again and seconds > DRAFT_SECONDS and least:
            break
        for length in DRAFT_LENGTHS:
            chunk = _chunk(tokens[: start + 1 + length], start, start, blocks, sampling)._replace(
                num_logits=1 + length, history=tokens[: start + 1], state=state
            )
            elapsed = executor.execute(Batch((chunk,))).elapsed
            seconds += elapsed
            if is_again:
                least[1 + length] = min(elapsed, least.get(1 + length, elapsed))
    cost.calibrate(least)
    executor.execute(Batch((), (_NAME,)))
    executor.zero_blocks(list(blocks))


def memory_profile_batches(
    max_batched_tokens: int, max_seqs: int, max_tokens: int, block_size: int
) -> tuple[list[Batch], int]:
    """Return two steps that need the most memory beside KV, and the number of blocks in a pool for them.

    One has prompts as long as possible, `max_tokens` at most, the other as many sequences as possible; every chunk is
    sampled, with sorted logits.
    """
    fit = min(max_batched_tokens, max_tokens)
    long = [min(fit, max_batched_tokens - start) for start in range(0, max_batched_tokens, fit)][:max_seqs]
    rows = min(max_batched_tokens, max_seqs)
    batches: list[Batch] = []
    num_blocks = 1
    for lengths in (long, [min(max_batched_tokens // rows, max_tokens)] * rows):
        chunks: list[Chunk] = []
        block = 1
        for number, length in enumerate(lengths):
            blocks = tuple(range(block, block + -(-length // block_size)))
            block += len(blocks)
            chunk = _chunk(array("i", bytes(4 * length)), 0, length, blocks, SamplingParams(top_p=0.9, seed=0))
            chunks.append(chunk._replace(request_id=f"{_NAME}-{number}"))
        batches.append(Batch(tuple(chunks)))
        num_blocks = max(num_blocks, block)
    return batches, num_blocks


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
