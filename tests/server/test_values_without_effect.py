"""Values of fields that change no answer, or that are newer than this server: never a reason to refuse a request."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server.asking import Asked, asking, write_model
from server.test_treatments import BASE, CHAT, FIELD, MESSAGES, RESPONSES

from headstart.openai.forms.skipped import SKIPPED_HEADER
from headstart.openai.forms.treatments import TREATMENTS, NameTreatment

OLLAMA = "/api/chat"
BASES = {
    **BASE,
    OLLAMA: {"messages": [{"role": "user", "content": "Go"}], "stream": False, "options": {"num_predict": 1}},
}
VALUES: tuple[Any, ...] = (7, True, "x" * 5000, [1], {"a": {"b": 1}})
WITHOUT_EFFECT: list[tuple[str, str]] = [
    *((row.api, row.name) for row in TREATMENTS if (row.place, row.treatment) == (FIELD, NameTreatment.IGNORED)),
    *((RESPONSES, name) for name in ("text.verbosity", "reasoning.summary", "reasoning.newer")),
    *((CHAT, name) for name in ("user", "safety_identifier", "prompt_cache_key", "stream_options.newer")),
    *((MESSAGES, name) for name in ("cache_control", "metadata", "metadata.user_id")),
]
NEWER = [
    (CHAT, "reasoning_effort", "reasoning_effort"),
    (RESPONSES, "reasoning.effort", "effort"),
    (MESSAGES, "output_config.effort", "effort"),
    (MESSAGES, "thinking.type", "thinking"),
    (OLLAMA, "think", "think"),
]


Ask = Callable[[str, Any], Asked]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask one server."""
    with asyncio.Runner() as runner:
        server = asking(write_model(tmp_path_factory.mktemp("values")))
        begun = runner.run(server.__aenter__())
        yield lambda path, body: runner.run(begun(path, body))
        runner.run(server.__aexit__(None, None, None))


def nested(path: str, value: Any) -> dict[str, Any]:
    """The fields that set a path such as text.verbosity."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_no_value_of_a_field_without_effect_is_a_reason_to_refuse(ask: Ask) -> None:
    plain = {api: ask(api, BASE[api]).prompt for api in BASE}
    wrong: list[Any] = []
    for api, path in WITHOUT_EFFECT:
        for value in VALUES:
            answer, prompt = ask(api, {**BASE[api], **nested(path, value)})
            if answer.status_code != 200 or prompt != plain[api]:
                wrong.append((api, path, value, answer.status_code, answer.text[:200]))
    assert wrong == []


@pytest.mark.parametrize("mark", [{"type": "ephemeral", "ttl": "24h"}, {"type": "persistent"}, "ephemeral", {}])
def test_a_breakpoint_in_an_unknown_form_is_no_reason_to_refuse(ask: Ask, mark: Any) -> None:
    part = {"type": "text", "text": "Go", "cache_control": mark}
    answer, prompt = ask(MESSAGES, {**BASE[MESSAGES], "messages": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 200 and "Go" in prompt, answer.text


@pytest.mark.parametrize(("api", "path", "name"), NEWER)
def test_an_effort_that_is_newer_than_the_server_is_skipped_and_named(ask: Ask, api: str, path: str, name: str) -> None:
    plain = ask(api, BASES[api]).prompt
    answer, prompt = ask(api, {**BASES[api], **nested(path, "ultra")})
    assert answer.status_code == 200 and prompt == plain, answer.text
    assert answer.headers[SKIPPED_HEADER] == f"field.{name}=1"


def test_the_usage_of_a_stream_is_no_matter_of_an_answer_without_one(ask: Ask) -> None:
    answer, _ = ask(CHAT, {**BASE[CHAT], "stream_options": {"include_usage": True}})
    assert answer.status_code == 200 and answer.json()["usage"], answer.text
