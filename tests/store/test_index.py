"""The index: where blocks are, told in runs, with every further copy of them."""

from pathlib import Path

from stored_blocks import SHAPE, key_of, name_of

from headstart.store.folder import SlotIndex, SlotRun
from headstart.store.format import SegmentHeader
from headstart.store.segment import Segment

KEYS = [key_of(index) for index in range(6)]


def segment(number: int) -> Segment:
    return Segment(number, Path(f"{number}"), SegmentHeader(SHAPE, 8, bytes(8)), 0)


def test_neighbours_are_found_as_one_run_up_to_a_gap_or_another_segment() -> None:
    index, one, two = SlotIndex(), segment(1), segment(2)
    index.append_block_hashes(one, [name_of(0), name_of(1), b"", name_of(2)])
    index.append_block_hashes(two, [name_of(3), name_of(4)])
    assert index.run(KEYS, 0) == SlotRun(one, 0, 2)
    assert index.run(KEYS, 2) == SlotRun(one, 3, 1)
    assert index.run(KEYS, 3) == SlotRun(two, 0, 2)
    assert index.run(KEYS, 5) is None
    assert len(index) == 5 and index.contains(name_of(2)) and not index.contains(b"")


def test_a_run_ends_where_the_keys_end() -> None:
    index, one = SlotIndex(), segment(1)
    index.append_block_hashes(one, [name_of(index) for index in range(6)])
    assert index.run(KEYS[:2], 0) == SlotRun(one, 0, 2)


def test_names_are_added_in_pieces() -> None:
    index, one = SlotIndex(), segment(3)
    index.append_block_hashes(one, [name_of(0)])
    index.append_block_hashes(one, [])
    index.append_block_hashes(one, [name_of(1)])
    assert index.run(KEYS, 1) == SlotRun(one, 1, 1) and one.block_hashes == [name_of(0), name_of(1)]
    assert not one.is_sealed
    index.append_block_hashes(one, [b""] * 6)
    assert one.is_sealed


def test_a_block_stored_three_times_is_lost_with_the_last_copy() -> None:
    index, one, two, three = SlotIndex(), segment(1), segment(2), segment(3)
    for each in (one, two, three):
        index.append_block_hashes(each, [name_of(0)])
    assert index.locations_of_block(name_of(0)) == [(one, 0), (two, 0), (three, 0)]
    assert index.drop_segment(two) == 0
    assert index.drop_segment(one) == 0 and index.run(KEYS, 0) == SlotRun(three, 0, 1)
    assert (
        index.drop_segment(three) == 1 and not index.contains(name_of(0)) and index.locations_of_block(name_of(0)) == []
    )
    assert index.drop_segment(three) == 0


def test_forgetting_a_block_where_it_is_not_changes_nothing() -> None:
    index, one, two = SlotIndex(), segment(1), segment(2)
    index.append_block_hashes(one, [name_of(0), name_of(1)])
    index.remove_location(name_of(0), two, 0)
    index.remove_location(name_of(0), one, 1)
    index.remove_location(name_of(5), one, 7)
    assert len(index) == 2
    index.remove_location(name_of(0), one, 0)
    assert len(index) == 1 and one.block_hashes == [b"", name_of(1)]
    assert index.drop_segment(one) == 1


def test_the_same_block_twice_in_one_segment_is_two_places() -> None:
    index, one = SlotIndex(), segment(1)
    index.append_block_hashes(one, [name_of(0), name_of(0)])
    index.remove_location(name_of(0), one, 0)
    assert index.run(KEYS, 0) == SlotRun(one, 1, 1)
    assert index.drop_segment(one) == 1


def test_worth_moving_is_what_is_kept_or_used_and_stored_nowhere_else() -> None:
    index, one, two = SlotIndex(), segment(1), segment(2)
    index.append_block_hashes(one, [name_of(index) for index in range(5)])
    index.append_block_hashes(two, [name_of(1)])
    index.mark_slots_used(one, 1, 2)
    index.mark_slots_used(one, 7, 3)  # beyond what it holds
    assert index.slots_to_move(one, {name_of(4), name_of(1)}) == ([4], [2])
    assert [use > 0 for use in one.uses] == [False, True, True, False, False]


def test_the_fifth_of_used_blocks_whose_use_is_the_oldest_is_not_worth_moving() -> None:
    index, old, new = SlotIndex(), segment(1), segment(2)
    index.append_block_hashes(old, [name_of(at) for at in range(5)])
    index.append_block_hashes(new, [name_of(at) for at in range(5, 10)])
    for at in (4, 3, 2, 1, 0):
        index.mark_slots_used(old, at, 1)
    index.mark_slots_used(new, 0, 5)
    assert index.slots_to_move(old, ()) == ([], [0, 1, 2])
    index.mark_slots_used(old, 4, 1)
    assert index.slots_to_move(old, ()) == ([], [4, 0, 1])
