from headstart.core.events import AllBlocksCleared, BlockRemoved, Event
from headstart.core.hashing import BlockHash
from headstart.router.feed import MAX_WAITING, Feed


def batch(number: int) -> list[Event]:
    return [BlockRemoved((BlockHash(bytes([number % 256])),))]


def started() -> Feed:
    feed = Feed()
    assert feed.offer(0, batch(0)) == batch(0)
    return feed


def test_batches_in_their_order_pass_through() -> None:
    feed = started()
    assert feed.offer(1, batch(1)) == batch(1)
    assert feed.replay_from is None and feed.num_gaps == 0


def test_what_comes_behind_a_gap_waits_for_the_replay() -> None:
    feed = started()
    assert feed.offer(3, batch(3)) == []
    assert feed.offer(4, batch(4)) == []
    assert feed.replay_from == 1 and feed.num_gaps == 1
    assert feed.offer(1, batch(1), replayed=True) == batch(1)
    assert feed.offer(2, batch(2), replayed=True) == batch(2) + batch(3) + batch(4)
    assert feed.replay_from is None


def test_what_was_there_already_is_left_out() -> None:
    feed = started()
    feed.offer(1, batch(1), replayed=True)
    feed.offer(2, batch(2), replayed=True)
    assert feed.offer(0, batch(0), replayed=True) == []
    assert feed.offer(1, batch(1)) == []  # live, and slower than the replay
    assert feed.offer(3, batch(3)) == batch(3)


def test_a_gap_that_cannot_be_filled_empties_the_index() -> None:
    feed = started()
    feed.offer(3, batch(3))
    feed.offer(4, batch(4))
    assert feed.give_up() == [AllBlocksCleared(), *batch(3), *batch(4)]
    assert feed.num_lost == 2 and feed.replay_from is None
    assert feed.give_up() == []


def test_no_more_is_kept_than_a_publisher_keeps() -> None:
    feed = started()
    for number in range(2, MAX_WAITING + 2):
        assert feed.offer(number, batch(number)) == []
    assert feed.offer(MAX_WAITING + 2, batch(2))[0] == AllBlocksCleared()
    assert feed.num_lost == 1


def test_a_publisher_that_starts_again_voids_what_it_told() -> None:
    feed = started()
    feed.offer(1, batch(1))
    assert feed.offer(0, batch(7)) == [AllBlocksCleared(), *batch(7)]
    assert feed.num_restarts == 1
    assert feed.offer(1, batch(8)) == batch(8)


def test_a_new_start_whose_first_batches_are_lost_is_noticed_too() -> None:
    feed = started()
    for number in range(1, 9):
        feed.offer(number, batch(number))
    assert feed.offer(3, batch(7)) == [AllBlocksCleared(), *batch(7)]
    assert feed.offer(4, batch(8)) == batch(8)


def test_who_comes_late_starts_with_an_empty_index_and_no_gap() -> None:
    feed = Feed()
    assert feed.offer(17, batch(17)) == [AllBlocksCleared(), *batch(17)]
    assert feed.replay_from is None
