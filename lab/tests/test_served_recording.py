"""`serve --record`: a real server's requests, replayed by the simulator, hit as many tokens as they did there."""

import json
from array import array
from pathlib import Path
from random import Random

import pytest
from server.harness import wait_for

from headstart.cli import main as cli
from headstart.sim.profile import ReplicaProfile
from headstart.sim.profile_file import write_profile_file
from headstart.sim.sim_workload import read_decision_log_requests
from headstart.sim.step_cost import AdditiveCost
from headstart.sim.sweep import SimulationConfig
from headstart.workload.synthetic import random_tokens
from headstart_lab.runners.served_replica import Launch, replica

NUM_BLOCKS = 64  # of which one is reserved
NUM_REQUESTS = 60


def prompts(rng: Random) -> "list[array[int]]":
    """Sessions that grow, a shared prefix, one-off prompts and repetitions: more than the pool holds."""
    common = random_tokens(50, 512, rng)
    sessions = [common + random_tokens(20, 512, rng) for _ in range(6)]
    found: list[array[int]] = []
    for _ in range(NUM_REQUESTS):
        number = rng.randrange(9)
        if number < 6:
            found.append(sessions[number][:])
            sessions[number] = (sessions[number] + random_tokens(rng.choice((0, 16, 30)), 512, rng))[:400]
        else:
            found.append(random_tokens(rng.randint(20, 300), 512, rng))
    return found


@pytest.mark.parametrize("eviction", ["2q", pytest.param("lhd", marks=pytest.mark.long)])
def test_a_replay_hits_what_the_server_hit(
    eviction: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "requests.jsonl"
    flags = ("--num-blocks", str(NUM_BLOCKS), "--threads", "1", "--eviction-policy", eviction)
    with replica(Launch(tiny, tmp_path, (*flags, "--record", str(recording))), None) as server:
        rng = Random(7)
        asked = prompts(rng)
        answers = [server.ask(prompt, output_tokens=rng.randint(1, 20)) for prompt in asked]
        wait_for(lambda: recording.read_text().count("\n") == NUM_REQUESTS)
    assert {answer.error for answer in answers} == {None}
    rows = [json.loads(line) for line in recording.read_text().splitlines()]
    assert [row["cached_tokens"] for row in rows] == [answer.cached_tokens for answer in answers]
    assert not any(str(asked[0].tolist()[:4])[1:-1] in line for line in recording.read_text().splitlines())

    profile = ReplicaProfile(
        "served",
        "the server's limits; a step takes no time, so that requests run one after the other as they did",
        AdditiveCost(step=1e-6),
        num_blocks=NUM_BLOCKS - 1,
        block_size=16,
        scheduling_policy="lpm",
        eviction_policy=eviction,
    )
    fleet = SimulationConfig(profile, replicas=1).run_new_fleet(read_decision_log_requests(recording))
    simulated = {int(one.record.request_id): one.record.cached_tokens for one in fleet.records}
    assert [simulated[number] for number in range(NUM_REQUESTS)] == [answer.cached_tokens for answer in answers]
    assert fleet.replicas["r0"].num_capacity_evictions > 0, "the pool was never full"

    write_profile_file(profile, tmp_path / "served.json", {})
    words = ["simulate", "--decisions", str(recording), "--replicas", "1", "--profile", str(tmp_path / "served.json")]
    assert cli.main(words) == 0
    (point,) = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    hits, total = sum(answer.cached_tokens for answer in answers), sum(map(len, asked))
    assert hits > 0.2 * total and point["hit_rate"] == pytest.approx(hits / total)
    assert point["redundancy"] >= point["redundancy_bound"] >= 1.0
