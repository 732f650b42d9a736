"""RecurrentStates: the states of the running requests of a model with recurrent layers, one vector in fp32 each.

A chunk continues the state that the one before it has left, begins with zeros, or begins with a state that was kept in
blocks of the KV pool. Behind drafts there is a state for each number of them that may be accepted, until the next chunk
begins with one. A state fills its blocks in their canonical form, as bytes: they hold no keys and values then.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.core.batch import Chunk
from headstart.model.attention.base import KVBlockIO
from headstart.model.kv_writes import Int32s
from headstart.model.step_inputs import RecurrentState


class RecurrentStates:
    """States of `size` numbers, by request id and the number of tokens that they cover."""

    def __init__(self, size: int, blocks: KVBlockIO, device: torch.device) -> None:
        self._size, self._blocks, self._device = size, blocks, device
        self._states: dict[str, dict[int, Tensor]] = {}

    def begin_step(self, chunks: Sequence[Chunk], qo_indptr: Int32s) -> tuple[RecurrentState, ...]:
        """Return the states of a step, which updates them; `qo_indptr` as in StepInputs. Call `end` behind it."""
        return tuple(
            self._advance(chunk, int(begin), int(end))
            for chunk, begin, end in zip(chunks, qo_indptr[:-1], qo_indptr[1:], strict=True)
        )

    def save_step_states(self, chunks: Sequence[Chunk], rows: Sequence[RecurrentState]) -> None:
        """Write the states that the chunks of a step are to keep into their blocks."""
        for chunk, row in zip(chunks, rows, strict=True):
            states = dict(row.saves)
            for position, pages in chunk.saves:
                self._write(pages, states[position - chunk.start])

    def state_of(self, request_id: str, num_tokens: int) -> Tensor:
        """Return the state of a running request behind its first `num_tokens`, all that are computed."""
        return self._states[request_id][num_tokens]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Drop the states of finished requests."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _advance(self, chunk: Chunk, begin: int, end: int) -> RecurrentState:
        """Return the state that a chunk begins with, from now on the one behind its last token, and those to keep."""
        known = self._states.get(chunk.request_id, {})
        if chunk.state:
            state = self._read(chunk.state)
        elif not chunk.start:
            state = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        elif chunk.start in known:
            state = known[chunk.start]
        else:
            raise AssertionError(f"{chunk.request_id}: a chunk from {chunk.start} on, but states of {sorted(known)}")
        last = chunk.start + len(chunk.token_ids)
        drafted = range(chunk.start + chunk.num_non_draft_tokens, last)
        places = {
            place: torch.empty_like(state) for place in sorted({*drafted, *(position for position, _ in chunk.saves)})
        }
        self._states[chunk.request_id] = {last: state} | {place: places[place] for place in drafted}
        return RecurrentState(begin, end, state, tuple((place - chunk.start, kept) for place, kept in places.items()))

    def _read(self, pages: Sequence[int]) -> Tensor:
        data = b"".join(bytes(self._blocks.read_block(block)) for block in pages)
        numbers = np.frombuffer(data, np.float32, self._size).copy()
        return torch.from_numpy(numbers).to(self._device)

    def _write(self, pages: Sequence[int], state: Tensor) -> None:
        """Write a state into blocks, the rest of the last one with zeros."""
        size = self._blocks.block_bytes
        data = state.cpu().numpy().view(np.uint8).data
        assert -(-len(data) // size) == len(pages), f"{len(pages)} blocks do not hold a state of {len(data)} bytes"
        for index, block in enumerate(pages):
            part = data[index * size : (index + 1) * size]
            self._blocks.write_block(block, part if len(part) == size else bytes(part).ljust(size, b"\0"))
