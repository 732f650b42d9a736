"""ModelRunner: the executor on torch. It computes a batch in one forward pass and returns one row per chunk.

A chunk that is out of bounds, has hidden states that are not finite, or cannot be sampled returns a row with an error.
It has no effect on the other rows: nothing here mixes rows, and attention reads only the blocks of its own row.
"""

import time

import numpy as np
import torch

from headstart.core.batch import Batch, Chunk, RowError, RowErrorKind, RowResult, StepResult
from headstart.core.cache.block_store import Data
from headstart.model.attention.base import backend_factory
from headstart.model.grammar.grammar_compiler import CachingGrammarCompiler
from headstart.model.grammar.grammar_rows import GrammarRows
from headstart.model.kernels.library import kernel_library_in_use
from headstart.model.kernels.rows import are_chunks_finite
from headstart.model.kernels.stack import HeadOutputs
from headstart.model.recurrent_states import RecurrentStates
from headstart.model.sampling.sampler import Sampler
from headstart.model.step_inputs import StepInputBounds, StepInputs, build_step_inputs
from headstart.model.weights.model_loader import LoadedModel

_NOT_FINITE = RowError(RowErrorKind.NON_FINITE, "the model computed no finite hidden states")


class ModelRunner:
    """Implementation of core's Executor over `num_blocks` KV blocks, of which block 0 is never used."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
        grammars: CachingGrammarCompiler | None = None,
    ) -> None:
        """`grammars` compiles the grammars of requests; without it they may have none."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.loaded = loaded
        self.attention = backend_factory(loaded.attention_backend)(
            loaded.kv_shape, num_blocks=num_blocks, block_size=block_size, dtype=loaded.dtype, device=loaded.device
        )
        self.block_bytes = self.attention.kv.block_bytes
        self._kernels = kernel_library_in_use() if loaded.device.type == "cpu" else None
        rows = None if grammars is None else GrammarRows(grammars, torch.get_num_threads())
        self.sampler = Sampler(loaded.vocab_size, seed=seed, kernels=self._kernels, grammars=rows)
        self._bounds = StepInputBounds(num_blocks, block_size, loaded.vocab_size, loaded.max_model_len)
        size = loaded.model.state_size
        self.states = RecurrentStates(size, self.attention.kv, loaded.device) if size else None

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Drop the state of finished requests and compute the batch; `elapsed` is the wall time of the whole call."""
        began = time.perf_counter()
        self.sampler.drop(batch.finished)
        if self.states is not None:
            self.states.drop(batch.finished)
        rows: list[RowResult | None] = [None] * len(batch.chunks)
        step, kept, errors = build_step_inputs(batch, self._bounds, self.loaded.device, self._kernels)
        for index, message in errors.items():
            rows[index] = RowResult(error=RowError(RowErrorKind.REQUEST, message))
        if step is not None:
            computed = self._compute([batch.chunks[index] for index in kept], step)
            for index, row in zip(kept, computed, strict=True):
                rows[index] = row
        complete = tuple(row for row in rows if row is not None)
        assert len(complete) == len(batch.chunks), (len(complete), len(batch.chunks))
        return StepResult(complete, time.perf_counter() - began)

    def read_block(self, block_id: int) -> Data:
        """Copy one block in canonical form. Safe from any thread, also while `execute` runs; see PagedKV."""
        return self.attention.kv.read_block(block_id)

    def write_block(self, block_id: int, data: Data) -> None:
        """Store a block given in canonical form. Call it between two steps. Raises ValueError for a wrong length."""
        self.attention.kv.write_block(block_id, data)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Set blocks to zero whose content may not be finite."""
        self.attention.kv.zero_blocks(block_ids)

    def _compute(self, chunks: list[Chunk], step: StepInputs) -> list[RowResult]:
        """Compute the rows of chunks that are in bounds."""
        if self.states is not None:
            step.states = self.states.begin_step(chunks, step.qo_indptr)
        num_logits = sum(chunk.num_logits for chunk in chunks)
        ahead = HeadOutputs(step.qo_indptr) if num_logits == step.num_tokens else None
        hidden = self.loaded.model.forward(step, self.attention.begin_step(step), ahead)
        if self.states is not None and step.states is not None:
            self.states.save_step_states(chunks, step.states)
        finite = None if ahead is None else ahead.finite
        finite = are_chunks_finite(self._kernels, hidden, step.qo_indptr) if finite is None else finite
        rows = [RowResult() if ok else RowResult(error=_NOT_FINITE) for ok in finite]
        sampling = [index for index, chunk in enumerate(chunks) if chunk.num_logits and finite[index]]
        if sampling:
            sampled_chunks = [chunks[index] for index in sampling]
            early = None if ahead is None else ahead.logits
            last = hidden if early is None else early
            num_logits = sum(chunk.num_logits for chunk in sampled_chunks)
            if num_logits < len(last):
                ends = step.qo_indptr[1:][sampling].astype(np.int64)
                rows_of = ends - 1
                if num_logits > len(sampling):
                    spans = zip(ends.tolist(), sampled_chunks, strict=True)
                    rows_of = np.concatenate([np.arange(end - chunk.num_logits, end) for end, chunk in spans])
                last = last.index_select(0, torch.from_numpy(rows_of).to(last.device))
            logits = self.loaded.model.logits_from_hidden(last) if early is None else last
            sampled = self.sampler.sample(logits, sampled_chunks)
            for index, row in zip(sampling, sampled, strict=True):
                rows[index] = row
        for index, chunk in enumerate(chunks):
            if chunk.sampling.prompt_logprobs is not None and rows[index].error is None:
                own = hidden[int(step.qo_indptr[index]) : int(step.qo_indptr[index + 1])]
                found = self.sampler.prompt_logprobs_of_chunk(self.loaded.model.logits_from_hidden, own, chunk)
                rows[index] = found if found.error else rows[index]._replace(prompt_logprobs=found.prompt_logprobs)
        return rows
