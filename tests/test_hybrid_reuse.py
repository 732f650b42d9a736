"""Hybrid models with the prefix cache: reuse changes no token, no logit's bit and no state's bit."""

from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from model.tiny import HYBRIDS, eager, make_checkpoint
from torch import Tensor

from headstart.config.options import EngineOptions
from headstart.core.cache.block_store import BlockStore
from headstart.core.engine import Engine
from headstart.core.request import Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.engine.assembly import build_engine
from headstart.model.model_runner import ModelRunner
from headstart.model.weights.init_model import write_random_model
from headstart.model.weights.model_loader import LoadedModel, load_model

SIZE = 8


def engine_of(
    loaded: LoadedModel, num_blocks: int = 400, *, caching: bool = True, step: int = 64, store: BlockStore | None = None
) -> Engine:
    pages = -(-loaded.state_bytes // (SIZE * loaded.kv_bytes_per_token))
    limits = Limits(max_batched_tokens=step, max_seqs=8, max_model_len=256)
    config = SchedulerConfig(num_blocks, SIZE, limits, enable_prefix_caching=caching, state_pages=pages)
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=SIZE)
    return Engine(Scheduler(config, store=store), runner, store=store)


def request(name: str, prompt: list[int], num: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=num, logprobs=1)
    return Request(name, array("i", prompt), sampling)


def run(engine: Engine, requests: list[Request], rng: Random) -> dict[str, tuple[list[int], list[float], int, Tensor]]:
    """Serve requests that arrive at random: tokens, log-probabilities, cached tokens, and the last state of each."""
    lengths = {request.request_id: len(request.prompt) for request in requests}
    waiting, found = list(requests), dict[str, tuple[list[int], list[float], int, Tensor]]()
    runner = engine.executor
    assert isinstance(runner, ModelRunner) and runner.states is not None
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.5:
            engine.add_request(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            tokens, values, cached, _ = found.get(output.request_id, ([], [], 0, torch.zeros(0)))
            if output.breakdown is not None:
                cached = output.breakdown.num_cached
            values = values + [entry.logprob for entry in output.logprobs]
            found[output.request_id] = (
                tokens + list(output.token_ids),
                values,
                cached,
                runner.states.state_of(
                    output.request_id, lengths[output.request_id] + len(tokens) + len(output.token_ids) - 1
                ),
            )
        engine.scheduler.pool.check_invariants()
    return found


def conversations(loaded: LoadedModel, rng: Random, num: int) -> list[list[list[int]]]:
    """Prompts of conversations of three turns that begin alike, with the model's own answers."""
    system, engine = [rng.randrange(3, 128) for _ in range(45)], engine_of(loaded, caching=False)
    found: list[list[list[int]]] = []
    for index in range(num):
        turns, prompt = list[list[int]](), list(system)
        for turn in range(3):
            prompt = prompt + [rng.randrange(3, 128) for _ in range(rng.randint(3, 14))]
            turns.append(prompt)
            answer = run(engine, [request(f"{index}-{turn}", prompt, 12)], rng)[f"{index}-{turn}"][0]
            prompt = prompt + answer
        found.append(turns)
    return found


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reuse_changes_no_bit_of_states_and_probabilities(family: str, dtype: str, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path), dtype=dtype, device="cpu")
    chats = conversations(loaded, Random(1), 3)
    requests = [request(f"{i}-{turn}", chats[i][turn], 12) for turn in range(3) for i in range(3)]
    cold = run(engine_of(loaded, caching=False), requests, Random(1))
    for num_blocks, step in ((900, 64), (900, 11), (75, 30)):
        warm = run(engine_of(loaded, num_blocks, step=step), requests, Random(2))
        for name, (tokens, values, _, state) in cold.items():
            assert warm[name][0] == tokens and warm[name][1] == values
            assert torch.equal(warm[name][3], state)
    assert sum(entry[2] for entry in run(engine_of(loaded, 900), requests, Random(3)).values()) > 200


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_next_turn_reuses_the_last_one_to_its_last_whole_block(family: str, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path), dtype="float32", device="cpu")
    (turns,) = conversations(loaded, Random(5), 1)
    engine = engine_of(loaded, 900)
    cached = [
        run(engine, [request(str(turn), prompt, 12)], Random(0))[str(turn)][2] for turn, prompt in enumerate(turns)
    ]
    assert cached == [0, *((len(prompt) + 11) // SIZE * SIZE for prompt in turns[:-1])]


@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_with_reuse_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    loaded = load_model(make_checkpoint(family, tmp_path), dtype="float32", device="cpu")
    oracle, rng = eager(tmp_path), Random(7)
    tree, engine = [[rng.randrange(3, 128) for _ in range(40)]], engine_of(loaded, 300, step=33)
    requests: list[Request] = []
    for index in range(16):
        text = rng.choice(tree)
        prompt = text[: rng.randint(1, len(text))] + [rng.randrange(3, 128) for _ in range(rng.choice([0, 1, 9]))]
        tree.append(prompt)
        requests.append(request(str(index), prompt, 8))
    found = run(engine, requests, rng)
    for each in requests:
        prompt = list(each.prompt)
        expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert found[each.request_id][0] == expected[0, len(prompt) :].tolist()
    assert sum(entry[2] for entry in found.values()) > 50


@pytest.mark.parametrize("drafts", [None, '{"method": "ngram"}'])
def test_an_engine_built_from_options_reuses_prefixes_and_takes_drafts(
    drafts: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint("lfm2", write_random_model("tiny", tmp_path / "model", progress=False), vocab_size=512)
    options = EngineOptions(model=str(folder), num_gpu_blocks_override=200, dtype="float32", max_num_seqs=4)
    options = replace(options, speculative_config=drafts)
    engine, _ = build_engine(options)
    assert f"has recurrent layers: {19 if drafts else 4} states of" in capsys.readouterr().err
    prompt = [Random(1).randrange(3, 500) for _ in range(50)]
    for name, due in (("0", 0), ("1", 48)):
        engine.add_request(request(name, prompt, 4))
        outputs = [output for _ in range(30) if engine.has_work for output in engine.step()]
        assert sum(output.breakdown.num_cached for output in outputs if output.breakdown is not None) == due
