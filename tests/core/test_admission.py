"""Room to grow, and the choice of victims: by hand, blocks of 4 tokens."""

import pytest
from checking import generate, make_engine, make_request

from headstart.core.engine import Engine
from headstart.core.errors import RequestTooLargeError
from headstart.core.sched import admission
from headstart.core.sched.admission import FIRST_GUESS
from headstart.core.sequence import Sequence


def running(engine: Engine) -> list[Sequence]:
    return list(engine.scheduler.running)


def blocks_reserved(engine: Engine) -> int:
    return sum(map(engine.scheduler.admission.blocks_reserved_for_sequence, running(engine)))


def test_an_output_is_expected_to_be_as_long_as_those_before_and_no_longer_than_it_may() -> None:
    engine = make_engine(num_blocks=60, max_model_len=200)
    engine.add_request(make_request("short", [1] * 4, 5))
    engine.add_request(make_request("long", [2] * 4, 150))
    engine.step()
    # each holds the block of its prompt; the KV of the very last token is never needed
    assert blocks_reserved(engine) == 1 + (4 + FIRST_GUESS - 1) // 4
    for _ in range(200):
        engine.scheduler.admission.record_output_length(9)
    assert blocks_reserved(engine) == 1 + 2


def test_what_a_stop_string_or_a_client_ended_counts_as_an_output_too() -> None:
    engine = make_engine(num_blocks=60, max_model_len=200)
    for number in range(100):
        engine.add_request(make_request(f"r{number}", [number] * 3, 100))
        engine.step()
        engine.step()
        assert engine.abort(f"r{number}")
    engine.add_request(make_request("last", [7] * 4, 100))
    engine.step()
    assert blocks_reserved(engine) == 1  # two tokens are expected, and a block of four holds them


def test_the_sequence_is_preempted_that_frees_enough_and_loses_least() -> None:
    engine = make_engine(num_blocks=40, max_model_len=100, expects_short_outputs=True)
    for name, length in (("needy", 3), ("large", 30), ("small", 6), ("middle", 14)):
        engine.add_request(make_request(name, [ord(name[0])] * length, 60))
    engine.step()
    needy, *behind = running(engine)
    room, cache = engine.scheduler.admission, engine.scheduler.cache
    hit = cache.match_prefix(needy)
    free = cache.num_available_after_hit(needy, hit)

    def victim(missing: int) -> str:
        tokens = (len(needy.block_ids) + free + missing) * 4
        return room.choose_victim(needy, hit, tokens, behind[::-1]).request_id

    assert [victim(missing) for missing in (1, 2, 3, 4, 5, 8, 50)] == [
        "small", "small", "middle", "middle", "large", "large", "middle",
    ]  # fmt: skip


def test_only_what_is_not_pinned_for_others_can_be_used() -> None:
    engine = make_engine(num_blocks=11, max_model_len=64)
    engine.add_prefix("system", range(8))
    generate(engine)
    engine.add_request(make_request("behind it", [*range(8), *[50] * 20], 13))  # 10 blocks, 2 of them pinned
    with pytest.raises(RequestTooLargeError, match="need 9 KV blocks but the pool has 8 beside 2 pinned ones"):
        engine.add_request(make_request("stranger", [60] * 20, 17))


def test_sequences_that_may_not_be_preempted_hold_their_common_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 blocks a prompt of 17 tokens with 8 more needs 6, of which 4 are common."""
    monkeypatch.setattr(admission, "MAX_PREEMPTIONS", 0)
    engine = make_engine(num_blocks=11)
    names = ("first", "second", "third", "fourth")
    for number, name in enumerate(names):
        engine.add_request(make_request(name, [*range(16), 20 + number], 8))
    for _ in range(3):
        engine.step()
    assert [seq.request_id for seq in running(engine)] == ["first", "second", "third"]
    outputs = generate(engine, make_request("stranger", [60] * 17, 8))
    assert [len(outputs[name]) for name in (*names, "stranger")] == [5, 6, 6, 8, 8]  # less those of the first steps
    assert engine.scheduler.counters.num_preemptions == 0
