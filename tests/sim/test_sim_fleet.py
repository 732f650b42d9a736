"""A fleet in virtual time: exact times of hand-made cases, conservation, determinism, and what a router sees."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.fleets import BLOCK, check_conservation, fleet, profile, replica_of, requests

from headstart.sim.sim_fleet import FleetOptions
from headstart.sim.sim_request import SimRequest


def ask(at: float, length: int, output: int, first: int = 1) -> SimRequest:
    return SimRequest(at, length, output, tuple(range(first, first + -(-length // BLOCK))), BLOCK)


def test_one_request_has_exact_times() -> None:
    found = fleet(1, profile())
    found.run([ask(2.0, 20, 3)])
    # 16 tokens, 4 tokens, two decodes: 1 + 4, 1 + 1, and twice 1 + 0.125
    record = found.records[0].record
    assert (record.arrival, record.first_token, record.finish) == (2.0, 9.0, 11.25)
    assert record.tpot == 1.125


def test_a_request_that_arrives_during_a_step_joins_the_next_one() -> None:
    found = fleet(1, profile())
    found.run([ask(0.0, 8, 3), ask(0.5, 4, 1, first=50)])
    first, second = sorted(found.records, key=lambda one: int(one.record.request_id))
    assert first.record.first_token == 3.0
    # the step from 3.0 holds a decode and 4 prompt tokens, the next one a decode
    assert second.record.first_token == second.record.finish == 3.0 + 1.0 + 0.125 + 1.0
    assert first.record.finish == 5.125 + 1.125


def test_a_cached_prefix_is_not_computed_again() -> None:
    found = fleet(1, profile())
    found.run([ask(0.0, 12, 1), ask(100.0, 12, 1), ask(200.0, 10, 1)])
    assert [one.record.cached_tokens for one in found.records] == [0, 11, 8]
    assert [one.record.ttft for one in found.records] == [4.0, 1.25, 1.5]
    assert found.routers[0].prediction_error == 0


def test_a_slow_replica_takes_its_factor_longer() -> None:
    found = fleet(1, profile())
    replica_of(found).speed.factor = 3.0
    found.run([ask(0.0, 12, 1)])
    assert found.records[0].record.finish == 12.0


def test_probes_tell_the_router_the_queue() -> None:
    found = fleet(1, profile(seqs=1), options=FleetOptions(probe_interval=1.5))
    seen: list[tuple[int, int]] = []

    def look(now: float) -> None:
        reported = found.routers[0].endpoints["r0"].reported
        assert reported is not None and reported.at == 1.5
        seen.append((reported.running, reported.waiting))

    found.at(1.6, look)
    found.run([ask(0.0, 16, 4, first=1), ask(0.25, 16, 1, first=60), ask(0.5, 16, 1, first=90)])
    assert seen == [(1, 2)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.sampled_from(["cost", "least-load", "round-robin", "weighted"]),
    st.integers(16, 48),
)
def test_every_request_ends_once_and_no_block_leaks(seed: int, num: int, policy: str, blocks: int) -> None:
    asked = requests(seed, 40)
    found = fleet(num, profile(blocks, noise=0.1), policy=policy, seed=seed)
    found.run(asked)
    check_conservation(found, asked)
    assert all(one.record.ok for one in found.records)
    counters = [replica.counters() for replica in found.replicas.values()]
    assert sum(c.prompt_tokens for c in counters) == sum(one.prompt_tokens for one in asked)
    assert sum(c.cached_tokens for c in counters) == sum(one.record.cached_tokens for one in found.records)
    assert sum(c.generation_tokens for c in counters) == sum(one.output_tokens for one in asked)


def test_a_seed_gives_one_result_and_another_seed_another() -> None:
    asked = requests(3, 60)

    def run(seed: int) -> list[object]:
        found = fleet(3, profile(24, noise=0.1), seed=seed)
        return list(found.run(asked))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_request_that_never_fits_fails_and_others_are_served() -> None:
    asked = [ask(0.0, 400, 1), ask(1.0, 8, 1, first=500)]
    found = fleet(1, profile())
    found.run(asked)
    assert [one.record.ok for one in found.records] == [False, True]
    check_conservation(found, asked)


def test_a_stopped_replica_breaks_its_requests_and_those_without_a_token_are_served_elsewhere() -> None:
    found = fleet(2, profile(), policy="round-robin")
    asked = [ask(0.0, 8, 50), ask(0.0, 8, 50, first=40), ask(9.5, 8, 2, first=80), ask(9.6, 8, 2, first=90)]
    found.at(10.0, lambda now: found.stop_replica("r0", now))
    found.run(asked)
    check_conservation(found, asked)
    by_id = {int(one.record.request_id): one for one in found.records}
    broken = [number for number, one in by_id.items() if not one.record.ok]
    assert len(broken) == 1 and broken[0] in (0, 1)
    moved = [number for number in (2, 3) if by_id[number].num_attempts == 2]
    assert len(moved) == 1 and by_id[moved[0]].replica == "r1"


def test_a_fleet_without_replicas_up_fails_its_requests() -> None:
    found = fleet(1, profile())
    found.at(0.0, lambda now: found.stop_replica("r0", now))
    asked = [ask(1.0, 8, 2)]
    found.run(asked)
    assert found.records[0].record.error is not None
    check_conservation(found, asked)


def test_block_ids_stand_for_their_tokens() -> None:
    request = SimRequest(0.0, 10, 1, (7, 8, 9), 4)
    assert request.prompt_token_ids() == array("i", [7, 7, 7, 7, 8, 8, 8, 8, 9, 9])
    with pytest.raises(AssertionError, match="ids for"):
        SimRequest(0.0, 13, 1, (7, 8, 9), 4).prompt_token_ids()


def test_requests_by_ids_and_by_tokens_run_alike() -> None:
    asked = requests(5, 50)
    expanded = [
        SimRequest(one.at, one.prompt_tokens, one.output_tokens, token_ids=one.prompt_token_ids()) for one in asked
    ]
    assert fleet(2, profile(24)).run(asked) == fleet(2, profile(24)).run(expanded)
