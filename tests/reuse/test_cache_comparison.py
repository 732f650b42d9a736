"""Comparison of a prompt with an earlier one: common tokens, the change, and its names in both hosted dialects."""

import random
from array import array
from typing import Any

import pytest

from headstart.core.request import CacheMode, SamplingParams
from headstart.openai.generation_params import GenerationParams
from headstart.openai.tools.tool_fields import Tool, ToolParams
from headstart.reuse.cache_comparison import (
    CacheComparison,
    CacheDiagnosis,
    PromptChangeKind,
    PromptSourceHashes,
    anthropic_diagnostics,
    compare_prompts,
    fingerprint_prompt,
    num_common_tokens,
)
from headstart.server.apis.answer_diagnosis import FingerprintCache, chat_source_hashes

RULES = {"role": "system", "content": "Answer in one word. " * 12}
ASKED = {"role": "user", "content": "Which river? " * 8}
ANSWER = {"role": "assistant", "content": "The Danube."}
MORE = {"role": "user", "content": "And the next one?"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("rivers", "lakes")
]


def params(tools: list[dict[str, Any]] | None = None, **fields: Any) -> GenerationParams:
    shown = None if tools is None else ToolParams(tuple(Tool(tool["function"]["name"], {}, tool) for tool in tools))
    return GenerationParams(SamplingParams(), tools=shown, **fields)


def ids(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, extra: str = "") -> "array[int]":
    """A token per character of a chat template like others: tools, messages, and the generation prompt."""
    text = extra + "".join(map(str, tools or ()))
    text += "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"
    return array("i", list(text.encode()))


def compare(
    before: tuple[list[dict[str, Any]], GenerationParams],
    now: tuple[list[dict[str, Any]], GenerationParams],
    **raw: Any,
) -> CacheComparison:
    def tools_of(used: GenerationParams) -> Any:
        return None if used.tools is None else used.tools.definitions

    shapes = [chat_source_hashes(messages, used, b"") for messages, used in (before, now)]
    earlier = fingerprint_prompt(shapes[0], ids(before[0], tools_of(before[1]), raw.get("extra_before", "")))
    return compare_prompts("earlier", earlier, shapes[1], ids(now[0], tools_of(now[1]), raw.get("extra_now", "")))


def test_the_next_turn_continues_the_earlier_prompt() -> None:
    found = compare(([RULES, ASKED], params(TOOLS)), ([RULES, ASKED, ANSWER, MORE], params(TOOLS)))
    assert found.change is None and found.num_common == found.num_compared
    assert anthropic_diagnostics(found, 16) is None


@pytest.mark.parametrize(
    ("before", "now", "change", "field", "openai", "anthropic"),
    [
        (
            ([RULES, ASKED], params(TOOLS)), ([RULES, ASKED], params(TOOLS[::-1])),
            PromptChangeKind.TOOLS_REORDERED, "tools", "tools_changed", "tools_changed",
        ),
        (
            ([RULES, ASKED], params(TOOLS)), ([RULES, ASKED], params(TOOLS[:1])),
            PromptChangeKind.TOOLS_CHANGED, "tools", "tools_changed", "tools_changed",
        ),
        (
            ([RULES, ASKED], params()), ([{**RULES, "content": "Now. " + RULES["content"]}, ASKED, ANSWER], params()),
            PromptChangeKind.SYSTEM_CHANGED, "messages[0]", "input_changed", "system_changed",
        ),
        (
            ([RULES, ASKED], params()), ([RULES, {**ASKED, "content": "Which lake?"}, ANSWER, MORE], params()),
            PromptChangeKind.MESSAGES_CHANGED, "messages[1]", "input_changed", "messages_changed",
        ),
        (
            ([RULES, ASKED, ANSWER, MORE], params()), ([RULES, MORE], params()),
            PromptChangeKind.MESSAGES_DROPPED, "messages[1]", "context_compacted", "messages_changed",
        ),
    ],
)  # fmt: skip
def test_changes_have_their_names_in_both_dialects(
    before: Any, now: Any, change: PromptChangeKind, field: str, openai: str, anthropic: str
) -> None:
    found = compare(before, now)
    assert (found.change, found.field) == (change, field)
    told = CacheDiagnosis(found, 16, num_cached=0, num_evicted=0).openai_json()
    assert (told["type"], told["reason"]) == ("cache_miss", openai)
    assert told["comparison_reusable_tokens"] == found.num_common < found.num_compared
    assert told["cache_missed_tokens"] == found.num_tokens - found.num_common // 16 * 16
    shown = anthropic_diagnostics(found, 16)
    assert shown is not None and shown["cache_miss_reason"]["type"] == anthropic
    assert shown["cache_miss_reason"]["cache_missed_input_tokens"] == found.num_lost_to_change(16) > 0


def test_changes_without_a_name_in_a_dialect_are_unavailable_there() -> None:
    before, now = ([RULES, ASKED], params(template_options=(("tone", "dry"),))), ([RULES, ASKED, ANSWER], params())
    found = compare(before, now, extra_before="dry", extra_now="warm")
    assert found.change is PromptChangeKind.TEMPLATE_OPTIONS_CHANGED
    told = CacheDiagnosis(found, 16, num_cached=0, num_evicted=0)
    assert told.openai_json() == {"type": "unavailable"} and told.cause == "template_options_changed"
    assert anthropic_diagnostics(found, 16) == {"cache_miss_reason": {"type": "unavailable"}}


def test_the_effort_of_reasoning_is_a_reason_of_its_own() -> None:
    before = ([RULES, ASKED], params(template_options=(("reasoning_effort", "low"), ("enable_thinking", True))))
    found = compare(before, ([RULES, ASKED], params(template_options=(("reasoning_effort", "high"),))),
                    extra_before="low", extra_now="high")  # fmt: skip
    assert found.change is PromptChangeKind.REASONING_EFFORT_CHANGED
    assert CacheDiagnosis(found, 16, 0, 0).openai_json()["reason"] == "reasoning_effort_changed"


def test_a_change_that_the_template_does_not_show_is_none() -> None:
    found = compare(([RULES, ASKED], params()), ([RULES, {**ASKED, "name": "ann"}, ANSWER], params()))
    assert found.change is None


def test_a_template_that_changes_earlier_turns_is_named() -> None:
    before = ([RULES, ASKED], params())
    found = compare(before, ([RULES, ASKED, ANSWER, MORE], params()), extra_now="today")
    assert found.change is PromptChangeKind.RENDERED_DIFFERENTLY and found.num_common == 0


def test_nothing_is_told_about_prompts_of_another_salt() -> None:
    found = compare(([RULES, ASKED], params(cache_salt="a")), ([RULES, ASKED], params(cache_salt="b")))
    assert found.change is PromptChangeKind.CACHE_SALT_CHANGED
    assert (found.num_common, found.num_compared) == (0, 0)


def test_an_earlier_prompt_that_was_not_published_is_named() -> None:
    found = compare(([RULES, ASKED], params(cache=CacheMode.READ_ONLY)), ([RULES, ASKED, ANSWER], params()))
    assert found.change is PromptChangeKind.NOT_PUBLISHED
    assert CacheDiagnosis(found, 16, 0, 0).cache_diagnostics_json()["cause"] == "not_published"


@pytest.mark.parametrize(("cached", "evicted", "result", "cause", "openai"), [
    (320, 0, "hit", None, "cache_hit"),
    (0, 320, "miss", "evicted", "unavailable"),
    (0, 0, "miss", "not_cached", "unavailable"),
])  # fmt: skip
def test_what_was_really_cached_decides_about_a_continued_prompt(
    cached: int, evicted: int, result: str, cause: str | None, openai: str
) -> None:
    found = compare(([RULES, ASKED], params()), ([RULES, ASKED, ANSWER, MORE], params()))
    assert found.num_common // 16 * 16 <= 368
    told = CacheDiagnosis(found, 16, found.num_common // 16 * 16 if cached else 0, evicted)
    assert (told.cache_diagnostics_json()["result"], told.cause, told.openai_json()["type"]) == (result, cause, openai)


def test_a_changed_prompt_that_another_request_had_cached_is_a_hit() -> None:
    found = compare(([RULES, ASKED], params()), ([{**RULES, "content": "x" + RULES["content"]}, ASKED], params()))
    assert CacheDiagnosis(found, 16, num_cached=found.num_tokens // 16 * 16, num_evicted=0).is_full_hit


def test_common_tokens_are_exact_at_the_end_and_never_too_many() -> None:
    rng = random.Random(3)
    shape: PromptSourceHashes = chat_source_hashes([ASKED], params(), b"")
    for _ in range(300):
        one = array("i", [rng.randrange(9) for _ in range(rng.randint(1, 130))])
        other = one[: rng.randint(0, len(one))] + array("i", [rng.randrange(9) for _ in range(rng.randint(0, 40))])
        true = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        found = num_common_tokens(fingerprint_prompt(shape, one), other)
        exact_from = max(len(one) // 16 - 2, 0) * 16
        assert found == (true if true >= exact_from else true // 16 * 16), (len(one), true, found)


def test_fingerprints_are_found_by_their_tenant_only_and_bounded() -> None:
    memory = FingerprintCache(64 * 1024)
    shape = chat_source_hashes([RULES, ASKED], params(), b"")
    kept = fingerprint_prompt(shape, ids([RULES, ASKED]))
    memory.put("ann", "resp_1", kept)
    assert memory.find_values("ann", ["resp_1"])[0] is kept and memory.find_values("bob", ["resp_1"])[0] is None
    for number in range(200):
        memory.put("ann", f"resp_{number}", kept)
    assert memory.num_bytes <= 32 * 1024 and 5 < len(memory) < 200
    assert memory.find_values("ann", ["resp_199"])[0] is kept and memory.find_values("ann", ["resp_1"])[0] is None


def test_a_fingerprint_holds_no_text_and_no_tokens() -> None:
    kept = fingerprint_prompt(chat_source_hashes([RULES, ASKED], params(TOOLS), b""), ids([RULES, ASKED], TOOLS))
    assert "Danube" not in repr(kept) and "river" not in repr(kept) and "Answer" not in repr(kept)
