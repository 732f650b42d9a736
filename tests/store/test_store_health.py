"""A side that fails is paused, tried again after ever longer pauses, and told about once when that changes."""

import errno

from headstart.store.store_health import SideHealth, describe_error


class Told(list[str]):
    """The lines a health wrote."""

    def health(self, max_errors: int = 1) -> SideHealth:
        return SideHealth("writing", max_errors=max_errors, say=self.append)


def pauses(health: SideHealth, now: float, num: int) -> list[int]:
    """Fails as soon as it may be tried, `num` times; returns how long each pause was, in whole seconds."""
    found: list[int] = []
    for _ in range(num):
        health.record_failure("no", now)
        wait = next(seconds for seconds in range(61) if health.may_attempt(now + seconds))
        assert not health.may_attempt(now + wait * 0.99)
        found.append(wait)
        now += wait
    return found


def test_pauses_double_up_to_half_a_minute() -> None:
    assert pauses(Told().health(), 100.0, 7) == [1, 2, 4, 8, 16, 30, 30]


def test_it_is_told_once_when_it_stops_and_once_when_it_works_again() -> None:
    told = Told()
    health = told.health()
    for now in (1.0, 2.0, 4.0):
        health.record_failure("No space left on device (ENOSPC)", now)
    assert health.failure_text == "writing: No space left on device (ENOSPC)"
    for now in (8.0, 9.0):
        health.record_success(now)
    assert (health.failure_text, health.num_degraded, health.may_attempt(9.0)) == ("", 1, True)
    assert len(told) == 2 and "ENOSPC" in told[0] and told[1] == "writing works again"


def test_single_errors_between_successes_do_not_pause_it() -> None:
    told = Told()
    health = told.health(max_errors=3)
    for _ in range(5):
        health.record_failure("no", 1.0)
        health.record_failure("no", 1.0)
        health.record_success(1.0)
    assert health.may_attempt(1.0) and not told
    for _ in range(3):
        health.record_failure("no", 1.0)
    assert not health.may_attempt(1.0) and health.num_degraded == 1


def test_one_that_flutters_is_paused_ever_longer_and_one_that_held_is_not() -> None:
    health = Told().health()
    assert pauses(health, 0.0, 3) == [1, 2, 4]
    health.record_success(7.0)
    assert pauses(health, 8.0, 1) == [8]
    health.record_success(16.0)
    assert pauses(health, 100.0, 1) == [1]


def test_reasons_name_the_symbol() -> None:
    assert describe_error(OSError(errno.EROFS, "Read-only file system")) == "Read-only file system (EROFS)"
    assert describe_error(ValueError("odd")) == "ValueError: odd" and describe_error(KeyError()) == "KeyError"
