"""Scenarios: every workload of the suite as phases of jobs, defined once for all runners.

Pure: chance is the `rng` argument, so one seed is one set of prompts. A scenario is one repetition; the next one draws
new prompts, so that it is cold even if a cache cannot be reset. Not here: the runners (`measurement/runner.py`), the
measurement of a phase (`bench/measure.py`), and traces (`traces.py`).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headstart.workload.jobs import GREEDY, Job, TokenSampling, jobs_from_prompts
from headstart.workload.synthetic import INTENT, RequestShape, prompts_with_prefix, random_tokens
from headstart.workload.synthetic import shared_prefix_prompts as shared_prompts
from headstart.workload.synthetic import token_rotations as rotated


@dataclass(frozen=True, slots=True)
class WorkloadPhase:
    """Jobs that are served together: the next phase starts when all of them have ended."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int = 0  # 0: each job when it is due; else so many at a time, in order
    is_measured: bool = True  # False: it only fills the cache


@dataclass(frozen=True, slots=True)
class WorkloadScenario:
    """One repetition of a workload, to be served with a cache that contains none of its prompts."""

    name: str
    phases: tuple[WorkloadPhase, ...]

    @property
    def longest(self) -> int:
        """The tokens of the longest request, output included."""
        return max(len(job.prompt) + job.output for phase in self.phases for job in phase.jobs)

    def num_blocks_without_sharing(self, block_size: int = 16) -> int:
        """Return the number of KV blocks that hold all of it at once without any sharing."""
        jobs = [job for phase in self.phases for job in phase.jobs]
        return sum((len(job.prompt) + job.output) // block_size + 1 for job in jobs)


BURST = RequestShape(shared=2048, own=32, output=16)  # twins: many at once with one new prefix
GENERATED = RequestShape(shared=1024, own=64, output=32)  # a small version of SGLang's generated-shared-prefix
FIRST_TOKEN = RequestShape(INTENT.shared, INTENT.own, output=1)
STREAMS = RequestShape(shared=1024, own=16, output=128)  # decode


def token_rotations_scenario(
    vocab_size: int, rng: Random, *, count: int = 48, length: int = 1025, passes: int = 1
) -> WorkloadScenario:
    """Rotations of one list of tokens (vLLM #3402), all at once, one output token: `cold`, then the same `warm`."""
    jobs = tuple(jobs_from_prompts(rotated(random_tokens(length, vocab_size, rng), count), 1))
    return WorkloadScenario(
        "rotations", (WorkloadPhase("cold", jobs), *(WorkloadPhase("warm", jobs) for _ in range(passes)))
    )


def single_stream_scenario(
    vocab_size: int, rng: Random, *, prompt: int = 128, output: int = 128, requests: int = 3
) -> WorkloadScenario:
    """New prompts one at a time: time per output token without other requests."""
    return WorkloadScenario(
        "single-stream", (_one_at_a_time("alone", _new(requests, prompt, vocab_size, rng), output),)
    )


def cold_ttft_scenario(vocab_size: int, rng: Random, *, length: int = 1000, requests: int = 3) -> WorkloadScenario:
    """New prompts one at a time: time to the first token without cache hits."""
    return WorkloadScenario("cold-ttft", (_one_at_a_time("cold", _new(requests, length, vocab_size, rng), 1),))


def warm_ttft_scenario(
    vocab_size: int, rng: Random, *, shape: RequestShape = FIRST_TOKEN, requests: int = 8
) -> WorkloadScenario:
    """Prompts one at a time whose first `shape.shared` tokens are cached from others: time to the first token."""
    prompts = prompts_with_prefix(
        random_tokens(shape.shared, vocab_size, rng), requests + 2, shape.own, vocab_size, rng
    )
    before, asked = _warm_up(prompts[:2]), _one_at_a_time("warm", prompts[2:], shape.output)
    return WorkloadScenario("warm-ttft", (before, asked))


def prefill_scenario(
    vocab_size: int, rng: Random, *, lengths: Sequence[int], cached_share: float = 0.9, requests: int = 3
) -> WorkloadScenario:
    """For each length: `cold LENGTH`, new prompts one at a time; `warm LENGTH`, of which `cached_share` is cached."""
    phases: list[WorkloadPhase] = []
    for length in lengths:
        phases.append(_one_at_a_time(f"cold {length}", _new(requests, length, vocab_size, rng), 1))
        shared = min(int(length * cached_share), length - 1)
        prefix = random_tokens(shared, vocab_size, rng)
        prompts = prompts_with_prefix(prefix, requests + 1, length - shared, vocab_size, rng)
        phases += [_warm_up(prompts[:1]), _one_at_a_time(f"warm {length}", prompts[1:], 1)]
    return WorkloadScenario("prefill", tuple(phases))


def concurrent_decode_scenario(
    vocab_size: int,
    rng: Random,
    *,
    is_shared: bool,
    streams: int = 32,
    shape: RequestShape = STREAMS,
    sampling: TokenSampling = GREEDY,
) -> WorkloadScenario:
    """Streams that decode at once with cached prefixes: one for all, or one for each."""
    count = 1 if is_shared else streams
    prefixes = [random_tokens(shape.shared, vocab_size, rng) for _ in range(count)]
    before = [prefix + random_tokens(shape.own, vocab_size, rng) for prefix in prefixes]
    prompts = [prefixes[i % count] + random_tokens(shape.own, vocab_size, rng) for i in range(streams)]
    name = "shared" if is_shared else "distinct"
    jobs = jobs_from_prompts(prompts, shape.output, sampling=sampling)
    return WorkloadScenario(f"decode-{name}", (_warm_up(before), WorkloadPhase(name, tuple(jobs))))


def shared_prefix_scenario(
    vocab_size: int,
    rng: Random,
    *,
    groups: int = 8,
    prompts: int = 8,
    shape: RequestShape = GENERATED,
    due: Sequence[float] | None = None,
    concurrency: int = 0,
) -> WorkloadScenario:
    """SGLang's generated-shared-prefix: groups of questions, one system prompt per group, in random order, cold.

    All at once, or at the times `due` (seconds, rising), or `concurrency` at a time.
    """
    found = shared_prompts(groups, prompts, shape, vocab_size, rng)
    rng.shuffle(found)
    return WorkloadScenario(
        "shared-prefix", (WorkloadPhase("cold", tuple(jobs_from_prompts(found, shape.output, due)), concurrency),)
    )


def shared_burst_scenario(
    vocab_size: int, rng: Random, *, requests: int = 32, shape: RequestShape = BURST
) -> WorkloadScenario:
    """A burst of requests with one new prefix."""
    found = prompts_with_prefix(random_tokens(shape.shared, vocab_size, rng), requests, shape.own, vocab_size, rng)
    return WorkloadScenario("twins", (WorkloadPhase("cold", tuple(jobs_from_prompts(found, shape.output))),))


def intent_recognition_scenario(
    vocab_size: int, rng: Random, *, shape: RequestShape = INTENT, requests: int = 8
) -> WorkloadScenario:
    """Intent recognition (PrefixCacheManager, blog) without load: requests with one cached prefix, one at a time."""
    prompts = prompts_with_prefix(
        random_tokens(shape.shared, vocab_size, rng), requests + 2, shape.own, vocab_size, rng
    )
    return WorkloadScenario("intent", (_warm_up(prompts[:2]), _one_at_a_time("alone", prompts[2:], shape.output)))


def poisson_intent_recognition_scenario(
    vocab_size: int, rng: Random, *, due: Sequence[float], prefix: "array[int]", shape: RequestShape = INTENT
) -> WorkloadScenario:
    """Intent recognition (PrefixCacheManager, blog) under load: one request at each `due` second, `prefix` cached.

    `synthetic.unit_arrivals`, divided by the rate, are the times of a Poisson process.
    """
    prompts = prompts_with_prefix(prefix, len(due), shape.own, vocab_size, rng)
    warm = _warm_up(prompts_with_prefix(prefix, 1, shape.own, vocab_size, rng))
    return WorkloadScenario(
        "poisson", (warm, WorkloadPhase("load", tuple(jobs_from_prompts(prompts, shape.output, due))))
    )


def _new(count: int, length: int, vocab_size: int, rng: Random) -> "list[array[int]]":
    return [random_tokens(length, vocab_size, rng) for _ in range(count)]


def _one_at_a_time(name: str, prompts: "Sequence[array[int]]", output: int) -> WorkloadPhase:
    return WorkloadPhase(name, tuple(jobs_from_prompts(prompts, output)), concurrency=1)


def _warm_up(prompts: "Sequence[array[int]]") -> WorkloadPhase:
    """Return a phase that brings prompts into the cache, one at a time.

    Two output tokens: some engines publish no blocks of a request that ends with its first token.
    """
    return WorkloadPhase("warm-up", tuple(jobs_from_prompts(prompts, 2)), concurrency=1, is_measured=False)
