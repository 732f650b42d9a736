"""Simulated replicas of a hybrid model: a hit ends at a checkpoint, which takes blocks of the pool."""

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.core.cache.hashing import is_checkpoint_page_hash
from headstart.core.errors import ConfigError
from headstart.sim.profile import REFERENCE, ReplicaProfile
from headstart.sim.profile_file import read_profile_file, resolve_profile, write_profile_file
from headstart.sim.sim_replica import SimReplica

HYBRID = replace(REFERENCE, num_blocks=64, block_size=16, state_tokens=40)


def cached(replica: SimReplica, name: str, prompt: list[int]) -> int:
    """Serve one request of one token and return the tokens that it found."""
    before, now = replica.scheduler.counters.cached_tokens, 0.0
    replica.submit(name, array("i", prompt), 1, now)
    while (seconds := replica.begin_step(now)) is not None:
        now += seconds
        replica.end_step()
    return replica.scheduler.counters.cached_tokens - before


@pytest.mark.parametrize(("profile", "third"), [(HYBRID, 32), (replace(HYBRID, state_tokens=0), 32)])
def test_a_branch_of_a_hybrid_is_found_at_second_sight(profile: ReplicaProfile, third: int) -> None:
    replica = SimReplica("r0", profile)
    prompts = [[*range(40), *range(100 * start, 100 * start + 20)] for start in (1, 2, 3)]
    found = [cached(replica, str(index), prompt) for index, prompt in enumerate(prompts)]
    assert found == [0, 0 if profile.state_tokens else 32, third]
    published = replica.pool.published_hashes
    assert isinstance(published, dict)
    assert sum(map(is_checkpoint_page_hash, published)) % 3 == 0 and any(
        map(is_checkpoint_page_hash, published)
    ) == bool(profile.state_tokens)


def test_a_profile_of_a_hybrid_knows_the_size_of_its_state(tmp_path: Path) -> None:
    assert resolve_profile("qwen3.5-9b@l40s").state_tokens == 1608
    write_profile_file(HYBRID, tmp_path / "mine.json", {})
    assert read_profile_file(tmp_path / "mine.json") == HYBRID
    document = json.loads((tmp_path / "mine.json").read_text())
    for value in (-1, "many"):
        (tmp_path / "mine.json").write_text(json.dumps(document | {"state_tokens": value}))
        with pytest.raises(ConfigError, match=r"mine\.json"):
            read_profile_file(tmp_path / "mine.json")
