"""Chunks and logits of hand-made sequences through a ModelRunner, for tests of the torch half."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from model.tiny import make_checkpoint
from torch import Tensor

from headstart.core.batch import Batch, Chunk
from headstart.core.request import GREEDY, SamplingParams
from headstart.model.kv_writes import KVWrites
from headstart.model.model_runner import ModelRunner
from headstart.model.step_inputs import StepInputBounds, build_step_inputs
from headstart.model.weights.model_loader import LoadedModel, load_model


def chunk(
    tokens: list[int],
    start: int,
    end: int,
    blocks: list[int],
    *,
    request_id: str = "a",
    write_from: int = 0,
    num_logits: int = 0,
    sampling: SamplingParams = GREEDY,
) -> Chunk:
    """The chunk `tokens[start:end]` of a prompt `tokens`."""
    return Chunk(
        request_id,
        array("i", tokens[start:end]),
        start,
        blocks,
        write_from,
        num_logits,
        sampling,
        len(tokens),
        array("i", tokens),
    )


def all_logits(runner: ModelRunner, *chunks: Chunk) -> list[Tensor]:
    """Logits [n, vocab] in fp32 of every position of every chunk, computed as one step."""
    loaded = runner.loaded
    bounds = StepInputBounds(runner.num_blocks, runner.block_size, loaded.vocab_size, loaded.max_model_len)
    with torch.inference_mode():
        step, _, errors = build_step_inputs(Batch(chunks), bounds, loaded.device)
        assert step is not None and not errors, errors
        if runner.states is not None:
            step = replace(step, states=runner.states.begin_step(chunks, step.qo_indptr))
        logits = loaded.model.logits_from_hidden(loaded.model.forward(step, runner.attention.begin_step(step))).float()
    return list(logits.split([len(c.token_ids) for c in chunks]))


def change_block(runner: ModelRunner, block: int, change: Callable[[Tensor], object]) -> None:
    """Lets `change` edit a block's KV, [layers, keys and values, block_size, kv heads, head_dim], in place."""
    shape, dtype = runner.loaded.kv_shape, runner.loaded.dtype
    data = bytearray(runner.read_block(block))
    size = (shape.num_layers, 2, runner.block_size, shape.num_kv_heads, shape.head_dim)
    change(torch.frombuffer(data, dtype=dtype).view(size))
    runner.write_block(block, bytes(data))


def token_writes(slots: list[int]) -> KVWrites:
    """Writes of all tokens of a step, one by one."""
    where = torch.tensor(slots, dtype=torch.int64)
    return KVWrites(where, None, (), None, where.numpy())


def without_spans(writes: KVWrites) -> KVWrites:
    """The same writes, one by one."""
    loose = None if writes.tokens is None else writes.tokens.numpy()
    return writes._replace(spans=(), loose=loose, loose_slots=writes.slots.numpy())


class Shared:
    """Prompts in random chunks and random blocks, the leading full blocks of equal prefixes shared between them.

    A prompt that begins with the first one's leading blocks waits until they are computed, then never writes them.
    """

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], rng: Random) -> None:
        self.runner, self.prompts, self.rng = runner, prompts, rng
        size = runner.block_size
        free = rng.sample(range(1, runner.num_blocks), runner.num_blocks - 1)
        self.tables: list[list[int]] = []
        self.starts: list[int] = []
        self.write_from: list[int] = []
        for prompt in prompts:
            leader = self.tables[0] if self.tables else []
            common = 0
            while (common + 1) * size <= len(prompt) and leader[common : common + 1]:
                if prompt[: (common + 1) * size] != prompts[0][: (common + 1) * size]:
                    break
                common += 1
            needed = -(-len(prompt) // size) + 2 - common  # two more: room to generate
            self.tables.append(leader[:common] + [free.pop() for _ in range(needed)])
            self.write_from.append(common * size)
            self.starts.append(min(common * size, len(prompt) - 1))

    def run(self, longest: int) -> list[Tensor]:
        """Computes all prompts in chunks of up to `longest` tokens; logits of the positions each computed itself."""
        done = list(self.starts)
        found: list[list[Tensor]] = [[] for _ in self.prompts]
        while any(at < len(prompt) for at, prompt in zip(done, self.prompts, strict=True)):
            chosen: list[tuple[int, Chunk]] = []
            for index, prompt in enumerate(self.prompts):
                ready = index == 0 or self.write_from[index] <= done[0]
                if done[index] < len(prompt) and ready and self.rng.random() < 0.8:
                    end = min(len(prompt), done[index] + self.rng.choice([1, 2, self.rng.randint(1, longest)]))
                    made = chunk(
                        prompt,
                        done[index],
                        end,
                        self.tables[index],
                        request_id=str(index),
                        write_from=self.write_from[index],
                    )
                    chosen.append((index, made))
            self.rng.shuffle(chosen)
            if chosen:
                for (index, made), logits in zip(chosen, all_logits(self.runner, *(c for _, c in chosen)), strict=True):
                    found[index].append(logits)
                    done[index] += len(made.token_ids)
        return [torch.cat(parts) for parts in found]


def tiny_runner(loaded: LoadedModel, *, num_blocks: int = 64, block_size: int = 16) -> ModelRunner:
    """A runner with a small pool."""
    return ModelRunner(loaded, num_blocks=num_blocks, block_size=block_size)


def load_tiny(family: str, folder: Path, **overrides: Any) -> LoadedModel:
    """A tiny random model of `family`, in fp32 on the CPU."""
    return load_model(make_checkpoint(family, folder, **overrides), dtype="float32", device="cpu")


def forced_logits(loaded: LoadedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits [len(tokens), vocab] from which `tokens` would be chosen one after another behind `prompt`."""
    runner = tiny_runner(loaded, num_blocks=16, block_size=16)
    text = prompt + tokens[:-1]
    blocks = list(range(1, len(text) // 16 + 2))
    return all_logits(runner, chunk(text, 0, len(text), blocks))[0][len(prompt) - 1 :]
