"""The real engine with drafts: tokens are those without, greedy or drawn, in float32, with every sampling parameter."""

from array import array
from collections.abc import Iterator
from random import Random

import pytest
from model.tiny import make_checkpoint

from headstart.core.batch import Batch, RowResult, StepResult, TokenLogprob
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineStats
from headstart.core.request import CacheMode, Request, SamplingParams
from headstart.core.sched.limits import Limits
from headstart.core.sched.scheduler import Scheduler
from headstart.core.sched.scheduler_config import SchedulerConfig
from headstart.core.speculation.speculation_config import SpeculationConfig
from headstart.model.model_runner import ModelRunner
from headstart.model.sampling import verification
from headstart.model.weights.model_loader import LoadedModel, load_model

VOCAB = 128
LEN = 160


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_checkpoint("llama", tmp_path_factory.mktemp("llama")), dtype="float32", device="cpu")


def requests(rng: Random, count: int) -> list[Request]:
    """Prompts with repetitions; every third request is an earlier one again, so that it repeats an earlier output."""
    made: list[Request] = []
    for number in range(count):
        if number % 3 == 2:
            again = made[rng.randrange(len(made))]
            made.append(Request(f"r{number}", again.prompt, again.sampling, domain=again.domain))
            continue
        prompt = rng.choices(range(VOCAB), k=rng.randrange(1, 24)) * rng.randrange(1, 4)
        sampling = SamplingParams(
            max_tokens=rng.randrange(1, 40),
            min_tokens=rng.choice([0, 0, 5]),
            temperature=rng.choice([0.0, 0.0, 0.2, 1.0]),
            top_k=rng.choice([0, 0, 4]),
            top_p=rng.choice([1.0, 0.8]),
            seed=rng.randrange(1000),  # without one, the draws are those of the request's id
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([None, None, 2]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), k=rng.choice([0, 2]))),
        )
        made.append(Request(f"r{number}", array("i", prompt), sampling, domain=rng.choice([b"", b"a"])))
    return made


class SteadyRunner(ModelRunner):
    """Every step takes as long, so the lengths of drafts do not depend on the machine."""

    def execute(self, batch: Batch) -> StepResult:
        return super().execute(batch)._replace(elapsed=0.001)


class Run:
    """One run of an engine over the requests, with some preemptions, evictions and aborts."""

    def __init__(self, loaded: LoadedModel, made: list[Request], config: SpeculationConfig | None, blocks: int) -> None:
        limits = Limits(max_batched_tokens=96, max_seqs=6, max_model_len=LEN)
        scheduler = Scheduler(SchedulerConfig(blocks, 16, limits, model=loaded.fingerprint, speculation=config))
        for _ in range(300):
            scheduler.admission.record_output_length(1)  # it admits too many, so some are preempted
        engine = Engine(scheduler, SteadyRunner(loaded, num_blocks=blocks, block_size=16, seed=1))
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in made}
        self.logprobs: dict[str, list[TokenLogprob]] = {request.request_id: [] for request in made}
        waiting = iter(made)
        self._step(engine, waiting, 6)
        while engine.has_work:
            self._step(engine, waiting, 1)
        scheduler.pool.check_invariants()
        assert scheduler.pool.num_free == scheduler.pool.usable_capacity
        self.stats: EngineStats = engine.stats()

    def _step(self, engine: Engine, waiting: Iterator[Request], most: int) -> None:
        for request in waiting:
            engine.add_request(request)
            most -= 1
            if not most:
                break
        for output in engine.step():
            assert output.error is None
            self.tokens[output.request_id] += output.token_ids
            self.logprobs[output.request_id] += output.logprobs


def compare(loaded: LoadedModel, seed: int, count: int, config: SpeculationConfig, blocks: int) -> EngineStats:
    """Runs the same requests with and without drafts; returns what the engine with drafts counted."""
    made = requests(Random(seed), count)
    plain, drafted = Run(loaded, made, None, blocks), Run(loaded, made, config, blocks)
    for request in made:
        name = request.request_id
        assert drafted.tokens[name] == plain.tokens[name], name
        wants = request.sampling.logprobs is not None
        assert len(drafted.logprobs[name]) == len(drafted.tokens[name]) * wants
        for one, other in zip(drafted.logprobs[name], plain.logprobs[name], strict=True):
            assert one.token_id == other.token_id and one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    return drafted.stats


def test_tokens_and_log_probabilities_are_those_without_drafts(loaded: LoadedModel) -> None:
    stats = compare(loaded, 1, 90, SpeculationConfig(7, 4, 1), blocks=14)
    counters = stats.counters
    assert counters.num_accepted_tokens > 100 and counters.num_draft_tokens > counters.num_accepted_tokens + 50
    assert counters.num_preemptions > 0 and stats.pool.total_evictions > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_tokens_are_those_without_drafts_over_two_thousand_requests(loaded: LoadedModel) -> None:
    total = 0
    for seed in range(20):
        config = SpeculationConfig(1 + seed % 15, 2 + seed % 7, 1 + seed % 2)
        total += compare(loaded, 100 + seed, 100, config, blocks=(14, 24, 200)[seed % 3]).counters.num_accepted_tokens
    assert total > 2000


def test_a_request_that_does_not_read_the_cache_has_drafts_of_its_own_tokens_only(loaded: LoadedModel) -> None:
    made = [
        Request(f"r{number}", array("i", range(30)), SamplingParams(temperature=0.0, max_tokens=20), cache=mode)
        for number, mode in enumerate((CacheMode.READ_WRITE, CacheMode.BYPASS))
    ]
    alone = Run(loaded, made[1:], SpeculationConfig(), 24).stats.counters
    after = Run(loaded, made, SpeculationConfig(), 24).stats.counters
    assert alone.num_draft_tokens == 0 and after.num_draft_tokens == 0


@pytest.mark.parametrize("bug", ["draws again with the first number", "takes the logits one position too far"])
def test_a_planted_bug_is_caught(bug: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "draws again with the first number":
        monkeypatch.setattr(verification.VerifiedChunk, "chunk_after_verified", lambda self: self.chunk)
    else:
        add = verification.VerifiedChunk.add_sampled_row

        def planted(self: verification.VerifiedChunk, row: RowResult) -> bool:
            going = add(self, row)
            self.first += not self.token_ids[1:] and going and self.first + 2 < self.chunk.num_logits
            return going

        monkeypatch.setattr(verification.VerifiedChunk, "add_sampled_row", planted)
    with pytest.raises((AssertionError, IndexError)):
        compare(loaded, 1, 90, SpeculationConfig(7, 4, 1), blocks=14)
