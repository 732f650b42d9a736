"""Rows with a grammar: masks in the kernel and in torch, forced tokens, grammars that exceed their limits."""

import json
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from headstart.core.batch import Chunk, RowErrorKind, RowResult
from headstart.core.errors import InvalidRequestError
from headstart.core.request import SamplingParams
from headstart.model.grammar.grammar_compiler import MAX_GRAMMARS, CachingGrammarCompiler
from headstart.model.grammar.grammar_rows import GrammarRows
from headstart.model.kernels.library import kernel_library_in_use
from headstart.model.sampling.logit_edits import LogitEdits
from headstart.model.sampling.sampler import Sampler
from headstart.openai.structured.grammar_text import (
    choice_grammar,
    grammar_from_lark,
    grammar_parser_limits,
    json_schema_grammar,
    regex_grammar,
)

FOLDER = Path(__file__).parents[2] / "src" / "headstart" / "bundled" / "intent"
VOCAB = 1536
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {
        "intent": {"enum": ["alarm_set", "weather_query"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["intent", "n"],
    "additionalProperties": False,
}
Sample = Callable[[torch.Tensor, list[Chunk]], list[RowResult]]


@pytest.fixture(scope="module")
def grammars() -> CachingGrammarCompiler:
    return CachingGrammarCompiler(FOLDER, VOCAB, (EOS,), grammar_parser_limits())


@pytest.fixture(params=["torch", "kernel"])
def sampler(request: pytest.FixtureRequest, grammars: CachingGrammarCompiler) -> Sampler:
    compiled = kernel_library_in_use() if request.param == "kernel" else None
    if request.param == "kernel" and compiled is None:
        pytest.skip("no kernels here")
    return Sampler(VOCAB, kernels=compiled, grammars=GrammarRows(grammars, 2))


def chunk(request_id: str, outputs: list[int], grammar: str | None, **sampling: Any) -> Chunk:
    history = array("i", [5, 6, *outputs])
    params = SamplingParams(**{"stop_token_ids": (EOS,), "max_tokens": 999, **sampling}, grammar=grammar)
    start = len(history) - 1
    return Chunk(
        request_id=request_id,
        token_ids=history[start:],
        start=start,
        block_ids=(1,),
        write_from=start,
        num_logits=1,
        sampling=params,
        num_prompt_tokens=2,
        history=history,
    )


def answer(sampler: Sampler, request_id: str, grammar: str, seed: int, **sampling: Any) -> tuple[list[int], list[int]]:
    """The tokens of one answer to random logits, and the number of tokens of each row."""
    outputs: list[int] = []
    sizes: list[int] = []
    while not outputs or outputs[-1] != EOS:
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1000 * seed + len(outputs)))
        (row,) = sampler.sample(logits, [chunk(request_id, outputs, grammar, seed=seed, **sampling)])
        assert row.error is None, row.error
        outputs += row.token_ids
        sizes.append(len(row.token_ids))
    sampler.drop([request_id])
    return outputs, sizes


def text_of(grammars: CachingGrammarCompiler, outputs: list[int]) -> str:
    grammars.begin_compile(json_schema_grammar({})).result()
    assert grammars._tokenizer is not None
    return grammars._tokenizer.decode_str(outputs[:-1])


def test_random_logits_give_valid_answers_with_forced_tokens(
    sampler: Sampler, grammars: CachingGrammarCompiler
) -> None:
    for seed in range(20):
        outputs, sizes = answer(sampler, "r", json_schema_grammar(SCHEMA), seed)
        value = json.loads(text_of(grammars, outputs))
        assert value.keys() == {"intent", "n"} and value["intent"] in ("alarm_set", "weather_query")
        assert value["n"] <= 99 and max(sizes) > 3 and len(sizes) < len(outputs) / 2


def test_the_tokens_are_the_same_one_by_one_with_logprobs(sampler: Sampler) -> None:
    grammar = choice_grammar(["alarm_set", "alarm_unset", "weather"])  # logits differ by position, so only forced ones
    alone, sizes = answer(sampler, "r", grammar, 3, logprobs=0, temperature=0.0)
    assert set(sizes) == {1}
    together, _ = answer(sampler, "r", grammar, 3, temperature=0.0)
    assert alone == together


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), greedy=st.booleans(), top_k=st.sampled_from([0, 1, 5]), bias=st.booleans())
def test_kernel_and_torch_choose_the_same_allowed_token(seed: int, greedy: bool, top_k: int, bias: bool) -> None:
    compiled = kernel_library_in_use()
    if compiled is None:
        pytest.skip("no kernels here")
    rng = np.random.default_rng(seed)
    size = 70  # not a multiple of 32
    allowed = rng.integers(0, 2, 96).astype(np.uint8)
    allowed[rng.integers(0, size)] = 1
    mask = np.packbits(allowed, bitorder="little").view(np.int32)
    logits = torch.from_numpy(rng.standard_normal((1, size)).astype(np.float32))
    if rng.random() < 0.2:
        logits[:, torch.from_numpy(allowed[:size] == 1)] = -float("inf")
        logits[0, 0 if not allowed[0] else int(np.argmin(allowed[:size]))] = 1.0
    row = chunk(
        "r",
        [],
        "any",
        temperature=0.0 if greedy else 1.0,
        top_k=top_k,
        seed=seed,
        min_tokens=3,
        logit_bias=((1, 50.0), (2, 50.0)) if bias else (),
    )
    found: list[int] = []
    for one in (compiled, None):
        sampler = Sampler(size, kernels=one)
        sampler.edits = LogitEdits(size, lambda _: mask)
        sampler._grammars = Fixed(mask)  # type: ignore[assignment]
        (chosen,) = sampler._sample(logits, [row])
        assert chosen.error is None and allowed[chosen.token_ids[0]], (chosen, allowed)
        found.append(chosen.token_ids[0])
    assert found[0] == found[1]


class Fixed:
    """GrammarRows with one mask."""

    def __init__(self, mask: Any) -> None:
        self._mask = mask

    def mask_of_row(self, _: Chunk) -> Any:
        return self._mask


def test_rows_without_a_grammar_are_sampled_as_ever(sampler: Sampler) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = [chunk("a", [], None, seed=1), chunk("b", [], None, temperature=0.0)]
    plain = Sampler(VOCAB).sample(logits[:2], free)
    mixed = sampler.sample(logits, [*free, chunk("c", [], regex_grammar("[0-9]+"))])
    assert mixed[:2] == plain and mixed[2].error is None


def test_after_a_preemption_the_grammar_continues_from_the_known_tokens(grammars: CachingGrammarCompiler) -> None:
    sampler = Sampler(VOCAB, grammars=GrammarRows(grammars, 1))
    grammar = json_schema_grammar(SCHEMA)
    outputs, _ = answer(sampler, "r", grammar, 7)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    for at in range(len(outputs) - 1):
        fresh = Sampler(VOCAB, grammars=GrammarRows(grammars, 1))  # knows nothing of the tokens before
        (row,) = fresh.sample(logits, [chunk("r", outputs[:at], grammar, seed=7)])
        assert row.error is None
        matcher = grammars.matcher(grammar)
        assert matcher.consume_tokens(outputs[:at])
        valid = [token for token in row.token_ids if token != EOS]
        assert matcher.validate_tokens(valid) == len(valid)


def test_min_tokens_does_not_prevent_the_only_continuation(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB)
    (row,) = sampler.sample(logits, [chunk("r", [], choice_grammar(["alarm"]), min_tokens=50)])
    assert row.error is None and row.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_exceeds_its_limits_fails_its_own_row(temperature: float) -> None:
    tight = LLParserLimits(step_lexer_fuel=1, initial_lexer_fuel=2000, verbose_errors=False, step_max_items=1)
    grammars = CachingGrammarCompiler(FOLDER, VOCAB, (EOS,), tight)
    sampler = Sampler(VOCAB, grammars=GrammarRows(grammars, 2))
    hard = grammar_from_lark("start: /[a-z]*(foo|bar)[a-z]{3,300}/ | /[b-x]*(baz)[a-z]{3,300}/")
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    free = chunk("free", [], None, temperature=temperature, seed=1)
    try:
        failed, fine = sampler.sample(logits, [chunk("hard", [], hard, temperature=temperature), free])
    except InvalidRequestError:
        pytest.skip("it does not compile with these limits")
    assert failed.error is not None and failed.error.kind is RowErrorKind.GRAMMAR
    assert fine == Sampler(VOCAB).sample(logits[1:], [free])[0]


def test_compiled_grammars_are_cached_within_limits(grammars: CachingGrammarCompiler) -> None:
    own = CachingGrammarCompiler(FOLDER, VOCAB, (EOS,), grammar_parser_limits())
    texts = [regex_grammar(f"a{{{number}}}") for number in range(1, MAX_GRAMMARS + 10)]
    first = own.begin_compile(texts[0])
    assert own.begin_compile(texts[0]) is first and isinstance(first.result(), LLMatcher)
    for text in texts[1:]:
        own.begin_compile(text)
    assert len(own._compiled) == MAX_GRAMMARS and own.begin_compile(texts[0]) is not first
    assert own._num_bytes == sum(map(len, own._compiled))


def test_a_wrong_grammar_is_an_error_of_the_request(grammars: CachingGrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        grammars.begin_compile(regex_grammar("([")).result()
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        CachingGrammarCompiler(Path("/nowhere"), VOCAB, (EOS,), grammar_parser_limits()).matcher(regex_grammar("a"))


@pytest.fixture(scope="module")
def drawn() -> Iterator[Random]:
    yield Random(0)


def test_cut_answers_are_valid_prefixes(grammars: CachingGrammarCompiler, drawn: Random) -> None:
    sampler = Sampler(VOCAB, grammars=GrammarRows(grammars, 1))
    grammar = json_schema_grammar({"type": "array", "items": {"type": "string"}, "minItems": 2})
    for seed in range(5):
        outputs: list[int] = []
        for _ in range(drawn.randrange(1, 12)):
            logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed + len(outputs)))
            (row,) = sampler.sample(logits, [chunk(f"r{seed}", outputs, grammar, seed=seed)])
            outputs += row.token_ids
        valid = [token for token in outputs if token != EOS]
        assert grammars.matcher(grammar).validate_tokens(valid) == len(valid)


def test_tenants_take_turns_in_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CachingGrammarCompiler(Path("/nowhere"), VOCAB, (EOS,), grammar_parser_limits())
    begun, is_first, held = list[str](), threading.Event(), threading.Event()

    def compile_one(grammar: str) -> None:
        begun.append(grammar)
        is_first.set()
        held.wait(10)

    monkeypatch.setattr(compiler, "_compile", compile_one)
    first = [compiler.begin_compile(f"hog {number}", "hog") for number in range(50)]
    is_first.wait(10)
    others = [compiler.begin_compile(f"{tenant} {number}", tenant) for number in range(2) for tenant in ("one", "two")]
    held.set()
    wait([*first, *others], 10)
    assert begun[:7] == ["hog 0", "hog 1", "one 0", "two 0", "hog 2", "one 1", "two 1"]
    assert begun[7:] == [f"hog {number}" for number in range(3, 50)]
