"""StoredResponses: owned by tenants, bounded in bytes, entries and age; conversations keep the turns they need."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.openai.responses_api.response_memory import StoredResponse, StoredResponses


def stored(response_id: str, text: str = "x") -> StoredResponse:
    said: dict[str, Any] = {"type": "message", "role": "assistant", "content": [{"text": f"re {text}"}]}
    asked: dict[str, Any] = {"type": "message", "role": "user", "content": [{"text": text}]}
    return StoredResponse({"id": response_id, "output": [said]}, [asked])


def texts(memory: StoredResponses, tenant: str, response_id: str, now: float = 0.0) -> list[str] | None:
    found = memory.history(tenant, response_id, now)
    return None if found is None else [item["content"][0]["text"] for item in found.items]


def put(memory: StoredResponses, tenant: str, response_id: str, after: str = "", now: float = 0.0) -> None:
    before = memory.history(tenant, after, now) if after else None
    memory.add(tenant, stored(response_id, response_id), now, before.last if before is not None else None)


def test_a_conversation_has_all_turns_in_order() -> None:
    memory = StoredResponses(1 << 20, 100.0)
    put(memory, "a", "r1")
    put(memory, "a", "r2", "r1")
    put(memory, "a", "r3", "r2")
    put(memory, "a", "other", "r1")
    assert texts(memory, "a", "r3") == ["r1", "re r1", "r2", "re r2", "r3", "re r3"]
    assert texts(memory, "a", "other") == ["r1", "re r1", "other", "re other"]


def test_only_its_tenant_finds_a_response() -> None:
    memory = StoredResponses(1 << 20, 100.0)
    put(memory, "a", "r1")
    assert memory.get("a", "r1", 0.0) == stored("r1", "r1")  # the owner does find it
    assert memory.get("b", "r1", 0.0) is None and memory.history("b", "r1", 0.0) is None
    assert not memory.remove("b", "r1", 0.0) and memory.remove("a", "r1", 0.0)
    assert memory.get("a", "r1", 0.0) is None and memory.num_bytes == 0 == memory.num_entries


def test_a_removed_response_stays_part_of_those_that_continue_it() -> None:
    memory = StoredResponses(1 << 20, 100.0)
    put(memory, "a", "r1")
    put(memory, "a", "r2", "r1")
    assert memory.remove("a", "r1", 0.0) and memory.get("a", "r1", 0.0) is None
    assert texts(memory, "a", "r2") == ["r1", "re r1", "r2", "re r2"]
    assert memory.remove("a", "r2", 0.0) and memory.num_bytes == 0


def test_a_response_removed_while_the_next_one_is_computed_is_part_of_it() -> None:
    memory = StoredResponses(1 << 20, 100.0)
    put(memory, "a", "r1")
    before = memory.history("a", "r1", 0.0)
    assert before is not None and memory.remove("a", "r1", 0.0)
    memory.add("a", stored("r2", "r2"), 0.0, before.last)
    assert texts(memory, "a", "r2") == ["r1", "re r1", "r2", "re r2"]
    assert memory.remove("a", "r2", 0.0) and memory.num_bytes == 0


def test_the_least_recently_used_response_is_removed_first() -> None:
    memory = StoredResponses(1 << 20, 100.0, max_entries=2)
    put(memory, "a", "r1")
    put(memory, "a", "r2")
    assert memory.get("a", "r1", 0.0) is not None
    put(memory, "a", "r3")
    assert [memory.get("a", name, 0.0) is not None for name in ("r1", "r2", "r3")] == [True, False, True]


def test_a_tenant_that_stores_much_evicts_its_own_responses_only() -> None:
    memory = StoredResponses(1 << 20, 100.0, max_entries=10)
    put(memory, "small", "r1")
    for number in range(50):
        put(memory, "large", f"l{number}")
    assert memory.get("small", "r1", 0.0) is not None and memory.num_entries == 10


def test_old_responses_are_not_found() -> None:
    memory = StoredResponses(1 << 20, 100.0)
    put(memory, "a", "r1", now=5.0)
    assert memory.get("a", "r1", 105.0) is not None
    assert memory.get("a", "r1", 105.1) is None and memory.num_bytes == 0


def test_with_no_bytes_nothing_is_stored() -> None:
    memory = StoredResponses(0, 100.0)
    put(memory, "a", "r1")
    assert memory.get("a", "r1", 0.0) is None and memory.num_entries == 0


ACTIONS = st.tuples(
    st.sampled_from(["add", "remove", "get"]), st.sampled_from("ab"), st.integers(0, 7), st.integers(0, 7)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40), st.integers(0, 6000))
def test_bounds_hold_and_histories_are_complete(actions: list[tuple[str, str, int, int]], max_bytes: int) -> None:
    memory = StoredResponses(max_bytes, 1e9, max_entries=5)
    expected: dict[tuple[str, str], list[str]] = {}
    for number, (action, tenant, one, other) in enumerate(actions):
        name = f"r{one}"
        if action == "add":
            name, after = f"r{one}-{number}", next((n for t, n in expected if t == tenant and n[1] == str(other)), "")
            known = texts(memory, tenant, after) or []
            put(memory, tenant, name, after)
            expected[tenant, name] = [*known, name, f"re {name}"]
        elif action == "remove":
            memory.remove(tenant, next((n for t, n in expected if t == tenant and n[1] == str(one)), ""), 0.0)
        assert memory.num_bytes <= max_bytes and memory.num_entries <= 5
        for (owner, known_name), items in expected.items():
            assert texts(memory, owner, known_name) in (None, items)
            assert memory.get("b" if owner == "a" else "a", known_name, 0.0) is None
    for owner, name in expected:
        memory.remove(owner, name, 0.0)
    assert memory.num_bytes == 0 == memory.num_entries
