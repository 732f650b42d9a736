"""The checking executor: its "KV" is (position, token), so any wrong, stale or missing block is caught at the read.

The oracle of every scheduling test. It samples a pure function of the whole sequence, so outputs can be predicted
without it: `expected_tokens`.
"""

import struct
import zlib
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from headstart.core.batch import (
    Batch,
    Chunk,
    RequestStepOutput,
    RowError,
    RowErrorKind,
    RowResult,
    StepResult,
    TokenLogprob,
)
from headstart.core.cache.block_store import BlockStore, Data
from headstart.core.engine import Engine
from headstart.core.errors import InvalidRequestError
from headstart.core.grammars import GrammarCompiler
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import SpeculationConfig

VOCAB = 97
EMPTY, GARBAGE = (-1, -1), (-2, -2)


NextToken = Callable[["array[int]"], int]


def next_token(tokens: "array[int]") -> int:
    """Return the token that the model of these tests samples after `tokens`."""
    return zlib.crc32(tokens.tobytes()) % VOCAB


def repeating_token(tokens: "array[int]") -> int:
    """Return a next token that mostly continues as before: by the last two tokens, but for one time in six."""
    if zlib.crc32(tokens.tobytes()) % 6 == 0:
        return zlib.crc32(tokens.tobytes()) // 6 % VOCAB
    return zlib.crc32(tokens[-2:].tobytes()) % 5


def expected_tokens(
    prompt: Iterable[int], num: int, stop: tuple[int, ...] = (), model: NextToken = next_token
) -> list[int]:
    """The output of `num` tokens at most, without any engine."""
    tokens, out = array("i", prompt), []
    while len(out) < num:
        out.append(model(tokens))
        tokens.append(out[-1])
        if out[-1] in stop:
            break
    return out


class CheckingExecutor:
    """An Executor that verifies every block it reads and every block it is told to write.

    `poison` decides which chunks fail: their KV becomes NaN-like garbage and their row an error. `refuse` decides
    which rows fail by the request's own fault: their KV is as it should be. A grammar is a number here: so many tokens
    are forced after each sampled one. They are those that would be sampled, so the output is the same.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        poison: Callable[[Chunk], bool] = lambda _: False,
        refuse: Callable[[Chunk], bool] = lambda _: False,
        model: NextToken = next_token,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = 8 * block_size
        self.poison = poison
        self.refuse = refuse
        self.model = model
        self.slots: list[tuple[int, int] | str | None] = [None] * (num_blocks * block_size)
        self.batches: list[Batch] = []
        self.finished: list[str] = []
        self.corrupted: set[int] = set()  # blocks that were corrupted and not cleared since
        self.harmed: set[str] = set()  # requests that read one of them

    def zero_blocks(self, block_ids: list[int]) -> None:
        self.corrupted.difference_update(block_ids)
        for block in block_ids:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.slots[slot] = None

    def corrupt(self, block: int) -> None:
        """Make readers of the block fail, until it is cleared or written anew."""
        self.corrupted.add(block)
        for slot in range(block * self.block_size, (block + 1) * self.block_size):
            self.slots[slot] = "NaN"

    def read_block(self, block_id: int) -> bytes:
        """Position and token of every slot; (-1, -1) for an empty one and (-2, -2) for garbage."""
        slots = self.slots[block_id * self.block_size : (block_id + 1) * self.block_size]
        return b"".join(
            struct.pack("<ii", *(slot if isinstance(slot, tuple) else (GARBAGE, EMPTY)[slot is None])) for slot in slots
        )

    def write_block(self, block_id: int, data: Data) -> None:
        if len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes, a block has {self.block_bytes}")
        for slot, pair in enumerate(struct.iter_unpack("<ii", data), block_id * self.block_size):
            self.slots[slot] = None if pair == EMPTY else "NaN" if pair == GARBAGE else pair

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        self.finished += batch.finished
        assert len({chunk.request_id for chunk in batch.chunks}) == len(batch.chunks), "a sequence is twice in a batch"
        self._check_writers(batch)
        for chunk in batch.chunks:  # all writes of a layer come before its reads
            for position in range(max(chunk.start, chunk.write_from), chunk.start + len(chunk.token_ids)):
                value = (position, chunk.token_ids[position - chunk.start])
                self.slots[self._slot(chunk, position)] = "NaN" if self.poison(chunk) else value
        rows = tuple(self._row(chunk) for chunk in batch.chunks)
        for chunk, row in zip(batch.chunks, rows, strict=True):
            if row.error is not None and row.error.kind is RowErrorKind.NON_FINITE:  # layers behind the first wrote NaN
                for position in range(max(chunk.start, chunk.write_from), chunk.start + len(chunk.token_ids)):
                    self.slots[self._slot(chunk, position)] = "NaN"
        return StepResult(rows, elapsed=1.0)

    def _row(self, chunk: Chunk) -> RowResult:
        drafts = chunk.token_ids[len(chunk.token_ids) + 1 - chunk.num_logits :] if chunk.num_logits else array("i")
        end = chunk.start + len(chunk.token_ids)
        known = chunk.history + drafts
        assert len(chunk.token_ids) >= 1 and end <= len(known) and len(drafts) < len(chunk.token_ids)
        assert known[chunk.start : end] == chunk.token_ids
        blocks = -(-end // self.block_size)
        assert len(chunk.block_ids) >= blocks, f"{chunk.request_id}: {end} tokens in {len(chunk.block_ids)} blocks"
        for block in set(chunk.block_ids[:blocks]):
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                if self.slots[slot] == "NaN":  # also masked slots multiply 0 x NaN
                    self.harmed.update([chunk.request_id] if block in self.corrupted else [])
                    return RowResult(error=RowError(RowErrorKind.NON_FINITE, "not finite"))
        for position in range(end):
            held = self.slots[self._slot(chunk, position)]
            assert held == (position, known[position]), (
                f"{chunk.request_id} reads {held} at position {position}, token {known[position]} is due"
            )
        assert (chunk.num_logits > 0) == (end - len(drafts) == len(chunk.history) and chunk.sampling.max_tokens > 0)
        if self.refuse(chunk):
            return RowResult(error=RowError(RowErrorKind.REQUEST, "refused"))
        tokens = self._sampled(chunk, drafts) if chunk.num_logits else ()
        if chunk.sampling.prompt_logprobs is None:
            return RowResult(tokens)
        followers = chunk.history[chunk.start + 1 : min(end + 1, chunk.num_prompt_tokens)]
        return RowResult(tokens, prompt_logprobs=tuple(TokenLogprob(token, 0.0) for token in followers))

    def _sampled(self, chunk: Chunk, drafts: "array[int]") -> tuple[int, ...]:
        """The tokens that are sampled up to the first that differs from the drafts, and the forced ones behind each."""
        num_forced = 0 if chunk.sampling.grammar is None else int(chunk.sampling.grammar)
        tokens: list[int] = []
        while len(tokens) <= len(drafts) and drafts[: len(tokens)].tolist() == tokens:
            tokens += expected_tokens([*chunk.history, *tokens], 1 + num_forced, model=self.model)
        return tuple(tokens)

    def _check_writers(self, batch: Batch) -> None:
        readers: dict[int, int] = {}
        for chunk in batch.chunks:
            for block in chunk.block_ids:
                assert 0 < block < self.num_blocks, f"{chunk.request_id} uses block {block}"
                readers[block] = readers.get(block, 0) + 1
        for chunk in batch.chunks:
            assert len(set(chunk.block_ids)) == len(chunk.block_ids), "a block is twice in a table"
            for position in range(max(chunk.start, chunk.write_from), chunk.start + len(chunk.token_ids)):
                block = chunk.block_ids[position // self.block_size]
                assert readers[block] == 1, f"{chunk.request_id} writes block {block}, which is shared"

    def _slot(self, chunk: Chunk, position: int) -> int:
        return chunk.block_ids[position // self.block_size] * self.block_size + position % self.block_size


class Grammars:
    """A GrammarCompiler that ends when it is told: `compiled` at once, `finish` later. "wrong" does not compile."""

    def __init__(self, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._pending: list[tuple[str, Future[None]]] = []

    def begin_compile(self, grammar: str, tenant: str = "") -> "Future[None]":
        future: Future[None] = Future()
        self._pending.append((grammar, future))
        if self._compiled:
            self.finish()
        return future

    def finish(self) -> None:
        """All grammars are compiled now."""
        for grammar, future in self._pending:
            if grammar == "wrong":
                future.set_exception(InvalidRequestError("the grammar cannot be compiled: wrong"))
            else:
                future.set_result(None)
        self._pending.clear()


def make_engine(
    num_blocks: int = 9,
    block_size: int = 4,
    *,
    poison: Callable[[Chunk], bool] = lambda _: False,
    enable_prefix_caching: bool = True,
    policy: str = "fcfs",
    charge_cached: bool = False,
    lpm_k: int = 4,
    eviction_policy: str = "lru",
    tenant_floor: float = 0.0,
    expects_short_outputs: bool = False,
    store: BlockStore | None = None,
    grammars: GrammarCompiler | None = None,
    model: NextToken = next_token,
    speculation: SpeculationConfig | None = None,
    executor_class: type[CheckingExecutor] = CheckingExecutor,
    **limits: int,
) -> Engine:
    """A small engine over the checking executor: 8 usable blocks of 4 tokens.

    One that `expects_short_outputs` admits too many for its pool, so that some must be preempted.
    """
    values = {"max_batched_tokens": 64, "max_seqs": 8, "max_model_len": 64} | limits
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks,
            block_size,
            Limits(**values),
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            lpm_k=lpm_k,
            eviction_policy=eviction_policy,
            tenant_floor=tenant_floor,
            speculation=speculation,
            charge_cached=charge_cached,
        ),
        store=store,
    )
    for _ in range(300 * expects_short_outputs):
        scheduler.admission.record_output_length(1)
    executor = executor_class(num_blocks, block_size, poison, model=model)
    return Engine(scheduler, executor, store=store, grammars=grammars)


def make_request(request_id: str, prompt: Iterable[int], max_tokens: int = 1, **fields: object) -> Request:
    """A greedy request; `fields` are Request's, `stop` or `grammar`."""
    stop, grammar = fields.pop("stop", ()), fields.pop("grammar", None)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop, grammar=grammar)  # type: ignore[arg-type]
    return Request(request_id, array("i", prompt), sampling, **fields)  # type: ignore[arg-type]


def run(engine: Engine, max_steps: int = 10_000) -> dict[str, list[RequestStepOutput]]:
    """Steps until nothing is left, checking the pool after every step; the outputs of each request."""
    outputs: dict[str, list[RequestStepOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.pool.check_invariants()
    raise AssertionError(f"still busy after {max_steps} steps")


def generate(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    """Adds the requests, runs them all and returns their tokens."""
    for request in requests:
        engine.add_request(request)
    return {rid: [t for output in outs for t in output.token_ids] for rid, outs in run(engine).items()}


def executor_of(engine: Engine) -> CheckingExecutor:
    assert isinstance(engine.executor, CheckingExecutor)
    return engine.executor
