"""Wishes are a bag of names, counted late."""

import pytest

from headstart.core.cache.hashing import BlockHash
from headstart.core.sched.queued_block_refs import MAX_UNCOUNTED, QueuedBlockRefCounts

A, B, C = (BlockHash(letter) for letter in (b"a", b"b", b"c"))


def test_a_name_is_wanted_until_everybody_who_added_it_took_it_back() -> None:
    wants = QueuedBlockRefCounts()
    wants.add([A, B])
    wants.add([A])
    wants.add_pending_to_counts()
    assert A in wants and B in wants and C not in wants and len(wants) == 2
    wants.discard([A])
    assert A in wants
    wants.discard([A, B])
    assert not wants


def test_what_was_added_in_parts_may_be_taken_back_at_once() -> None:
    wants = QueuedBlockRefCounts()
    wants.add([A])
    wants.add([B, C])
    wants.discard([A, B, C])
    wants.add_pending_to_counts()
    assert not wants


def test_what_was_added_is_a_copy() -> None:
    wants, names = QueuedBlockRefCounts(), [A]
    wants.add(names)
    names.append(B)
    wants.add_pending_to_counts()
    assert A in wants and B not in wants


def test_taking_back_too_much_is_noticed() -> None:
    wants = QueuedBlockRefCounts()
    wants.add([A])
    with pytest.raises(AssertionError, match="dereferenced more often than referenced"):
        wants.discard([A, A])


def test_uncounted_wishes_do_not_pile_up() -> None:
    wants = QueuedBlockRefCounts()
    for _ in range(MAX_UNCOUNTED + 1):
        wants.add([A])
    assert A in wants and not wants._uncounted
