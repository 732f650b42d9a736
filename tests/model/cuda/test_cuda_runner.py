"""CudaRunner through the real engine against ModelRunner, in float32 and Triton's interpreter."""

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cuda_runs import drive, load, make_runner, random_requests
from tiny import NATIVE
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from headstart.core.batch import UNKNOWN_TOKEN, Batch, Chunk, RowErrorKind, RowResult
from headstart.core.request import SamplingParams
from headstart.model.cuda import decoder_pass
from headstart.model.cuda.cuda_runner import CudaRunner
from headstart.model.cuda.decoder_pass import PassResult
from headstart.model.cuda.step_graphs import GraphKey
from headstart.model.cuda.triton_layers import silu_mul
from headstart.model.model_runner import ModelRunner
from headstart.model.paged_kv import PagedKV
from headstart.model.weights.model_loader import LoadedModel

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.long
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", NATIVE)
def test_tokens_are_those_of_the_reference(family: str, exact: bool, tmp_path: Path) -> None:
    loaded = load(family, tmp_path, exact=exact)
    requests = random_requests(loaded.vocab_size, 7, Random(3), lengths=(1, 2, 17, 40), tokens=3)
    expected = drive(ModelRunner(loaded, num_blocks=60, block_size=16), requests)
    runner = make_runner(loaded)
    assert drive(runner, requests) == expected
    assert drive(runner, requests, budget=40) == expected  # other chunks


def test_a_prompt_and_its_decodes_with_graphs(llama: LoadedModel) -> None:
    requests = random_requests(llama.vocab_size, 3, Random(5), lengths=(17, 3), tokens=3)
    expected = drive(ModelRunner(llama, num_blocks=60, block_size=16), requests)
    runner = make_runner(llama)
    runner.warm_up([GraphKey("decodes", 4, 0), GraphKey("mixed", 64, 32), GraphKey("groups", 4, 0)])
    assert drive(runner, requests) == expected


def test_a_bad_chunk_and_a_corrupt_block_fail_alone(llama: LoadedModel) -> None:
    runner = make_runner(llama)
    tokens = array("i", range(3, 23))
    good = Chunk("good", tokens, 0, (1, 2), 0, 1, GREEDY, 20, tokens)
    outside = good._replace(request_id="outside", block_ids=(1, 60))
    corrupt = Chunk("corrupt", tokens[16:17], 16, (3, 4), 16, 1, GREEDY, 17, tokens[:17])
    runner.kv.pool[3] = float("nan")
    rows = runner.execute(Batch((good, outside, corrupt))).rows
    assert [row.error and row.error.kind for row in rows] == [None, RowErrorKind.REQUEST, RowErrorKind.NON_FINITE]
    assert rows[0].token_ids == runner.execute(Batch((good,))).rows[0].token_ids
    runner.write_block(9, runner.read_block(1))
    assert torch.equal(runner.kv.pool[9], runner.kv.pool[1])
    assert not runner.kv.pool[0].any()


def test_a_block_has_the_same_canonical_form_as_elsewhere(llama: LoadedModel) -> None:
    runner = make_runner(llama)
    reference = PagedKV(llama.kv_shape, num_blocks=60, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    data = torch.randn(llama.kv_bytes_per_token * 16 // 4).numpy().tobytes()
    for executor in (runner, reference):
        executor.write_block(5, data)
        assert bytes(executor.read_block(5)) == data
    keys = reference.layers[1][0, :, 5]
    assert torch.equal(runner.kv.layers[1][0][5], keys)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.9])
def test_a_step_continues_tokens_that_the_host_has_not_seen(llama: LoadedModel, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=temperature, top_p=0.9, seed=3)
    first, second = array("i", range(3, 23)), array("i", range(40, 57))
    prompts = [
        Chunk("a", first, 0, (1, 2), 0, 1, sampling, 20, first),
        Chunk("b", second, 0, (3, 4), 0, 1, sampling, 17, second),
    ]
    outputs: list[list[list[int]]] = []
    for ahead in (False, True):
        runner, found = make_runner(llama), [list[int](), list[int]()]
        submitted, order = runner.submit(Batch(tuple(prompts))), [0, 1]
        for step in range(4):
            if not ahead:
                _take(runner.collect(submitted).rows, order, found)
            following = order[::-1]  # rows change places between two steps
            chunks = [_decode(prompts[at], found[at], step, None if not ahead else order.index(at)) for at in following]
            after = runner.submit(Batch(tuple(chunks)))
            if ahead:
                _take(runner.collect(submitted).rows, order, found)
            submitted, order = after, following
        _take(runner.collect(submitted).rows, order, found)
        outputs.append(found)
    assert outputs[0] == outputs[1] and len(outputs[0][0]) == 5


def _take(rows: tuple[RowResult, ...], order: list[int], found: list[list[int]]) -> None:
    for at, row in zip(order, rows, strict=True):
        assert row.error is None
        found[at] += row.token_ids


def _decode(prompt: Chunk, outputs: list[int], step: int, from_previous: int | None) -> Chunk:
    """Return the chunk of output `step` + 1, whose token is known or is row `from_previous` of the step before."""
    start, history = len(prompt.token_ids) + step, prompt.history + array("i", outputs)
    token = history[-1:] if from_previous is None else array("i", [UNKNOWN_TOKEN])
    return prompt._replace(token_ids=token, start=start, write_from=start, history=history, from_previous=from_previous)


@pytest.mark.parametrize(("num_chunks", "own", "expected"), [(1, 1, 5), (2, 1, 10), (2, 3, 10)])
def test_launches_of_a_layer(
    num_chunks: int, own: int, expected: int, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, launches = make_runner(llama), list[str]()
    for module, names in (
        (decoder_pass.triton_attention, ("launch_attention", "launch_single_token_step", "merge_partial_results")),
        (decoder_pass.triton_layers, ("add_rms_norm", "silu_mul", "matvec", "embed_tokens")),
        (decoder_pass, ("rotate_and_append_kv",)),
        (decoder_pass.F, ("linear",)),
        (decoder_pass.torch, ("mm",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, _counted(getattr(module, name), launches))
    tokens = array("i", range(3, 23))
    chunks = [Chunk(f"{at}", tokens[:own], 0, (1 + at,), 0, 1, GREEDY, own, tokens[:own]) for at in range(num_chunks)]
    runner.execute(Batch(tuple(chunks)))
    rest = {"embed": 1, "head": 1, "first norm": 0 if num_chunks * own == 1 else 1}
    assert len(launches) == expected * 2 + sum(rest.values())


def _counted(launch: Callable[..., Any], launches: list[str]) -> Callable[..., Any]:
    def counted(*arguments: Any, **options: Any) -> Any:
        launches.append(launch.__name__)
        return launch(*arguments, **options)

    return counted


class _RefusesSyncs(TorchDispatchMode):
    """Refuses what would wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "unique"), func
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device_between_submit_and_collect(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(llama)
    tokens, drawn = array("i", range(3, 23)), SamplingParams(max_tokens=1, temperature=0.7, top_k=5, seed=1)
    edited = SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.3, logit_bias=((5, 1.0),), logprobs=2)
    chunks = [
        Chunk(f"{at}", tokens, 0, (1 + 2 * at, 2 + 2 * at), 0, 1, s, 20, tokens)
        for at, s in enumerate((GREEDY, drawn, edited))
    ]
    monkeypatch.setattr(
        runner.decoder, "run", lambda *a: _precomputed(runner, a)
    )  # the interpreter itself reads values
    with _RefusesSyncs():
        handle = runner.submit(Batch(tuple(chunks)))
    assert [len(row.token_ids) for row in runner.collect(handle).rows] == [1, 1, 1]


def _precomputed(runner: CudaRunner, arguments: tuple[Any, ...]) -> PassResult:
    """Return results as a pass has them, for as many rows and outputs."""
    layout = arguments[2]
    hidden = torch.zeros(layout.rows, runner.decoder.config.hidden_size)
    logits = torch.arange(float(layout.outputs * runner.loaded.vocab_size)).view(layout.outputs, -1)
    values, ids = logits.max(-1)
    answer = torch.cat((ids.int(), values.view(torch.int32)))
    return PassResult(hidden, logits, answer, torch.ones(layout.rows, dtype=torch.int32))


def test_a_row_that_the_host_samples_again_is_continued_with_its_token(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.9, top_p=0.9, seed=4)
    prompt = array("i", range(3, 23))
    first = Chunk("a", prompt, 0, (1, 2), 0, 1, sampling, 20, prompt)
    runner = make_runner(llama)
    expected = runner.execute(Batch((first,))).rows[0].token_ids[0]
    other = (expected + 1) % llama.vocab_size
    again = make_runner(llama)
    kept, chosen = again.sampler.finish_sampling, [other]

    def rows(*arguments: Any) -> list[RowResult]:
        """Return another token for the first row that is asked for."""
        found = kept(*arguments)
        return [found[0]._replace(token_ids=(chosen.pop(),))] if chosen else found

    monkeypatch.setattr(again.sampler, "finish_sampling", rows)
    handle = again.submit(Batch((first,)))
    second = again.submit(Batch((_decode(first, [], 0, 0),)))
    assert again.collect(handle).rows[0].token_ids == (other,)
    third = again.submit(Batch((_decode(first, [other], 1, 0),)))
    found = [again.collect(each).rows[0].token_ids[0] for each in (second, third)]
    outputs = [other]
    for step in range(2):
        outputs += runner.execute(Batch((_decode(first, outputs, step, None),))).rows[0].token_ids
    assert found == outputs[1:]


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_step_that_does_not_fit_is_computed_in_several_passes(
    llama: LoadedModel, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [array("i", range(at, at + 9)) for at in (3, 20, 41)]
    prompts = [Chunk(f"{at}", own, 0, (1 + at,), 0, 1, GREEDY, 9, own) for at, own in enumerate(tokens)]
    reference = ModelRunner(llama, num_blocks=60, block_size=16)
    runner = make_runner(llama)
    monkeypatch.setattr(runner.planner, "step_fits", lambda rows, room: len(rows.indptr) == 2)  # one chunk
    expected, outputs = ([list[int](), list[int](), list[int]()] for _ in range(2))
    _take(reference.execute(Batch(tuple(prompts))).rows, [0, 1, 2], expected)
    handle = runner.submit(Batch(tuple(prompts)))
    for step in range(2):
        known = [_decode(prompts[at], expected[at], step, None) for at in range(3)]
        _take(reference.execute(Batch(tuple(known))).rows, [0, 1, 2], expected)
        if not ahead:
            _take(runner.collect(handle).rows, [0, 1, 2], outputs)
        chunks = [_decode(prompts[at], outputs[at], step, at if ahead else None) for at in range(3)]
        after = runner.submit(Batch(tuple(chunks)))
        if ahead:
            _take(runner.collect(handle).rows, [0, 1, 2], outputs)
        handle = after
    _take(runner.collect(handle).rows, [0, 1, 2], outputs)
    assert outputs == expected and len(outputs[0]) == 3


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_a_second_launch_finds_the_interpreter_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(2, 8)
    expected = silu_mul(values)
    monkeypatch.delattr(interpreter, "_patch_builtin")
    assert torch.equal(silu_mul(values), expected)
