"""Workloads of simulations: trace files, router decision logs, and synthetic traffic. Chance is the `rng` argument."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from headstart.core.cache.hashing import BlockHash
from headstart.core.errors import ConfigError
from headstart.router.decision_log import NAME_BYTES, DecisionRecord
from headstart.sim.sim_request import SimRequest, requests_from_trace
from headstart.workload.block_paths import BlockPaths
from headstart.workload.recorded.trace_files import read_trace_path
from headstart.workload.synthetic import poisson_arrivals
from headstart.workload.traces import CHAIN_BLOCK, check_traced_request, check_workload_duration

DECODE_HEAVY = "decode-heavy"
HOT_DOCUMENTS = "hot-documents"


@dataclass(frozen=True, slots=True)
class SyntheticTraffic:
    """Synthetic traffic: groups that share a prefix, chosen by Zipf's law; Poisson arrivals; lognormal outputs.

    A prompt is `shared` tokens of its group and `own` others. In a burst of `burst` requests all have the same group.
    """

    groups: int = 48
    shared: int = 1536
    own: int = 512
    output_mu: float = 6.0
    output_sigma: float = 1.0
    max_output: int = 8192
    burst: int = 1


SYNTHETIC = {
    DECODE_HEAVY: SyntheticTraffic(),
    HOT_DOCUMENTS: SyntheticTraffic(groups=64, shared=16_384, own=512, output_mu=5.0, output_sigma=0.5, burst=12),
}
"""Synthetic workloads by name."""


def read_trace_requests(path: Path, *, speed: float = 1.0, skip: int = 0, count: int = 0) -> list[SimRequest]:
    """Return `count` requests of a trace file after the first `skip` (0: all), from time 0. Raises ConfigError."""
    return slice_and_rebase_requests(requests_from_trace(read_trace_path(path), speed=speed), skip, count)


def read_decision_log_requests(path: Path, *, speed: float = 1.0, skip: int = 0, count: int = 0) -> list[SimRequest]:
    """Return the requests of a router's decision log, in order of arrival. Raises ConfigError.

    An output is as long as the log says; where it does not, as long as the request allowed, or one token.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--decisions {path}: {error}") from error
    records = [_decision(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise ConfigError(f"--decisions {path}: there are no decisions")
    records.sort(key=lambda record: record.at)
    numbers: dict[str, int] = {}
    found = [_of_decision(record, numbers, records[0].at, speed) for record in records]
    return slice_and_rebase_requests(found, skip, count)


def _decision(path: Path, number: int, line: str) -> DecisionRecord:
    try:
        fields: Any = json.loads(line)
        record = DecisionRecord.from_dict(fields)
        check_traced_request(record.at, record.prompt_tokens, max(record.num_output or 0, record.output_tokens))
        if not (isinstance(record.block_size, int) and record.block_size > 0 and isinstance(record.names, str)):
            raise ValueError(f"block_size is {record.block_size!r} and names is {record.names!r}")
        return record
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"--decisions {path}: line {number} is no decision: {error}"[:400]) from error


def _of_decision(record: DecisionRecord, numbers: dict[str, int], start: float, speed: float) -> SimRequest:
    """Return a decision as a request: a number per block hash, and one of its own for the tokens after them."""
    width = 2 * NAME_BYTES
    names = [record.names[at : at + width] for at in range(0, len(record.names), width)]
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    while len(ids) * record.block_size < record.prompt_tokens:
        ids.append(numbers.setdefault(f"{len(numbers)}", len(numbers)))
    return SimRequest(
        (record.at - start) / speed,
        record.prompt_tokens,
        max(record.num_output or record.output_tokens, 1),
        tuple(ids),
        record.block_size,
        session=record.session,
    )


def slice_and_rebase_requests(requests: Sequence[SimRequest], skip: int, count: int) -> list[SimRequest]:
    """Return `count` requests after the first `skip`, the first of them at time 0. Raises ConfigError for none."""
    found = list(requests[skip : skip + count if count else None])
    if not found:
        raise ConfigError(f"{len(requests)} requests, of which {skip} are skipped: none is left")
    start = found[0].at
    check_workload_duration(found[-1].at - start)
    return [
        replace(one, at=one.at - start, after=tuple(index - skip for index in one.after if index >= skip))
        for one in found
    ]


def synthetic_requests(name: str, rate: float, count: int, seed: int) -> list[SimRequest]:
    """Return `count` requests of a synthetic workload at `rate` per second. Raises ConfigError for an unknown name."""
    if name not in SYNTHETIC:
        raise ConfigError(f"there is no workload {name!r}; there are {', '.join(SYNTHETIC)}")
    traffic, rng = SYNTHETIC[name], Random(f"{name}/{seed}")
    times = poisson_arrivals(rate, count, rng)
    weights = list(accumulate(1 / rank for rank in range(1, traffic.groups + 1)))
    found: list[SimRequest] = []
    group = 0
    for number, at in enumerate(times):
        if number % traffic.burst == 0:
            group = rng.choices(range(traffic.groups), cum_weights=weights)[0]
        output = min(max(round(rng.lognormvariate(traffic.output_mu, traffic.output_sigma)), 1), traffic.max_output)
        length = traffic.shared + traffic.own
        ids = _ids(group, traffic, number)
        found.append(SimRequest(at, length, output, ids, CHAIN_BLOCK, session=str(group)))
    return found


def _ids(group: int, traffic: SyntheticTraffic, number: int) -> tuple[int, ...]:
    """Return chain ids: those of the group's prefix, then ids that no other request has."""
    shared, own = traffic.shared // CHAIN_BLOCK, -(-traffic.own // CHAIN_BLOCK)
    first = traffic.groups * shared + number * own
    return (*range(group * shared, (group + 1) * shared), *range(first, first + own))


def prompt_block_paths(requests: Iterable[SimRequest], block_size: int) -> BlockPaths:
    """Return the chains of full blocks of the prompts; equal ids are equal blocks behind equal prefixes."""
    ids: dict[BlockHash, int] = {}
    paths: list[list[int]] = []
    lengths: list[int] = []
    for request in requests:
        block_hashes = request.routing_prompt(request.prompt_token_ids(), [block_size]).block_hashes(block_size)
        paths.append([ids.setdefault(block_hash, len(ids)) for block_hash in block_hashes])
        lengths.append(request.prompt_tokens)
    return BlockPaths(block_size, paths, lengths)
