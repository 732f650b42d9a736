"""Evicted blocks are remembered for a while, by name only."""

from headstart.core.cache.hashing import BlockHash
from headstart.core.cache.history import EvictionHistory, EvictionRecord

GONE = EvictionRecord("capacity", "r1", 2.0)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(4, "little"))


def test_a_hash_is_remembered_with_its_eviction_until_published_again() -> None:
    history = EvictionHistory(8)
    history.add(name(1), GONE)
    assert history.get(name(1)) == GONE and history.get(name(2)) is None
    assert history.pop(name(1)) == GONE
    assert history.get(name(1)) is None and history.pop(name(1)) is None and len(history) == 0


def test_at_least_half_and_at_most_all_of_the_capacity_is_remembered() -> None:
    history = EvictionHistory(8)
    for number in range(100):
        history.add(name(number), GONE)
        assert len(history) <= 8
        assert all(history.get(name(n)) for n in range(max(number - 3, 0), number + 1))


def test_an_old_name_is_forgotten_too() -> None:
    history = EvictionHistory(4)
    for number in range(3):
        history.add(name(number), GONE)
    assert history.pop(name(0)) == GONE and history.get(name(0)) is None
