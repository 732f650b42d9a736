"""headstart.LLM with speculative_config: answers are those without, with grammars, stops, int8 and small pools."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart import LLM
from headstart.core.errors import ConfigError
from headstart.engine.llm import Completion

SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "bathroom"]}, "level": {"type": "integer", "maximum": 99}},
        "required": ["room", "level"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 5,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "lights", "schema": SCHEMA}}}
PROMPTS = [
    'the lights: {"room":"kitchen","level":10},{"room":"bathroom","level":20},{"room":"kitchen","level":10}; again:',
    "turn on the light in the kitchen, then turn on the light in the kitchen, then turn on the light in the",
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_min": 1}

samplings = st.fixed_dictionaries(
    {"seed": st.integers(0, 99), "temperature": st.sampled_from([0.0, 0.3, 1.0]), "max_tokens": st.integers(1, 60)},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 2.0]),
        "top_k": st.integers(1, 5),
        "top_p": st.sampled_from([0.1, 0.9]),
        "logprobs": st.integers(0, 3),
        "stop": st.sampled_from([["level"], ["light"], ["}", "e"]]),
        "min_tokens": st.integers(0, 1),
        "response_format": st.just(FORMAT["response_format"]),
    },
)


@pytest.fixture(scope="module", params=["float32", "int8", "tight"])
def llms(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """One model without drafts and one with them."""
    kind: str = request.param
    options: dict[str, Any] = {"quantization": "int8"} if kind == "int8" else {"dtype": "float32"}
    options |= {"num_blocks": 18 if kind == "tight" else 400, "max_model_len": 256}
    with LLM(**options) as plain, LLM(speculative_config=DRAFTS, **options) as drafted:
        yield plain, drafted


def seen(answer: Completion) -> tuple[Any, ...]:
    entries = None if answer.logprobs is None else [(one.token_id, round(one.logprob, 2)) for one in answer.logprobs]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.error, entries


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=samplings)
def test_answers_are_those_without_drafts(llms: tuple[LLM, LLM], sampling: dict[str, Any]) -> None:
    plain, drafted = llms
    for _ in range(2):  # the second time, the first answer is a source of drafts
        expected, found = (llm.generate(PROMPTS, sampling, progress=False) for llm in (plain, drafted))
        assert [seen(one) for one in found] == [seen(one) for one in expected]


def test_drafts_of_these_prompts_are_accepted(llms: tuple[LLM, LLM]) -> None:
    drafted = llms[1]
    for more in ({"min_tokens": 40}, FORMAT):
        sampling = {"temperature": 0.0, "max_tokens": 60, **more}
        before = drafted.engine.stats().counters.num_accepted_tokens
        steps = drafted.engine.stats().num_steps
        first = drafted.generate(PROMPTS[:1], sampling, progress=False)[0]
        again = drafted.generate(PROMPTS[:1], sampling, progress=False)[0]
        assert again.token_ids == first.token_ids
        assert drafted.engine.stats().counters.num_accepted_tokens > before + 5
        assert drafted.engine.stats().num_steps - steps < 2 * len(first.token_ids)


def test_the_config_is_json_or_a_mapping() -> None:
    with LLM(num_blocks=40, speculative_config=json.dumps(DRAFTS)) as llm:
        assert llm.engine.scheduler.speculation is not None
        assert llm.engine.scheduler.speculation.cost.is_measured
    with pytest.raises(ConfigError, match="speculative_config: method is 'eagle'"):
        LLM(num_blocks=40, speculative_config={"method": "eagle"})
