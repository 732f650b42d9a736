"""Random sentences of the grammars of forced calls: each is read back as calls whose arguments match the schema.

A walk takes tokens that the grammar allows, at random; now and then it tries to end a string or a value.
"""

import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend
from tools.test_tool_grammar import FAMILIES, HARD, OPTIONAL, Answers, tool

from headstart.bundled import bundled_intent_model_folder

ENDS = ('"', "}", "]", "\n</parameter>\n", "</arg_value>", "</function>", "</tool_call>", "0", "z/z", "2024-02-29")
NAMED = {"type": "object", "properties": {"a b": {"type": "string"}}, "required": ["a b"]}
PARAMETERS: dict[str, Any] = {"hard": HARD, "opt-1": OPTIONAL, "none": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend.from_file(str(Path(bundled_intent_model_folder()) / "tokenizer.json"))


def sentence(answers: Answers, rng: random.Random, max_tokens: int = 160) -> str | None:
    """A text of the grammar; None if the walk does not come to an end."""
    matcher = LLMatcher(answers.engine, answers.params.sampling.grammar)
    vocab_size = answers.engine.vocab_size
    ends = [list(answers.encode(end)) for end in ENDS]
    tokens: list[int] = []
    while len(tokens) < max_tokens and not (matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5)):
        chosen = matcher.compute_ff_tokens()
        if not chosen and rng.random() < 0.6:
            end = rng.choice(ends)
            chosen = end if matcher.validate_tokens(end) == len(end) else []
        if not chosen:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [token for token in range(vocab_size) if mask >> token & 1]
            chosen = [rng.choice([token for token in allowed if token != answers.engine.eos_token] or allowed)]
        if not matcher.consume_tokens(chosen) or matcher.is_error():
            return None
        tokens += chosen
    return answers.tokenizer.decode(tokens, skip_special_tokens=False) if matcher.is_accepting() else None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sentence_is_read_back_as_calls_that_match_their_schema(backend: Backend, family: str) -> None:
    parameters = PARAMETERS if family != "llama3_json" else {**PARAMETERS, "named": NAMED}
    tools = [tool(name, schema) for name, schema in parameters.items()]
    answers = Answers(backend, family, tools=tools, tool_choice="required")
    rng, num_read = random.Random(family), 0
    for _ in range(24):
        text = sentence(answers, rng)
        if text is None:
            continue
        calls = answers.calls(text)
        assert calls, text
        for name, arguments in calls:
            jsonschema.validate(arguments, parameters[name], format_checker=jsonschema.FormatChecker())
            num_read += 1
        assert answers.parsed(text).content == "", text
    assert num_read >= 6
