"""Explanations in words: every reason has a sentence, and the sentence says what the answer says."""

from typing import Any

import pytest
from tokenizer_folders import BYTE_LEVEL, build

from headstart.core.batch import PromptTokenBreakdown
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.reuse.reuse_explainer import ExplainedEviction, Explanation, NearMatch, ReuseEndReason
from headstart.server.cache_api.explanation_text import reuse_explanation_json

TOKENIZER = Tokenizer(build(BYTE_LEVEL))
MONDAY, TUESDAY = (tuple(TOKENIZER.encode(text)) for text in ("Monday at noon", "Tuesday at noon"))
BEFORE = tuple(TOKENIZER.encode("the quick brown fox jumps over the lazy dog and comes on "))
NEAR = NearMatch("cmpl-1", 35, BEFORE, TUESDAY, MONDAY)
HIT, COLD = PromptTokenBreakdown(16, 16, 0, 0, 68), PromptTokenBreakdown(computed=100)


def told(reason: ReuseEndReason, **fields: Any) -> str:
    values: dict[str, Any] = {"request_id": "cmpl-2", "status": "finished", "then": HIT, "now": HIT, "position": 32}
    explanation = Explanation(num_prompt_tokens=100, block_size=16, reason=reason, **(values | fields))
    return reuse_explanation_json(explanation.as_dict(), TOKENIZER)["message"]


@pytest.mark.parametrize("reason", ReuseEndReason)
def test_every_reason_is_told_in_whole_sentences(reason: ReuseEndReason) -> None:
    message = told(reason, near=NEAR, eviction=ExplainedEviction("capacity", "cmpl-3", False, None, 5.0)).split("\n")[0]
    assert message.startswith("32 of 100 prompt tokens were cached (16 pinned, 16 shared). ")
    assert message.endswith(".") and "None" not in message and "{" not in message


def test_a_divergence_shows_both_texts() -> None:
    head, *texts = told(ReuseEndReason.DIVERGED, near=NEAR).split("\n")
    assert "first 35 tokens with request cmpl-1; then token 36 differs: that one had 'M', this one 'T'" in head
    assert "Of these 3 did not count: blocks of 16 tokens are shared whole." in head
    assert [line.split(":")[0].strip() for line in texts] == ["both", "that", "this"]
    assert "Monday at noon" in texts[1] and "Tuesday at noon" in texts[2] and max(map(len, texts)) < 60


def test_a_divergence_says_what_it_costs_and_how_to_mend_it() -> None:
    assert "stand in both" not in told(ReuseEndReason.DIVERGED, near=NEAR)
    message = told(ReuseEndReason.DIVERGED, near=NEAR._replace(repeated_tokens=1180))
    assert "seems to be a time or date, which changes with every request: move it after the constant part." in message
    assert "Behind it 1,180 tokens stand in both prompts, and are computed again because of it." in message
    unseen = told(ReuseEndReason.UNSEEN, now=COLD, position=0, near=NEAR._replace(common_tokens=3, repeated_tokens=64))
    assert "Behind it 64 tokens stand in both prompts" in unseen


def test_an_end_is_no_difference() -> None:
    message = told(ReuseEndReason.EXTENDS, near=NEAR._replace(other=()))
    assert "which ends there: what follows is new, from token 36 on" in message and "\n" not in message


def test_a_pinned_prefix_goes_by_its_name() -> None:
    assert "with the pinned prefix 'intent:v2'" in told(
        ReuseEndReason.DIVERGED, near=NEAR._replace(request_id="prefix:intent:v2:3")
    )


@pytest.mark.parametrize(
    ("eviction", "said"),
    [
        (ExplainedEviction("capacity", "cmpl-3", False, None, 5.0), "evicted to make room for request cmpl-3 5 s ago"),
        (
            ExplainedEviction("capacity", "cmpl-3", False, "batch", 5.0),
            "evicted to make room for request cmpl-3 of tenant batch 5 s ago",
        ),
        (
            ExplainedEviction("capacity", None, False, "batch", 5.0),
            "evicted to make room for a request of tenant batch 5 s ago",
        ),
        (ExplainedEviction("capacity", None, True, None, 600.0), "evicted to make room for another tenant 10 min ago"),
        (ExplainedEviction("capacity", None, False, None, 7200.0), "evicted to make room 2 h ago"),
        (ExplainedEviction("reset", None, False, None, 5.0), "dropped when the prefix cache was reset 5 s ago"),
        (
            ExplainedEviction("failed", None, False, None, 5.0),
            "dropped because a request that used them failed in the engine 5 s ago",
        ),
    ],
)
def test_an_eviction_says_why_for_whom_and_when(eviction: ExplainedEviction, said: str) -> None:
    assert f"The blocks from token 33 on were {said}." in told(ReuseEndReason.EVICTED, eviction=eviction)


def test_what_was_is_told_apart_from_what_would_be() -> None:
    assert told(ReuseEndReason.UNSEEN, now=COLD).startswith(
        "32 of 100 prompt tokens were cached (16 pinned, 16 shared). If it came"
    )
    asked = told(ReuseEndReason.UNSEEN, request_id=None, status=None, then=None, now=COLD, position=0)
    assert asked == "0 of 100 prompt tokens would be cached if it began now. No recent request begins like this one."
    nearest = told(ReuseEndReason.UNSEEN, now=COLD, position=0, near=NEAR._replace(common_tokens=3))
    assert "No recent request begins with the same block of 16 tokens; the nearest, request cmpl-1, shares" in nearest
    assert "shares its first 3 tokens" in nearest and "\n  this:  " in nearest
    aborted = told(ReuseEndReason.TAIL, then=None)
    assert aborted.startswith("32 of 100 prompt tokens were cached when it began.")


def test_half_a_character_at_the_border_is_left_out() -> None:
    euro = tuple(TOKENIZER.encode("€"))
    near = NearMatch("cmpl-1", 35, BEFORE + euro[:1], euro[1:] + TUESDAY, euro[2:] + MONDAY)
    explanation = Explanation("a", "finished", 100, 16, 32, ReuseEndReason.DIVERGED, HIT, HIT, near)
    shown = reuse_explanation_json(explanation.as_dict(), TOKENIZER)["near_match"]
    assert "\ufffd" not in shown["text_before"] + shown["text"] + shown["other_text"]
    assert len(euro) == 1 or shown["token"]["text"].startswith("bytes:")
