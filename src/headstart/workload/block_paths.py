"""BlockPaths: the prompts of a trace as chains of block ids, and the prompt tokens that hits leave to compute.

Equal ids are equal blocks behind equal prefixes. Only full blocks have ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace

from headstart.core.errors import ConfigError
from headstart.workload.traces import CHARS_PER_TOKEN, Trace, TracedRequest

TEXT_BLOCK = 16
"""Tokens per block of prompts that are texts."""


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """One chain of full blocks of `block_size` tokens per request, and the length of each prompt in tokens."""

    block_size: int
    paths: Sequence[Sequence[int]]
    lengths: Sequence[int]

    @property
    def num_distinct(self) -> int:
        """Number of distinct blocks: the size of a pool that never evicts."""
        return len({block for path in self.paths for block in path})

    def computed_tokens(self, hits: Sequence[int]) -> int:
        """Return the prompt tokens left to compute for these numbers of leading cached blocks; at least one each."""
        size = self.block_size
        return sum(max(length - size * hit, 1) for length, hit in zip(self.lengths, hits, strict=True))


def trace_block_paths(trace: Trace) -> BlockPaths:
    """Return the paths of a trace: its own blocks, or blocks of 16 tokens of texts.

    Raises ConfigError for a trace that states lengths only.
    """
    requests = trace.requests
    lengths = [request.length for request in requests]
    if all(request.hash_ids for request in requests):
        size = trace.block_size
        return BlockPaths(size, [row.hash_ids[: row.length // size] for row in requests], lengths)
    if not any(request.text for request in requests):
        raise ConfigError(f"a trace of the kind {trace.kind!r} states no prompts, so nothing is known to be shared")
    ids: dict[tuple[int, str], int] = {}
    chars = TEXT_BLOCK * CHARS_PER_TOKEN
    paths: list[list[int]] = []
    for request in requests:
        path: list[int] = []
        for start in range(0, len(request.text) - chars + 1, chars):
            key = (path[-1] if path else -1, request.text[start : start + chars])
            path.append(ids.setdefault(key, len(ids)))
        paths.append(path)
    return BlockPaths(TEXT_BLOCK, paths, lengths)


def overlap_sessions(trace: Trace, at_once: int, stretch: float = 1.0) -> Trace:
    """Return the sessions of a trace, `at_once` of them at a time, with `stretch` times their recorded pauses.

    In order of their first request, each session begins when an earlier one has ended; its sub-agents belong to it.
    Requests that come after others come after the end of that session, too. Raises ConfigError for a trace without
    sessions.
    """
    sessions: dict[str, list[TracedRequest]] = {}
    for request in trace.requests:
        sessions.setdefault(request.root_session, []).append(request)
    if "" in sessions:
        raise ConfigError(f"a trace of the kind {trace.kind!r} has no sessions that could overlap")
    slots: list[tuple[float, int, tuple[int, ...]]] = [(0.0, slot, ()) for slot in range(at_once)]
    found: list[TracedRequest] = []
    for session in sessions.values():
        start, slot, ended = slots[0]
        first = session[0].at
        for request in session:
            at = stretch * (request.at - first)
            after, pause = (request.after, stretch * request.pause) if request.after else (ended, at)
            found.append(replace(request, at=start + at, after=after, pause=pause))
        last = (found[-1].number,) if trace.kind == "sessions" else ()
        heapreplace(slots, (found[-1].at, slot, last))
    found.sort(key=lambda request: request.at)
    return replace(trace, requests=tuple(found))
