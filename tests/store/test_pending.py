"""Blocks that wait to be written: their order, what is dropped when too much waits, and what replaces what."""

from headstart.core.cache.block_store import BlockKey
from headstart.core.cache.hashing import BlockHash
from headstart.store.writer import BlockOffer, PendingOffers


def offer(number: int, version: int = 1) -> BlockOffer:
    return BlockOffer(number, version, BlockKey(name(number), BlockHash(bytes(32)), b""))


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def pending(*numbers: int, max_blocks: int = 9) -> PendingOffers:
    made = PendingOffers(max_blocks)
    for number in numbers:
        made.add(offer(number))
    return made


def taken(waiting: PendingOffers, num: int = 99) -> list[int]:
    return [offer.block for offer in waiting.take(num)]


def test_those_offered_first_go_first() -> None:
    waiting = pending(1, 2, 3)
    assert taken(waiting, 2) == [1, 2] and len(waiting) == 1


def test_pinned_ones_go_before_used_ones_before_the_rest() -> None:
    waiting = pending(1, 2, 3, 4)
    waiting.mark_used([name(3), name(7)])
    waiting.set_pinned_blocks({name(4), name(5)})
    waiting.add(offer(5))
    assert taken(waiting) == [4, 5, 3, 1, 2]


def test_what_is_no_longer_pinned_still_counts_as_used() -> None:
    waiting = pending(1, 2)
    waiting.set_pinned_blocks({name(2)})
    waiting.set_pinned_blocks(set())
    assert taken(waiting) == [2, 1]


def test_too_many_drop_the_oldest_of_those_worth_least() -> None:
    waiting = pending(1, 2, 3, max_blocks=3)
    waiting.mark_used([name(2)])
    assert waiting.add(offer(4)) == 1
    assert taken(waiting) == [2, 3, 4]


def test_pinned_ones_are_dropped_only_when_nothing_else_waits() -> None:
    waiting = PendingOffers(2)
    waiting.set_pinned_blocks({name(1), name(2), name(3)})
    assert [waiting.add(offer(number)) for number in (1, 2, 3)] == [0, 0, 1]
    assert taken(waiting) == [2, 3]


def test_offered_again_it_waits_once_with_the_new_version() -> None:
    waiting = pending(1)
    assert waiting.add(offer(1, version=2)) == 0
    assert waiting.take(9) == [offer(1, version=2)]


def test_put_back_they_are_the_next_but_not_in_place_of_a_newer_version() -> None:
    waiting = pending(1, 2, 3)
    first = waiting.take(2)
    waiting.add(offer(2, version=2))
    waiting.put_back(first)
    assert waiting.take(9) == [offer(1), offer(3), offer(2, version=2)]


def test_shedding_spares_the_pinned_and_the_newest() -> None:
    waiting = pending(1, 2, 3, 4)
    waiting.set_pinned_blocks({name(1)})
    assert waiting.trim_to_newest(1) == 2 and waiting.trim_to_newest(1) == 0
    assert taken(waiting) == [1, 4]


def test_what_is_forgotten_does_not_come() -> None:
    waiting = pending(1, 2, 3)
    waiting.remove([name(2), name(9)])
    assert len(waiting) == 2 and waiting.clear() == 2 and taken(waiting) == []
