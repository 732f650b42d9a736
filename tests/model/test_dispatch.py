"""Measured dispatch: products are timed once per processor, the timings decide, and the forms give the same numbers."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from model.test_linear import assert_near, random
from model.tiny import make_checkpoint

from headstart.core.errors import ConfigError
from headstart.model.kernels.library import Kernels, kernels
from headstart.model.layers.decoder import Decoder
from headstart.model.layers.dispatch import (
    LEAST_WEIGHTS,
    PREFIX,
    ROWS,
    Measured,
    Timing,
    all_measured,
    chosen_kernels,
    measured,
)
from headstart.model.layers.linear import Form, Linear
from headstart.model.setup.doctor import report
from headstart.model.weights.model_loader import load_model

SIZES = [(64, 32), (40, 64)]
LARGE = [(LEAST_WEIGHTS // 32, 32)]


@pytest.fixture
def found() -> Kernels:
    chosen = kernels()
    if chosen is None:
        pytest.skip("no compiled kernels here")
    return chosen


def rewritten(cache: Path, *, torch_seconds: float) -> None:
    """Change the kept timings: our kernels take a second."""
    (path,) = cache.glob(f"{PREFIX}*.json")
    stored = json.loads(path.read_text())
    for timing in stored["timings"]:
        timing |= {"kernels": 1.0, "torch": torch_seconds}
    path.write_text(json.dumps(stored))


def test_every_size_is_timed_at_every_number_of_rows_and_kept(found: Kernels, tmp_path: Path) -> None:
    first = measured(found, SIZES, tmp_path)
    assert [(t.outputs, t.inputs, t.rows) for t in first.timings] == [
        (outputs, inputs, rows) for outputs, inputs in sorted(SIZES) for rows in ROWS
    ]
    assert all(timing.kernels > 0 and timing.torch > 0 for timing in first.timings)
    assert measured(found, SIZES, tmp_path) == first
    assert all_measured(tmp_path) == [first]


@pytest.mark.parametrize(("seconds", "ours"), [(2.0, True), (0.95, True), (0.5, False)])
def test_torch_is_chosen_if_it_is_clearly_faster(found: Kernels, tmp_path: Path, seconds: float, ours: bool) -> None:
    assert chosen_kernels(found, "auto", LARGE, tmp_path) in (found, None)
    rewritten(tmp_path, torch_seconds=seconds)
    assert chosen_kernels(found, "auto", LARGE, tmp_path) is (found if ours else None)
    assert chosen_kernels(found, "kernels", LARGE, tmp_path) is found
    assert chosen_kernels(found, "torch", LARGE, tmp_path) is None


def test_other_threads_and_other_sizes_are_measured_by_themselves(found: Kernels, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            measured(found, SIZES, tmp_path)
        measured(found, SIZES[:1], tmp_path)
    finally:
        torch.set_num_threads(before)
    assert sorted(kept.threads for kept in all_measured(tmp_path)) == [1, 2, 2]


def test_small_models_are_not_measured(found: Kernels, tmp_path: Path) -> None:
    assert chosen_kernels(found, "auto", SIZES, tmp_path) is found
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"timings": [{}]}', '{"timings": []}', '{"timings": 3}'])
def test_a_damaged_file_is_measured_again(found: Kernels, tmp_path: Path, content: str) -> None:
    first = measured(found, SIZES[:1], tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert all_measured(tmp_path) == []
    again = measured(found, SIZES[:1], tmp_path)
    assert len(again.timings) == len(first.timings) and all_measured(tmp_path) == [again]


def test_the_ratio_is_a_geometric_mean() -> None:
    timings = tuple(
        Timing(outputs=1, inputs=1, rows=1, kernels=ours, torch=theirs) for ours, theirs in [(1.0, 4.0), (2.0, 2.0)]
    )
    found = Measured(cpu="", variant="avx2", threads=1, timings=timings)
    assert found.ratio == pytest.approx(2.0) and found.prefers_kernels
    assert asdict(found)["timings"][0]["torch"] == 4.0


def test_both_forms_give_the_same_product(found: Kernels) -> None:
    weight, x = random(70, 300), random(20, 300)
    ours, torchs = (Linear(weight.clone(), form=Form(form)) for form in (found, None))
    assert_near(ours(x), torchs(x), 300**0.5)


def test_a_model_runs_in_the_form_that_is_asked_for(found: Kernels, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    for choice, fused in [("kernels", True), ("torch", False), ("auto", True)]:
        model = load_model(tmp_path, dtype="bfloat16", device="cpu", linear_dispatch=choice).model
        assert isinstance(model, Decoder) and (model.fused is not None) is fused
    with pytest.raises(ConfigError, match="linear_dispatch 'fast' is not known; choose auto, kernels, torch"):
        load_model(tmp_path, device="cpu", linear_dispatch="fast")


def test_stored_kv_is_not_shared_by_activations_of_other_bits(found: Kernels, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)

    def fingerprint(quantization: str, bits: int) -> bytes:
        return load_model(
            tmp_path, dtype="bfloat16", device="cpu", quantization=quantization, activation_bits=bits
        ).fingerprint

    assert fingerprint("int4", 8) != fingerprint("int4", 16)
    assert fingerprint("none", 8) == fingerprint("none", 16)  # no weights in blocks: nothing is rounded
    assert fingerprint("int8", 8) == fingerprint("int8", 16)
    with pytest.raises(ConfigError, match="activation_bits is 4; choose 8 or 16"):
        load_model(tmp_path, device="cpu", activation_bits=4)


def test_doctor_shows_what_was_measured(found: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "headstart" / "kernels"
    measured(found, SIZES[:1], cache)
    rewritten(cache, torch_seconds=3.0)
    rows = {name: value for section in report().sections for name, value in section.rows}
    assert "our kernels for inputs of 32 (torch takes 3.00 x the time, " in rows["bfloat16 linears"]
