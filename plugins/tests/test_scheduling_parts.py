"""Options, promises and the waiting order of the scheduler plug-in, without an engine."""

from dataclasses import dataclass
from random import Random

import pytest

from headstart_plugins.scheduling.prefix_order import PrefixQueue
from headstart_plugins.scheduling.promised_blocks import Writer, is_promised, num_cached_blocks, num_common_blocks
from headstart_plugins.scheduling.scheduling_options import SchedulingOptions, read_options


def hashes(text: str) -> list[bytes]:
    """Return chained hashes of blocks of one letter: each names the text up to its end."""
    return [text[: end + 1].encode() for end in range(len(text))]


def test_options_are_read_below_their_key() -> None:
    assert read_options({}) == read_options(None) == SchedulingOptions()
    assert read_options({"headstart": {"lpm_k": 8, "page_aligned": True}}) == SchedulingOptions(
        lpm_k=8, page_aligned=True
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lpm": 8}, r"no option 'lpm'; it has promised_blocks, lpm_k, page_aligned, max_prefills"),
        ({"promised_blocks": 1}, "promised_blocks is 1; it must be of type bool"),
        ({"lpm_k": True}, "lpm_k is True; it must be of type int"),
        ({"lpm_k": 0}, "at least 1"),
        ({"max_prefills": -1}, "use 0 for no limit"),
        ("on", "must be an object"),
    ],
)
def test_wrong_options_are_refused_by_name(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options({"headstart": given})


def test_a_request_waits_for_the_block_that_a_prefill_is_going_to_write() -> None:
    leader, cached = Writer(hashes("abcdef"), 2), set(hashes("ab"))
    assert is_promised(hashes("abcx"), 4, [leader], cached.__contains__)
    assert not is_promised(hashes("abx"), 3, [leader], cached.__contains__)  # all that they share is written
    assert not is_promised(hashes("x"), 1, [leader], cached.__contains__)


def test_a_request_does_not_wait_for_its_last_token() -> None:
    """The last token of a prompt is always computed, so the block with it is not taken from the cache."""
    leader, cached = Writer(hashes("abc"), 2), set(hashes("ab"))
    assert not is_promised(hashes("abc"), 2, [leader], cached.__contains__)
    assert is_promised(hashes("abcd"), 3, [leader], cached.__contains__)


def test_blocks_that_another_request_wrote_need_no_promise() -> None:
    leader = Writer(hashes("abcdef"), 1)
    assert not is_promised(hashes("abcx"), 4, [leader], set(hashes("abc")).__contains__)
    assert is_promised(hashes("abcx"), 4, [leader], set(hashes("ab")).__contains__)


def test_the_searches_agree_with_a_walk() -> None:
    rng = Random(1)
    for _ in range(300):
        one, other = ("".join(rng.choice("ab") for _ in range(rng.randrange(9))) for _ in range(2))
        limit, length = rng.randrange(10), rng.randrange(9)
        walk = 0
        while walk < min(len(one), len(other), limit) and one[walk] == other[walk]:
            walk += 1
        assert num_common_blocks(hashes(one), hashes(other), limit) == walk
        cached = set(hashes(one)[:length])
        assert num_cached_blocks(hashes(one), limit, cached.__contains__) == min(length, limit, len(one))


@dataclass(eq=False)
class Request:
    """A waiting request whose cached prefix is `match` blocks long."""

    name: str
    match: int
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    is_admitted: bool = False


def queue_of(k: int, *requests: Request) -> PrefixQueue[Request]:
    queue = PrefixQueue[Request](k, lambda r: r.match, lambda r: r.is_admitted)
    for request in requests:
        queue.add_request(request)
    return queue


def admit(queue: PrefixQueue[Request]) -> str:
    request = queue.peek_request()
    assert queue.pop_request() is request
    request.is_admitted = True
    return request.name


def test_the_oldest_is_first_of_every_k_and_the_longest_match_of_the_others() -> None:
    queue = queue_of(3, *(Request(f"{i}", match) for i, match in enumerate([0, 1, 5, 2, 7, 3])))
    assert [admit(queue) for _ in range(6)] == ["0", "4", "2", "1", "5", "3"]


def test_a_request_is_admitted_within_k_times_its_place() -> None:
    queue = queue_of(8, Request("old", 0), Request("poor", 0))
    names: list[str] = []
    for i in range(40):
        queue.add_request(Request(f"rich{i}", 9))
        names.append(admit(queue))
    assert names.index("old") == 0 and names.index("poor") == 8


def test_a_skipped_request_keeps_its_place_and_is_no_admission() -> None:
    queue = queue_of(2, Request("a", 0), Request("b", 3), Request("c", 9))
    skipped = [queue.pop_request(), queue.pop_request()]
    assert [r.name for r in skipped] == ["a", "b"]  # still the turn of the oldest
    queue.prepend_requests(reversed(skipped))
    assert [r.name for r in queue] == ["a", "b", "c"]
    queue.begin_step()
    assert [admit(queue) for _ in range(3)] == ["a", "c", "b"]


def test_preempted_requests_go_first_and_are_not_counted() -> None:
    a, b, c = Request("a", 0), Request("b", 1), Request("c", 9)
    queue = queue_of(2, a, b, c)
    assert admit(queue) == "a"
    queue.begin_step()
    a.is_admitted, a.num_preemptions = False, 1
    queue.prepend_request(a)
    assert [admit(queue) for _ in range(3)] == ["a", "c", "b"]


def test_removed_requests_are_gone() -> None:
    a, b = Request("a", 0), Request("b", 1)
    queue = queue_of(2, a, b)
    queue.remove_requests([a, Request("other", 0)])
    assert list(queue) == [b] and len(queue) == 1 and queue
    queue.remove_request(b)
    assert not queue
    with pytest.raises(ValueError, match="not in this queue"):
        queue.remove_request(b)
    with pytest.raises(IndexError):
        queue.peek_request()
