"""SimRequest: one request of a simulated workload, by block ids or tokens; expanded only when it arrives.

A block id stands for `id_size` equal tokens, so an hour of traffic with 145 million tokens needs a few megabytes until
it is served, and the scheduler still sees every token.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.core.cache.hashing import root_hash
from headstart.router.routing_request import RoutingPrompt
from headstart.workload.jobs import Job
from headstart.workload.recorded.agent_sessions import ConsecutiveIdRuns
from headstart.workload.traces import CHAIN_BLOCK, Trace

ROOT = root_hash(b"")
"""Parent of every first block: the same in simulated engines and routers, so that block hashes can be compared."""
CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A prompt of `prompt_tokens` tokens, `output_tokens` of which follow it.

    The prompt is `token_ids` if given; else the expansion of `block_ids`, chain ids of `id_size` tokens each.
    """

    at: float  # seconds
    prompt_tokens: int
    output_tokens: int
    block_ids: Sequence[int] = ()
    id_size: int = CHAIN_BLOCK
    token_ids: "array[int] | None" = None
    session: str | None = None
    after: tuple[int, ...] = ()  # indices of the requests whose answers it needs: then `at` is not its time
    pause: float = 0.0  # seconds after the last of these

    def prompt_token_ids(self) -> "array[int]":
        """Return the token ids of the prompt, packed int32."""
        if self.token_ids is not None:
            return self.token_ids
        found, size = array("i"), self.id_size
        found.frombytes(b"".join([array("i", (number,)).tobytes() * size for number in self.block_ids]))
        del found[self.prompt_tokens :]
        assert len(found) == self.prompt_tokens, f"{len(self.block_ids)} ids for {self.prompt_tokens} tokens"
        return found

    def routing_prompt(self, token_ids: "array[int]", block_sizes: Iterable[int]) -> RoutingPrompt:
        """Return the prompt as a router sees it: the hashes at the given block sizes, without tokens."""
        prompt = RoutingPrompt(token_ids, ROOT)
        for size in block_sizes:
            prompt.block_hashes(size)
        prompt.drop_tokens()
        return prompt


def requests_from_trace(trace: Trace, *, speed: float = 1.0) -> list[SimRequest]:
    """Return the requests of a trace, arriving `speed` times as fast; pauses after an answer are shortened alike.

    Prompts without block ids are expanded here: texts with a token for every four characters, lengths with tokens that
    no other prompt has.
    """
    if all(request.hash_ids for request in trace.requests):
        rows = [row.hash_ids for row in trace.requests]
        indices = {row.number: index for index, row in enumerate(trace.requests)}
        return [
            SimRequest(
                row.at / speed,
                row.length,
                max(row.output, 1),
                ids,
                trace.block_size,
                session=row.session or None,
                after=tuple(indices[number] for number in row.after if number in indices),
                pause=row.pause / speed,
            )
            for row, ids in zip(trace.requests, _as_tokens(rows), strict=True)
        ]
    jobs = trace.to_jobs(1 << 30, 0, speed=speed)
    sessions = (row.session or None for row in trace.requests)
    return [request_from_job(job, session) for job, session in zip(jobs, sessions, strict=True)]


def _as_tokens(rows: "list[Sequence[int]]") -> "list[Sequence[int]]":
    """Return ids that are tokens: as they are, or numbered in the order in which they come if one is too large."""
    if all(isinstance(ids, ConsecutiveIdRuns) or (max(ids) < 1 << 31 and min(ids) >= 0) for ids in rows):
        return rows
    numbers: dict[int, int] = {}
    return [tuple(numbers.setdefault(number, len(numbers)) for number in ids) for ids in rows]


def request_from_job(job: Job, session: str | None = None) -> SimRequest:
    """Return a job of a synthetic workload as a request."""
    return SimRequest(job.at, len(job.prompt), job.output, token_ids=job.prompt, session=session)
