"""Training batches: generated text as tokens, positions and targets.

Early in training, short preambles replace long ones: random gaps between the positions of their lines spread them over
the distances of a full preamble, at a tenth of the cost.
"""

import zlib
from dataclasses import dataclass
from random import Random

import torch
from chat_format import END, preamble_text, question_text
from network import Batch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from headstart_lab.intent.intent import Example, Preamble, make_examples, make_preamble

IGNORED = -100
COPY_LENGTH = 16
NO_INTENTS = (0, 0)
"""The `num_intents` of a stage on random tokens, see `make_copy_batch`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the curriculum: `steps` batches of `num_preambles` x `num_segments` sentences."""

    name: str
    steps: int
    num_preambles: int
    num_segments: int
    num_drawn: int
    """Sentences drawn for a preamble; the shortest `num_segments` are kept, which saves padding."""
    num_intents: tuple[int, int]
    is_short: bool
    span: int
    """Positions over which gaps may spread a preamble; 0 for none."""


def make_batch(stage: Stage, tokenizer: PreTrainedTokenizerFast, seed: str) -> Batch:
    """Return the batch of a stage that belongs to `seed`."""
    if stage.num_intents == NO_INTENTS:
        return make_copy_batch(stage.num_preambles, stage.num_segments, len(tokenizer), seed)
    rng = Random(seed)
    preambles = [
        make_preamble(f"{seed}/{i}", rng.randint(*stage.num_intents), short=stage.is_short)
        for i in range(stage.num_preambles)
    ]
    drawn = [make_examples("train", stage.num_drawn, p, f"{seed}/{i}") for i, p in enumerate(preambles)]
    examples = [sorted(group, key=_length)[: stage.num_segments] for group in drawn]
    return encode_batch(preambles, examples, tokenizer, stage.span, rng)


def make_copy_batch(num_preambles: int, num_segments: int, vocab_size: int, seed: str) -> Batch:
    """Return random tokens to copy: a piece of the preamble, then a piece of the segment itself.

    Every target except the first of a piece follows from the rule "find the last token earlier on, copy the token after
    it", so the attention heads that do this (Olsson et al. 2022, induction heads) form within a few hundred steps.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    shape = num_preambles, num_segments
    preamble = torch.randint(5, vocab_size, (num_preambles, 3 * COPY_LENGTH), generator=generator)
    starts = torch.randint(0, 2 * COPY_LENGTH, (*shape, 1), generator=generator)
    piece = preamble[:, None].expand(*shape, -1).gather(2, starts + torch.arange(COPY_LENGTH))
    own = torch.randint(5, vocab_size, (*shape, COPY_LENGTH), generator=generator)
    own_start = torch.randint(0, COPY_LENGTH // 2, (*shape, 1), generator=generator)
    own_piece = own.gather(2, own_start + torch.arange(COPY_LENGTH // 2))
    row = torch.cat((own, piece, own_piece), dim=-1)
    targets = row[..., 1:].clone()
    targets[..., :COPY_LENGTH] = IGNORED
    targets[..., 2 * COPY_LENGTH - 1] = IGNORED
    gaps = torch.randint(0, 900, (num_preambles, 1, 1), generator=generator)
    return Batch(
        preamble=preamble,
        preamble_positions=torch.arange(preamble.shape[1]).expand(num_preambles, -1),
        preamble_is_real=torch.ones_like(preamble, dtype=torch.bool),
        segments=row[..., :-1],
        segment_positions=(preamble.shape[1] + gaps + torch.arange(row.shape[2] - 1)).expand(*shape, -1),
        targets=targets,
    )


def encode_batch(
    preambles: list[Preamble], examples: list[list[Example]], tokenizer: PreTrainedTokenizerFast, span: int, rng: Random
) -> Batch:
    """Return tokens, positions and targets of the same number of examples behind each preamble."""
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    heads = _encode([preamble_text(p.text) for p in preambles], tokenizer)
    flat = [example for group in examples for example in group]
    questions = _encode([question_text(e.sentence) for e in flat], tokenizer)
    answers = _encode([e.answer + END for e in flat], tokenizer)
    p_positions = [_spread(ids, newline, span, rng) for ids in heads]
    starts = [positions[-1] + 1 + _gap(positions[-1] + 1, span, rng) for positions in p_positions]
    rows = [q + a for q, a in zip(questions, answers, strict=True)]
    size = max(map(len, rows)) - 1
    learnt = [[IGNORED] * (len(q) - 1) + a for q, a in zip(questions, answers, strict=True)]
    shape = len(preambles), -1, size
    longest = max(map(len, heads))
    return Batch(
        preamble=_pad(heads, longest, 0),
        preamble_positions=_pad(p_positions, longest, 0),
        preamble_is_real=_pad([[1] * len(ids) for ids in heads], longest, 0).bool(),
        segments=_pad([row[:-1] for row in rows], size, 0).view(shape),
        segment_positions=(torch.tensor(starts)[:, None, None] + torch.arange(size)).expand(-1, len(examples[0]), -1),
        targets=_pad(learnt, size, IGNORED).view(shape),
    )


def _length(example: Example) -> int:
    return len(example.sentence) + len(example.answer)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def _gap(used: int, span: int, rng: Random) -> int:
    """Return a random number of positions to skip, so that at most `span` are used in all; often 0."""
    return rng.randint(0, max(0, span - used)) if span and rng.random() < 0.5 else 0


def _spread(ids: list[int], newline: int, span: int, rng: Random) -> list[int]:
    """Return the positions of the tokens, with random gaps after newlines."""
    num_lines = ids.count(newline)
    total = _gap(len(ids), span, rng)
    cuts = sorted(rng.randint(0, total) for _ in range(num_lines))
    positions: list[int] = []
    shift = line = 0
    for i, token in enumerate(ids):
        positions.append(i + shift)
        if token == newline:
            shift = cuts[line]
            line += 1
    return positions


def _pad(rows: list[list[int]], size: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (size - len(row)) for row in rows])
