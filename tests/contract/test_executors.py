"""What every executor promises, run on all of them: checking, null, and the runner on torch."""

from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from checking import CheckingExecutor
from model.paged import change_block
from model.tiny import make_checkpoint

from headstart.bench.nullexec import NullExecutor
from headstart.core.batch import Batch, Chunk
from headstart.core.engine import Engine
from headstart.core.executor import Executor
from headstart.core.limits import Limits
from headstart.core.request import FinishReason, Request, SamplingParams
from headstart.core.scheduler import Scheduler
from headstart.model.loader import load_model
from headstart.model.runner import ModelRunner

BLOCK = 16
NUM_BLOCKS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("contract"))


@pytest.fixture(params=["checking", "null", "runner"])
def make(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Executor]:
    if request.param == "checking":
        return lambda: CheckingExecutor(NUM_BLOCKS, BLOCK)
    if request.param == "null":
        return lambda: NullExecutor(NUM_BLOCKS, BLOCK, vocab_size=97)
    loaded = load_model(folder, dtype="float32", device="cpu")
    return lambda: ModelRunner(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK)


def chunk(request_id: str, tokens: list[int], start: int, n: int, blocks: list[int]) -> Chunk:
    history = array("i", tokens)
    last = start + n == len(tokens)
    return Chunk(request_id, history[start : start + n], start, blocks, start, int(last), GREEDY, len(tokens), history)


def run(executor: Executor, prompts: list[list[int]], *, caching: bool = True) -> list[list[int]]:
    """Greedy tokens of each prompt, all in one engine."""
    limits = Limits(max_batched_tokens=48, max_seqs=4, max_model_len=128)
    scheduler = Scheduler(NUM_BLOCKS, BLOCK, limits, enable_prefix_caching=caching)
    engine = Engine(scheduler, executor)
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    for request_id, prompt in zip(tokens, prompts, strict=True):
        engine.add_request(Request(request_id, array("i", prompt), GREEDY))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def test_one_row_per_chunk_and_tokens_only_where_logits_are_due(make: Callable[[], Executor]) -> None:
    tokens = list(range(1, 21))
    first = chunk("a", tokens, 0, 16, [1, 2])
    other = chunk("b", [5, 6, 7], 0, 3, [3])
    executor = make()
    result = executor.execute(Batch((first, other)))
    assert [len(row.token_ids) for row in result.rows] == [0, 1]
    rest = executor.execute(Batch((chunk("a", tokens, 16, 4, [1, 2]),), finished=("b",)))
    assert [len(row.token_ids) for row in rest.rows] == [1]
    assert all(row.error is None for row in (*result.rows, *rest.rows)) and result.elapsed >= 0


def test_an_empty_batch_gives_no_rows(make: Callable[[], Executor]) -> None:
    assert make().execute(Batch(())).rows == ()


def test_outputs_do_not_depend_on_reuse_nor_on_company(make: Callable[[], Executor]) -> None:
    shared = list(range(1, 40))
    prompts = [[*shared, 50], shared, shared, [*shared, 50, 51], [7] * 20, shared[:32]]
    together = run(make(), prompts)
    assert together == run(make(), prompts, caching=False)
    assert together == [run(make(), [prompt])[0] for prompt in prompts]


def test_geometry_is_what_was_asked_for(make: Callable[[], Executor]) -> None:
    executor = make()
    assert (executor.num_blocks, executor.block_size) == (NUM_BLOCKS, BLOCK)
    executor.zero_blocks([3, 4])


def test_a_token_outside_the_vocabulary_fails_alone_on_the_runner(folder: Path) -> None:
    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu"), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    alone = runner.execute(Batch((chunk("good", [1, 2, 3], 0, 3, [1]),))).rows[0]
    rows = runner.execute(Batch((chunk("bad", [1, 999, 3], 0, 3, [2]), chunk("good", [1, 2, 3], 0, 3, [3])))).rows
    assert rows[0].error is not None and rows[1] == alone


def test_an_engine_survives_a_row_that_is_not_finite_and_forgets_its_blocks(folder: Path) -> None:
    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu"), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    engine = Engine(Scheduler(NUM_BLOCKS, BLOCK, Limits(max_seqs=4, max_model_len=128)), runner)
    prompt = array("i", range(1, 40))

    def generate(request_id: str) -> tuple[list[int], FinishReason | None, int]:
        engine.add_request(Request(request_id, prompt, GREEDY))
        tokens, reason, cached = [], None, 0
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids
                reason, cached = output.finish_reason, output.num_cached_tokens
        return tokens, reason, cached

    clean = generate("cold")
    assert clean[1:] == (FinishReason.LENGTH, 0)
    for block in range(NUM_BLOCKS):
        change_block(runner, block, lambda kv: kv.fill_(float("nan")))  # all that is published is poisoned
    assert generate("hit")[1:] == (FinishReason.ERROR, 32)
    for block in range(NUM_BLOCKS):  # what was free is not zeroed by the engine: it did not know
        change_block(runner, block, lambda kv: kv.nan_to_num_(0.0))
    assert generate("again") == clean
