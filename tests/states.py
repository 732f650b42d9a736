"""An executor with a recurrent state, a checksum of all tokens: a wrong or late one is seen at the next chunk."""

import struct
import zlib
from collections.abc import Callable, Iterable
from random import Random

from checking import CheckingExecutor, NextToken, expected_tokens, make_request, next_token
from memory_store import Habits, MemoryStore, Shelf

from headstart.core.batch import Batch, Chunk, RequestStepOutput, RowError, RowErrorKind, RowResult, StepResult
from headstart.core.cache.block_store import BlockStore, Data
from headstart.core.engine import Engine
from headstart.core.request import CacheMode, RetentionHint
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import SpeculationConfig

PAGES = 2
_PAGE = struct.Struct("<4siqi")  # mark, tokens, checksum (-1: NaN), number of page


class StateExecutor(CheckingExecutor):
    """A CheckingExecutor that computes a state from its tokens, and reads and writes it in blocks of the pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        poison: Callable[[Chunk], bool] = lambda _: False,
        model: NextToken = next_token,
    ) -> None:
        super().__init__(num_blocks, block_size, poison, model=model)
        self.states: dict[str, dict[int, int]] = {}  # request id -> number of tokens -> their checksum
        self.pages: dict[int, tuple[int, int | None, int]] = {}  # block -> tokens, checksum (None: NaN), number of page
        self.failing: set[str] = set()  # requests that began from a state that was not finite
        self.num_reads = 0

    def zero_blocks(self, block_ids: list[int]) -> None:
        super().zero_blocks(block_ids)
        for block in block_ids:
            self.pages.pop(block, None)

    def read_block(self, block_id: int) -> bytes:
        """As for keys and values, or the page of a state."""
        if block_id not in self.pages:
            return super().read_block(block_id)
        at, checksum, index = self.pages[block_id]
        return _PAGE.pack(b"page", at, -1 if checksum is None else checksum, index).ljust(self.block_bytes, b"\0")

    def write_block(self, block_id: int, data: Data) -> None:
        self.pages.pop(block_id, None)
        if not bytes(data).startswith(b"page"):
            super().write_block(block_id, data)
            return
        assert len(data) == self.block_bytes
        _, at, checksum, index = _PAGE.unpack_from(data)
        self._hold(block_id, at, None if checksum < 0 else checksum, index)

    def _hold(self, block: int, at: int, checksum: int | None, index: int) -> None:
        self.pages[block] = (at, checksum, index)
        for slot in range(block * self.block_size, (block + 1) * self.block_size):
            self.slots[slot] = "NaN"

    def execute(self, batch: Batch) -> StepResult:
        for request_id in batch.finished:
            self.states.pop(request_id, None)
            self.failing.discard(request_id)
        written = [block for chunk in batch.chunks for _, pages in chunk.saves for block in pages]
        read = {block for chunk in batch.chunks for block in (*chunk.state, *chunk.block_ids)}
        assert len(set(written)) == len(written) and read.isdisjoint(written), "a page is written that is in use"
        for chunk in batch.chunks:
            assert not set(chunk.block_ids) & self.pages.keys(), "a page of a state is in a block table"
            self._advance(chunk)
        return super().execute(batch)

    def spoil(self, block: int) -> None:
        """Make every sequence that begins from the state in this block not finite."""
        self.pages[block] = (self.pages[block][0], None, self.pages[block][2])

    def _row(self, chunk: Chunk) -> RowResult:
        if chunk.request_id in self.failing:
            return RowResult(error=RowError(RowErrorKind.NON_FINITE, "not finite"))
        return super()._row(chunk)

    def _advance(self, chunk: Chunk) -> None:
        known = chunk.history + chunk.token_ids[chunk.num_non_draft_tokens :]
        at, checksum = chunk.start, 0
        if chunk.state:
            self.num_reads += 1
            found = [self.pages[block] for block in chunk.state]
            assert [page[2] for page in found] == list(range(PAGES)) and len({page[0] for page in found}) == 1, found
            at, kept = found[0][:2]
            checksum = zlib.crc32(chunk.history[:at].tobytes()) if kept is None else kept
            (self.failing.add if kept is None else self.failing.discard)(chunk.request_id)
        elif not chunk.start:
            self.failing.discard(chunk.request_id)
        else:
            assert chunk.start in self.states[chunk.request_id], f"{chunk.request_id}: no state of {chunk.start} tokens"
            checksum = self.states[chunk.request_id][chunk.start]
        assert at == chunk.start, f"{chunk.request_id} starts at {chunk.start}, its state is of {at} tokens"
        saves, states = dict(chunk.saves), {}
        for token in chunk.token_ids:
            at, checksum = at + 1, zlib.crc32(token.to_bytes(4, "little"), checksum)
            if at >= chunk.start + chunk.num_non_draft_tokens:
                states[at] = checksum
            for index, block in enumerate(saves.pop(at, ())):
                self._hold(block, at, None if self.poison(chunk) else checksum, index)
        assert not saves, f"places outside of the chunk: {saves}"
        assert checksum == zlib.crc32(known[:at].tobytes()), f"{chunk.request_id}: a wrong state at {at}"
        self.states[chunk.request_id] = states


def text(num: int, start: int = 0) -> list[int]:
    return list(range(start, start + num))


def state_engine(
    num_blocks: int = 33,
    block_size: int = 4,
    *,
    state_pages: int = PAGES,
    poison: Callable[[Chunk], bool] = lambda _: False,
    policy: str = "fcfs",
    eviction_policy: str = "lru",
    store: BlockStore | None = None,
    speculation: SpeculationConfig | None = None,
    max_draft_tokens: int = 0,
    model: NextToken = next_token,
    **limits: int,
) -> Engine:
    """A small engine with recurrent states of PAGES blocks."""
    values = {"max_batched_tokens": 64, "max_seqs": 8, "max_model_len": 96} | limits
    config = SchedulerConfig(
        num_blocks,
        block_size,
        Limits(**values),
        policy=policy,
        eviction_policy=eviction_policy,
        state_pages=state_pages,
        speculation=speculation,
        max_draft_tokens=max_draft_tokens,
    )
    executor = StateExecutor(num_blocks, block_size, poison, model)
    return Engine(Scheduler(config, store=store), executor, store=store)


def fickle_store(rng: Random, shelf: Shelf) -> MemoryStore:
    """A store whose loads are late, in pieces, and fail at random, and which writes late."""
    return MemoryStore(
        shelf,
        Habits(
            write_delay=lambda: rng.choice([0, 0, 3]),
            load_delay=lambda: rng.choice([0, 0, 2, 40]),
            piece=lambda: rng.choice([1, 2, 100]),
            fails=lambda: rng.random() < 0.1,
        ),
    )


def random_run(
    seed: int,
    num_requests: int,
    shelf: Shelf | None = None,
    speculation: SpeculationConfig | None = None,
    model: NextToken = next_token,
) -> tuple[StateExecutor, int]:
    """Serve random requests of a random tree of prefixes on a small pool, with aborts and failures of rows.

    Every output is compared with the tokens that are due. With a `shelf`, blocks and states are stored there, and come
    back from it. Return the executor, and the tokens that were cached, with a `shelf` those that came from it.
    """
    rng = Random(seed)
    bad = {-1}
    engine = state_engine(
        rng.choice([17, 25, 41, 81]),
        policy=rng.choice(["fcfs", "lpm", "priority"]),
        eviction_policy=rng.choice(["lru", "2q", "lhd"]),
        max_batched_tokens=rng.choice([9, 24, 64]),
        max_seqs=rng.choice([2, 5, 8]),
        max_model_len=64,
        poison=lambda chunk: chunk.start in bad,
        store=None if shelf is None else fickle_store(rng, shelf),
        speculation=speculation,
        model=model,
    )
    for _ in range(rng.choice([0, 300])):
        engine.scheduler.admission.record_output_length(1)
    executor = engine.executor
    assert isinstance(executor, StateExecutor)
    texts, live, cached = [[rng.randrange(90) for _ in range(20)]], dict[str, tuple[list[int], int, list[int]]](), 0
    sent = 0
    while sent < num_requests or engine.has_work:
        if sent < num_requests and len(live) < 12 and rng.random() < 0.6:
            text = rng.choice(texts)
            prompt = [*text[: rng.randint(1, len(text))], *(rng.randrange(90) for _ in range(rng.choice([0, 1, 3, 9])))]
            num, name = rng.choice([0, 1, 2, 8 if speculation is None else 18]), str(sent)
            mode = rng.choices(list(CacheMode), [8, 1, 1])[0]
            fields = {"cache": mode, "tenant": rng.choice(["", "a", "b"]), "priority": rng.randrange(3)}
            fields["boundary"] = sent % 3 * len(prompt) // 3  # of every third none
            request = make_request(name, prompt[:44], num, retention=RetentionHint(rng.choice([10, 50])), **fields)
            engine.add_request(request)
            live[name], sent = (prompt[:44], num, []), sent + 1
        if live and rng.random() < 0.03:
            name = rng.choice(list(live))
            assert engine.abort(name)
            del live[name]
        if rng.random() < 0.01:
            engine.reset_prefix_cache()
        bad = {rng.randrange(40)} if rng.random() < 0.03 else {-1}
        for output in engine.step(float(sent)):
            prompt, num, tokens = live[output.request_id]
            tokens += output.token_ids
            assert tokens == expected_tokens(prompt, num, model=model)[: len(tokens)]
            if output.breakdown is not None:
                cached += output.breakdown.num_cached
            if output.finish_reason is not None:
                _finished(output, prompt, num, tokens, texts, rng)
                del live[output.request_id]
        engine.scheduler.pool.check_invariants()
    pool = engine.scheduler.pool
    if shelf is not None:
        cached = engine.stats().counters.store_tokens
    assert pool.num_free == pool.usable_capacity, "a page of a state is held and has no owner"
    return executor, cached


def _finished(
    output: RequestStepOutput, prompt: list[int], num: int, tokens: list[int], texts: list[list[int]], rng: Random
) -> None:
    assert output.error is not None or len(tokens) == num
    if output.error is None and len(prompt) + num < 40:
        texts.append([*prompt, *tokens])
        if len(texts) > 12:
            del texts[rng.randrange(len(texts))]


def serve(
    engine: Engine,
    prompt: Iterable[int],
    num: int = 1,
    name: str = "a",
    model: NextToken = next_token,
    boundary: int = 0,
) -> RequestStepOutput:
    """Run one request alone; its output with the breakdown, its tokens checked."""
    text, found, first = list(prompt), list[int](), None
    engine.add_request(make_request(name, text, num, boundary=boundary))
    while engine.has_work:
        for output in engine.step():
            found += output.token_ids
            first = output if output.breakdown is not None else first
        engine.scheduler.pool.check_invariants()
    assert found == expected_tokens(text, num, model=model) and first is not None
    return first
