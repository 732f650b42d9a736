"""CudaRunner: the executor on a GPU. A step is one copy in, one graph or one pass of launches, one copy out, one event.

`submit` returns as soon as the step is queued, so the next one is planned and packed while it runs; `collect` waits for
its event. Rows that the device could not sample itself (DeviceSampler) are sampled when they are collected; if the next
step has already gone on with another token for such a row, the chunk that continues it is computed again.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.core.batch import Batch, Chunk, RowError, RowErrorKind, RowResult, StepResult
from headstart.core.cache.block_store import Data
from headstart.model.cuda.cuda_kv import CudaKV
from headstart.model.cuda.decoder_pass import DECODES, GROUPS, MIXED, CudaDecoder, PassResult
from headstart.model.cuda.device_sampling import DeviceSampler
from headstart.model.cuda.staged_sampling import StagedParamsLayout
from headstart.model.cuda.steady_decodes import SteadyDecodes
from headstart.model.cuda.step_graphs import GraphKey, StepGraphs, longest_graph_tokens
from headstart.model.cuda.step_plan import PackedStepChunks, StepArrayLayout, StepPlanner
from headstart.model.grammar.grammar_compiler import CachingGrammarCompiler
from headstart.model.grammar.grammar_rows import GrammarRows
from headstart.model.kv_writes import Int32s
from headstart.model.layers.decoder import Decoder
from headstart.model.step_inputs import PackedChunks, StepInputBounds, chunk_problems, pack_chunks
from headstart.model.weights.model_loader import LoadedModel

META_INTS = 1 << 20  # room for the array of a step
MAX_ROWS = 256  # of decodes; more are computed in several passes
GRAPHS_BYTES = (
    1 << 30
)  # of the driver and torch for 60 graphs: 0.3 GB on an H200 beside logits that they share, once 1.0 GB
MAX_ANSWERS = 1 << 15  # ints that come back from a step without log-probabilities
_NOT_FINITE = RowResult(error=RowError(RowErrorKind.NON_FINITE, "the model computed no finite hidden states"))


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass over some chunks of a step, on its way."""

    chunks: list[Chunk]
    where: list[int]  # their indices in the batch
    indptr: Int32s
    sampled: list[int]  # indices in `chunks`
    staged: StagedParamsLayout
    answer: Tensor  # pinned: the sampler's answer, then whether each token's hidden states are finite
    done: "torch.cuda.Event | None"
    num_answers: int = 0  # ints of the sampler's answer
    logits: Tensor | None = None
    prompt_rows: dict[int, RowResult] = field(
        default_factory=dict[int, RowResult]
    )  # with log-probabilities of a prompt


@dataclass(slots=True, eq=False)
class SubmittedStep:
    """A step that is queued on the device."""

    began: float
    finished: tuple[str, ...]  # requests whose state is dropped when this step is collected: those before name them
    rows: list[RowResult | None]
    passes: list[_Pass]
    outputs: list[int]  # by chunk: its row in the buffer of sampled tokens, -1: none
    patches: dict[int, RowResult] = field(default_factory=dict)  # chunks computed again


class CudaRunner:
    """Implementation of core's AsyncExecutor for a native decoder over `num_blocks` KV blocks, block 0 never used.

    Without a GPU (Triton's interpreter) it does the same without graphs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
        grammars: CachingGrammarCompiler | None = None,
        max_rows: int = MAX_ROWS,
        max_graph_tokens: int | None = None,
    ) -> None:
        """`max_rows`: the most decodes of a step. `max_graph_tokens`: of a step with prompts; None: as it pays."""
        assert isinstance(loaded.model, Decoder)
        exact = loaded.batch_invariant
        if max_graph_tokens is None:
            linears = [linear for layer in loaded.model.layers for linear in layer.linear_weights]
            num_weights = sum(linear.weight.numel() for linear in linears if linear.weight is not None)
            max_graph_tokens = longest_graph_tokens(len(loaded.model.layers), num_weights)
        self.loaded, self.num_blocks, self.block_size = loaded, num_blocks, block_size
        self.device = loaded.device
        self.kv = CudaKV(
            loaded.kv_shape, num_blocks=num_blocks, block_size=block_size, dtype=loaded.dtype, device=loaded.device
        )
        self.block_bytes = self.kv.block_bytes
        max_positions, config = loaded.max_model_len, loaded.model.config
        self.decoder = CudaDecoder(loaded.model, self.kv, max_positions=max_positions, exact=exact)
        self.graphs = StepGraphs(self.kv, max_rows=max_rows, max_tokens=max_graph_tokens)
        rows = None if grammars is None else GrammarRows(grammars, torch.get_num_threads())
        self.sampler = DeviceSampler(loaded.vocab_size, seed=seed, grammars=rows)
        self._bounds = StepInputBounds(num_blocks, block_size, loaded.vocab_size, max_positions)
        self.planner = StepPlanner(
            page=block_size,
            group=config.num_heads // config.num_kv_heads,
            kv_heads=config.num_kv_heads,
            processors=self.decoder.processors,
            max_parts=self.decoder.max_parts,
            split=self.decoder.split,
            exact=exact,
        )
        self._steady = SteadyDecodes(self._bounds, self.decoder.split)
        on_gpu = self.device.type == "cuda"
        self._max_rows = max(max_rows, max_graph_tokens)
        self._staging = [torch.zeros(META_INTS, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._meta = torch.zeros(META_INTS, dtype=torch.int32, device=self.device)
        self._answers = [torch.zeros(MAX_ANSWERS, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._sampled = torch.zeros(MAX_ANSWERS, dtype=torch.int32, device=self.device)
        self._turn = 0
        self._flying: list[SubmittedStep] = []  # submitted and not collected, oldest first
        self._ended = 0.0  # when a step was last collected

    def execute(self, batch: Batch) -> StepResult:
        """See core's Executor."""
        return self.collect(self.submit(batch))

    @torch.inference_mode()
    def submit(self, batch: Batch) -> SubmittedStep:
        """See core's AsyncExecutor."""
        with self._device():
            return self._submit(batch)

    def _submit(self, batch: Batch) -> SubmittedStep:
        began = time.perf_counter()
        step = SubmittedStep(began, batch.finished, [None] * len(batch.chunks), [], [-1] * len(batch.chunks))
        previous = self._flying[-1].outputs if self._flying else []
        where = list(range(len(batch.chunks)))
        ready = self._steady.try_build_next_step(batch.chunks, previous)
        if ready is not None:
            step.passes.append(self._launch_pass(step, list(batch.chunks), where, ready))
            self._flying.append(step)
            return step
        packed = pack_chunks(batch.chunks, self._bounds) if batch.chunks else None
        if packed is None and batch.chunks:
            errors = chunk_problems(batch.chunks, self._bounds)
            for index, message in errors.items():
                step.rows[index] = RowResult(error=RowError(RowErrorKind.REQUEST, message))
            where = [index for index in where if index not in errors]
            packed = pack_chunks([batch.chunks[index] for index in where], self._bounds) if where else None
        if packed is not None:
            self._launch(step, [batch.chunks[index] for index in where], where, packed, previous)
        self._flying.append(step)
        return step

    @torch.inference_mode()
    def collect(self, handle: object) -> StepResult:
        """See core's AsyncExecutor."""
        assert isinstance(handle, SubmittedStep) and self._flying[0] is handle, "steps are collected in their order"
        step = self._flying.pop(0)
        with self._device():
            for one in step.passes:
                self._finish(step, one)
        for index, row in step.patches.items():
            step.rows[index] = row
        self.sampler.drop(step.finished)
        rows = tuple(row for row in step.rows if row is not None)
        assert len(rows) == len(step.rows), (len(rows), len(step.rows))
        now = time.perf_counter()
        began, self._ended = max(step.began, self._ended), now
        return StepResult(rows, now - began)

    def read_block(self, block_id: int) -> Data:
        """See core's Executor."""
        return self.kv.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        """See core's Executor."""
        self.kv.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """See core's Executor."""
        self.kv.zero_blocks(block_ids)

    @torch.inference_mode()
    def warm_up(self, keys: Sequence[GraphKey] | None = None) -> None:
        """Compile kernels and capture graphs, all of them if none are named."""
        self._steady.forget()  # what is captured is padded otherwise
        for key in self.graphs.keys_to_capture() if keys is None else keys:
            layout = StepArrayLayout(key.rows, key.rows, key.outputs)
            self._meta.zero_()
            self._meta[layout.slots_offset : layout.slots_offset + key.rows] = -1
            self._meta[layout.previous_rows_offset : layout.previous_rows_offset + key.rows] = -1
            with self._device():
                self.graphs.capture_graph(key, lambda key=key, layout=layout: self._run(layout, key.kind))

    def _device(self) -> AbstractContextManager[object]:
        """Return a context with this runner's GPU as the thread's own: Triton launches there."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _run(self, layout: StepArrayLayout, kind: str) -> PassResult:
        """Launch a pass; its best tokens are what the next step continues, unless others are sampled."""
        result = self.decoder.run(self._meta, self._sampled, layout, kind)
        if result.answer is not None:
            count = len(result.answer) // 2
            self._sampled[:count].copy_(result.answer[:count])
        return result

    def _launch(
        self, step: SubmittedStep, chunks: list[Chunk], where: list[int], packed: PackedChunks, previous: list[int]
    ) -> None:
        """Queue the passes of a step: one, unless its partial results or its array are too large."""
        rows = _step_rows(packed, chunks, previous, self.block_size)
        too_many = len(chunks) > 1 and len(chunks) > self._max_rows
        if not too_many and (len(chunks) == 1 or self.planner.step_fits(rows, META_INTS // 2)):
            step.passes.append(self._launch_pass(step, chunks, where, rows))
            return
        if any(chunk.from_previous is not None for chunk in chunks):  # a pass overwrites the tokens of the step before
            known = self._sampled[: max(previous) + 1].tolist()
            tokens = [known[previous[c.from_previous]] if c.from_previous is not None else -1 for c in chunks]
            chunks = [
                chunk if token < 0 else _with_token(chunk, token) for chunk, token in zip(chunks, tokens, strict=True)
            ]
        middle = len(chunks) // 2
        kept: list[int] = []
        for part in (slice(0, middle), slice(middle, None)):
            half = pack_chunks(chunks[part], self._bounds)
            assert half is not None, "chunks in bounds are out of bounds in parts"
            self._launch(step, chunks[part], where[part], half, [])
            for one in step.passes:
                self._finish(step, one)
            rows_of = [step.rows[index] for index in where[part]]
            kept += [row.token_ids[-1] if row is not None and row.token_ids else 0 for row in rows_of]
            step.passes.clear()
        tokens = torch.tensor(kept, dtype=torch.int32)
        self._sampled[: len(kept)].copy_(tokens)
        for at, index in enumerate(where):
            step.outputs[index] = at

    def _launch_pass(
        self,
        step: SubmittedStep,
        chunks: list[Chunk],
        where: list[int],
        planned: "PackedStepChunks | tuple[Int32s, StepArrayLayout]",
    ) -> _Pass:
        """Queue a pass: of rows to plan, or of decodes whose array is known."""
        turn, self._turn = self._turn, 1 - self._turn
        staging = self._staging[turn]
        memory, sampled = staging.numpy(), [index for index, chunk in enumerate(chunks) if chunk.num_logits]
        if isinstance(planned, PackedStepChunks):
            count, indptr = len(planned.tokens), planned.indptr
            only_decodes = count == len(chunks) == len(sampled)
            spans = [np.arange(indptr[i + 1] - chunks[i].num_logits, indptr[i + 1]) for i in sampled]
            selected = np.concatenate(spans).astype(np.int32) if spans and not only_decodes else np.zeros(0, np.int32)
            key = self.graphs.find_padded_key(GROUPS if only_decodes else MIXED, count, len(selected))
            tile_rows = (self.decoder.group_tile if only_decodes else self.decoder.tile).tile_rows
            padded, outputs = (None, len(selected)) if key is None else (key.rows, key.outputs)
            options: dict[str, Any] = dict(padded=padded, tile_rows=tile_rows, selected=selected, outputs=outputs)
            if only_decodes:
                planned = self._steady.pad_block_tables(planned)
                layout = self.planner.fill(memory, planned, **options)
                self._steady.remember(chunks, planned, memory, layout)
            else:
                layout = self.planner.fill(memory, planned, **options)
                self._steady.forget()
        else:
            only_decodes, indptr = True, np.arange(len(chunks) + 1, dtype=np.int32)
            array, layout = planned
            memory[: layout.total] = array
            key = self.graphs.find_padded_key(GROUPS, len(chunks), 0)
        kind = (DECODES if layout.needs_no_merge_pass else GROUPS) if only_decodes else MIXED
        some = [chunks[index] for index in sampled]
        staged = self.sampler.stage(some, memory[layout.total :]) if some else StagedParamsLayout(0)
        used = layout.total + staged.used
        self._meta[:used].copy_(staging[:used], non_blocking=True)
        if key is None:
            result = self._run(layout, kind)
        else:
            key, capture = key._replace(kind=kind), layout._replace(total=0)
            result = self.graphs.replay(key, lambda: self._run(capture, kind))
        one = _Pass(chunks, where, indptr, sampled, staged, self._answers[turn], self._events[turn])
        self._queue_answer(step, one, result, self._meta[layout.total :])
        return one

    def _queue_answer(self, step: SubmittedStep, one: _Pass, result: PassResult, params: Tensor) -> None:
        """Sample what needs more than the best token, and queue the copy of the answer to the host."""
        one.logits, answer, chunks = result.logits, result.answer, one.chunks
        if one.logits is not None and one.staged.needs_logits_kept:
            one.logits = one.logits.clone()  # the next step overwrites those of a graph
            one.chunks = [chunk._replace(block_ids=tuple(chunk.block_ids)) for chunk in chunks]
        if one.logits is not None and one.staged.used:
            answer = self.sampler.launch(one.logits, params, one.staged)
            self._sampled[: len(one.logits)].copy_(answer[: len(one.logits)])
        one.num_answers = 0 if answer is None else answer.numel()
        parts = [part for part in (answer, result.finite) if part is not None]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if whole.numel() > len(one.answer):
            one.answer = torch.empty(whole.numel(), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        one.answer = one.answer[: whole.numel()]
        one.answer.copy_(whole, non_blocking=True)
        if one.done is not None:
            one.done.record(torch.cuda.current_stream(self.device))
        first = 0
        for index in one.sampled:
            step.outputs[one.where[index]] = first + chunks[index].num_logits - 1
            first += chunks[index].num_logits
        for index, chunk in enumerate(chunks):
            if chunk.sampling.prompt_logprobs is not None:  # waits for the device
                own = result.hidden[int(one.indptr[index]) : int(one.indptr[index + 1])]
                one.prompt_rows[index] = self.sampler.sampler.prompt_logprobs_of_chunk(
                    self.decoder.logits_from_hidden, own, chunk
                )

    def _finish(self, step: SubmittedStep, one: _Pass) -> None:
        """Wait for a pass and fill in its rows."""
        if one.done is not None:
            one.done.synchronize()
        answer = one.answer.numpy()
        rows = [RowResult()] * len(one.chunks)
        flags = answer[one.num_answers :]
        if len(flags):
            finite = np.logical_and.reduceat(flags[: one.indptr[-1]] != 0, one.indptr[:-1])
            rows = [RowResult() if ok else _NOT_FINITE for ok in finite]
        if one.sampled and one.logits is not None:
            some = [one.chunks[index] for index in one.sampled]
            found = self.sampler.finish_sampling(answer[: one.num_answers], one.staged, some, one.logits)
            for index, row in zip(one.sampled, found, strict=True):
                if rows[index].error is None:
                    rows[index] = row
            if one.staged.needs_logits_kept and self._flying:
                self._continue_again(step, one, answer, rows)
        for index, row in one.prompt_rows.items():
            if rows[index].error is None:
                rows[index] = row if row.error else rows[index]._replace(prompt_logprobs=row.prompt_logprobs)
        for index, row in zip(one.where, rows, strict=True):
            step.rows[index] = row

    def _continue_again(self, step: SubmittedStep, one: _Pass, answer: Int32s, rows: list[RowResult]) -> None:
        """Compute the chunks of the next step again whose token the host has chosen differently from the device."""
        answer = answer.copy()  # its memory is that of the next pass
        following = self._flying[0]
        for later in following.passes:
            for at, chunk in enumerate(later.chunks):
                if chunk.from_previous is None or chunk.from_previous not in one.where:
                    continue
                row = rows[one.where.index(chunk.from_previous)]
                token = answer[step.outputs[chunk.from_previous]]
                if row.error is not None or not row.token_ids or row.token_ids[-1] == token:
                    continue
                index = later.where[at]
                (kept, self._flying), turn = (self._flying, []), self._turn
                sampled = self._sampled.clone()
                again = self.execute(Batch((_with_token(chunk, row.token_ids[-1]),)))
                self._flying, self._turn = kept, turn
                following.patches[index] = again.rows[0]
                sampled[following.outputs[index]] = self._sampled[0]
                self._sampled.copy_(sampled)


def _step_rows(packed: PackedChunks, chunks: Sequence[Chunk], previous: list[int], block_size: int) -> PackedStepChunks:
    """Return the packed chunks with a slot for every token; `previous`: rows of the tokens sampled before, by chunk."""
    positions, lengths = packed.positions, np.diff(packed.qo_indptr)
    first_page, write_from = packed.kv_indptr[:-1], packed.write_from
    before = np.full(len(packed.tokens), -1, np.int32)
    for index, chunk in enumerate(chunks):
        if chunk.from_previous is not None:
            before[packed.qo_indptr[index]] = previous[chunk.from_previous]
    if len(packed.tokens) > len(lengths):
        first_page, write_from = np.repeat(first_page, lengths), np.repeat(write_from, lengths)
    slots = packed.blocks[first_page + positions // block_size] * block_size + positions % block_size
    slots = np.where(positions >= write_from, slots, -1).astype(np.int32)
    return PackedStepChunks(
        tokens=packed.tokens,
        positions=positions.astype(np.int32),
        slots=slots,
        previous=before,
        indptr=packed.qo_indptr,
        table_ptr=packed.kv_indptr,
        blocks=packed.blocks,
    )


def _with_token(chunk: Chunk, token: int) -> Chunk:
    """Return a chunk whose unknown token is `token`."""
    known = chunk.token_ids.__class__("i", [token])
    history = chunk.history[: chunk.start] + known
    return chunk._replace(token_ids=known, history=history, from_previous=None)
