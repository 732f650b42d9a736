"""Structured output with headstart.LLM and the bundled model: every whole answer is valid, whatever happens to it."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from headstart import LLM
from headstart.core.errors import InvalidRequestError
from headstart.engine import assembly

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "room": {"enum": ["kitchen", "bathroom", "living room"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 100},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["room", "level", "notes"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA}}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=400, max_model_len=512, dtype="float32") as loaded:
        yield loaded


def ask(llm: LLM, prompts: list[Any], **sampling: Any) -> list[Any]:
    found = llm.generate(prompts, {"max_tokens": 200, **FORMAT, **sampling}, progress=False)
    return [choice for done in found for choice in (done.outputs or (done,))]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 4))
def test_whole_answers_match_the_schema(llm: LLM, seed: int, temperature: float, n: int) -> None:
    answers = ask(llm, ["turn on", "dim the lamp"], seed=seed, temperature=temperature, n=n)
    assert len(answers) == 2 * n
    for answer in answers:
        assert answer.finish_reason == "stop", answer.error
        jsonschema_rs.validate(SCHEMA, json.loads(answer.text))


def test_an_answer_behind_half_a_character_is_still_json(llm: LLM) -> None:
    token_ids = list(llm.tokenizer.encode("turn on \U00013000"))
    assert "\ufffd" in llm.tokenizer.decode(token_ids[:-1])
    (answer,) = ask(llm, [token_ids[:-1]], seed=1, temperature=1.0)
    jsonschema_rs.validate(SCHEMA, json.loads(answer.text))


def test_choices_with_a_seed_are_reproducible(llm: LLM) -> None:
    first, again = (ask(llm, ["hello"], n=3, seed=5, temperature=2.0) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert len({one.text for one in first}) > 1


def test_tokens_are_the_same_with_log_probabilities(llm: LLM) -> None:
    plain, with_logprobs = ask(llm, ["hello"], seed=5), ask(llm, ["hello"], seed=5, logprobs=1)
    assert plain[0].token_ids == with_logprobs[0].token_ids
    assert len(with_logprobs[0].logprobs) == len(plain[0].token_ids)


def test_preempted_answers_are_the_same(llm: LLM) -> None:
    prompts = [f"{index} turn on the light in the room" for index in range(8)]
    expected = [one.token_ids for one in ask(llm, prompts, temperature=1.5, seed=3)]
    with LLM(num_blocks=16, max_model_len=128, dtype="float32", enable_prefix_caching=False) as small:
        for _ in range(300):
            small.engine.scheduler.admission.record_output_length(1)
        found = [one.token_ids for one in ask(small, prompts, temperature=1.5, seed=3, max_tokens=60)]
        assert small.engine.stats().counters.num_preemptions > 0
    assert found == [tokens[:60] for tokens in expected]


@pytest.mark.parametrize("stop", [{"stop": ["level"]}, {"max_tokens": 7}])
def test_a_cut_answer_is_a_beginning(llm: LLM, stop: dict[str, Any]) -> None:
    (whole,), (cut,) = ask(llm, ["hello"], seed=5), ask(llm, ["hello"], seed=5, **stop)
    assert whole.text.startswith(cut.text) and cut.text != whole.text
    assert cut.finish_reason == ("stop" if "stop" in stop else "length")


def test_the_other_forms_give_what_they_ask_for(llm: LLM) -> None:
    def one(**values: Any) -> str:
        (done,) = llm.generate(["x"], {"max_tokens": 60, "temperature": 1.0, "seed": 1, **values}, progress=False)
        assert done.finish_reason == "stop"
        return done.text

    assert one(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert one(guided_regex="[0-9]{4}-[0-9]{2}").replace("-", "").isdigit()
    assert one(guided_grammar='start: "(" start ")" | "x"').strip("()") == "x"


def test_answers_are_reused_as_prefixes(llm: LLM) -> None:
    (done,) = ask(llm, ["a prompt of some length, so that it fills a block or two of the pool"], seed=5)
    tokens = [*done.prompt_token_ids, *done.token_ids]
    (again,) = llm.generate([tokens], {"max_tokens": 1}, progress=False)
    assert again.num_cached_tokens == (len(tokens) - 1) // 16 * 16


def test_a_schema_that_is_not_supported_is_refused_before_anything_runs(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 1, "uniqueItems": True}
    loose = {"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}
    with pytest.warns(UserWarning, match="may not keep to response_format: uniqueItems"):
        llm.generate(["x"], {"response_format": loose, "max_tokens": 4}, progress=False)
    with pytest.raises(InvalidRequestError, match="contains") as caught:
        llm.generate(["x"], {"guided_json": {"contains": {}}}, progress=False)
    assert caught.value.param == "guided_json" and not llm.engine.has_work


def test_a_grammar_that_exceeds_its_limits_fails_alone_and_its_blocks_stay_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        assembly, "grammar_parser_limits", lambda: LLParserLimits(max_lexer_states=30, verbose_errors=False)
    )
    llm = LLM(num_blocks=100, max_model_len=512, dtype="float32")
    before = llm.engine.stats()
    regex = "[a-z]{60}[0-9]"  # compiles, and exceeds the limits after some tokens
    prompt = "a prompt whose blocks are published, with some words more to fill two blocks or so"
    (failed,) = llm.generate([prompt], {"guided_regex": regex, "max_tokens": 300, "ignore_eos": True}, progress=False)
    stats = llm.engine.stats()
    assert failed.finish_reason == "error" and "constrained" in str(failed.error)
    assert stats.counters.num_row_errors == before.counters.num_row_errors + 1
    assert stats.pool.evictions_by_cause["failed"] == before.pool.evictions_by_cause["failed"]
    (again,) = llm.generate([prompt], {"max_tokens": 1}, progress=False)
    assert again.num_cached_tokens >= 16


def test_quantized_models_have_structured_output() -> None:
    with LLM(num_blocks=50, max_model_len=512, quantization="int8") as loaded:
        (done,) = ask(loaded, ["hello"], seed=1)
        jsonschema_rs.validate(SCHEMA, json.loads(done.text))
