"""The executor on torch: rows fail alone, cached blocks are reused untouched, blocks travel, logprobs add up."""

from pathlib import Path
from random import Random

import pytest
import torch
from model.paged import all_logits, change_block, chunk, load_tiny, tiny_runner
from model.tiny import eager

from headstart.core.batch import Batch, RowErrorKind, RowResult
from headstart.core.request import SamplingParams
from headstart.model.attention.base import resolve_backend
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.model_loader import LoadedModel


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(request.param, tmp_path_factory.mktemp("model"))


def text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 128) for _ in range(length)]


def rows_of(runner: ModelRunner, *chunks: object) -> tuple[RowResult, ...]:
    return runner.execute(Batch(tuple(chunks))).rows


def test_poisoned_and_invalid_rows_fail_alone(loaded: LoadedModel) -> None:
    texts = [text(seed, 40) for seed in range(4)]
    tables = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]

    def prepared() -> ModelRunner:
        runner = tiny_runner(loaded)
        firsts = [chunk(t, 0, 32, b, request_id=str(i)) for i, (t, b) in enumerate(zip(texts, tables, strict=True))]
        assert all(row == RowResult() for row in rows_of(runner, *firsts))
        return runner

    lasts = [
        chunk(t, 32, 40, b, request_id=str(i), num_logits=1) for i, (t, b) in enumerate(zip(texts, tables, strict=True))
    ]
    decode = chunk([*texts[3][:32], 5], 32, 33, [10, 11, 13], request_id="d", num_logits=1)
    clean = rows_of(prepared(), *lasts, decode)
    assert all(row.error is None and len(row.token_ids) == 1 for row in clean)
    runner = prepared()
    change_block(runner, 5, lambda kv: kv.fill_(float("nan")))  # the second sequence's
    outside = chunk([1, 999], 0, 2, [14], request_id="x", num_logits=1)
    rows = rows_of(runner, lasts[0], lasts[1], outside, lasts[2], lasts[3], decode)
    assert rows[1].error == (RowErrorKind.NON_FINITE, "the model computed no finite hidden states")
    assert rows[2].error is not None and "999" in rows[2].error.message
    assert rows[2].error.kind is RowErrorKind.REQUEST and rows[1].token_ids == ()
    assert [rows[i] for i in (0, 3, 4, 5)] == [clean[i] for i in (0, 2, 3, 4)]
    runner.zero_blocks([4, 5, 6])
    again = [chunk(texts[1], 0, 40, tables[1], num_logits=1)]
    assert rows_of(runner, *again)[0].token_ids == clean[1].token_ids


def test_a_poisoned_chunk_in_mid_prompt_is_reported_too(loaded: LoadedModel) -> None:
    runner = tiny_runner(loaded)
    change_block(runner, 1, lambda kv: kv[0, 1].fill_(float("inf")))
    assert rows_of(runner, chunk(text(0, 40), 16, 30, [1, 2]))[0].error is not None


def test_shared_blocks_are_read_and_never_written(loaded: LoadedModel) -> None:
    runner, tokens = tiny_runner(loaded), text(1, 32)
    whole = all_logits(runner, chunk(tokens, 0, 32, [3, 4]))[0]
    before = [runner.read_block(block) for block in (3, 4)]
    change_block(runner, 4, lambda kv: kv[:, :, 15].add_(1e-3))  # a trace: a rewrite would erase it
    marked = runner.read_block(4)
    assert marked != before[1]
    last = all_logits(runner, chunk(tokens, 31, 32, [3, 4], write_from=32))[0]
    assert runner.read_block(4) == marked and runner.read_block(3) == before[0]
    torch.testing.assert_close(last[0], whole[-1], atol=0.05, rtol=0.05)


def test_blocks_read_from_one_runner_serve_another(loaded: LoadedModel) -> None:
    source, target, tokens = tiny_runner(loaded), tiny_runner(loaded), text(2, 40)
    expected = all_logits(source, chunk(tokens, 0, 40, [1, 2, 3]))[0][-1]
    for old, new in ((1, 9), (2, 8)):
        target.write_block(new, source.read_block(old))
    found = all_logits(target, chunk(tokens, 32, 40, [9, 8, 7], write_from=32))[0][-1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_prompt_logprobs_of_chunks_equal_log_softmax_of_the_oracle(loaded: LoadedModel) -> None:
    tokens, runner = text(3, 37), tiny_runner(loaded)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    found = []
    for start, end in ((0, 20), (20, 36), (36, 37)):
        made = chunk(tokens, start, end, [5, 6, 7], num_logits=int(end == 37), sampling=sampling)
        (row,) = rows_of(runner, made)
        found += row.prompt_logprobs
    with torch.inference_mode():
        expected = torch.log_softmax(eager(loaded.folder)(torch.tensor([tokens])).logits[0].float(), -1)
    assert [entry.token_id for entry in found] == tokens[1:]
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(expected[position, tokens[position + 1]].item(), abs=1e-3)
        assert entry.top[0][0] == expected[position].argmax().item() and len(entry.top) == 2
    assert row.token_ids == (expected[-1].argmax().item(),) and len(row.logprobs) == 1


def test_an_empty_batch_and_finished_requests_are_fine(loaded: LoadedModel) -> None:
    result = tiny_runner(loaded).execute(Batch((), ("a", "unknown")))
    assert result.rows == () and result.elapsed >= 0


def test_a_chunk_that_samples_nothing_gives_an_empty_row(loaded: LoadedModel) -> None:
    assert rows_of(tiny_runner(loaded), chunk(text(4, 9), 0, 9, [1])) == (RowResult(),)


def test_loaded_model_says_what_a_front_end_must_know(tmp_path: Path) -> None:
    model = load_tiny("llama", tmp_path, eos_token_id=[2, 9])
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (128, 512, (2, 9))
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model.attention_backend == resolve_backend("auto") and len(model.fingerprint) == 32
    assert model.architecture == "LlamaForCausalLM"
