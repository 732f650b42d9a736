"""--speculative-config: vLLM's names, and one clear line for what is not supported."""

import json
import re

import pytest

from headstart.core.errors import ConfigError
from headstart.core.speculation.speculation_config import SpeculationConfig, parse_speculative_config


def test_without_a_config_nothing_is_drafted() -> None:
    assert parse_speculative_config(None) is None and parse_speculative_config("") is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SpeculationConfig()),
        ({"num_speculative_tokens": 3}, SpeculationConfig(num_speculative_tokens=3)),
        ({"prompt_lookup_max": 1}, SpeculationConfig(prompt_lookup_max=1, prompt_lookup_min=1)),
        ({"prompt_lookup_min": 200}, SpeculationConfig(prompt_lookup_max=200, prompt_lookup_min=200)),
        ({"prompt_lookup_min": 20}, SpeculationConfig(prompt_lookup_max=128, prompt_lookup_min=20)),
        ({"prompt_lookup_max": 5, "prompt_lookup_min": 3}, SpeculationConfig(15, 5, 3)),
    ],
)
def test_what_is_left_out_has_a_default(values: dict[str, int], expected: SpeculationConfig) -> None:
    assert parse_speculative_config(json.dumps({"method": "ngram", **values})) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ("{}", "method is None"),
        ('{"method": "eagle"}', "method is 'eagle'; the one that is supported is 'ngram'"),
        ('{"method": "ngram", "model": "x"}', "unknown key 'model'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0; it must be 1 to 64"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "must be a whole number"),
        ('{"method": "ngram", "prompt_lookup_max": 257}', "prompt_lookup_max is 257; it must be 1 to 256"),
        ('{"method": "ngram", "prompt_lookup_min": 0}', "prompt_lookup_min is 0"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', "prompt_lookup_min is 5"),
    ],
)
def test_an_invalid_config_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.*{re.escape(message)}") as error:
        parse_speculative_config(text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
