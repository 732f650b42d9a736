"""The router's explanations: where prompts part, what differs there, why a replica reused no more, and in words."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.gateway.proxy.request_reader import conversation_text
from headstart.gateway.recent_routings import RecentRoutings, RoutedRequest
from headstart.gateway.routing_explanation import Json, explain, explain_unsent_prompt
from headstart.http.http_errors import HttpError
from headstart.reuse.causes import KINDS, classify_difference, message_index_at, split_into_messages

SYSTEM = "You are a careful assistant who answers in one sentence. " * 8  # 456 characters
Messages = list[Mapping[str, str]]


def chat(*messages: tuple[str, str], **fields: object) -> str:
    return conversation_text(
        {"messages": [{"role": role, "content": reported} for role, reported in messages], **fields}
    )


def seen(request_id: str, prompt: "str | array[int]", at: float = 0.0, **fields: Any) -> RoutedRequest:
    return RoutedRequest(request_id, "a", prompt, at, **{"endpoint": "http://one", **fields})


def explained(first: RoutedRequest, second: RoutedRequest, cached: int | None, *others: RoutedRequest) -> Json:
    """The second, after the first and the others were answered."""
    recent = RecentRoutings()
    for one in (first, *others):
        recent.add(one)
        recent.record_usage(one.request_id, 0, at=one.at)
    recent.add(second)
    if cached is not None:
        recent.record_usage(second.request_id, cached, at=9.0)
    answer = explain(recent, second.request_id, tenant="a", now=10.0)
    assert answer == json.loads(json.dumps(answer)) and answer["object"] == "route.explanation"
    head = answer["message"].split("\n")[0]
    assert head.endswith(".") and "None" not in head and "{" not in head
    return answer


def differing(this: str, that: str, *, is_chat: bool = False) -> str | None:
    at = next((i for i, (a, b) in enumerate(zip(this, that, strict=False)) if a != b), min(len(this), len(that)))
    kind = classify_difference(this, that, at, is_chat=is_chat)
    assert kind is None or kind in KINDS
    return kind


def test_a_divergence_is_shown_with_its_place_and_both_texts() -> None:
    first = chat(("system", SYSTEM), ("user", "It is 12:30:05. What is the time?"))
    second = chat(("system", SYSTEM), ("user", "It is 12:31:40. What is the time?"))
    answer = explained(seen("one", first, is_chat=True), seen("two", second, 1.0, is_chat=True), 96)
    near = answer["near_match"]
    assert answer["reason"] == "diverged" and near["request_id"] == "one" and near["kind"] == "timestamp"
    assert near["common_chars"] == first.index("0:05") and near["message"] == {"index": 1, "role": "user", "offset": 10}
    assert near["text_before"].endswith("It is 12:3") and len(near["text_before"]) == 40
    assert near["text"].startswith("1:40. What") and near["other_text"].startswith("0:05. What")
    head, *texts = answer["message"].split("\n")
    assert "in message 2 (user) is a time or date" in head and "with request one" in head
    assert [line.split(":")[0].strip() for line in texts] == ["both", "that", "this"]


@pytest.mark.parametrize(
    ("this", "that", "kind"),
    [
        ("at 2026-03-01T10:00:00Z do", "at 2026-03-02T10:00:00Z do", "timestamp"),
        ("on Monday, do", "on Tuesday, do", "timestamp"),
        ("now 1767225600 do", "now 1767225731 do", "timestamp"),
        ("id 0b9c5f7e-43a1-4b7e-9d1c-2f6d0a9b8c7d.", "id 0b9c5f7e-43a1-4b7e-9d1c-2f6d0a9b8c7e.", "uuid"),
        ("call req_8fj39Xk2p now", "call req_8fj39Xk3p now", "identifier"),
        ("take 12 of them", "take 19 of them", "number"),
        ("one  two three four", "one two three four", "whitespace"),
        ("one\r\ntwo three", "one\ntwo three", "whitespace"),
        ('{"name": "get", "kind": "function"}', '{"kind": "function", "name": "get"}', "json_order"),
        ("red green blue", "green blue red", "order"),
        ("the cat sat down", "the dog ran off", "content"),
        ("the cat", "the cat sat", None),
    ],
)
def test_the_kind_of_a_difference_in_text(this: str, that: str, kind: str | None) -> None:
    assert differing(this, that) == kind
    assert differing(that, this) == kind


def test_the_kind_of_a_difference_between_conversations() -> None:
    base = [("system", "be kind"), ("user", "first question"), ("assistant", "an answer"), ("user", "second one")]
    whole = chat(*base)

    def kind(*messages: tuple[str, str]) -> str | None:
        return differing(chat(*messages), whole, is_chat=True)

    assert kind(("system", "be terse"), *base[1:]) == "system_prompt"
    assert kind(base[0], base[2], base[1], base[3]) == "message_order"
    assert kind(base[0], *base[2:]) == "messages_dropped"
    assert kind(base[0], ("user", "what came between"), *base[1:]) == "messages_inserted"
    assert kind(base[0], ("assistant", "first question"), *base[2:]) == "role"
    assert kind(*base[:3], ("user", "another one")) == "content"
    assert kind(*base, ("assistant", "more")) is None


def test_tools_in_another_order_are_told_apart_from_other_tools() -> None:
    tools = [{"name": name, "parameters": {"type": "object"}} for name in ("find", "book")]
    one, other = (chat(("user", "hi"), tools=given) for given in (tools, tools[::-1]))
    assert differing(one, other, is_chat=True) == "json_order"
    assert differing(one, chat(("user", "hi"), tools=tools[:1]), is_chat=True) == "content"


def test_the_messages_of_a_conversation_are_found_again() -> None:
    text = chat(("system", "be kind"), ("user", ""), ("assistant", "two\nlines"))
    found = split_into_messages(text)
    assert [(one.role, text[one.start : one.end]) for one in found] == [
        ("system", "be kind"),
        ("user", ""),
        ("assistant", "two\nlines"),
    ]
    assert [message_index_at(found, at) for at in (0, 8, text.index("<user"), len(text))] == [0, 0, 1, 2]
    assert message_index_at(split_into_messages('[{"tools": 1}]\n' + text), 3) is None


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "", "nobody", "<user>\n", 7, None]) | st.text(max_size=5)},
        optional={"content": st.text(max_size=8) | st.sampled_from(["\n<tool>\n", None, [{"type": "text"}]])},
    ),
    max_size=4,
)


@given(these=MESSAGES, those=MESSAGES)
def test_whatever_roles_messages_have_their_difference_is_of_some_kind(these: list[Any], those: list[Any]) -> None:
    this, that = (conversation_text({"messages": messages}) for messages in (these, those))
    at = next((at for at, (one, other) in enumerate(zip(this, that, strict=False)) if one != other), None)
    if at is not None:
        assert classify_difference(this, that, at, is_chat=True) in KINDS


PROMPT = SYSTEM + "What is the capital of France?"
REUSABLE = 96  # of about 122 tokens, in blocks of 16: all but the last and less what an estimate may be off by


def test_all_of_it_was_there() -> None:
    answer = explained(seen("one", PROMPT), seen("two", PROMPT, 1.0), 112)
    assert answer["reason"] == "complete" and "Everything was there" in answer["message"]


def test_a_prompt_that_goes_on_shares_all_of_the_one_before() -> None:
    answer = explained(seen("one", SYSTEM), seen("two", PROMPT, 1.0), 112)
    assert answer["reason"] == "extends" and "which ends there: what follows is new" in answer["message"]


def test_another_replica_is_named_with_the_reason_it_was_chosen() -> None:
    first, second = seen("one", PROMPT), seen("two", PROMPT, 1.0, endpoint="http://two", why="least cost")
    answer = explained(first, second, 0)
    assert answer["reason"] == "other_replica" and answer["other"]["endpoint"] == "http://one"
    assert "request one went to http://one, and this one to http://two (least cost)" in answer["message"]


def test_what_is_gone_at_the_same_replica_was_evicted() -> None:
    answer = explained(seen("one", PROMPT), seen("two", PROMPT, 4.0), 16)
    assert answer["reason"] == "evicted" and answer["other"] == {
        "request_id": "one",
        "endpoint": "http://one",
        "why_there": None,
        "session": None,
        "seconds_ago": 10.0,
    }
    assert "evicted since" in answer["message"]


def test_what_was_not_answered_yet_was_still_being_computed() -> None:
    recent = RecentRoutings()
    recent.add(seen("one", PROMPT))
    recent.add(seen("two", PROMPT, 1.0))
    recent.record_usage("one", 0, at=2.0)
    recent.record_usage("two", 0, at=3.0)
    assert explain(recent, "two", tenant="a")["reason"] == "computing"


def test_an_equal_prompt_of_another_adapter_or_domain_is_of_no_use() -> None:
    for fields in ({"adapter": "lora"}, {"domain": b"d"}, {"model": "other"}):
        answer = explained(seen("one", PROMPT), seen("two", PROMPT, 1.0, **fields), 0)
        assert answer["reason"] == "isolated" and "share nothing across these" in answer["message"]
        answer = explained(seen("one", PROMPT), seen("two", PROMPT, 1.0, **fields), 112)
        assert answer["reason"] == "complete"


def test_a_prompt_of_less_than_a_block_is_too_short() -> None:
    answer = explained(seen("one", "The sky is blue"), seen("two", "The sky is grey", 1.0), 0)
    assert answer["reason"] == "too_short" and "does not fill a block of 16 tokens" in answer["message"]


def test_less_than_a_block_in_common_was_never_seen_and_the_nearest_request_is_named() -> None:
    answer = explained(seen("one", "The sky is blue. " * 9), seen("two", "The sky is grey. " * 9, 1.0), 0)
    assert answer["reason"] == "never_seen" and answer["near_match"]["request_id"] == "one"
    assert "begins with the same block of 16 tokens" in answer["message"] and "with request one" in answer["message"]
    ids = array("i", [*range(15), *range(100, 120)])
    assert explained(seen("one", array("i", range(40))), seen("two", ids, 1.0), 0)["reason"] == "never_seen"


def test_the_head_of_every_chat_is_no_block_however_many_tokens_a_template_adds() -> None:
    """A short conversation of 60 tokens: most of them are its template's, and characters stand for many tokens."""
    first, second = chat(("user", "light on")), chat(("user", "play jazz"))
    answer = explained(seen("one", first, is_chat=True), seen("two", second, 1.0, is_chat=True, prompt_tokens=60), 0)
    assert answer["reason"] == "never_seen" and answer["near_match"]["common_tokens"] <= len("<user>\n")
    reported = explained(seen("one", first, is_chat=True), seen("two", second, 1.0, is_chat=True, prompt_tokens=60), 16)
    assert reported["reason"] == "diverged", "the replica says that they share a block: the template's own head"


def test_what_is_not_reported_is_not_explained_away() -> None:
    answer = explained(seen("one", PROMPT), seen("two", PROMPT, 1.0), None)
    assert answer["reason"] == "unreported" and answer["near_match"]["request_id"] == "one"


def test_a_prompt_without_a_common_prefix_was_never_seen() -> None:
    assert explained(seen("one", "abc"), seen("two", PROMPT, 1.0), 0)["reason"] == "never_seen"
    assert explained(seen("one", "abc"), seen("two", PROMPT, 1.0), 64)["reason"] == "unseen_but_cached"


def test_token_ids_are_counted_exactly() -> None:
    first, second = array("i", range(100)), array("i", [*range(40), *range(200, 260)])
    answer = explained(seen("one", first), seen("two", second, 1.0), 32)
    assert answer["reason"] == "diverged" and answer["prompt_tokens"] == 100 and answer["prompt_tokens_exact"]
    near = answer["near_match"]
    assert (near["common_tokens"], near["common_chars"]) == (40, None) and near["text"].startswith("200 201")
    assert "its first 40 token ids with" in answer["message"]
    assert explained(seen("one", first), seen("two", second, 1.0), 16)["reason"] == "evicted"


def test_a_prompt_that_is_not_sent_is_explained_by_what_the_router_believes() -> None:
    recent = RecentRoutings()
    recent.add(seen("one", PROMPT))
    recent.record_usage("one", 0, at=1.0)
    asked = seen("asked", PROMPT, 2.0, predicted_tokens=112)
    answer = explain_unsent_prompt(recent, asked)
    assert answer["request_id"] is None and answer["reason"] == "complete" and len(recent) == 1
    assert answer["message"].startswith("112 of about 122 prompt tokens would be cached at http://one")


def test_what_is_another_tenants_is_not_known() -> None:
    recent = RecentRoutings()
    recent.add(seen("one", PROMPT))
    for request_id, tenant in (("one", "b"), ("two", "a")):
        with pytest.raises(HttpError) as error:
            explain(recent, request_id, tenant=tenant)
        assert (error.value.status, error.value.code, error.value.param) == (404, "unknown_request", "request_id")
    assert explain(recent, "one", tenant=None)["request_id"] == "one"


prompts = st.text("ab", max_size=60).map(lambda text: text * 3)
requests = st.lists(
    st.tuples(st.booleans(), prompts, st.sampled_from(["r1", "r2"]), st.none() | st.integers(0, 60)), max_size=12
)


@given(requests)
def test_no_tenant_reads_the_text_of_another(sent: list[tuple[bool, str, str, int | None]]) -> None:
    recent = RecentRoutings()
    letters = {"µ": "µπ", "ж": "жд"}  # each tenant's own, in all that is its own
    for number, (is_first, text, endpoint, cached) in enumerate(sent):
        tenant = "µ" if is_first else "ж"
        prompt = text.translate({ord(old): new for old, new in zip("ab", letters[tenant], strict=True)})
        one = RoutedRequest(f"{tenant}{number}", tenant, prompt, float(number), endpoint=tenant + endpoint, why=tenant)
        recent.add(one)
        if cached is not None:
            recent.record_usage(one.request_id, cached, at=number + 0.5)
    for one in list(recent):
        foreign = "ж" if one.tenant == "µ" else "µ"
        told = json.dumps(explain(recent, one.request_id, tenant=one.tenant), ensure_ascii=False)
        assert not set(letters[foreign]) & set(told)
        with pytest.raises(HttpError):
            explain(recent, one.request_id, tenant=foreign)
