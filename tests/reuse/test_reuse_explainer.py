"""The explainer: every reason by hand, who may see what, and that it remembers no more than it may."""

from array import array
from collections.abc import Iterable

import pytest
from checking import generate, make_engine, make_request, run

from headstart.core.engine import Engine
from headstart.core.recent_requests import RecentRequests
from headstart.core.request import CacheMode, Request, SamplingParams
from headstart.reuse.reuse_explainer import (
    Explanation,
    ReuseEndReason,
    Viewer,
    explain_prompt_reuse,
    explain_request_reuse,
)

ADMIN = Viewer(is_admin=True)
ANONYMOUS = Viewer()
A, B = Viewer("a"), Viewer("b")


def why(engine: Engine, request_id: str, viewer: Viewer = ANONYMOUS, now: float = 0.0) -> Explanation:
    found = explain_request_reuse(engine.scheduler, engine.recent, request_id, viewer, now)
    assert found is not None
    return found


def why_not(engine: Engine, prompt: Iterable[int], viewer: Viewer = ANONYMOUS, **fields: object) -> Explanation:
    """Explain a prompt of 4-token blocks as it would be served now."""
    return explain_prompt_reuse(engine.scheduler, engine.recent, make_request("", prompt, **fields), viewer, 10.0)


def of(tenant: str, salt: str = "") -> dict[str, object]:
    return {"tenant": tenant, "domain": f"{tenant}/{salt}".encode()}


def prompt(*changes: tuple[int, int], length: int = 18) -> list[int]:
    """Token ids 0, 1, 2, ... with some replaced."""
    tokens = list(range(length))
    for position, token in changes:
        tokens[position] = token
    return tokens


def test_a_first_prompt_was_never_seen() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    found = why(engine, "first")
    assert (found.reason, found.position, found.status) == (ReuseEndReason.UNSEEN, 0, "finished")
    assert found.then is not None and found.then.computed == 18
    assert found.now.shared == 16 and found.now.computed == 2


def test_tokens_behind_a_divergence_are_found_at_any_offset() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("short", prompt()))
    longer = [*range(9), 90, 91, 92, *range(10, 18)]
    near = why_not(engine, longer).near
    assert near is not None and (near.common_tokens, near.repeated_tokens) == (9, 8)
    near = why_not(engine, [*range(9), *range(90, 99)]).near
    assert near is not None and near.repeated_tokens == 0, "nothing behind it is the same"


def test_a_divergence_is_named_with_the_tokens_around_it() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("monday", prompt()))
    generate(engine, make_request("tuesday", prompt((9, 90))))
    found = why(engine, "tuesday")
    assert (found.reason, found.position) == (ReuseEndReason.DIVERGED, 8) and found.then is not None
    assert (found.then.shared, found.then.computed) == (8, 10)
    near = found.near
    assert near is not None and (near.request_id, near.common_tokens) == ("monday", 9)
    assert (
        near.before == tuple(range(9)) and near.this == (90, *range(10, 18)) and near.other[:9] == tuple(range(9, 18))
    )


def test_of_several_near_matches_the_longest_and_then_the_newest_is_named() -> None:
    engine = make_engine(num_blocks=40)
    for rid, change in (("short", (6, 60)), ("long", (13, 60)), ("longer", (14, 60)), ("newer", (14, 61))):
        generate(engine, make_request(rid, prompt(change)))
    near = why_not(engine, prompt()).near
    assert near is not None and (near.request_id, near.common_tokens) == ("newer", 14)


def test_only_what_came_before_explains_a_request() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    generate(engine, make_request("second", prompt()))
    assert why(engine, "first").reason is ReuseEndReason.UNSEEN


def test_less_than_a_block_in_common_was_never_seen_and_the_nearest_request_is_named() -> None:
    """Text that a chat template writes before every conversation makes two of them no relatives."""
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    for common in (1, 2, 3):
        found = why_not(engine, prompt((common, 50)))
        assert (found.reason, found.position) == (ReuseEndReason.UNSEEN, 0)
        assert found.near is not None and (found.near.request_id, found.near.common_tokens) == ("first", common)
    assert why_not(engine, prompt((0, 50))).near is None
    generate(engine, make_request("short", prompt(length=2), 1))
    assert why_not(engine, [0, 1, 50, 51, 52, 53]).reason is ReuseEndReason.UNSEEN, (
        "nor does it extend so short a request"
    )


def test_from_a_whole_block_in_common_on_it_is_a_divergence() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt(), cache=CacheMode.READ_ONLY))
    generate(engine, make_request("second", prompt((4, 50))))
    found = why_not(engine, prompt((4, 60)))
    assert (found.reason, found.position) == (ReuseEndReason.DIVERGED, 4)


def test_a_conversation_that_goes_on_extends_the_turn_before_output_included() -> None:
    engine = make_engine(num_blocks=40)
    output = generate(engine, make_request("turn1", prompt(length=7), 5))["turn1"]
    found = why_not(engine, [*prompt(length=7), *output, 91, 92, 93, 94, 95])
    assert (found.reason, found.position) == (ReuseEndReason.EXTENDS, 8)
    assert found.near is not None and found.near.common_tokens == 12 and found.near.other == ()


def test_a_divergence_in_the_output_of_the_turn_before_is_found() -> None:
    engine = make_engine(num_blocks=40)
    output = generate(engine, make_request("turn1", prompt(length=7), 9))["turn1"]
    found = why_not(engine, [*prompt(length=7), *output[:3], 91, 92, 93, 94, 95])
    assert found.reason is ReuseEndReason.DIVERGED and found.near is not None and found.near.common_tokens == 10
    assert found.near.other[:6] == tuple(output[3:])


def test_a_whole_cached_prompt_computes_its_last_token() -> None:
    engine = make_engine(num_blocks=40)
    for rid in ("first", "again"):
        generate(engine, make_request(rid, prompt(length=16)))
    found = why(engine, "again")
    assert (found.reason, found.position, found.near) == (ReuseEndReason.COMPLETE, 15, None)


def test_what_does_not_fill_a_block_is_not_shared() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    assert why_not(engine, prompt()).reason is ReuseEndReason.TAIL
    assert why_not(engine, [7, 8, 9]).reason is ReuseEndReason.TAIL


def test_an_eviction_names_cause_culprit_and_time() -> None:
    engine = make_engine(num_blocks=9)
    engine.add_request(make_request("old", prompt()))
    engine.step(1.0)
    engine.add_request(make_request("flood", [50 + i % 40 for i in range(30)]))
    engine.step(4.0)
    found = why_not(engine, prompt())
    assert found.reason is ReuseEndReason.EVICTED and found.eviction is not None
    assert (found.eviction.cause, found.eviction.by, found.eviction.by_another_tenant) == ("capacity", "flood", False)
    assert found.eviction.seconds_ago == 6.0


def test_an_eviction_is_remembered_for_the_request_that_missed_by_it() -> None:
    engine = make_engine(num_blocks=9)
    for rid, tokens in (("old", prompt()), ("flood", [50 + i % 40 for i in range(30)]), ("again", prompt())):
        generate(engine, make_request(rid, tokens))
    assert engine.scheduler.cache.match_prefix(
        engine.scheduler.cache.new_sequence(make_request("", prompt()), 0)
    ).num_tokens
    found = why(engine, "again")
    assert found.reason is ReuseEndReason.EVICTED and found.eviction is not None and found.eviction.by == "flood"


def test_a_reset_and_a_failed_row_are_causes_too() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    assert engine.reset_prefix_cache()
    found = why_not(engine, prompt())
    assert found.eviction is not None and (found.eviction.cause, found.eviction.by) == ("reset", None)
    engine = make_engine(num_blocks=40, poison=lambda chunk: len(chunk.history) > 18)
    generate(engine, make_request("fails", prompt(), 4))
    found = why_not(engine, prompt())
    assert found.eviction is not None and found.eviction.cause == "failed"


def test_what_another_is_computing_now_is_said_so() -> None:
    engine = make_engine(num_blocks=40, max_batched_tokens=6, max_seqs=2)
    engine.add_request(make_request("leader", prompt()))
    engine.step()
    found = why_not(engine, prompt())
    assert (found.reason, found.position) == (ReuseEndReason.COMPUTING, 4)
    assert found.near is not None and found.near.request_id == "leader"


def test_a_waiting_request_is_explained_as_of_now() -> None:
    engine = make_engine(num_blocks=40, max_seqs=1)
    engine.add_request(make_request("runs", prompt((5, 55)), 9))
    engine.step()
    engine.add_request(make_request("waits", prompt()))
    found = why(engine, "waits")
    assert (found.status, found.then, found.position) == (
        "waiting",
        None,
        4,
    ) and found.reason is ReuseEndReason.DIVERGED
    run(engine)
    assert why(engine, "waits").status == "finished"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"cache": CacheMode.BYPASS}, ReuseEndReason.BYPASS), ({"cache": CacheMode.READ_ONLY}, ReuseEndReason.TAIL)],
)
def test_the_mode_of_the_request_itself(fields: dict[str, object], reason: ReuseEndReason) -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    assert why_not(engine, prompt(), **fields).reason is reason
    generate(engine, make_request("asked", prompt(), **fields))
    assert why(engine, "asked").reason is reason


def test_prompt_logprobs_are_a_reason() -> None:
    engine = make_engine(num_blocks=40)
    request = Request("asked", array("i", prompt()), SamplingParams(prompt_logprobs=0))
    found = explain_prompt_reuse(engine.scheduler, engine.recent, request, ANONYMOUS, 0.0)
    assert (found.reason, found.position) == (ReuseEndReason.UNREAD, 0)


def test_without_a_cache_there_is_nothing_to_find() -> None:
    engine = make_engine(num_blocks=40, enable_prefix_caching=False)
    generate(engine, make_request("first", prompt()))
    assert why(engine, "first").reason is why_not(engine, prompt()).reason is ReuseEndReason.DISABLED


def test_a_read_only_request_leaves_nothing_for_the_next() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("one-off", prompt(), cache=CacheMode.READ_ONLY))
    found = why_not(engine, prompt())
    assert found.reason is ReuseEndReason.NOT_KEPT and found.near is not None and found.near.request_id == "one-off"


def test_the_same_tokens_under_another_salt_are_in_another_domain() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("salted", prompt(), **of("a", "salt")))
    found = why_not(engine, prompt(), A, **of("a"))
    assert found.reason is ReuseEndReason.ISOLATED and found.near is not None and found.near.request_id == "salted"


def test_a_twin_that_may_not_be_followed_was_still_computing() -> None:
    engine = make_engine(num_blocks=40)
    engine.add_request(make_request("first", prompt(length=5)))
    engine.add_request(make_request("twin", prompt(length=5)))
    run(engine)
    found = why(engine, "twin")
    assert (found.position, found.reason) in {(0, ReuseEndReason.COMPUTING), (4, ReuseEndReason.COMPLETE)}


def test_a_pinned_prefix_is_told_apart_and_can_be_the_nearest() -> None:
    engine = make_engine(num_blocks=40)
    engine.add_prefix("intent", prompt(length=12))
    run(engine)
    generate(engine, make_request("good", prompt()), make_request("bad", prompt((5, 55))))
    good, bad = why(engine, "good"), why(engine, "bad", ADMIN)
    assert good.then is not None and (good.then.pinned, good.then.shared) == (12, 0) and good.now.pinned == 12
    assert (bad.reason, bad.position) == (ReuseEndReason.DIVERGED, 4)
    engine = make_engine(num_blocks=40)
    engine.add_prefix("intent", prompt(length=12))
    run(engine)
    found = why_not(engine, prompt((5, 55)), ADMIN)
    assert found.near is not None and found.near.request_id.startswith("prefix:intent:")


def test_a_tenant_sees_nothing_of_others() -> None:
    engine = make_engine(num_blocks=9)
    generate(engine, make_request("of-a", prompt(), **of("a")))
    assert explain_request_reuse(engine.scheduler, engine.recent, "of-a", B, 0.0) is None
    stranger = why_not(engine, prompt(), B, **of("b"))
    assert (stranger.reason, stranger.position, stranger.near) == (ReuseEndReason.UNSEEN, 0, None)
    generate(engine, make_request("of-b", [50 + i % 40 for i in range(30)], **of("b")))
    victim = why_not(engine, prompt(), A, **of("a"))
    assert victim.eviction is not None and (victim.eviction.by, victim.eviction.by_another_tenant) == (None, True)
    told = why_not(engine, prompt(), ADMIN, **of("a")).eviction
    assert told == victim.eviction._replace(by="of-b", by_tenant="b") and victim.eviction.by_tenant is None
    forgotten = explain_prompt_reuse(
        engine.scheduler, RecentRequests(), make_request("", prompt(), **of("a")), ADMIN, 10.0
    )
    assert forgotten.eviction == told
    again = make_request("again", prompt(), **of("a"))
    engine.add_request(again)
    (output,) = [output for output in run(engine)["again"] if output.breakdown is not None]
    assert (output.evicted_by, output.num_evicted_tokens) == ("b", 16)


def test_an_administrator_sees_all() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("of-a", prompt(), **of("a")))
    assert why(engine, "of-a", ADMIN).reason is ReuseEndReason.UNSEEN
    found = why_not(engine, prompt(), ADMIN, **of("b"))
    assert found.reason is ReuseEndReason.ISOLATED and found.near is not None and found.near.request_id == "of-a"


def test_explaining_changes_nothing() -> None:
    engine = make_engine(num_blocks=40)
    generate(engine, make_request("first", prompt()))
    before = engine.stats()
    for _ in range(3):
        why(engine, "first"), why_not(engine, prompt((9, 90)))
    assert engine.stats() == before and not engine.has_work
    assert why_not(engine, prompt()).as_dict()["reason"] == "tail"


def test_the_oldest_are_forgotten_by_number_and_by_tokens() -> None:
    engine = make_engine(num_blocks=60)
    engine.recent = RecentRequests(max_requests=3, max_tokens=40)
    for index in range(5):
        generate(engine, make_request(f"r{index}", [index] * 5))
    assert [seen.request_id for seen in engine.recent] == ["r4", "r3", "r2"]
    generate(engine, make_request("long", [9] * 34))
    assert [seen.request_id for seen in engine.recent] == ["long", "r4"]
    assert explain_request_reuse(engine.scheduler, engine.recent, "r2", ANONYMOUS, 0.0) is None


def test_aborted_requests_leave_nothing_behind_to_wait_for() -> None:
    engine = make_engine(num_blocks=40, max_seqs=1)
    for rid in ("runs", "waits"):
        engine.add_request(make_request(rid, prompt(), 9))
    engine.step()
    assert engine.abort("runs") and engine.abort("waits")
    found = why(engine, "runs")
    assert (found.status, found.then) == ("finished", None) or found.then is not None
    assert explain_request_reuse(engine.scheduler, engine.recent, "waits", ANONYMOUS, 0.0) is None
