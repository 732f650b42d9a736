"""Dispatch: our kernels unless torch is asked for; rows are tested; what computes KV is in the store's fingerprint."""

from pathlib import Path

import pytest
import torch
from model.test_linear import assert_near, random
from model.tiny import make_checkpoint

from headstart.core.errors import ConfigError
from headstart.model.kernels import library
from headstart.model.kernels.library import KernelLibrary, kernel_library_in_use
from headstart.model.layers.decoder import Decoder
from headstart.model.layers.dispatch import are_linears_batch_invariant, linear_kernels_of_option
from headstart.model.layers.linear import FusedLinear, WeightForm
from headstart.model.setup.doctor import make_doctor_report
from headstart.model.weights.model_loader import load_model

RUNNABLE = library.runnable_variants()


@pytest.fixture
def found() -> KernelLibrary:
    chosen = kernel_library_in_use()
    if chosen is None:
        pytest.skip("no compiled kernels here")
    return chosen


def test_torch_multiplies_only_if_it_is_asked_for_or_alone(found: KernelLibrary) -> None:
    assert linear_kernels_of_option(found, "auto") is linear_kernels_of_option(found, "kernels") is found
    assert (
        linear_kernels_of_option(found, "torch")
        is linear_kernels_of_option(None, "auto")
        is linear_kernels_of_option(None, "kernels")
        is None
    )


def test_both_forms_give_the_same_product(found: KernelLibrary) -> None:
    weight, x = random(70, 300), random(20, 300)
    ours, torchs = (FusedLinear(weight.clone(), form=WeightForm(form)) for form in (found, None))
    assert_near(ours(x), torchs(x), 300**0.5)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_runs_in_the_form_that_is_asked_for(
    found: KernelLibrary, tmp_path: Path, dtype: str, quantization: str
) -> None:
    make_checkpoint("llama", tmp_path)
    for choice in ("kernels", "torch", "auto"):
        loaded = load_model(tmp_path, dtype=dtype, device="cpu", linear_dispatch=choice, quantization=quantization)
        ours = choice != "torch" or quantization != "none"
        assert isinstance(loaded.model, Decoder) and bool(loaded.model.head.packed) is ours
        assert (loaded.model.fused is not None) is (ours and dtype == "bfloat16")
        assert loaded.exceptions == (() if ours else ("torch-products",))
    with pytest.raises(ConfigError, match="linear_dispatch 'fast' is not known; choose auto, kernels, torch"):
        load_model(tmp_path, device="cpu", linear_dispatch="fast")


class Coarse(FusedLinear):
    """A product that rounds the rows of a step alike where there are more than eight, as a form per step may."""

    def __call__(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = super().__call__(rows, residual)
        return out if len(rows) <= 8 else (out.float() * (1 + 2**-7)).to(out.dtype)


def test_products_whose_rows_depend_on_their_number_are_noticed(found: KernelLibrary) -> None:
    weight = random(40, 64)
    for dtype in (torch.bfloat16, torch.float32):
        form = WeightForm(found, dtype=dtype)
        assert are_linears_batch_invariant([FusedLinear(weight.to(dtype, copy=True), form=form)] * 2)
        assert not are_linears_batch_invariant(
            [FusedLinear(weight.to(dtype, copy=True), form=form), Coarse(weight.to(dtype), form=form)]
        )


def test_what_is_not_exact_is_named(found: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, granite = make_checkpoint("llama", tmp_path / "llama"), make_checkpoint("granite", tmp_path / "granite")
    assert load_model(llama, device="cpu").exceptions == ()
    assert load_model(granite, device="cpu").exceptions == ("transformers",)
    assert load_model(llama, device="cpu", attention_backend="reference").exceptions == ("torch-attention",)
    with monkeypatch.context() as changed:
        changed.setattr(Decoder, "is_batch_invariant", lambda self: False)
        assert load_model(llama, device="cpu").exceptions == ("row-test",)
    monkeypatch.setenv(library.VARIABLE, "none")
    assert load_model(llama, device="cpu").exceptions == ("torch-products", "torch-attention")


def test_doctor_shows_where_reuse_is_exact(found: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> dict[str, str]:
        return dict(next(section.rows for section in make_doctor_report().sections if section.title == "exact reuse"))

    assert rows()["models of Headstart's decoder"] == "exact"
    assert rows()["models of Transformers"] == "not exact: transformers"
    monkeypatch.setenv(library.VARIABLE, "none")
    assert rows()["models of Headstart's decoder"] == "not exact: torch-products, torch-attention"


def test_stored_kv_is_not_shared_by_what_computes_it_otherwise(
    found: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path)

    def fingerprint(**settings: object) -> bytes:
        return load_model(tmp_path, device="cpu", **({"dtype": "bfloat16"} | settings)).fingerprint

    assert fingerprint(quantization="int4", activation_bits=8) != fingerprint(quantization="int4", activation_bits=16)
    assert fingerprint(activation_bits=8) == fingerprint(activation_bits=16)  # no weights in blocks: nothing is rounded
    assert fingerprint(quantization="int8", activation_bits=8) == fingerprint(quantization="int8", activation_bits=16)
    assert fingerprint() == fingerprint(linear_dispatch="kernels") == fingerprint(linear_dispatch="auto")
    for dtype in ("bfloat16", "float32"):
        assert fingerprint(dtype=dtype) != fingerprint(dtype=dtype, linear_dispatch="torch")
    known = [fingerprint()]
    for variant in RUNNABLE:
        monkeypatch.setenv(library.VARIABLE, variant)
        known.append(fingerprint())
    assert len(set(known)) == len(RUNNABLE)
    with pytest.raises(ConfigError, match="activation_bits is 4; choose 8 or 16"):
        load_model(tmp_path, device="cpu", activation_bits=4)
