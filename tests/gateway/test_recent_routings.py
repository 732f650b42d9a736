"""Recent: the longest common prefix is the true one, bounds hold, and tenants do not see each other."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from headstart.gateway.recent_routings import RecentRoutings, RoutedRequest


def seen(request_id: str, prompt: "str | array[int]", tenant: str = "a", adapter: str | None = None) -> RoutedRequest:
    return RoutedRequest(request_id, tenant, prompt, adapter=adapter)


def test_the_nearest_is_the_one_with_the_longest_common_prefix() -> None:
    recent = RecentRoutings()
    base = "x" * 2148
    for request_id, tail in (("short", "no"), ("long", "yes and"), ("other", "yes or")):
        recent.add(seen(request_id, base + tail))
    recent.add(seen("asked", base + "yes and no"))
    found = recent.find_nearest(seen("new", base + "yes and"))
    assert found is not None and found.seen.request_id == "asked" and found.common == len(base) + 7
    own = recent.find("asked", "a")
    assert own is not None
    near = recent.find_nearest(own)
    assert near is not None and near.seen.request_id == "long" and near.common == len(base) + 7


def test_only_requests_that_came_before_are_compared() -> None:
    recent = RecentRoutings()
    first = seen("first", "abc")
    recent.add(first)
    recent.add(seen("second", "abcd"))
    assert recent.find_nearest(first) is None


def test_of_equals_the_newest_of_its_own_scope_is_the_nearest() -> None:
    recent = RecentRoutings()
    for request_id, adapter in (("old", None), ("new", None), ("other", "lora")):
        recent.add(seen(request_id, "abc", adapter=adapter))
    found = recent.find_nearest(seen("asked", "abd"))
    assert found is not None and found.seen.request_id == "new"
    found = recent.find_nearest(seen("asked", "abd", adapter="lora"))
    assert found is not None and found.seen.request_id == "other"


def test_text_and_token_ids_have_nothing_in_common() -> None:
    recent = RecentRoutings()
    recent.add(seen("ids", array("i", [1, 2, 3])))
    assert recent.find_nearest(seen("text", "abc")) is None
    found = recent.find_nearest(seen("more", array("i", [1, 2, 4])))
    assert found is not None and found.common == 2


def test_a_report_finds_its_request_and_a_late_one_is_ignored() -> None:
    recent = RecentRoutings(max_requests=1)
    recent.add(seen("one", "abc"))
    recent.record_usage("one", 2, 3, at=5.0)
    known = recent.find("one", "a")
    assert known is not None and (known.cached_tokens, known.prompt_tokens, known.reported_at) == (2, 3, 5.0)
    recent.add(seen("two", "abc"))
    recent.record_usage("one", 2)
    assert recent.find("one", "a") is None and len(recent) == 1


def test_the_oldest_are_forgotten_when_there_are_too_many_bytes() -> None:
    recent = RecentRoutings(max_bytes=10_000)
    for number in range(20):
        recent.add(seen(str(number), f"{number % 10}" * 1000))
        assert recent.num_bytes <= 10_000
    assert [one.request_id for one in recent] == ["16", "17", "18", "19"]
    recent.add(seen("huge", "x" * 20_000))
    assert len(recent) == recent.num_bytes == 0 and recent.find_nearest(seen("asked", "x")) is None


def test_a_request_of_another_tenant_is_not_found() -> None:
    recent = RecentRoutings()
    recent.add(seen("one", "abc", tenant="a"))
    assert recent.find("one", "b") is None and recent.find("one", None) is recent.find("one", "a") is not None


texts = st.text("ab\ud800é", max_size=14)
entries = st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 9), texts), max_size=25)


@given(entries, st.sampled_from("xy"), texts, st.integers(1, 12))
def test_the_prefix_found_is_the_longest_of_all_prompts_of_the_tenant(
    added: list[tuple[str, int, str]], tenant: str, prompt: str, most: int
) -> None:
    recent = RecentRoutings(max_requests=most)
    for who, number, text in added:
        recent.add(seen(f"{who}{number}", text, tenant=who))
        assert len(recent) <= most
    own = [one.prompt for one in recent if one.tenant == tenant]
    longest = max((common(prompt, str(other)) for other in own), default=0)
    found = recent.find_nearest(seen("asked", prompt, tenant=tenant))
    assert (0 if found is None else found.common) == longest
    assert found is None or found.seen.tenant == tenant
    for one in list(recent):  # each against those before it
        before = [other for other in recent if other.tenant == one.tenant]
        before = before[: before.index(one)]
        near = recent.find_nearest(one)
        best = max((common(str(one.prompt), str(other.prompt)) for other in before), default=0)
        assert (0 if near is None else near.common) == best


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
