"""All layers in one call give, to the bit, what they give one by one, step after step, in every variant."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from model.paged import change_block, chunk, tiny_runner
from model.tiny import HYBRIDS, NATIVE, make_checkpoint
from torch import Tensor

from headstart.core.batch import Batch, Chunk, RowErrorKind
from headstart.model.attention.base import AttentionFunction
from headstart.model.kernels.chain import ChainLink, LinearChain, LinearChainWorkspace
from headstart.model.kernels.library import VARIABLE, find_kernels, runnable_variants
from headstart.model.kernels.packed import PackedLinear
from headstart.model.kernels.stack import HeadOutputs, KernelKind, LayerStack
from headstart.model.layers.decoder import Decoder
from headstart.model.layers.fused import FusedLayers
from headstart.model.layers.hybrid_decoder import HybridDecoder
from headstart.model.model_runner import ModelRunner
from headstart.model.step_inputs import StepInputBounds, StepInputs, build_step_inputs
from headstart.model.weights.model_loader import load_model

RUNNABLE = runnable_variants()
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in NATIVE),
    ("llama", {"num_key_value_heads": 1, "head_dim": 20, "tie_word_embeddings": True, "num_hidden_layers": 1}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 77, "hidden_size": 52, "head_dim": 10}),
]


@pytest.fixture(params=RUNNABLE, autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant this processor runs, one after the other."""
    monkeypatch.setenv(VARIABLE, request.param)
    if find_kernels().kernels is None:
        pytest.skip(find_kernels().note)


def make_runner(folder: Path, family: str = "llama", **overrides: Any) -> tuple[ModelRunner, FusedLayers]:
    make_checkpoint(family, folder, std=0.08, **overrides)
    loaded = load_model(folder, dtype="bfloat16", device="cpu", attention_backend="cpu")
    assert isinstance(loaded.model, Decoder) and loaded.model.fused is not None
    return tiny_runner(loaded), loaded.model.fused


def make_step(runner: ModelRunner, *chunks: Chunk) -> StepInputs:
    bounds = StepInputBounds(
        runner.num_blocks, runner.block_size, runner.loaded.vocab_size, runner.loaded.max_model_len
    )
    step, _, errors = build_step_inputs(Batch(chunks), bounds, runner.loaded.device)
    assert step is not None and not errors
    return step


def layer_by_layer(attend: AttentionFunction) -> AttentionFunction:
    """The same attention without a known class: only a function to call."""

    def call(*rows: Any, **settings: Any) -> Tensor:
        return attend(*rows, **settings)

    return call


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=[f"{f}-{i}" for i, (f, _) in enumerate(FAMILIES)])
def test_one_call_equals_one_per_layer(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    runner, layers = make_runner(tmp_path / "a", family, **overrides)
    other, _ = make_runner(tmp_path / "b", family, **overrides)
    rng = Random(3)
    first, second = ([rng.randrange(3, 128) for _ in range(80)] for _ in range(2))
    cuts = [((0, 25), (0, 1)), ((25, 26), (1, 70)), ((26, 79), (70, 71)), ((79, 80), (71, 72)), ((0, 3), (72, 73))]
    for ends in cuts:  # fewer and more rows in turns
        steps = zip((first, second), ends, ([5, 3, 9, 1, 2], [6, 7, 8, 4, 10]), strict=True)
        chunks = [chunk(tokens, begin, end, table) for tokens, (begin, end), table in steps]
        with torch.inference_mode():
            step = make_step(runner, *chunks)
            ahead = HeadOutputs(step.qo_indptr)
            whole = layers.forward(step, runner.attention.begin_step(step), ahead)
            begun = other.attention.begin_step(make_step(other, *chunks))
            parts = layers.forward(make_step(other, *chunks), layer_by_layer(begun))
            logits = runner.loaded.model.logits_from_hidden(parts)
        assert whole.shape == parts.shape and torch.equal(whole, parts), ends
        assert ahead.logits is not None and torch.equal(ahead.logits, logits) and ahead.finite == [True, True], ends
    for block in range(1, 11):
        assert runner.read_block(block) == other.read_block(block)


@pytest.mark.parametrize("token", [-1, 128])
def test_tokens_outside_the_vocabulary_are_refused(token: int, tmp_path: Path) -> None:
    runner, layers = make_runner(tmp_path)
    step = make_step(runner, chunk([5, 6], 0, 2, [1]))
    step.token_ids[1] = token
    before = runner.read_block(1)
    with pytest.raises(ValueError, match=r"a token outside \[0, 128\)"):
        layers.forward(step, runner.attention.begin_step(step))
    assert runner.read_block(1) == before


def test_positions_before_the_first_are_refused(tmp_path: Path) -> None:
    runner, layers = make_runner(tmp_path)
    step = make_step(runner, chunk([5, 6], 0, 2, [1]))
    step.positions[0] = -1
    with pytest.raises(ValueError, match="a position outside"):
        layers.forward(step, runner.attention.begin_step(step))


def test_a_step_that_was_checked_against_a_larger_pool_is_checked_again(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    bounds = StepInputBounds(runner.num_blocks + 1, runner.block_size, 128, 512)
    step, _, _ = build_step_inputs(Batch((chunk([5, 6], 0, 1, [runner.num_blocks]),)), bounds, torch.device("cpu"))
    assert step is not None
    with pytest.raises(ValueError, match="outside"):
        runner.attention.begin_step(step)


def test_a_decode_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    runner, _ = make_runner(tmp_path)
    decodes = [chunk([5, 6, 7, 8], 3, 4, [block], request_id=str(block), num_logits=1) for block in (1, 2, 3)]
    alone = runner.execute(Batch((decodes[0],))).rows
    change_block(runner, 2, lambda kv: kv.fill_(float("nan")))
    rows = runner.execute(Batch(tuple(decodes))).rows
    error = RowErrorKind.NON_FINITE, "the model computed no finite hidden states"
    assert [row.error for row in rows] == [None, error, None]
    assert rows[0] == rows[2] == alone[0] and len(rows[0].token_ids) == 1


def test_positions_far_behind_the_first_ones_are_rotated_too(tmp_path: Path) -> None:
    runner, layers = make_runner(tmp_path, max_position_embeddings=4096)
    tokens, table = [Random(1).randrange(3, 128) for _ in range(2200)], list(range(1, 139))
    other = ModelRunner(runner.loaded, num_blocks=140, block_size=16)
    wide = ModelRunner(runner.loaded, num_blocks=140, block_size=16)
    with torch.inference_mode():
        for begin, end in ((0, 10), (10, 2190), (2190, 2200)):  # positions below 1,024, then far above
            step = make_step(wide, chunk(tokens, begin, end, table))
            whole = layers.forward(step, wide.attention.begin_step(step)).clone()
            parts = layers.forward(step, layer_by_layer(other.attention.begin_step(step)))
            assert torch.equal(whole, parts)


def test_more_threads_than_at_the_last_step_find_memory(tmp_path: Path) -> None:
    runner, layers = make_runner(tmp_path)
    step, before = make_step(runner, chunk([5, 6], 0, 2, [1])), torch.get_num_threads()
    try:
        with torch.inference_mode():
            alone = layers.forward(step, runner.attention.begin_step(step)).clone()
            torch.set_num_threads(before + 2)
            assert torch.equal(layers.forward(step, runner.attention.begin_step(step)), alone)
    finally:
        torch.set_num_threads(before)


def test_the_runner_takes_the_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = make_runner(tmp_path)

    def refuse(*_: object) -> Tensor:
        raise AssertionError("the layers were run one by one")

    monkeypatch.setattr(FusedLayers, "_forward_by_layer", refuse)
    rows = runner.execute(Batch((chunk([5, 6, 7], 0, 3, [1], num_logits=1),))).rows
    assert rows[0].error is None and len(rows[0].token_ids) == 1


@pytest.mark.parametrize("family", HYBRIDS)
def test_one_call_of_a_hybrid_equals_one_per_mixer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, std=0.08)
    loaded = load_model(tmp_path, dtype="bfloat16", device="cpu", attention_backend="cpu")
    assert isinstance(loaded.model, HybridDecoder)
    calls = list[int]()
    monkeypatch.setattr(LayerStack, "__call__", counted(LayerStack.__call__, calls))
    whole, parts = tiny_runner(loaded), tiny_runner(loaded)
    assert whole.states is not None and parts.states is not None
    rng = Random(3)
    first, second = ([rng.randrange(3, 128) for _ in range(80)] for _ in range(2))
    cuts = [((0, 25), (0, 1)), ((25, 26), (1, 70)), ((26, 79), (70, 71)), ((79, 80), (71, 72))]
    for step, ends in enumerate(cuts):
        tables = zip("ab", (first, second), ends, ([5, 3, 9, 1, 2], [6, 7, 8, 4, 10]), strict=True)
        chunks = [chunk(tokens, *end, table, request_id=name) for name, tokens, end, table in tables]
        found, logits = list[Tensor](), list[Tensor]()
        for runner, wrapped in ((whole, lambda attend: attend), (parts, layer_by_layer)):
            inputs = make_step(runner, *chunks)
            assert runner.states is not None
            inputs = replace(inputs, states=runner.states.begin_step(chunks, inputs.qo_indptr))
            ahead = HeadOutputs(inputs.qo_indptr)
            with torch.inference_mode():
                hidden = loaded.model.forward(inputs, wrapped(runner.attention.begin_step(inputs)), ahead).clone()
                logits.append(loaded.model.logits_from_hidden(hidden) if ahead.logits is None else ahead.logits)
            found.append(hidden)
            assert ahead.finite == ([True, True] if runner is whole else None), ends
        assert torch.equal(*found) and torch.equal(*logits) and len(calls) == step + 1, ends
        for name, (_, end) in zip("ab", ends, strict=True):
            assert torch.equal(whole.states.state_of(name, end), parts.states.state_of(name, end)), ends
    for block in range(1, 11):
        assert whole.read_block(block) == parts.read_block(block)


def counted(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def call(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        function(*arguments, **options)

    return call


def test_a_stack_refuses_a_wrong_number_of_arguments_and_foreign_memory() -> None:
    kernels = find_kernels().kernels
    assert kernels is not None
    linear = PackedLinear(kernels, torch.zeros(8, 8, dtype=torch.bfloat16))
    chain, wide = (LinearChain(kernels, [ChainLink(linear, 0, 1)], widths) for widths in ((8, 8), (8, 8, 4)))
    embedding = torch.zeros(4, 8, dtype=torch.bfloat16)
    stack = LayerStack(kernels, [[chain], [chain]], [[(KernelKind.GATE, 0)]], embedding, chain, stream=0)
    with pytest.raises(ValueError, match="0 arguments for 1 kernels"):
        stack(*LinearChainWorkspace([chain]).buffers_for_rows(1), [])
    with pytest.raises(ValueError, match="this chain needs"):
        stack(*LinearChainWorkspace([wide]).buffers_for_rows(1), [])
