"""Steps of decodes that go on from the step before equal those that are planned anew, to the int."""

from array import array
from random import Random

import numpy as np
import pytest

from headstart.core.batch import Chunk
from headstart.core.request import SamplingParams
from headstart.model.cuda.cuda_runner import _step_rows
from headstart.model.cuda.steady_decodes import SteadyDecodes
from headstart.model.cuda.step_plan import Ints, StepArrayLayout, StepPlanner
from headstart.model.step_inputs import StepInputBounds, pack_chunks

PAGE, SPLIT = 4, 16
BOUNDS = StepInputBounds(num_blocks=400, block_size=PAGE, vocab_size=50, max_positions=120)
PLANNER = StepPlanner(page=PAGE, group=2, kv_heads=2, processors=8, max_parts=4096, split=SPLIT, exact=False)
NONE = np.zeros(0, np.int32)


class Sequences:
    """Running sequences; some share leading blocks."""

    def __init__(self, random: Random, count: int) -> None:
        self.random, self.fresh = random, iter(random.sample(range(1, 400), 399))
        shared = [next(self.fresh) for _ in range(12)]
        self.all = {f"s{at}": self.made(shared) for at in range(count)}

    def made(self, shared: list[int]) -> tuple[int, "array[int]"]:
        start = self.random.randrange(1, 60)
        common = shared[: self.random.choice((0, start // PAGE))]
        return start, array("i", common + [next(self.fresh) for _ in range(start // PAGE + 1 - len(common))])

    def chunks(self, *, known: bool) -> list[Chunk]:
        chunks: list[Chunk] = []
        for at, (name, (start, blocks)) in enumerate(self.all.items()):
            while len(blocks) <= start // PAGE:
                blocks.append(next(self.fresh))
            token = array("i", [self.random.randrange(50) if known else -1])
            row = None if known else len(self.all) - 1 - at
            chunks.append(Chunk(name, token, start, blocks, start, 1, SamplingParams(), 1, token, None, row))
            self.all[name] = start + 1, blocks
        return chunks


def planned(
    steady: SteadyDecodes, chunks: list[Chunk], previous: list[int], padded: int
) -> tuple[Ints, StepArrayLayout]:
    packed = pack_chunks(chunks, BOUNDS)
    assert packed is not None
    rows = steady.pad_block_tables(_step_rows(packed, chunks, previous, PAGE))
    memory = np.full(1 << 14, -7, np.int32)
    layout = PLANNER.fill(memory, rows, padded=padded, tile_rows=16, selected=NONE, outputs=0)
    steady.remember(chunks, rows, memory, layout)
    return memory[: layout.total], layout


@pytest.mark.parametrize("seed", range(30))
def test_steps_equal_those_that_are_planned_anew(seed: int) -> None:
    random = Random(seed)
    sequences = Sequences(random, random.randrange(1, 6))
    steady, oracle = SteadyDecodes(BOUNDS, SPLIT), SteadyDecodes(BOUNDS, SPLIT)
    previous, padded, advanced = [3, 1, 4, 0, 2, 5], random.choice((6, 8)), 0
    chunks = sequences.chunks(known=True)
    planned(steady, chunks, previous, padded)
    for _ in range(40):
        chunks = sequences.chunks(known=random.random() < 0.2)
        due, layout = planned(oracle, chunks, previous, padded)
        found = steady.try_build_next_step(chunks, previous)
        if found is None:
            assert any(chunk.start % SPLIT == 0 for chunk in chunks)
            planned(steady, chunks, previous, padded)
            continue
        advanced += 1
        assert found[1]._replace(total=0) == layout._replace(total=0) and np.array_equal(found[0], due)
    assert advanced > 15


CHANGES = {
    "another request": lambda c: c._replace(request_id="other"),
    "another position": lambda c: c._replace(start=c.start + 1),
    "two tokens": lambda c: c._replace(token_ids=array("i", [1, 2])),
    "no logits": lambda c: c._replace(num_logits=0),
    "a shared position": lambda c: c._replace(write_from=c.start + 1),
    "an adapter": lambda c: c._replace(adapter="a"),
    "another block": lambda c: c._replace(block_ids=array("i", [9]) + c.block_ids[1:]),
    "no block": lambda c: c._replace(block_ids=c.block_ids[:-1]),
    "a block out of bounds": lambda c: c._replace(block_ids=c.block_ids[:-1] + array("i", [400])),
    "an unknown token id": lambda c: c._replace(token_ids=array("i", [50]), from_previous=None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_differs_otherwise_is_planned_anew(change: str) -> None:
    steady = SteadyDecodes(BOUNDS, SPLIT)
    start, blocks = 5, array("i", [7, 8])
    one = Chunk("a", array("i", [3]), start, blocks, start, 1, SamplingParams(), 1, array("i", [3]))
    planned(steady, [one], [0], 1)
    following = one._replace(start=start + 1, write_from=start + 1, block_ids=array("i", blocks))
    assert steady.try_build_next_step([CHANGES[change](following)], [0]) is None
    assert steady.try_build_next_step([following, following], [0]) is None
    assert steady.try_build_next_step([following], [0]) is not None
    far = following._replace(start=120, write_from=120)
    assert steady.try_build_next_step([far], [0]) is None
    steady.forget()
    assert steady.try_build_next_step([following._replace(start=start + 2)], [0]) is None
