"""Scenarios: every workload of the suite as phases of jobs, the one definition of each for all who serve them.

Pure: chance is the `rng` argument, so one seed is one set of prompts. A scenario is one repetition; the next one draws
new prompts, so that it is cold even where a cache cannot be reset. Not here: who serves (`bench/runners/runner.py`),
how a phase is measured (`bench/measure.py`), and traces (`traces.py`).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headstart.workload.jobs import GREEDY, Job, Sampling, make_jobs
from headstart.workload.synthetic import INTENT, Shape, random_tokens, with_prefix
from headstart.workload.synthetic import rotations as rotated
from headstart.workload.synthetic import shared_prefix as shared_prompts


@dataclass(frozen=True, slots=True)
class Phase:
    """Jobs that are served together: the next phase starts when all of them are over."""

    name: str
    jobs: tuple[Job, ...]
    concurrency: int = 0  # 0: each job when it is due; else so many at a time, in their order
    is_measured: bool = True  # False: it only prepares the cache


@dataclass(frozen=True, slots=True)
class Scenario:
    """One repetition of a workload, to be served on a cache that knows none of its prompts."""

    name: str
    phases: tuple[Phase, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(len(job.prompt) + job.output for phase in self.phases for job in phase.jobs)

    def num_blocks(self, block_size: int = 16) -> int:
        """Blocks of KV in which all of it fits at once without any sharing."""
        jobs = [job for phase in self.phases for job in phase.jobs]
        return sum((len(job.prompt) + job.output) // block_size + 1 for job in jobs)


BURST = Shape(shared=2048, own=32, output=16)  # twins: many at once behind one new prefix
GENERATED = Shape(shared=1024, own=64, output=32)  # SGLang's generated-shared-prefix, in small
FIRST_TOKEN = Shape(INTENT.shared, INTENT.own, output=1)
STREAMS = Shape(shared=1024, own=16, output=128)  # decode


def rotations(vocab_size: int, rng: Random, *, count: int = 48, length: int = 1025, passes: int = 1) -> Scenario:
    """Source 001: rotations of one list of tokens, all at once, one token out: `cold`, then the same ones `warm`."""
    jobs = tuple(make_jobs(rotated(random_tokens(length, vocab_size, rng), count), 1))
    return Scenario("rotations", (Phase("cold", jobs), *(Phase("warm", jobs) for _ in range(passes))))


def single_stream(vocab_size: int, rng: Random, *, prompt: int = 128, output: int = 128, requests: int = 3) -> Scenario:
    """New prompts one at a time: time per output token with nobody else there."""
    return Scenario("single-stream", (_one_at_a_time("alone", _new(requests, prompt, vocab_size, rng), output),))


def cold_ttft(vocab_size: int, rng: Random, *, length: int = 1000, requests: int = 3) -> Scenario:
    """New prompts one at a time: time to the first token when everything is to be computed."""
    return Scenario("cold-ttft", (_one_at_a_time("cold", _new(requests, length, vocab_size, rng), 1),))


def warm_ttft(vocab_size: int, rng: Random, *, shape: Shape = FIRST_TOKEN, requests: int = 8) -> Scenario:
    """Prompts one at a time whose first `shape.shared` tokens others have brought before: time to the first token."""
    prompts = with_prefix(random_tokens(shape.shared, vocab_size, rng), requests + 2, shape.own, vocab_size, rng)
    before, asked = _warm_up(prompts[:2]), _one_at_a_time("warm", prompts[2:], shape.output)
    return Scenario("warm-ttft", (before, asked))


def prefill(
    vocab_size: int, rng: Random, *, lengths: Sequence[int], cached_share: float = 0.9, requests: int = 3
) -> Scenario:
    """For each length: `cold LENGTH`, new prompts one at a time; `warm LENGTH`, of which `cached_share` came before."""
    phases: list[Phase] = []
    for length in lengths:
        phases.append(_one_at_a_time(f"cold {length}", _new(requests, length, vocab_size, rng), 1))
        shared = min(int(length * cached_share), length - 1)
        prefix = random_tokens(shared, vocab_size, rng)
        prompts = with_prefix(prefix, requests + 1, length - shared, vocab_size, rng)
        phases += [_warm_up(prompts[:1]), _one_at_a_time(f"warm {length}", prompts[1:], 1)]
    return Scenario("prefill", tuple(phases))


def decode(
    vocab_size: int,
    rng: Random,
    *,
    is_shared: bool,
    streams: int = 32,
    shape: Shape = STREAMS,
    sampling: Sampling = GREEDY,
) -> Scenario:
    """Streams that decode at once behind cached prefixes: all behind one, or each behind its own."""
    count = 1 if is_shared else streams
    prefixes = [random_tokens(shape.shared, vocab_size, rng) for _ in range(count)]
    before = [prefix + random_tokens(shape.own, vocab_size, rng) for prefix in prefixes]
    prompts = [prefixes[i % count] + random_tokens(shape.own, vocab_size, rng) for i in range(streams)]
    name = "shared" if is_shared else "distinct"
    jobs = make_jobs(prompts, shape.output, sampling=sampling)
    return Scenario(f"decode-{name}", (_warm_up(before), Phase(name, tuple(jobs))))


def shared_prefix(
    vocab_size: int,
    rng: Random,
    *,
    groups: int = 8,
    prompts: int = 8,
    shape: Shape = GENERATED,
    due: Sequence[float] | None = None,
    concurrency: int = 0,
) -> Scenario:
    """SGLang's generated-shared-prefix: groups of questions behind a system prompt each, in random order, cold.

    All at once, or when `due` says (seconds, rising), or `concurrency` at a time.
    """
    found = shared_prompts(groups, prompts, shape, vocab_size, rng)
    rng.shuffle(found)
    return Scenario("shared-prefix", (Phase("cold", tuple(make_jobs(found, shape.output, due)), concurrency),))


def twins(vocab_size: int, rng: Random, *, requests: int = 32, shape: Shape = BURST) -> Scenario:
    """A burst behind one new prefix."""
    found = with_prefix(random_tokens(shape.shared, vocab_size, rng), requests, shape.own, vocab_size, rng)
    return Scenario("twins", (Phase("cold", tuple(make_jobs(found, shape.output))),))


def intent(vocab_size: int, rng: Random, *, shape: Shape = INTENT, requests: int = 8) -> Scenario:
    """Source 002 without load: requests behind one cached prefix, one at a time."""
    prompts = with_prefix(random_tokens(shape.shared, vocab_size, rng), requests + 2, shape.own, vocab_size, rng)
    return Scenario("intent", (_warm_up(prompts[:2]), _one_at_a_time("alone", prompts[2:], shape.output)))


def poisson(
    vocab_size: int, rng: Random, *, due: Sequence[float], prefix: "array[int]", shape: Shape = INTENT
) -> Scenario:
    """Source 002 under load: one request at each of the `due` seconds, behind `prefix`, which is cached by then.

    `synthetic.unit_arrivals`, divided by the rate, are the times of a Poisson process.
    """
    prompts = with_prefix(prefix, len(due), shape.own, vocab_size, rng)
    warm = _warm_up(with_prefix(prefix, 1, shape.own, vocab_size, rng))
    return Scenario("poisson", (warm, Phase("load", tuple(make_jobs(prompts, shape.output, due)))))


def _new(count: int, length: int, vocab_size: int, rng: Random) -> "list[array[int]]":
    return [random_tokens(length, vocab_size, rng) for _ in range(count)]


def _one_at_a_time(name: str, prompts: "Sequence[array[int]]", output: int) -> Phase:
    return Phase(name, tuple(make_jobs(prompts, output)), concurrency=1)


def _warm_up(prompts: "Sequence[array[int]]") -> Phase:
    """Brings prompts into the cache, one at a time.

    Two tokens out: there are engines that publish nothing of a request that ends with its first.
    """
    return Phase("warm-up", tuple(make_jobs(prompts, 2)), concurrency=1, is_measured=False)
