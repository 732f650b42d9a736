"""The promises of every executor, run on all of them: checking, null, virtual, and the runner on torch."""

from array import array
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from checking import CheckingExecutor
from checking_async import AsyncCheckingExecutor
from model.paged import change_block
from model.tiny import make_checkpoint

from headstart.core.batch import UNKNOWN_TOKEN, Batch, Chunk
from headstart.core.cache.block_store import Data
from headstart.core.engine import Engine
from headstart.core.executor import Executor, is_async
from headstart.core.request import FinishReason, Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import load_model
from headstart.sim.sim_replica import SimExecutor
from headstart.sim.step_cost import AdditiveCost
from headstart_lab.runners.null_executor import NullExecutor
from headstart_lab.runners.virtual_time import StepCost, VirtualClock, VirtualExecutor

BLOCK = 16
NUM_BLOCKS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
KEEPING_KV, WITHOUT_KV = (
    ("checking", "checking with lag", "null with blocks", "runner"),
    ("null", "virtual", "simulated"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("contract"))


@pytest.fixture(params=[*KEEPING_KV, *WITHOUT_KV])
def make(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Executor]:
    if request.param == "checking":
        return lambda: CheckingExecutor(NUM_BLOCKS, BLOCK)
    if request.param == "checking with lag":
        return lambda: AsyncCheckingExecutor(NUM_BLOCKS, BLOCK)
    if request.param.startswith("null"):
        block_bytes = 100 if "blocks" in request.param else 0
        return lambda: NullExecutor(NUM_BLOCKS, BLOCK, vocab_size=97, block_bytes=block_bytes)
    if request.param == "virtual":
        return lambda: VirtualExecutor(NUM_BLOCKS, BLOCK, 97, StepCost(step=1.0, token=0.0), VirtualClock())
    if request.param == "simulated":
        return lambda: SimExecutor(NUM_BLOCKS, BLOCK, AdditiveCost(step=1.0))
    loaded = load_model(folder, dtype="float32", device="cpu")
    return lambda: ModelRunner(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK)


def chunk(request_id: str, tokens: list[int], start: int, n: int, blocks: list[int]) -> Chunk:
    history = array("i", tokens)
    last = start + n == len(tokens)
    return Chunk(request_id, history[start : start + n], start, blocks, start, int(last), GREEDY, len(tokens), history)


def run(executor: Executor, prompts: list[list[int]], *, caching: bool = True) -> list[list[int]]:
    """Greedy tokens of each prompt, all in one engine."""
    limits = Limits(max_batched_tokens=48, max_seqs=4, max_model_len=128)
    scheduler = Scheduler(SchedulerConfig(NUM_BLOCKS, BLOCK, limits, enable_prefix_caching=caching))
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


def test_a_step_continues_rows_of_the_step_before_it_without_their_tokens(make: Callable[[], Executor]) -> None:
    """The row and the blocks of the step before are read on the device; the arrays of a batch change after submit."""
    executor = make()
    if not is_async(executor):
        return
    prompt, table = list(range(1, 16)), array("i", [1])
    first = chunk("a", prompt, 0, 15, table)._replace(sampling=SamplingParams(temperature=0.0, max_tokens=9))
    begun = executor.submit(Batch((chunk("b", [5, 6, 7], 0, 3, [3]), first)))
    table.append(2)
    unknown = array("i", [UNKNOWN_TOKEN])
    second = first._replace(token_ids=unknown, start=15, block_ids=array("i", [1]), write_from=15, from_previous=1)
    behind = executor.submit(Batch((second,), ("b",)))
    (_, row) = executor.collect(begun).rows
    first.history.append(row.token_ids[0])
    third = second._replace(start=16, block_ids=table, write_from=16, from_previous=0, history=first.history)
    last = executor.submit(Batch((third,)))
    tokens = [*row.token_ids, *executor.collect(behind).rows[0].token_ids, *executor.collect(last).rows[0].token_ids]
    whole = make().execute(Batch((chunk("c", [*prompt, *tokens[:2]], 0, 17, [4, 5]),)))
    assert len(tokens) == 3 and whole.rows[0].token_ids == (tokens[2],)


def test_geometry_is_what_was_asked_for(make: Callable[[], Executor]) -> None:
    executor = make()
    assert (executor.num_blocks, executor.block_size) == (NUM_BLOCKS, BLOCK)
    executor.zero_blocks([3, 4])


@pytest.mark.parametrize("make", KEEPING_KV, indirect=True)
def test_blocks_read_here_and_written_elsewhere_continue_with_the_same_tokens(make: Callable[[], Executor]) -> None:
    tokens, here, there = [7 + i % 11 for i in range(40)], make(), make()
    here.execute(Batch((chunk("a", tokens, 0, 32, [1, 2]),)))
    for old, new in ((1, 9), (2, 8)):
        data = here.read_block(old)
        assert len(data) == here.block_bytes
        for executor in (here, there):
            executor.write_block(new, data)
            assert executor.read_block(new) == data
    history, tables = list(tokens), ((here, [1, 2, 3]), (here, [9, 8, 7]), (there, [9, 8, 6]))
    for start, num in ((32, 8), (40, 1), (41, 1)):
        batches = [(executor, Batch((chunk("a", history, start, num, table),))) for executor, table in tables]
        rows = [executor.execute(batch).rows[0] for executor, batch in batches]
        assert rows[0].error is None and len(rows[0].token_ids) == 1 and rows[1:] == rows[:1] * 2
        history.append(rows[0].token_ids[0])


@pytest.mark.parametrize("make", KEEPING_KV, indirect=True)
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_written_block_reads_back_and_touches_no_other(
    make: Callable[[], Executor], wrap: Callable[[bytes], Data]
) -> None:
    executor = make()
    others = [executor.read_block(block) for block in (0, 1, 3)]
    data = bytes(1 + i % 100 for i in range(executor.block_bytes))
    executor.write_block(2, wrap(data))
    assert executor.read_block(2) == data
    assert [executor.read_block(block) for block in (0, 1, 3)] == others
    executor.zero_blocks([2])
    assert executor.read_block(2) == others[1]


@pytest.mark.parametrize("make", KEEPING_KV, indirect=True)
def test_a_block_of_another_length_is_refused_and_changes_nothing(make: Callable[[], Executor]) -> None:
    executor = make()
    before = executor.read_block(3)
    for length in (0, executor.block_bytes - 1, executor.block_bytes + 1):
        with pytest.raises(ValueError, match=f"{length} bytes|got {length}"):
            executor.write_block(3, bytes(length))
    assert executor.read_block(3) == before


@pytest.mark.parametrize("make", WITHOUT_KV, indirect=True)
def test_an_executor_without_kv_says_so_and_refuses_every_block(make: Callable[[], Executor]) -> None:
    executor = make()
    assert executor.block_bytes == 0
    with pytest.raises(ValueError, match="keeps no KV"):
        executor.read_block(3)
    for data in (b"", b"x"):
        with pytest.raises(ValueError, match=f"got {len(data)}"):
            executor.write_block(3, data)


@pytest.mark.parametrize("make", KEEPING_KV, indirect=True)
def test_reading_blocks_beside_steps_changes_no_token(make: Callable[[], Executor]) -> None:
    prompts = [[*range(1, 40), 50 + i] for i in range(6)]
    executor, errors, stop = make(), list[Exception](), Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert {len(executor.read_block(block)) for block in range(NUM_BLOCKS)} == {executor.block_bytes}
        except Exception as error:
            errors.append(error)

    reader = Thread(target=read)
    reader.start()
    try:
        found = [run(executor, prompts) for _ in range(3)]
    finally:
        stop.set()
        reader.join(timeout=120)
    assert not reader.is_alive() and not errors
    assert found == [run(make(), prompts)] * 3


def test_a_token_outside_the_vocabulary_fails_alone_on_the_runner(folder: Path) -> None:
    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu"), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    alone = runner.execute(Batch((chunk("good", [1, 2, 3], 0, 3, [1]),))).rows[0]
    rows = runner.execute(Batch((chunk("bad", [1, 999, 3], 0, 3, [2]), chunk("good", [1, 2, 3], 0, 3, [3])))).rows
    assert rows[0].error is not None and rows[1] == alone


def test_an_engine_computes_again_what_is_not_finite_and_replaces_the_blocks(folder: Path) -> None:
    runner = ModelRunner(load_model(folder, dtype="float32", device="cpu"), num_blocks=NUM_BLOCKS, block_size=BLOCK)
    engine = Engine(Scheduler(SchedulerConfig(NUM_BLOCKS, BLOCK, Limits(max_seqs=4, max_model_len=128))), runner)
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
    assert generate("hit") == clean
    stats = engine.stats()
    assert (stats.counters.num_recomputes, stats.pool.evictions_by_cause["failed"], stats.counters.num_row_errors) == (
        1,
        2,
        0,
    )
    assert generate("again") == (clean[0], FinishReason.LENGTH, 32)
