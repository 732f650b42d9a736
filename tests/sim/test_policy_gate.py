"""The gate of routing policies: `cost` stays close to exact knowledge, and ahead of what others do by default.

The figures are those of a virtual machine, the same on every real one; limits leave room for a change of a few percent.
The sample is requests 2,001 to 2,400 of Mooncake's `conversation_trace` (kvcache-ai/Mooncake, Apache-2.0).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headstart.router.rate_learner import RateLearner
from headstart.sim.profile import REFERENCE, ReplicaProfile
from headstart.sim.sim_report import FleetReport, fleet_report
from headstart.sim.sim_request import SimRequest
from headstart.sim.sim_workload import read_trace_requests, synthetic_requests
from headstart.sim.sweep import SimulationConfig

SAMPLE = Path(__file__).parent / "data" / "conversation_sample.jsonl"
SAMPLED = read_trace_requests(SAMPLE)
DECODES = replace(REFERENCE, num_blocks=800)


def run(policy: str, asked: Sequence[SimRequest], profile: ReplicaProfile) -> FleetReport:
    found = fleet_report(SimulationConfig(profile, 8, policy).run_new_fleet(asked))
    assert found.summary.errors == 0
    return found


def ttft(found: FleetReport) -> float:
    assert found.summary.ttft is not None
    return found.summary.ttft.mean


@cache
def oracle_ttft_of_the_sample() -> float:
    return ttft(run("oracle", SAMPLED, REFERENCE))


@pytest.mark.parametrize(
    ("asked", "profile", "to_oracle"),
    [
        (SAMPLED, REFERENCE, 1.10),
        pytest.param(synthetic_requests("decode-heavy", 14.0, 250, 0), DECODES, 1.10, marks=pytest.mark.long),
        pytest.param(synthetic_requests("hot-documents", 10.0, 400, 0), REFERENCE, 1.15, marks=pytest.mark.long),
    ],
    ids=["conversation", "decode-heavy", "hot-documents"],
)
def test_cost_is_close_to_exact_knowledge_and_not_dominated(
    asked: list[SimRequest], profile: ReplicaProfile, to_oracle: float
) -> None:
    cost, other = (run(policy, asked, profile) for policy in ("cost", "llm-d"))
    oracle = oracle_ttft_of_the_sample() if asked is SAMPLED else ttft(run("oracle", asked, profile))
    assert ttft(cost) < to_oracle * oracle
    assert ttft(cost) < ttft(other)
    assert min(cost.requests) > 0.25 * max(cost.requests)


def test_the_gate_notices_a_policy_that_learns_wrong_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica's luck taken for its speed, as before: the gate has to fail."""
    exact = oracle_ttft_of_the_sample()  # before the fault
    monkeypatch.setattr(
        RateLearner, "slowdown_versus_fleet", lambda self, pace, now: 3.0 ** (8 * pace.mean_log_slowdown(now))
    )
    monkeypatch.setattr(RateLearner, "is_unreliable", False)
    assert ttft(run("cost", SAMPLED, REFERENCE)) > 1.10 * exact


@pytest.mark.parametrize("budget", [512, 2048])
def test_the_tokens_of_a_step_are_learned_from_token_events(budget: int) -> None:
    fleet = SimulationConfig(replace(REFERENCE, max_batched_tokens=budget), 8).run_new_fleet(
        read_trace_requests(SAMPLE, count=100)
    )
    found = sorted(endpoint.load.max_step_tokens for endpoint in fleet.routers[0].endpoints.values())
    assert found[0] > 0.5 * budget and found[-1] <= 1.05 * budget and found[2] > 0.9 * budget
