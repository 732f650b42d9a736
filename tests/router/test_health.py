from headstart.router.health import MAX_AWAY, ReplicaHealth


def test_a_refused_connection_ejects_at_once_and_three_failures_do() -> None:
    assert ReplicaHealth().record_failed(0.0, refused=True)
    health = ReplicaHealth()
    assert [health.record_failed(0.0) for _ in range(3)] == [False, False, True]
    assert not health.is_up(0.5)


def test_an_answer_in_between_begins_the_count_anew() -> None:
    health = ReplicaHealth()
    health.record_failed(0.0)
    health.record_failed(0.0)
    health.record_succeeded(0.0)
    assert not health.record_failed(0.0) and health.is_up(0.0)


def test_it_comes_back_after_a_second_and_twice_as_long_each_time_it_fails_again() -> None:
    health, now, away = ReplicaHealth(), 0.0, list[float]()
    for _ in range(8):
        assert health.record_failed(now, refused=True)
        away.append(health.up_at - now)
        assert not health.is_up(now + away[-1] - 0.01)
        now += away[-1]
        assert health.is_up(now)
    assert away == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_AWAY, MAX_AWAY, MAX_AWAY]
    health.record_succeeded(now)
    health.record_failed(now, refused=True)
    assert health.up_at == now + 1.0


def test_on_probation_one_failure_is_enough() -> None:
    health = ReplicaHealth()
    health.record_failed(0.0, refused=True)
    assert health.record_failed(1.0)


def test_what_was_under_way_when_it_was_ejected_changes_nothing() -> None:
    health = ReplicaHealth()
    health.record_failed(0.0, refused=True)
    assert not health.record_failed(0.5)
    health.record_succeeded(0.5)
    assert not health.is_up(0.9)
    assert health.num_ejections == 1


def test_who_was_seen_again_starts_anew() -> None:
    health = ReplicaHealth()
    health.record_failed(0.0, refused=True)
    health.record_ready()
    assert not health.is_up(0.5), "it was never away: what was seen of it does not end an ejection"
    health.absent = True
    health.record_ready()
    assert health.is_up(0.5) and not health.absent
    health.draining = True
    health.record_ready()
    assert not health.draining
