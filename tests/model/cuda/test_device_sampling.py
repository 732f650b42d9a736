"""Sampling on the device against Sampler: equal rows, no wait for the device, and rows that are sampled again."""

import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.core.batch import UNKNOWN_TOKEN, Chunk, RowErrorKind, RowResult
from headstart.core.request import GREEDY, SamplingParams
from headstart.model.cuda import device_sampling, staged_sampling
from headstart.model.cuda.device_sampling import DeviceSampler
from headstart.model.cuda.staged_sampling import StagedParamsLayout
from headstart.model.grammar.grammar_compiler import CachingGrammarCompiler
from headstart.model.grammar.grammar_rows import GrammarRows
from headstart.model.sampling.sampler import Sampler
from headstart.openai.structured.grammar_text import (
    choice_grammar,
    grammar_from_lark,
    grammar_parser_limits,
    json_schema_grammar,
)

FOLDER = Path(__file__).parents[3] / "src" / "headstart" / "bundled" / "intent"
GRAMMAR_VOCAB = 1536
EOS = 0
VOCABS = (11, 37, 301, 1500, 40_000)
ROOM = np.zeros(1 << 20, np.int32)
ONE_OF_EACH = SamplingParams(
    top_k=9, top_p=0.9, min_p=0.01, seed=1, repetition_penalty=1.3, frequency_penalty=0.3, logprobs=3, min_tokens=99
)


def chunk_of(
    sampling: SamplingParams,
    outputs: Sequence[int] = (),
    drafts: Sequence[int] = (),
    request_id: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
) -> Chunk:
    history = array("i", [*prompt, *outputs])
    start = len(history) - 1
    return Chunk(
        request_id=request_id,
        token_ids=history[start:] + array("i", drafts),
        start=start,
        block_ids=(1,),
        write_from=start,
        num_logits=1 + len(drafts),
        sampling=sampling,
        num_prompt_tokens=len(prompt),
        history=history,
    )


def launched(device: DeviceSampler, logits: Tensor, chunks: Sequence[Chunk]) -> tuple[np.ndarray, StagedParamsLayout]:
    """The answer of the device, as the host gets it."""
    staged = device.stage(chunks, ROOM)
    params = torch.from_numpy(ROOM[: staged.used].copy()).to(logits.device)
    return device.launch(logits, params, staged).cpu().numpy(), staged


def sample(device: DeviceSampler, logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
    answer, staged = launched(device, logits, chunks)
    return device.finish_sampling(answer, staged, chunks, logits)


def random_params(rng: Random, vocab: int) -> SamplingParams:
    """Any combination of parameters; each is often at its default."""

    def maybe(value: Any, default: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else default

    return SamplingParams(
        temperature=rng.choice([0.0, 1e-6, 0.05, 0.7, 1.0, 2.5]),
        top_k=maybe(rng.choice([1, 2, 5, vocab // 2, vocab - 1, vocab, vocab + 7]), 0),
        top_p=maybe(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999999]), 1.0),
        min_p=maybe(rng.choice([1e-40, 0.02, 0.3, 1.0]), 0.0),
        seed=maybe(rng.randrange(100), None, 0.5),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.4, 1e-30, 1e30]), 1.0),
        logit_bias=maybe(tuple((rng.randrange(vocab), rng.choice([-100.0, 3.0, 100.0])) for _ in range(3)), ()),
        logprobs=maybe(rng.choice([0, 1, 5, 20]), None),
        min_tokens=maybe(rng.randrange(5), 0),
        stop_token_ids=tuple(rng.randrange(vocab + 2) for _ in range(rng.randrange(3))),
    )


def random_step(rng: Random, vocab: int, num_chunks: int) -> tuple[Tensor, list[Chunk]]:
    """Logits and chunks of a step. Drafts are often what the model says."""
    noise = torch.Generator().manual_seed(rng.randrange(10**9))
    chunks: list[Chunk] = []
    logits: list[Tensor] = []
    for index in range(num_chunks):
        params = GREEDY if rng.random() < 0.2 else random_params(rng, vocab)
        outputs = [rng.randrange(vocab) for _ in range(rng.randrange(6))]
        num_drafts = rng.choice([0, 0, 0, 1, 4])
        rows = torch.randn(1 + num_drafts, vocab, generator=noise) * rng.choice([0.01, 1.0, 1.0, 4.0, 4.0, 1e20])
        drafts = rows[:-1].argmax(-1).tolist() if rng.random() < 0.7 else [rng.randrange(vocab)] * num_drafts
        where = rng.randrange(len(rows))
        if rng.random() < 0.06:
            rows[where, rng.randrange(vocab)] = rng.choice([math.nan, math.inf, -math.inf])
        elif rng.random() < 0.04:
            rows[where] = -math.inf
        elif rng.random() < 0.04:  # only the stop tokens are left
            rows[:] = -math.inf
            rows[:, [*params.stop_token_ids, 0][0] % vocab] = 0.5
        prompt = [rng.randrange(vocab) for _ in range(1 + rng.randrange(5))]
        chunks.append(chunk_of(params, outputs, drafts, f"r{index}", prompt))
        logits.append(rows)
    return torch.cat(logits), chunks


def differences(vocab: int, num_steps: int, seed: int = 0, most: int = 20) -> tuple[int, int, int]:
    """The numbers of chunks whose rows differ, of chunks that were sampled again, and of all."""
    rng = Random(seed * 1000 + vocab)
    device, oracle = DeviceSampler(vocab, seed=3), Sampler(vocab, seed=3)
    differ = again = count = 0
    for _ in range(num_steps):
        logits, chunks = random_step(rng, vocab, rng.randrange(1, most))
        before = logits.clone()
        expected = oracle.sample(logits, chunks)
        with counted(device.sampler) as redone:
            found = sample(device, logits, chunks)
        assert torch.equal(before.nan_to_num(7.0), logits.nan_to_num(7.0))
        differ += sum(one != two for one, two in zip(expected, found, strict=True))
        again += len(redone)
        count += len(chunks)
        for one in (device, oracle):
            one.drop(chunk.request_id for chunk in chunks)
    return differ, again, count


@contextmanager
def counted(sampler: Sampler) -> Iterator[list[Chunk]]:
    """Collect the chunks that a sampler is given."""
    seen: list[Chunk] = []
    plain = sampler.sample

    def recording(logits: Tensor, chunks: Sequence[Chunk]) -> list[RowResult]:
        seen.extend(chunks)
        return plain(logits, chunks)

    sampler.sample = recording  # type: ignore[method-assign]
    yield seen
    del sampler.sample


@pytest.mark.parametrize("vocab", VOCABS)
def test_any_parameters_give_the_rows_of_the_sampler(vocab: int) -> None:
    differ, again, count = differences(vocab, 20 if vocab > 10_000 else 100)
    assert differ == 0 and count > 150
    assert again < count / 5  # the device has done the others


def test_hundreds_of_rows_in_one_step_are_those_of_the_sampler() -> None:
    differ, _, count = differences(301, 4, seed=3, most=400)
    assert differ == 0 and count > 400


@pytest.mark.long
@pytest.mark.parametrize("vocab", VOCABS)
def test_thousands_of_rows_are_those_of_the_sampler(vocab: int) -> None:
    differ, _, count = differences(vocab, 100 if vocab > 10_000 else 1000, seed=1)
    assert differ == 0 and count > 800


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_the_size_give_the_same_tokens(dtype: torch.dtype) -> None:
    rng = Random(5)
    for _ in range(20):
        logits, chunks = random_step(rng, 500, 8)
        expected = Sampler(500).sample(logits.to(dtype), chunks)
        found = sample(DeviceSampler(500), logits.to(dtype), chunks)
        assert [(r.token_ids, r.error) for r in found] == [(r.token_ids, r.error) for r in expected]


def test_greedy_step_is_one_maximum_and_two_copies() -> None:
    device = DeviceSampler(50)
    staged = device.stage([chunk_of(GREEDY)] * 4, ROOM)
    assert staged == StagedParamsLayout(4) and not staged.needs_logits_kept
    logits, params = torch.randn(4, 50), torch.empty(0, dtype=torch.int32)
    with Watch() as watch:
        device.launch(logits, params, staged)
    work = [
        name for name in watch.names if not name.startswith(("aten.slice", "aten.view", "aten.empty", "aten.detach"))
    ]
    assert work == ["aten.max.dim", "aten.copy_.default", "aten.copy_.default"]


def test_rows_of_padding_behind_the_staged_ones_are_ignored() -> None:
    logits = torch.randn(8, 50)
    logits[5:] = math.nan
    for params in (GREEDY, ONE_OF_EACH):
        chunks = [chunk_of(params, [5])] * 5
        assert sample(DeviceSampler(50), logits, chunks) == Sampler(50).sample(logits[:5], chunks)


class Watch(TorchDispatchMode):
    """Refuses what waits for a device or moves data between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        for bad in ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "aten.equal", "is_nonzero"):
            assert bad not in name, name
        assert not ("index.Tensor" in name and any(a is not None and a.dtype == torch.bool for a in args[1])), name
        result = func(*args, **(kwargs or {}))
        devices = {t.device for t in (*args, result) if isinstance(t, Tensor)}
        assert len(devices) < 2, (name, devices)
        self.names.append(name)
        return result


@pytest.mark.parametrize("where", ["cpu", "meta"])  # a meta tensor has no values: whatever reads one fails
def test_launch_reads_no_value_on_the_host(where: str) -> None:
    rng = Random(4)
    for _ in range(30):
        logits, chunks = random_step(rng, 2000, 12)
        chunks += [chunk_of(ONE_OF_EACH, [5, 6], request_id="all")]
        logits = torch.cat([logits, torch.randn(1, 2000)])
        device = DeviceSampler(2000)
        staged = device.stage(chunks, ROOM)
        params = torch.from_numpy(ROOM[: staged.used].copy())
        size = len(device.launch(logits, params, staged))
        logits, params = logits.to(where), params.to(where)
        with Watch():
            answer = device.launch(logits, params, staged)
        assert answer.dtype == torch.int32 and answer.shape == (size,) and answer.device.type == where


@pytest.mark.parametrize("bad", ["_local_scalar_dense", "lift_fresh", "nonzero", "meta"])
def test_the_watch_sees_what_it_refuses(bad: str) -> None:
    value = torch.ones(2)
    with pytest.raises(AssertionError), Watch():
        if bad == "_local_scalar_dense":
            value[0].item()
        elif bad == "lift_fresh":
            torch.tensor([1.0])
        elif bad == "nonzero":
            value[value > 0]
        else:
            value.to("meta")


def test_wide_top_p_set_is_sampled_again_once_and_sorted_from_then_on() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 0.01
    device, oracle = DeviceSampler(5000), Sampler(5000)
    outputs: list[int] = []
    for num_redone in (1, 0, 0):
        chunks = [chunk_of(SamplingParams(top_p=0.9), outputs)]
        with counted(device.sampler) as redone:
            rows = sample(device, logits, chunks)
        assert rows == oracle.sample(logits, chunks) and len(redone) == num_redone
        outputs += rows[0].token_ids
    device.drop(["r"])
    assert device.stage(chunks, ROOM).filters.width == 1024


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.9), SamplingParams(min_tokens=3, stop_token_ids=(4,))])
def test_row_planned_ahead_is_sampled_as_if_its_last_token_had_been_known(params: SamplingParams) -> None:
    logits = torch.randn(1, 5000) * 0.01
    if params.min_tokens:
        logits[:] = -math.inf
        logits[0, 4] = logits[0, 5] = 1.0
    known = chunk_of(params, [8, 9])
    history = array("i", known.history[:-1])
    ahead = known._replace(token_ids=array("i", [UNKNOWN_TOKEN]), history=history, from_previous=0)
    device = DeviceSampler(5000)
    for _ in range(2):  # the second time nothing is sampled again
        answer, staged = launched(device, logits, [ahead])
        history += array("i", [9, 7, 7])  # what the scheduler does before the step is collected
        assert device.finish_sampling(answer, staged, [ahead], logits) == Sampler(5000).sample(logits, [known])
        del history[-3:]


def test_top_k_bounds_the_sorted_part_of_a_wide_set() -> None:
    logits = torch.randn(1, 5000) * 0.01
    chunks = [chunk_of(SamplingParams(top_p=0.9999999, top_k=60, seed=2))]
    device = DeviceSampler(5000)
    with counted(device.sampler) as redone:
        assert sample(device, logits, chunks) == Sampler(5000).sample(logits, chunks)
    assert redone == []


def test_min_tokens_that_forbids_all_tokens_is_ignored() -> None:
    logits = torch.full((2, 50), -math.inf)
    logits[:, 4] = 1.0
    chunks = [chunk_of(SamplingParams(min_tokens=1, stop_token_ids=(4,))), chunk_of(SamplingParams())]
    assert sample(DeviceSampler(50), logits, chunks) == [RowResult((4,)), RowResult((4,))]


def test_id_that_cannot_be_edited_fails_its_row_alone() -> None:
    logits = torch.randn(3, 50)
    good = chunk_of(SamplingParams(temperature=0.0, logit_bias=((5, 1.0),)))
    chunks = [good, chunk_of(SamplingParams(logit_bias=((50, 100.0),))), good]
    rows = sample(DeviceSampler(50), logits, chunks)
    assert rows == Sampler(50).sample(logits, chunks)
    assert rows[1].error is not None and rows[1].error.kind is RowErrorKind.REQUEST


def test_step_whose_parameters_do_not_fit_is_sampled_on_the_host() -> None:
    logits = torch.randn(5, 50)
    chunks = [chunk_of(ONE_OF_EACH, [5], request_id="a"), chunk_of(GREEDY, [5], [7, 8, 9])]
    device = DeviceSampler(50)
    needed = device.stage(chunks, ROOM).used
    small = np.full(needed - 1, 7, np.int32)
    staged = device.stage(chunks, small)
    assert staged.used == 0 and staged.redo == {0, 1} and (small == 7).all() and staged.needs_logits_kept
    answer = device.launch(logits, torch.from_numpy(small[:0]), staged).numpy()
    assert device.finish_sampling(answer, staged, chunks, logits) == Sampler(50).sample(logits, chunks)
    assert device.stage(chunks, np.empty(needed, np.int32)).used == needed


def test_tokens_come_first_and_are_valid_ids_even_of_failed_rows() -> None:
    rng = Random(6)
    for poison in (math.nan, math.inf, -math.inf):
        chunks = [chunk_of(random_params(rng, 2000)) for _ in range(40)]
        logits = torch.full((40, 2000), poison)
        answer, _ = launched(DeviceSampler(2000), logits, chunks)
        assert (answer[:40] >= 0).all() and (answer[:40] < 2000).all()


def test_token_of_each_row_in_the_answer_is_that_of_its_row() -> None:
    logits, chunks = torch.randn(3, 50), [chunk_of(p, [9]) for p in (GREEDY, ONE_OF_EACH, SamplingParams(seed=1))]
    answer, _ = launched(DeviceSampler(50), logits, chunks)
    assert [(token,) for token in answer[:3].tolist()] == [r.token_ids for r in Sampler(50).sample(logits, chunks)]


@pytest.fixture(scope="module")
def grammars() -> CachingGrammarCompiler:
    return CachingGrammarCompiler(FOLDER, GRAMMAR_VOCAB, (EOS,), grammar_parser_limits())


GRAMMARS = (
    json_schema_grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    choice_grammar(["alarm_set", "alarm_unset", "weather"]),
    grammar_from_lark('start: (A | B)+ "y"\nA: /a*/\nB: "x" /[a-z]{30,60}/'),
)


def grammar_params(rng: Random) -> SamplingParams:
    params = random_params(rng, GRAMMAR_VOCAB)
    grammar = rng.choice([None, *GRAMMARS])
    if rng.random() < 0.3:
        params = replace(params, temperature=0.0, logprobs=None)
    return replace(params, grammar=grammar, stop_token_ids=(EOS,))


def grammar_differences(grammars: CachingGrammarCompiler, seed: int) -> tuple[int, int, int, set[RowErrorKind]]:
    """Answers of many requests side by side, some with grammars and some with drafts; see `differences`."""
    rng, noise = Random(seed), torch.Generator().manual_seed(seed)
    device, oracle = (made(GRAMMAR_VOCAB, grammars=GrammarRows(grammars, 2)) for made in (DeviceSampler, Sampler))
    differ = again = count = 0
    kinds: set[RowErrorKind] = set()
    running: dict[str, tuple[SamplingParams, list[int]]] = {}
    for step in range(40):
        running |= {f"r{step} {i}": (grammar_params(rng), []) for i in range(8 - len(running))}
        chunks: list[Chunk] = []
        rows: list[Tensor] = []
        for request_id, (params, outputs) in running.items():
            logits = torch.randn(3, GRAMMAR_VOCAB, generator=noise)
            if rng.random() < 0.1:
                logits[0, torch.randperm(GRAMMAR_VOCAB, generator=noise)[3:]] = -math.inf  # hardly any allowed is left
            elif rng.random() < 0.02:
                logits[0, 3] = math.nan
            chunk = chunk_of(params, outputs, request_id=request_id)
            if outputs and rng.random() < 0.3:
                ahead = Sampler(GRAMMAR_VOCAB, grammars=GrammarRows(grammars, 1)).sample(logits[:1], [chunk])[0]
                chunk = chunk_of(params, outputs, ahead.token_ids[:2], request_id)
            chunks.append(chunk)
            rows.append(logits[: chunk.num_logits])
        logits = torch.cat(rows)
        expected = oracle.sample(logits, chunks)
        with counted(device.sampler) as redone:
            found = sample(device, logits, chunks)
        again += sum(chunk.num_logits == 1 for chunk in redone)
        count += len(chunks)
        for chunk, one, two in zip(chunks, expected, found, strict=True):
            differ += one != two
            kinds |= {one.error.kind} if one.error else set()
            running[chunk.request_id][1].extend(one.token_ids)
            if one.error or EOS in one.token_ids or len(running[chunk.request_id][1]) > 25:
                del running[chunk.request_id]
                device.drop([chunk.request_id])
                oracle.drop([chunk.request_id])
    return differ, again, count, kinds


def test_rows_with_grammars_are_those_of_the_sampler(grammars: CachingGrammarCompiler) -> None:
    totals = [grammar_differences(grammars, seed) for seed in range(6)]
    assert [differ for differ, *_ in totals] == [0] * 6
    again, count = sum(total[1] for total in totals), sum(total[2] for total in totals)
    assert again < count / 4, (again, count)
    assert RowErrorKind.NON_FINITE in set[RowErrorKind]().union(*(total[3] for total in totals))


def test_grammar_that_exceeds_its_limits_fails_its_row_alone() -> None:
    tight = LLParserLimits(step_lexer_fuel=1, initial_lexer_fuel=2000, verbose_errors=False, step_max_items=1)
    grammars = CachingGrammarCompiler(FOLDER, GRAMMAR_VOCAB, (EOS,), tight)
    hard = grammar_from_lark("start: /[a-z]*(foo|bar)[a-z]{3,300}/ | /[b-x]*(baz)[a-z]{3,300}/")
    chunks = [chunk_of(SamplingParams(grammar=hard), request_id="hard"), chunk_of(ONE_OF_EACH, [5])]
    logits = torch.randn(2, GRAMMAR_VOCAB, generator=torch.Generator().manual_seed(1))
    rows = sample(DeviceSampler(GRAMMAR_VOCAB, grammars=GrammarRows(grammars, 2)), logits, chunks)
    assert rows == Sampler(GRAMMAR_VOCAB, grammars=GrammarRows(grammars, 2)).sample(logits, chunks)
    assert [row.error and row.error.kind for row in rows] == [RowErrorKind.GRAMMAR, None]


# The module, the code that is replaced, and the bug.
BUGS = {
    "temperature": (device_sampling, "div_(temperature)", "div_(temperature * 1.01)"),
    "min_p": (device_sampling, "probs < min_p * probs.amax", "probs < 0 * probs.amax"),
    "top_k": (device_sampling, "(top_k.long() - 1)", "(top_k.long() - 2)"),
    "top_k_of_others": (device_sampling, ".masked_fill_(top_k <= 0, 0)", ""),
    "top_p": (device_sampling, "_cumsum(best) < needed", "_cumsum(best) <= needed - 0.01"),
    "top_p_of_others": (device_sampling, ".masked_fill_(top_p >= 1, 0)", ""),
    "total": (device_sampling, "total.masked_fill(top_k == 0, 1)", "1"),
    "flag_of_width": (device_sampling, "if filters.width < probs.shape[-1]", "if False"),
    "random_number": (device_sampling, "high.double() * 2.0**LOW_BITS", "high.double() * 2.0**LOW_BITS * 0.99"),
    "order": (device_sampling, "tokens.index_copy_(0, order, chosen.int())", "tokens[: len(chosen)] = chosen.int()"),
    "repetition": (device_sampling, "torch.where(old > 0, old / factor, old * factor)", "old / factor"),
    "largest": (device_sampling, ".clamp_(-_LARGEST, _LARGEST)", ""),
    "infinite": (device_sampling, "torch.where(old.isinf(), old, new)", "new"),
    "unbanned": (device_sampling, "(values == -inf) * _NO_TOKEN", "0"),
    "drafts": (device_sampling, "chunk.history + VerifiedChunk(chunk, first).drafts[:ahead]", "chunk.history"),
    "index_of_output": (device_sampling, "self.sampler.uniform(chunk, ahead)", "self.sampler.uniform(chunk)"),
    "not_finite": (device_sampling, "~np.isfinite(", "np.isnan("),
    "logprob_of_best": (device_sampling, "tokens.index_select(0, asked)", "best.index_select(0, asked)"),
    "slices": (device_sampling, "columns[:, part]", "columns[:, : part.stop - part.start]"),
    "mask": (device_sampling, "& 1\n", "| 1\n"),
    "drafts_behind_a_grammar": (device_sampling, "if chunks[at].num_logits > 1", "if False"),
    "accepted_twice": (device_sampling, "is not None and at not in redo", "is not None"),
    "filter_before_top_p": (staged_sampling, "or sampling.min_p > 0", ""),
    "rows_of_masks": (staged_sampling, "slice(masks[0][0], masks[-1][0] + 1)", "slice(0, len(masks))"),
    "bits": (staged_sampling, "row.uniform * 2**53", "row.uniform * 2**52"),
    "penalties": (staged_sampling, "-e.penalties", "e.penalties"),
    "bans": (staged_sampling, "-np.inf", "-1.0"),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", ["", *BUGS])
def test_planted_bug_is_seen(bug: str, grammars: CachingGrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (staged_sampling, device_sampling):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        if bug and BUGS[bug][0] is module:
            _, code, planted = BUGS[bug]
            assert source.count(code) == 1, bug
            source = source.replace(code, planted)
        changed = ModuleType(module.__name__)
        monkeypatch.setitem(sys.modules, module.__name__, changed)
        exec(compile(source, bug or "unchanged", "exec"), changed.__dict__)
    monkeypatch.setitem(globals(), "DeviceSampler", changed.DeviceSampler)
    seen = any(differences(vocab, 60, seed=2)[0] for vocab in (37, 1500))
    seen = seen or differences(37, 2, seed=3, most=300)[0] > 0
    seen = seen or any(grammar_differences(grammars, seed)[0] for seed in (8, 9))
    assert seen == bool(bug)


@pytest.mark.gpu
def test_gpu_samples_the_tokens_of_the_cpu_without_a_sync() -> None:
    rng = Random(8)
    device, oracle = DeviceSampler(40_000), Sampler(40_000)
    differ = count = 0
    for _ in range(40):
        logits, chunks = random_step(rng, 40_000, 12)
        expected = oracle.sample(logits, chunks)
        staged = device.stage(chunks, ROOM)
        ours, params = logits.cuda(), torch.from_numpy(ROOM[: staged.used].copy()).cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            answer = device.launch(ours, params, staged)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = device.finish_sampling(answer.cpu().numpy(), staged, chunks, ours)
        differ += sum(one.token_ids != two.token_ids for one, two in zip(expected, found, strict=True))
        count += len(chunks)
        for one in (device, oracle):
            one.drop(chunk.request_id for chunk in chunks)
    assert differ <= count / 100  # a draw or a filter that depends on a difference below 1e-6
