"""Generation: text, aligned tokens, stop strings and finish reasons from the engine's outputs."""

import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_folders import BYTE_LEVEL, METASPACE, build

from headstart.core.batch import PromptTokenBreakdown, RequestStepOutput, TokenLogprob
from headstart.core.request import FinishReason, Request
from headstart.openai.bounds import RequestBounds
from headstart.openai.generation_params import ParamsKind, parse_params, sampling_params_for_prompt
from headstart.openai.text.generation import GeneratedOutput, OutputDelta
from headstart.openai.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build(BYTE_LEVEL), eos_token_ids=(1,))
EOS = 1
BOUNDS = RequestBounds(TOKENIZER.vocab_size, max_model_len=1000, eos_token_ids=(EOS,))
PROMPT = TOKENIZER.encode("play some music")


def make(*, tokenizer: Tokenizer = TOKENIZER, prompt: "array[int]" = PROMPT, **values: Any) -> GeneratedOutput:
    params = parse_params({"max_tokens": 500, **values}, BOUNDS, ParamsKind.COMPLETION)
    return GeneratedOutput(
        tokenizer, Request("r", prompt, sampling_params_for_prompt(params, len(prompt), BOUNDS)), params
    )


def tokens_of(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 100, ((token_id, -token_id / 100),))


def run(
    generation: GeneratedOutput, token_ids: list[int], end: FinishReason | None = FinishReason.LENGTH, step: int = 1
) -> list[OutputDelta]:
    """Feeds the tokens `step` at a time; the last output carries `end`."""
    deltas: list[OutputDelta] = []
    for start in range(0, len(token_ids), step):
        some = tuple(token_ids[start : start + step])
        is_last = start + step >= len(token_ids)
        breakdown = None if start else PromptTokenBreakdown(shared=3, computed=len(PROMPT) - 3)
        output = RequestStepOutput(
            "r", some, tuple(map(logprob, some)), end if is_last else None, len(PROMPT), 3, breakdown=breakdown
        )
        deltas.append(generation.update(output))
    return deltas


def text_of(deltas: list[OutputDelta]) -> str:
    return "".join((delta.echo.text if delta.echo is not None else "") + delta.text for delta in deltas)


@given(text=st.text(max_size=30), step=st.integers(1, 4))
def test_text_arrives_whole_whatever_the_steps(text: str, step: int) -> None:
    generation = make()
    token_ids = tokens_of("a" + text)
    deltas = run(generation, token_ids, step=step)
    assert text_of(deltas) == generation.text_with_echo == "a" + text
    assert generation.token_ids == token_ids == [i for delta in deltas for i in delta.token_ids]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert generation.num_cached_tokens == 3


def test_a_character_is_never_split() -> None:
    deltas = run(make(), tokens_of("x 𓀀 y"))
    assert text_of(deltas) == "x 𓀀 y" and not any("\ufffd" in delta.text for delta in deltas)


def test_half_a_character_at_the_end_is_shown_as_a_replacement() -> None:
    deltas = run(make(), tokens_of("x𓀀")[:-1])
    assert text_of(deltas) == "x\ufffd" and deltas[-1].text == "\ufffd"


def test_the_end_of_sequence_is_counted_but_not_shown() -> None:
    generation = make()
    deltas = run(generation, [*tokens_of("done"), EOS], FinishReason.STOP)
    assert (generation.text_with_echo, generation.finish_reason, generation.stop_reason) == ("done", "stop", None)
    assert generation.num_tokens == len(tokens_of("done")) + 1
    assert not deltas[-1].must_abort


def test_a_stop_token_is_told_and_shown_only_if_wanted() -> None:
    stop = tokens_of("!")[0] if len(tokens_of("!")) == 1 else tokens_of("a")[0]
    silent, shown = make(stop_token_ids=[stop]), make(stop_token_ids=[stop], include_stop_str_in_output=True)
    for generation in (silent, shown):
        run(generation, [*tokens_of("done"), stop], FinishReason.STOP)
        assert (generation.finish_reason, generation.stop_reason) == ("stop", stop)
    assert silent.text_with_echo == "done"
    assert shown.text_with_echo == "done" + TOKENIZER.token_text(stop)


@pytest.mark.parametrize("step", [1, 2, 5, 100])
@pytest.mark.parametrize(("include", "expected"), [(False, "the quick bro"), (True, "the quick brown fo")])
def test_a_stop_string_across_tokens_ends_the_text(step: int, include: bool, expected: str) -> None:
    generation = make(stop=["wn fo", "zzz"], include_stop_str_in_output=include)
    deltas = run(generation, tokens_of("the quick brown fox jumps over the lazy dog"), step=step)
    assert text_of(deltas) == generation.text_with_echo == expected
    ended = [delta for delta in deltas if delta.finish_reason]
    assert len(ended) == 1 and ended[0].stop_reason == "wn fo" and ended[0].finish_reason == "stop"
    assert ended[0].must_abort == (step < 100)  # else the engine had ended by itself
    assert all(delta == OutputDelta() for delta in deltas[deltas.index(ended[0]) + 1 :])


@given(
    text=st.text("ab ", min_size=1, max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    step=st.integers(1, 3),
    include=st.booleans(),
)
def test_stop_strings_cut_where_a_search_of_the_whole_text_would(
    text: str, stops: list[str], step: int, include: bool
) -> None:
    generation = make(stop=stops, include_stop_str_in_output=include)
    text_of(run(generation, tokens_of(text), step=step))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (generation.text_with_echo, generation.finish_reason) == (text, "length")
        return
    end, _, stop = min(ends)
    assert generation.text_with_echo == (text[:end] if include else text[: end - len(stop)])
    assert (generation.finish_reason, generation.stop_reason) == ("stop", stop)


def test_what_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    generation = make(stop=["abcd"])
    deltas = [generation.update(RequestStepOutput("r", (token,))) for token in (tokens_of("a") + tokens_of("b"))]
    assert text_of(deltas) == "" and not any(delta.has_output for delta in deltas)
    assert generation.update(RequestStepOutput("r", tuple(tokens_of("x")))).text == "abx"
    generation.update(RequestStepOutput("r", tuple(tokens_of("ab"))))
    assert generation.update(RequestStepOutput("r", (EOS,), (), FinishReason.STOP)).text == "ab"


def test_no_stop_string_is_looked_for_in_the_first_min_tokens() -> None:
    letters = [tokens_of(letter)[0] for letter in "xaxaxa"]
    generation = make(stop=["xa"], min_tokens=3)
    run(generation, letters)
    assert (generation.text_with_echo, generation.finish_reason) == ("xa", "stop")
    assert generation.token_ids == letters[:4]


def test_tokens_come_with_the_end_of_their_text() -> None:
    generation = make(stop=["abcd"], logprobs=1)
    a, b, x = (tokens_of(letter)[0] for letter in "abx")
    held = [generation.update(RequestStepOutput("r", (token,), (logprob(token),))) for token in (a, b)]
    assert [delta.token_ids for delta in held] == [(), ()]
    delta = generation.update(RequestStepOutput("r", (x,), (logprob(x),)))
    assert delta.token_ids == (a, b, x)
    assert [(entry.token_id, entry.offset) for entry in delta.logprobs] == [(a, 0), (b, 1), (x, 2)]


@given(text=st.text("abé 東", min_size=1, max_size=20), step=st.integers(1, 4), stop=st.text("ab", max_size=2))
def test_there_is_one_entry_per_token_and_offsets_lie_in_the_text(text: str, step: int, stop: str) -> None:
    generation = make(logprobs=0, stop=[stop] if stop else None)
    deltas = run(generation, tokens_of(text), step=step)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == generation.token_ids
    assert entries == generation.logprobs
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets) and offsets[0] == 0


def test_without_asking_there_are_no_logprobs() -> None:
    assert not any(delta.logprobs for delta in run(make(), tokens_of("abc")))


@pytest.mark.parametrize("step", [1, 100])
def test_an_echo_puts_the_prompt_first_and_stop_strings_ignore_it(step: int) -> None:
    generation = make(echo=True, stop=["music", "!"])
    deltas = run(generation, tokens_of(" now! ok"), step=step)
    assert text_of(deltas) == generation.text_with_echo == "play some music now"
    assert generation.token_ids == tokens_of(" now! ok")[: generation.num_tokens]


def test_an_echo_with_logprobs_has_the_prompts_first() -> None:
    generation = make(echo=True, logprobs=1)
    known = tuple(logprob(token) for token in PROMPT[1:])
    generation.update(RequestStepOutput("r", prompt_logprobs=known[:1]))
    token = tokens_of("a")[0]
    delta = generation.update(
        RequestStepOutput("r", (token,), (logprob(token),), FinishReason.LENGTH, prompt_logprobs=known[1:])
    )
    assert delta.echo is not None
    entries = [*delta.echo, *delta.logprobs]
    assert [entry.token_id for entry in entries] == [*PROMPT, token]
    assert entries[0].logprob is None and entries[0].top == ()
    assert [entry.logprob for entry in entries[1:]] == [-t / 100 for t in (*PROMPT[1:], token)]
    assert entries[-1].offset == len("play some music")
    assert delta.token_ids == (token,)


def test_only_the_echo_is_shown_if_no_tokens_are_wanted() -> None:
    generation = make(echo=True, max_tokens=0)
    delta = generation.update(RequestStepOutput("r", tuple(tokens_of("a")), (), FinishReason.LENGTH))
    assert (text_of([delta]), delta.token_ids, delta.finish_reason) == ("play some music", (), "length")
    assert generation.num_tokens == 0


@pytest.mark.parametrize(("reason", "word"), [(FinishReason.ABORT, "abort"), (FinishReason.ERROR, "error")])
def test_a_failure_is_no_answer(reason: FinishReason, word: str) -> None:
    generation = make(stop=["abc"])
    generation.update(RequestStepOutput("r", tuple(tokens_of("ab"))))
    delta = generation.update(RequestStepOutput("r", finish_reason=reason, error="row is not finite"))
    assert (delta.text, delta.finish_reason, delta.error) == ("", word, "row is not finite")
    assert generation.error == "row is not finite"


def test_special_tokens_show_only_if_they_are_not_skipped() -> None:
    start = TOKENIZER.backend.token_to_id("<|im_start|>")
    assert text_of(run(make(), [start, *tokens_of("a")])) == "a"
    assert text_of(run(make(skip_special_tokens=False), [start, *tokens_of("a")])) == "<|im_start|>a"


def test_the_first_word_continues_the_prompt() -> None:
    tokenizer = Tokenizer(build(METASPACE))
    generation = make(tokenizer=tokenizer, prompt=tokenizer.encode("the quick"))
    deltas = run(generation, tokens_of("brown fox", tokenizer))
    assert text_of(deltas) == " brown fox"


def test_a_choice_that_waits_to_be_sent_takes_little_memory() -> None:
    def finished() -> GeneratedOutput:
        generation = make(logprobs=1)
        run(generation, tokens_of("play some music " * 5)[:32])
        return generation

    run(finished(), [])  # what is looked up once
    tracemalloc.start()
    try:
        kept = [finished() for _ in range(100)]
        num_bytes = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert num_bytes < 6000
