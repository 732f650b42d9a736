import pytest

from headstart.router.index import event_sequencer as feed_module
from headstart.router.index.event_sequencer import MAX_WAITING, DueBatches, EventSequencer


def batch(number: int, publisher: str = "first") -> bytes:
    """The events of one publisher under one number: no other ever has the same."""
    return f"{publisher}/{number}".encode()


def batches(*numbers: int, publisher: str = "first") -> list[bytes]:
    return [batch(number, publisher) for number in numbers]


def started(*, replays: bool = False) -> EventSequencer:
    feed = EventSequencer(replays=replays)
    assert feed.offer(0, batch(0)) == DueBatches(False, batches(0))
    return feed


def test_batches_in_their_order_pass_through() -> None:
    feed = started()
    assert feed.offer(1, batch(1)) == DueBatches(False, batches(1))
    assert feed.replay_from is None and feed.num_gaps == 0


def test_what_comes_behind_a_gap_waits_for_the_replay() -> None:
    feed = started()
    assert feed.offer(3, batch(3)) == DueBatches(False, [])
    assert feed.offer(4, batch(4)) == DueBatches(False, [])
    assert feed.replay_from == 1 and feed.num_gaps == 1
    assert feed.offer(1, batch(1), replayed=True) == DueBatches(False, batches(1))
    assert feed.offer(2, batch(2), replayed=True) == DueBatches(False, batches(2, 3, 4))
    assert feed.replay_from is None


def test_what_was_there_already_is_left_out() -> None:
    feed = started()
    feed.offer(1, batch(1), replayed=True)
    feed.offer(2, batch(2), replayed=True)
    assert feed.offer(0, batch(0), replayed=True) == DueBatches(False, [])
    assert feed.offer(1, batch(1)) == DueBatches(False, [])  # live, and slower than the replay
    assert feed.offer(3, batch(3)) == DueBatches(False, batches(3))
    assert feed.num_restarts == 0


def test_a_gap_that_cannot_be_filled_empties_the_index() -> None:
    feed = started()
    feed.offer(3, batch(3))
    feed.offer(4, batch(4))
    assert feed.give_up() == DueBatches(True, batches(3, 4))
    assert feed.num_lost == 2 and feed.replay_from is None
    assert feed.give_up() == DueBatches(False, [])


def test_no_more_is_kept_than_a_publisher_keeps() -> None:
    feed = started()
    for number in range(2, MAX_WAITING + 2):
        assert feed.offer(number, batch(number)) == DueBatches(False, [])
    due = feed.offer(MAX_WAITING + 2, batch(MAX_WAITING + 2))
    assert due.void and len(due.batches) == MAX_WAITING + 1
    assert feed.num_lost == 1


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_WAITING_BYTES", 1_000)
    feed = started()
    for number in range(2, 12):
        assert feed.offer(number, bytes([number]) * 100) == DueBatches(False, [])
    due = feed.offer(12, bytes(100))
    assert due.void and len(due.batches) == 11 and feed.num_lost == 1
    assert feed.offer(14, bytes(1_000)) == DueBatches(False, []), "nothing of them is counted any more"


def test_small_batches_between_gaps_do_not_keep_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_WAITING_BYTES", 1_000)
    feed = started()
    for number in range(2, 402, 2):
        feed.offer(number, b"")
    for number in range(402, 802, 2):
        feed.offer(number, bytes(400))
        assert sum(map(len, feed._waiting.values())) <= 1_000


def test_the_same_batch_again_and_a_new_start_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_WAITING_BYTES", 1_000)
    feed = started(replays=True)
    for _ in range(20):
        assert feed.offer(2, bytes(900), replayed=True) == DueBatches(False, [])
    feed.reset()
    assert feed.offer(2, bytes(900)) == DueBatches(False, [])


def test_a_publisher_that_starts_again_voids_what_it_told() -> None:
    feed = started()
    feed.offer(1, batch(1))
    assert feed.offer(0, batch(0, "second")) == DueBatches(True, batches(0, publisher="second"))
    assert feed.num_restarts == 1
    assert feed.offer(1, batch(1, "second")) == DueBatches(False, batches(1, publisher="second"))


def test_a_new_start_whose_first_batches_are_lost_is_noticed_too() -> None:
    feed = started()
    for number in range(1, 9):
        feed.offer(number, batch(number))
    assert feed.offer(3, batch(3, "second")) == DueBatches(True, batches(3, publisher="second"))
    assert feed.offer(4, batch(4, "second")) == DueBatches(False, batches(4, publisher="second"))


def test_a_new_start_behind_a_replay_is_noticed_before_anything_was_live() -> None:
    feed = EventSequencer(replays=True)
    for number in range(5):
        feed.offer(number, batch(number), replayed=True)
    assert feed.offer(2, batch(2)) == DueBatches(False, [])  # live, and slower
    assert feed.offer(3, batch(3, "second")).void
    assert feed.num_restarts == 1 and feed.replay_from == 0


def test_a_replay_shows_that_the_publisher_is_another_one() -> None:
    """It says something else under the number that was taken last: what waits behind the gap is its own, too."""
    feed = started(replays=True)
    feed.offer(1, batch(1))
    assert feed.offer(5, batch(5, "second")) == DueBatches(False, [])  # not known yet
    assert feed.next_batch_number == 2
    assert feed.offer(1, batch(1, "second"), replayed=True) == DueBatches(True, [])
    assert feed.num_restarts == 1 and feed.next_batch_number == 0
    for number in range(5):
        assert feed.offer(number, batch(number, "second"), replayed=True) == DueBatches(
            False, batches(number, publisher="second")
        )
    assert feed.offer(6, batch(6, "second")) == DueBatches(False, []) and feed.replay_from == 5
    assert feed.offer(5, batch(5, "second"), replayed=True) == DueBatches(False, batches(5, 6, publisher="second"))


def test_a_late_batch_of_the_former_publisher_is_void_with_the_next_one_of_the_new_publisher() -> None:
    feed = started(replays=True)
    assert feed.offer(0, batch(0, "second"), replayed=True) == DueBatches(True, [])
    assert feed.offer(0, batch(0, "second"), replayed=True) == DueBatches(False, batches(0, publisher="second"))
    assert feed.offer(1, batch(1)) == DueBatches(False, batches(1))  # cannot be told from one of the new publisher
    assert feed.offer(1, batch(1, "second")) == DueBatches(True, [])
    assert feed.num_restarts == 2 and feed.replay_from == 0
    assert feed.offer(0, batch(0, "second"), replayed=True) == DueBatches(False, batches(0, 1, publisher="second"))


def test_who_comes_late_starts_with_an_empty_index_and_no_gap() -> None:
    feed = EventSequencer()
    assert feed.offer(17, batch(17)) == DueBatches(True, batches(17))
    assert feed.replay_from is None


def test_who_comes_late_waits_for_what_can_be_replayed() -> None:
    feed = EventSequencer(replays=True)
    assert feed.offer(2, batch(2)) == DueBatches(False, [])
    assert feed.replay_from == 0
    assert feed.offer(0, batch(0), replayed=True) == DueBatches(False, batches(0))
    assert feed.offer(1, batch(1), replayed=True) == DueBatches(False, batches(1, 2))
    assert feed.num_gaps == feed.num_lost == 0


def test_what_was_before_our_time_and_is_not_kept_is_not_called_lost() -> None:
    feed = EventSequencer(replays=True)
    assert feed.offer(8, batch(8), replayed=True) == DueBatches(False, [])
    assert feed.offer(9, batch(9)) == DueBatches(False, [])
    assert feed.give_up() == DueBatches(True, batches(8, 9))
    assert feed.num_lost == 0


def test_a_connection_that_was_lost_may_hide_anything() -> None:
    feed = started()
    assert feed.reset() == DueBatches(True, [])
    assert feed.offer(1, batch(1, "second")) == DueBatches(True, batches(1, publisher="second"))
    assert feed.num_restarts == 0
