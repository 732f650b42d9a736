"""Placement: no text of a conversation is lost in a chat template, and what a template shows as it is stays so."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conversations import BOUNDS, FOLDER, NAMED_TOKENS, Shown, all_templates, conversation, lost, misplaced_reasoning
from real.smollm2 import UnreachableError
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.core.errors import InvalidRequestError
from headstart.openai.chat.template_forms import ONE_TEXT, encode_content_forms, parse_content_forms
from headstart.openai.engine_requests import check_all_messages_rendered, note_dropped_reasoning
from headstart.openai.forms.skipped import SkippedNames

NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NUM_ALL = 70
NEED_VARIABLES = {"fireworks-ai-llama-3-firefunction-v2"}  # of their own, without which they refuse every conversation


@cache
def template(name: str) -> Shown:
    return Shown(FOLDER / f"{name}.jinja")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*cities: str, content: str = "") -> dict[str, Any]:
    named = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": f"call_{n}", "type": "function", "function": one} for n, one in enumerate(named)],
    }


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


@pytest.mark.parametrize("name", NAMES)
def test_no_text_of_a_random_conversation_is_lost(name: str) -> None:
    check_random_conversations(template(name), 60)


def check_random_conversations(shown: Shown, count: int) -> None:
    for seed in range(count):
        sent = conversation(random.Random(seed))
        messages = shown.read(sent)
        before = repr(messages)
        placed = shown.place(messages)
        assert repr(messages) == before
        assert shown.place(placed.messages).messages == placed.messages, seed
        prompt = shown.render(messages)
        assert (lost(sent, prompt), misplaced_reasoning(sent, prompt)) == ([], []), (shown.name, seed)
        assert named_reasoning(messages, prompt) == num_without_reasoning(sent, prompt), (shown.name, seed)
        quiet = shown.forms.reasoning_key != "reasoning_content" or not shown.forms.shows_probe("object arguments")
        if not placed.counts and not quiet and shown.forms.shows_probe("empty answer"):
            assert placed.messages == messages


def named_reasoning(messages: Sequence[dict[str, Any]], prompt: str) -> int:
    """Return the number of reasonings that the header names as left out of a prompt."""
    skipped = SkippedNames()
    note_dropped_reasoning(messages, prompt, replace(BOUNDS, skipped=skipped))
    return dict(skipped.counts()).get("item.reasoning", 0)


def num_without_reasoning(sent: Sequence[dict[str, Any]], prompt: str) -> int:
    return sum(one["reasoning_content"] not in prompt for one in sent if one.get("reasoning_content"))


def test_reasoning_that_is_left_out_is_named_once_for_each() -> None:
    thought = {**answer("Ok"), "reasoning_content": " Hm.\n"}
    assert named_reasoning([user("Hi"), thought, user("?"), thought, user("!")], "Hi Hm. Ok ? Ok !") == 1
    assert named_reasoning([user("Hi"), thought], "Hi Hm. Ok") == 0
    assert named_reasoning([user("Hm."), thought], "Hm. Ok") == 1  # that of the user is before it
    assert named_reasoning([user("Hi"), {**answer("Ok"), "reasoning_content": "\n"}], "Hi Ok") == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_of_the_next_turn_extends_that_of_this_one(name: str) -> None:
    """With a system message in each turn; what is compared ends where this turn's answer begins."""
    shown = template(name)
    rng = random.Random(7)
    for _ in range(20):
        messages = [message for message in shown.read(conversation(rng)) if "reasoning_content" not in message]
        messages = [message for message in messages if message["role"] != "tool" and "tool_calls" not in message]
        more = [*messages, answer("Zzanswer"), system("Zzsystem"), user("Zzlast")]
        if messages[-1]["role"] == "assistant":
            continue
        now = shown.render(messages, add_generation_prompt=False)
        assert shown.render(more, add_generation_prompt=False).startswith(now.removesuffix("</s>")), name


def test_what_a_template_shows_is_rendered_as_it_was_sent() -> None:
    sent = [
        system("Be brief."),
        user("Hi"),
        calls("Oslo", "Rome"),
        result(0, "Snow"),
        result(1, "Sun"),
        answer("Ok"),
        user("?"),
    ]
    qwen = template("Qwen-Qwen2.5-7B-Instruct")
    assert qwen.place(sent).messages == sent and not qwen.place(sent).counts
    inline = [system("Be brief."), user("Hi"), system("In French."), user("Now")]
    assert qwen.place(inline).messages == inline


def test_a_system_message_in_between_is_a_user_turn_where_it_would_be_refused() -> None:
    gemma = template("google-gemma-2-2b-it")
    sent = [system("Be brief."), user("Hi"), answer("Hello"), system("In French."), user("Bye")]
    placed = gemma.place(sent)
    assert placed.messages == [user("Be brief.\n\nHi"), answer("Hello"), user("In French.\n\nBye")]
    assert placed.counts == {"inline_system": 2, "joined_turns": 2}


def test_a_developer_message_is_a_system_message_where_it_would_vanish() -> None:
    sent = [{"role": "developer", "content": "Be brief."}, user("Hi")]
    placed = template("Qwen-Qwen2.5-7B-Instruct").place(sent)
    assert placed.messages == [system("Be brief."), user("Hi")]
    assert placed.counts == {"developer_as_system": 1}


def test_calls_that_a_template_drops_are_text_and_results_user_turns() -> None:
    gemma = template("google-gemma-2-2b-it")
    placed = gemma.place([user("Hi"), calls("Oslo", content="Wait."), result(0, "Snow")])
    called, shown = placed.messages[1:]
    assert called["content"].startswith("Wait.\n<tool_call>") and '"Oslo"' in called["content"]
    assert shown == user("<tool_response>\nSnow\n</tool_response>")
    assert placed.counts == {"plain_calls": 2}


def test_parallel_calls_are_single_ones_where_only_one_is_allowed() -> None:
    llama = template("meta-llama-Llama-3.1-8B-Instruct")
    sent = [user("Hi"), calls("Oslo", "Rome"), result(1, "Sun"), result(0, "Snow")]
    text = llama.render(sent)
    assert text.index("Oslo") < text.index("Snow") < text.index("Rome") < text.index("Sun")
    assert llama.place(sent).counts == {"separate_calls": 1}


def test_user_text_behind_results_is_joined_to_them_where_roles_must_alternate() -> None:
    mistral = template("mistralai-Mistral-Nemo-Instruct-2407")
    sent = [user("Hi"), calls("Oslo"), result(0, "Snow"), system("Be brief.")]
    assert mistral.place(sent).messages[-1]["content"] == "Snow\n\nBe brief."
    assert "[TOOL_RESULTS]" in mistral.render(sent)


def test_ids_that_a_template_refuses_become_short_ones_that_stay_the_same() -> None:
    mistral = template("Mistral-Small-3.2-24B-Instruct-2506")
    sent = [user("Hi"), calls("Oslo"), result(0, "Snow")]
    called, shown = mistral.place(sent).messages[1:]
    assert called["tool_calls"][0]["id"] == shown["tool_call_id"] and len(shown["tool_call_id"]) == 9
    assert mistral.render([*sent, answer("Cold")]).startswith(mistral.render(sent))


def test_without_knowledge_of_a_template_messages_stay() -> None:
    assert ONE_TEXT.shows_probe("anything")
    assert parse_content_forms(encode_content_forms(ONE_TEXT)) == ONE_TEXT
    forms = template("google-gemma-2-2b-it").forms
    assert parse_content_forms(encode_content_forms(forms)) == forms and not forms.shows_probe("system")


@pytest.mark.long
def test_no_text_is_lost_in_any_template_of_llama_cpp() -> None:
    try:
        paths = sorted(all_templates().glob("*.jinja"))
    except UnreachableError as error:
        pytest.skip(str(error))
    assert len(paths) == NUM_ALL
    for path in paths:
        if path.stem in NEED_VARIABLES:
            with pytest.raises(InvalidRequestError, match="undefined"):
                Shown(path).render([user("Hi")])
        else:
            check_random_conversations(Shown(path), 60)
            check_against_transformers(Shown(path), 20)


def is_list(content: object) -> bool:
    return isinstance(content, list)


def has_null(messages: list[dict[str, Any]]) -> bool:
    return any(message["content"] is None for message in messages)


def check_against_transformers(shown: Shown, count: int) -> None:
    """Conversations that need no placement are rendered as by apply_chat_template."""
    for seed in range(count):
        sent = conversation(random.Random(1000 + seed))
        messages = shown.read(sent)
        if shown.place(messages).messages != messages:
            continue
        has_form = all(message["role"] in shown.forms.separators for message in sent if is_list(message["content"]))
        tools = None if shown.forms.shows_probe("no tools") else []
        (expected,), _ = render_jinja_template(
            [sent if has_form and has_null(sent) <= has_null(messages) else messages],
            tools,
            chat_template=shown.source,
            add_generation_prompt=True,
            **NAMED_TOKENS,
        )
        assert shown.render(messages) == expected, (shown.name, seed)


@pytest.mark.parametrize("name", NAMES)
def test_what_needs_no_placement_is_rendered_as_transformers_does(name: str) -> None:
    check_against_transformers(template(name), 20)


def test_a_message_that_is_dropped_after_all_is_refused_by_name() -> None:
    sent = [user("Hello there"), answer("Yes"), user("secret words")]
    check_all_messages_rendered(sent, "<user>Hello there<user>secret words")
    with pytest.raises(
        InvalidRequestError, match=r"messages\[2\]\.content is dropped by the model's chat template"
    ) as caught:
        check_all_messages_rendered(sent, "<user>Hello there<assistant>Yes")
    assert caught.value.param == "messages[2].content"
    check_all_messages_rendered([user("..."), user(""), user("Hi"), user("Hi")], "... Hi")
