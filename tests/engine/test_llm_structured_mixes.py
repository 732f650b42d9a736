"""Structured output beside other parameters, in float32 and int8, with a warm cache and in a tight pool."""

import json
from array import array
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart import LLM
from headstart.core.request import Request, SamplingParams
from headstart.engine.llm import Completion
from headstart.openai.structured.grammar_text import json_schema_grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "room": {"enum": ["kitchen", "bathroom"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 100},
        "note": {"type": "string", "maxLength": 5},
        "when": {"type": "string", "format": "time"},
    },
    "required": ["room", "level", "note"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA}}}
PROMPT = "a prompt that fills some blocks of the pool, so that its second use reads them from the prefix cache: light"

samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 99), "temperature": st.sampled_from([0.0, 0.7, 1.5]), "n": st.integers(1, 3)},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 200).map(str), st.sampled_from([-100, 100]), max_size=3),
        "top_k": st.integers(1, 5),
        "top_p": st.sampled_from([0.1, 0.9]),
        "min_p": st.just(0.2),
        "logprobs": st.integers(0, 3),
        "stop": st.sampled_from([["level"], ["}"], ["\u00e9", '"note":']]),
        "max_tokens": st.integers(1, 40),
        "min_tokens": st.integers(0, 1),
    },
)


def is_tight(name: str) -> bool:
    return name.startswith("tight")


@pytest.fixture(scope="module", params=["float32", "int8", "tight float32", "tight int8"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A model; in a tight pool three answers at once cannot end without preemptions."""
    name: str = request.param
    options: dict[str, Any] = {"quantization": "int8"} if name.endswith("int8") else {"dtype": "float32"}
    with LLM(num_blocks=22 if is_tight(name) else 400, max_model_len=256, **options) as loaded:
        yield loaded


def ask(llm: LLM, sampling: dict[str, Any]) -> list[Completion]:
    done = llm.generate([PROMPT], {"max_tokens": 200, **FORMAT, **sampling}, progress=False)[0]
    return [*(done.outputs or (done,))]


def check(answer: Completion, sampling: dict[str, Any]) -> None:
    """The answer is a value of the schema, or the beginning of one."""
    assert answer.error is None
    assert len(answer.token_ids) <= sampling.get("max_tokens", 200)
    if answer.finish_reason == "stop" and answer.stop_reason is None:
        jsonschema_rs.validate(SCHEMA, json.loads(answer.text))
    else:
        assert answer.finish_reason == "length" or answer.stop_reason in sampling["stop"]
        assert '{"room":"'.startswith(answer.text[:9])
    if "logprobs" in sampling:
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=samplings)
def test_answers_match_the_schema_beside_any_other_parameter(llm: LLM, sampling: dict[str, Any]) -> None:
    first, again = ask(llm, sampling), ask(llm, sampling)
    assert len(first) == sampling["n"]
    for answer in (*first, *again):
        check(answer, sampling)
    assert again[0].num_cached_tokens >= 16
    assert [one.token_ids for one in again] == [one.token_ids for one in first]


def test_answers_with_log_probabilities_and_stops_are_beginnings_of_those_without(llm: LLM) -> None:
    for seed in range(3):
        sampling = {"seed": seed, "temperature": 1.0, "presence_penalty": 1.0, "n": 2}
        plain, chosen = ask(llm, sampling), ask(llm, {**sampling, "logprobs": 2, "stop": ['"note"']})
        for whole, cut in zip(plain, chosen, strict=True):
            assert cut.stop_reason == '"note"' and whole.text.startswith(cut.text)
            assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_constrained_and_free_answers_in_one_batch_have_the_tokens_that_they_have_alone(llm: LLM) -> None:
    grammar = json_schema_grammar(SCHEMA)
    prompts = [array("i", llm.tokenizer.encode(f"{PROMPT} {number}")) for number in range(6)]
    requests = [
        Request(f"mix-{at}", prompt, SamplingParams(max_tokens=30, seed=at, grammar=grammar if at % 2 else None))
        for at, prompt in enumerate(prompts)
    ]

    def run(batch: list[Request]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {request.request_id: [] for request in batch}
        for request in batch:
            llm.engine.add_request(request)
        while llm.engine.has_work:
            for output in llm.engine.step(0.0):
                found[output.request_id] += output.token_ids
        return found

    alone = {name: tokens for request in requests for name, tokens in run([request]).items()}
    assert run(requests) == alone


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_tight_pool_preempts(quantization: str) -> None:
    options: dict[str, Any] = {"quantization": "int8"} if quantization == "int8" else {"dtype": "float32"}
    sampling = {"seed": 1, "temperature": 1.5, "n": 6, "max_tokens": 60, "logprobs": 1, **FORMAT}
    with LLM(num_blocks=400, max_model_len=128, **options) as wide:
        expected = [one.token_ids for one in ask(wide, sampling)]
    with LLM(num_blocks=18, max_model_len=128, **options) as tight:
        for _ in range(300):
            tight.engine.scheduler.admission.record_output_length(1)  # it expects short answers
        answers = ask(tight, sampling)
        assert tight.engine.stats().counters.num_preemptions > 0
    for answer in answers:
        check(answer, sampling)
    assert [one.token_ids for one in answers] == expected
