"""Profiles by name and from files."""

import json
from pathlib import Path

import pytest

from headstart.core.errors import ConfigError
from headstart.core.sched.step_time import MaxStepTime
from headstart.sim.profile import REFERENCE, ReplicaProfile
from headstart.sim.profile_file import (
    GPUS,
    LABEL,
    MODELS,
    datasheet_profile,
    read_profile_file,
    resolve_profile,
    write_profile_file,
)
from headstart.sim.sim_store import OffloadTier
from headstart.sim.step_cost import AdditiveCost, PaddedCost, RooflineCost, StepWork, SuperlinearCost

COSTS = (
    AdditiveCost(1.0, 2.0, 3.0, 4.0, 5.0),
    RooflineCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    PaddedCost(AdditiveCost(1.0), 4, 32),
    SuperlinearCost(RooflineCost(1.0, 2.0, 3.0, 4.0, 5.0), 2.0, 8.0),
)


@pytest.mark.parametrize("cost", COSTS)
def test_what_is_written_is_read(cost: AdditiveCost, tmp_path: Path) -> None:
    profile = ReplicaProfile(
        "mine", "made up", cost, 99, block_size=16, step_bound=MaxStepTime(0.5), offload=OffloadTier(7, 8.0, 0.5)
    )
    write_profile_file(profile, tmp_path / "mine.json", {"p50": 0.1})
    assert read_profile_file(tmp_path / "mine.json") == profile
    assert resolve_profile(str(tmp_path / "mine.json")) == profile


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cost": {"shape": "cubic"}}, "shape is 'cubic'"),
        ({"cost": {"shape": "sum", "steps": 1}}, "steps"),
        ({"num_block": 3}, "num_block"),
        ({"max_seqs": 10_000}, "max-num-seqs"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(change: dict[str, object], complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_profile_file(REFERENCE, path, {})
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=complaint):
        read_profile_file(path)


def test_other_shapes_of_a_profile_cost_about_the_same() -> None:
    work = StepWork(streams=8, resident=40_000, new=2048, pairs=2048 * 1024.0)
    plain = REFERENCE.cost.seconds(work)
    for shape in ("padded", "superlinear", "roofline"):
        found = resolve_profile(f"reference+{shape}")
        assert found.name == f"reference+{shape}" and found.num_blocks == REFERENCE.num_blocks
        assert found.cost.seconds(work) == pytest.approx(plain, rel=0.15)
    with pytest.raises(ConfigError, match="no shape 'round'"):
        resolve_profile("reference+round")


def test_datasheet_profiles_are_labelled_and_plausible() -> None:
    found = datasheet_profile("qwen3-32b@2xh100")
    assert found.source == LABEL
    # a 32B model on two H100: within a third of the reference's constants, which are of such a machine
    one_token, reference = StepWork(new=8192), REFERENCE.cost.seconds(StepWork(new=8192))
    assert found.cost.seconds(one_token) == pytest.approx(reference, rel=1 / 3)
    assert found.cost.seconds(StepWork(streams=1)) == pytest.approx(
        REFERENCE.cost.seconds(StepWork(streams=1)), rel=0.8
    )
    assert 200_000 < found.num_kv_tokens < 400_000
    for model in MODELS:
        for gpu in GPUS:
            assert datasheet_profile(f"{model}@8x{gpu}").num_blocks > 64


@pytest.mark.parametrize("name", ["h100", "llama-3.1-8b@h9000", "gpt@h100", "llama-3.1-8b@0xh100", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no profile"):
        resolve_profile(name)


def test_a_model_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"such as llama-3\.3-70b@2xh100"):
        datasheet_profile("llama-3.3-70b@h100")
